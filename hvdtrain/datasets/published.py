"""Data sets by their published sizes: what a plan needs where their files are not."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.base import Dataset
from hvdtrain.errors import DataError


@dataclass(frozen=True, eq=False)
class Blank:
    """So many examples that are not there: black images of class 0."""

    examples: int
    shape: tuple[int, ...] = ()
    """Of one image; () where it is not known."""

    def __len__(self) -> int:
        return self.examples

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if not self.shape:
            raise DataError("there is no example to look at")
        return np.zeros((len(indices), *self.shape), np.uint8), np.zeros(len(indices), np.int64)


SIZES = {"cifar100": (50_000, 10_000, 100), "imagenet": (1_281_167, 50_000, 1000)}
"""Training examples, validation examples, classes. ImageNet's are ILSVRC 2012's (Russakovsky et al. 2015,
arXiv:1409.0575, table 2)."""


def missing(name: str, data_dir: Path | None) -> str:
    """Why the files of a set of SIZES cannot be read; nothing where they can be looked for, or are in the package."""
    if name not in SIZES:
        return ""
    if data_dir is not None:
        return "" if _is_here(data_dir) else f"{data_dir} is not here"
    if name == "imagenet":
        return "no --data-dir is given"
    from hvdtrain.datasets.cifar100 import FOLDER
    from hvdtrain.datasets.download import default_data_dir

    return "" if _is_here(default_data_dir() / FOLDER) else "not downloaded yet"


def _is_here(path: Path) -> bool:
    """False too where it may not be looked for, or nothing can have that name."""
    return os.access(path, os.F_OK)


def load(name: str, train_crop: int) -> Dataset:
    """A set of SIZES without its files."""
    train, valid, classes = SIZES[name]
    side = train_crop if name == "imagenet" else 32
    shape = (side, side, 3)
    return Dataset(name, Blank(train, shape), Blank(valid, shape), classes, shape, (0.5,) * 3, (0.5,) * 3)
