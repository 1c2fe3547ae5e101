"""Data sets that the device holds, whose batches are gathered there."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from hvdtrain.core.progress import Request
from hvdtrain.datasets import Split
from hvdtrain.datasets.augment import WHOLE, Augmenter, axes, blend, inside, shares
from hvdtrain.datasets.base import Arrays
from hvdtrain.datasets.cifar100 import PIXELS, SIDE, Cifar, placements, source_pixels
from hvdtrain.errors import RecipeError

Pair = tuple[torch.Tensor, torch.Tensor]


def hold(split: Split, device: torch.device) -> "Rows | Pixels":
    """The split, copied to the device. Raises RecipeError where its examples are not in memory.

    Its `batches` give the same bits as `Split.read`, as tensors on the device. All requests are copied there at once,
    before the first batch: no step waits for them.
    """
    match split:
        case Cifar():
            return Pixels(split, device)
        case Arrays():
            return Rows(split.x, split.y, device)
    raise RecipeError(f"{type(split).__name__} is read from files and cannot lie on the device; drop data_on_device.")


class Rows:
    """Examples without augmentation: number i is row i modulo the number of rows."""

    def __init__(self, x: np.ndarray, y: np.ndarray, device: torch.device) -> None:
        self.sides = list(x.shape[1:3])
        self._x, self._y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    def batches(self, requests: Sequence[Request]) -> Iterator[Pair]:
        for indices in _copied([indices for indices, _ in requests], self._x.device):
            rows = indices % len(self._y)
            yield self._x[rows], self._y[rows]


class Pixels:
    """CIFAR's images, which one gather from all pixels crops, flips and rotates."""

    def __init__(self, split: Cifar, device: torch.device) -> None:
        self.sides = [SIDE, SIDE]
        self._pixels, self._labels = (torch.from_numpy(array).to(device) for array in (split.pixels, split.labels))

    def batches(self, requests: Sequence[Request]) -> Iterator[Pair]:
        device = self._pixels.device
        batches = _copied([indices for indices, _ in requests], device)
        draws = [drawn for _, drawn in requests if drawn is not None]
        if not draws:
            images = self._pixels[:-1].view(-1, SIDE, SIDE, 3)
            yield from ((images[indices], self._labels[indices]) for indices in batches)
            return
        # The host computes sine and cosine: a GPU's may differ in the last bit, and so choose another pixel.
        placed = _copied([placements(drawn) for drawn in draws], device)
        steps = torch.arange(SIDE, dtype=torch.int32, device=device)
        for indices, placement in zip(batches, placed, strict=True):
            pixel, is_inside = source_pixels(placement, steps)
            black = len(self._pixels) - 1
            sources = torch.where(is_inside, pixel + indices[:, None, None] * PIXELS, black)
            yield self._pixels[sources], self._labels[indices]


def augmented(
    pairs: Iterator[Pair],
    requests: Sequence[Request],
    augmenter: Augmenter | None,
    device: torch.device,
    sides: list[int],
) -> Iterator[Pair]:
    """The pairs (x, y) of these requests, augmented on the device to the same bits as on the host; `sides`: height and
    width of the images."""
    drawn = [draws for _, draws in requests if augmenter and draws is not None and augmenter.is_due(draws)]
    if not augmenter or not drawn:
        yield from pairs
        return
    rows, columns = (torch.from_numpy(of).to(device) for of in axes(*sides))
    fill = torch.tensor(augmenter.fill, dtype=torch.uint8, device=device)
    erased = _copied([augmenter.erased(draws, *sides) for draws in drawn], device)
    mixed = _copied([augmenter.mixed(draws, *sides) for draws in drawn], device) if augmenter.mixes else erased
    for (x, y), boxes, how in zip(pairs, erased, mixed, strict=True):
        images = torch.where(inside(boxes, rows, columns), fill, x) if augmenter.erasing else x
        if not augmenter.mixes:
            yield images, y
            continue
        blend(images, shares(how, rows, columns))
        own = how[:, 6:].repeat_interleave(2, 0).float() / WHOLE
        both = F.one_hot(torch.stack([y, y.view(-1, 2).flip(1).reshape(-1)]), augmenter.classes)
        yield images, both[0] * own + both[1] * (1 - own)


def _copied(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, copied there as one array."""
    if not arrays:
        return []
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(whole.split([len(array) for array in arrays]))
