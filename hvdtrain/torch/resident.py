"""Data sets that lie on the device whole: a batch is gathered there, augmented, from its examples' numbers."""

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

        What the requests say goes to the device in one piece, before the first batch: no step waits for it.
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
        for part in _sent([indices for indices, _ in requests], self._x.device):
            rows = part % len(self._y)
            yield self._x[rows], self._y[rows]


class _Pixels:
    """CIFAR's pictures, cropped, flipped and rotated by one gather from all pixels."""

    def __init__(self, split: Cifar, device: torch.device) -> None:
        self._pixels, self._labels = (torch.from_numpy(part).to(device) for part in (split.pixels, split.labels))

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        device = self._pixels.device
        parts = _sent([indices for indices, _ in requests], device)
        draws = [drawn for _, drawn in requests if drawn is not None]
        if not draws:
            pictures = self._pixels[:-1].view(-1, SIDE, SIDE, 3)
            yield from ((pictures[part], self._labels[part]) for part in parts)
            return
        # Sine and cosine are the host's: the device's may differ in the last bit, and a pixel with it.
        placed = _sent([placements(drawn) for drawn in draws], device)
        for part, place in zip(parts, placed, strict=True):
            yield self._pixels[self._sources(part, place)], self._labels[part]

    def _sources(self, indices: torch.Tensor, placed: torch.Tensor) -> torch.Tensor:
        """The pixels' numbers in the table [n, 32, 32]; the last one is black."""
        pixel, inside = source_pixels(placed)
        return torch.where(inside, pixel + indices[:, None, None] * PIXELS, len(self._pixels) - 1)


def source_pixels(placed: torch.Tensor) -> Pair:
    """`hvdtrain.datasets.cifar100.source_pixels` from placements [n, 2, 4], in integers: exact on any device."""
    steps = torch.arange(SIDE, dtype=torch.int32, device=placed.device)
    start, per_row, per_column, offset = placed[..., None, None].unbind(2)
    cropped = (start + per_row * steps[:, None] + per_column * steps) >> FIXED_BITS
    inside = (cropped >= -offset) & (cropped >= 0) & (cropped < SIDE) & (cropped < SIDE - offset)
    row, column = (cropped + offset).unbind(1)
    return row * SIDE + column, inside.all(1)


def _sent(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The parts on the device, copied there as one."""
    if not parts:
        return []
    whole = torch.from_numpy(np.concatenate(parts)).to(device)
    return list(whole.split([len(part) for part in parts]))
