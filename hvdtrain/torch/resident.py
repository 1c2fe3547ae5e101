"""Data sets that the device holds whole: it gathers and augments a batch from its examples' indices."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from hvdtrain.datasets import Split
from hvdtrain.datasets.base import Arrays
from hvdtrain.datasets.cifar100 import FIXED_BITS, PIXELS, SIDE, Cifar, placements
from hvdtrain.datasets.synthetic import Synthetic
from hvdtrain.errors import RecipeError

if TYPE_CHECKING:
    from hvdtrain.core.progress import Request

Pair = tuple[torch.Tensor, torch.Tensor]


class Held(Protocol):
    """A split on the device."""

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        """For each request what `Split.read` gives for it, to the bit, as tensors on the device.

        All requests are copied to the device at once, before the first batch: no step waits for them.
        """


def hold(split: Split, device: torch.device) -> Held:
    """The split, copied onto the device. Raises RecipeError where it does not lie in memory."""
    match split:
        case Cifar():
            return _Pixels(split, device)
        case Synthetic():
            return _Rows(split.images, split.labels, device)
        case Arrays():
            return _Rows(split.x, split.y, device)
    raise RecipeError(f"{type(split).__name__} is read from files and cannot lie on the device; drop data_on_device.")


class _Rows:
    """Examples without augmentation: number i is row i, counted round."""

    def __init__(self, x: np.ndarray, y: np.ndarray, device: torch.device) -> None:
        self._x, self._y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        for indices in _copied([indices for indices, _ in requests], self._x.device):
            rows = indices % len(self._y)
            yield self._x[rows], self._y[rows]


class _Pixels:
    """CIFAR's images, cropped, flipped and rotated by one gather from all pixels."""

    def __init__(self, split: Cifar, device: torch.device) -> None:
        self._pixels, self._labels = (torch.from_numpy(array).to(device) for array in (split.pixels, split.labels))

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        device = self._pixels.device
        batches = _copied([indices for indices, _ in requests], device)
        draws = [drawn for _, drawn in requests if drawn is not None]
        if not draws:
            images = self._pixels[:-1].view(-1, SIDE, SIDE, 3)
            yield from ((images[indices], self._labels[indices]) for indices in batches)
            return
        # Sine and cosine are the host's: the device's may differ in the last bit, and a pixel with it.
        placed = _copied([placements(drawn) for drawn in draws], device)
        for indices, placement in zip(batches, placed, strict=True):
            yield self._pixels[self._sources(indices, placement)], self._labels[indices]

    def _sources(self, indices: torch.Tensor, placement: torch.Tensor) -> torch.Tensor:
        """The pixels' indices in the table [n, 32, 32]; the last one is black."""
        pixel, inside = source_pixels(placement)
        return torch.where(inside, pixel + indices[:, None, None] * PIXELS, len(self._pixels) - 1)


def source_pixels(placement: torch.Tensor) -> Pair:
    """`hvdtrain.datasets.cifar100.source_pixels` from placements [n, 2, 4], in integers: exact on any device."""
    steps = torch.arange(SIDE, dtype=torch.int32, device=placement.device)
    start, per_row, per_column, offset = placement[..., None, None].unbind(2)
    cropped = (start + per_row * steps[:, None] + per_column * steps) >> FIXED_BITS
    inside = (cropped >= -offset) & (cropped >= 0) & (cropped < SIDE) & (cropped < SIDE - offset)
    row, column = (cropped + offset).unbind(1)
    return row * SIDE + column, inside.all(1)


def _copied(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, copied there as one."""
    if not arrays:
        return []
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(whole.split([len(array) for array in arrays]))
