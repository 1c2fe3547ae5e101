"""CIFAR-100 in its published files: 32x32 images of 100 classes (A. Krizhevsky, 2009).

Augmented as in the NERSC tutorial of SC20: a crop after padding by 4, a flip, a rotation by up to 15 degrees.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.base import Dataset, digest
from hvdtrain.datasets.download import default_data_dir, download_cifar100
from hvdtrain.datasets.pickles import read_batch
from hvdtrain.errors import DataError

FOLDER = "cifar-100-python"
CLASSES = 100
MEAN = (0.50708, 0.48655, 0.44092)
STD = (0.26733, 0.25644, 0.27615)
SIDE = 32
PIXELS = SIDE * SIDE
PADDING = 4
DEGREES = 15
FIXED_BITS = 16
"""Pillow rotates in fixed-point numbers of so many bits after the point."""


@dataclass(frozen=True, eq=False)
class Cifar:
    """All pixels in a row, uint8 [N * 1024 + 1, 3], the last one black; labels int64 [N]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if draws is None:
            images = self.pixels[:-1].reshape(-1, SIDE, SIDE, 3)[indices]
        else:
            images = self._augmented(indices, draws)
        return images, self.labels[indices]

    def digest(self) -> str:
        return digest(self.pixels, self.labels)

    def _augmented(self, indices: NDArray[np.int64], draws: NDArray[np.float32]) -> NDArray[np.uint8]:
        pixel, inside = source_pixels(draws)
        first = np.asarray(indices)[:, None, None] * PIXELS
        return self.pixels.take(np.where(inside, pixel + first, len(self.pixels) - 1), axis=0)


def load(data_dir: Path | None) -> Dataset:
    """The training and the test images; without a data_dir, downloaded once and kept."""
    if data_dir is None:
        folder = download_cifar100(default_data_dir())
        remedy = f"remove {folder}, and the next run downloads it again"
    else:
        folder = data_dir if data_dir.name == FOLDER else data_dir / FOLDER
        remedy = f"unpack the published {FOLDER}.tar.gz into {folder.parent}, or leave data_dir out"
    train, valid = (_read(folder / split, remedy) for split in ("train", "test"))
    return Dataset("cifar100", train, valid, CLASSES, (SIDE, SIDE, 3), MEAN, STD)


def _read(path: Path, remedy: str) -> Cifar:
    batch = read_batch(path, remedy)
    planes, labels = batch.get("data"), batch.get("fine_labels")
    if not isinstance(planes, np.ndarray) or not isinstance(labels, list):
        raise DataError(f"{path} lacks the array 'data' or the list 'fine_labels': {remedy}")
    if planes.ndim != 2 or planes.shape[1] != 3 * PIXELS or not len(planes):
        raise DataError(
            f"{path}: wrong image shape: 'data' must be [N, 3 * 32 * 32], got {list(planes.shape)}: {remedy}"
        )
    if len(labels) != len(planes) or not all(isinstance(k, int) and 0 <= k < CLASSES for k in labels):
        raise DataError(f"{path}: 'fine_labels' must be {len(planes)} numbers from 0 to 99: {remedy}")
    return Cifar(_pixels(planes), np.array(labels, np.int64))


def _pixels(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pixels = np.zeros((len(planes) * PIXELS + 1, 3), np.uint8)
    pixels[:-1].reshape(-1, PIXELS, 3)[:] = planes.reshape(-1, 3, PIXELS).transpose(0, 2, 1)
    return pixels


def source_pixels(draws: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """For each pixel of n augmented images, its number in the original [n, 32, 32], and if it is inside."""
    (row, is_row), (column, is_column) = map(_axis, placements(draws).transpose(1, 2, 0))
    return row * SIDE + column, is_row & is_column


def placements(draws: NDArray[np.float32]) -> NDArray[np.int32]:
    """Where n augmented images lie in their originals, rows and columns: [n, 2, 4].

    Of each axis: its value at the first pixel, its growth per row and per column, in units of 2^-16 pixels, and the
    crop's offset in pixels. draws[:, 0] and [:, 1] place the crop, [:, 2] decides the flip, [:, 3] the angle.
    """
    offset = np.floor(draws[:, :2] * (2 * PADDING + 1)).astype(np.int32) - PADDING
    down, across = rotation((draws[:, 3].astype(np.float64) * 2 - 1) * DEGREES)
    is_flipped = (draws[:, 2] < 0.5)[:, None]
    # In fixed point, 32 - x minus the smallest unit mirrors column k to 31 - k exactly.
    mirror = np.array([(SIDE << FIXED_BITS) - 1, 0, 0], np.int32)
    across = np.where(is_flipped, mirror - across, across)
    return np.concatenate([np.stack([down, across], axis=1), offset[:, :, None]], axis=2)


def rotation(degrees: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The source row and column of Pillow's Image.rotate: nearest pixel, counter-clockwise about the centre.

    Each is [n, 3]: its value at the first pixel, its growth per row and per column, in units of 2^-16 pixels.
    Source: Image.rotate in Pillow's Image.py, affine_fixed in its Geometry.c.
    """
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    centre, half = SIDE / 2, 0.5
    row = [centre - (sin + cos) * centre + (sin + cos) * half, cos, sin]
    column = [centre - (cos - sin) * centre + (cos - sin) * half, -sin, cos]
    down, across = np.floor(np.array([row, column]) * (1 << FIXED_BITS) + 0.5).astype(np.int32)
    return down.T, across.T


def _axis(placement: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Source rows (or columns) [n, 32, 32] of one axis's placement [4, n], and if inside crop and image."""
    start, per_row, per_column, offset = placement[:, :, None]
    steps = np.arange(SIDE, dtype=np.int32)
    rows, columns = start + per_row * steps, per_column * steps
    cropped = (rows[:, :, None] + columns[:, None, :]) >> FIXED_BITS
    offset = offset[:, :, None]
    low, high = np.maximum(0, -offset), np.minimum(SIDE, SIDE - offset)
    return cropped + offset, (cropped >= low) & (cropped < high)
