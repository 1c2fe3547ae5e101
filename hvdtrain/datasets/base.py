"""The interface of every data set: two splits that are read by index, and the numbers that a model needs."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from hvdtrain.errors import DataError

DRAWS = 8
"""How many uniform numbers in [0, 1) one sample's augmentation may use."""
SMALL = 2**18
"""Bytes that a processor copies in some 20 microseconds."""
SHOWN = 200
"""Characters that a message has of what a file holds."""


class Split(Protocol):
    """Samples read by index, from any thread, and from other processes after pickling.

    Where it has a method `digest() -> str`, as the built-in ones do, that is of the list of its samples in their order.
    """

    def __len__(self) -> int:
        """The number of samples."""

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        """The samples at these n indices, as fresh arrays (x, y).

        x is uint8 [n, height, width, 3] and y int64 [n]; for a regression x and y are float32 [n, 1].
        draws, in [0, 1) and of shape [n, DRAWS], decide the augmentation: the same index and draws give the
        same bytes in every process. None leaves the samples as they are. Raises DataError for a damaged file.
        """


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split, and what a model and its input pipeline must know about them."""

    name: str
    train: Split
    valid: Split
    classes: int | None
    """The number of classes; None is a regression."""
    sample_shape: tuple[int, ...]
    """The shape of one training x; validation images differ from it only in ImageNet's crop size."""
    mean: tuple[float, ...]
    """Per channel, of pixels scaled to [0, 1]; empty for a regression."""
    std: tuple[float, ...]
    shards: tuple[int, ...] = ()
    """The training samples in each shard, where they are numbered shard after shard; () elsewhere."""
    items: tuple[int, ...] = ()
    """The training samples in each item, where they are computed item by item; () elsewhere."""
    draws: int = DRAWS
    """How many uniform numbers its augmentation is given for each sample."""
    names: tuple[str, ...] = ()
    """The classes' names by label; () where they have none."""
    left_out: str = ""
    """A line on the files that are not read; "" where there are none."""

    def contents(self) -> dict[str, Any]:
        """What must be the same wherever and whenever the run reads it, as JSON's values by name."""
        splits = {"training": self.train, "validation": self.valid}
        digests = {f"{kind} list": split.digest() for kind, split in splits.items() if hasattr(split, "digest")}
        counts = {f"{kind} examples": len(split) for kind, split in splits.items()}
        names = {"class names": list(self.names)} if self.names else {}
        return {**counts, "classes": self.classes, **names, **digests}


@dataclass(frozen=True, eq=False)
class Arrays:
    """A split that lies in memory and is not augmented."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        return self.x[indices], self.y[indices]

    def digest(self) -> str:
        return digest(self.x, self.y)


def is_read_at_once(split: Split, batch: int) -> bool:
    """Whether so many of the split's examples are read sooner than a thread is woken to read them ahead."""
    return isinstance(split, Arrays) and split.x[:batch].nbytes <= SMALL


def digest(*arrays: np.ndarray) -> str:
    """64 bits, in hex, of the arrays' types, shapes and values."""
    found = xxhash.xxh3_64()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def sha256(path: Path) -> str:
    """Of a file, however long."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def default_data_dir() -> Path:
    """$HVDTRAIN_DATA, or hvdtrain/data in the user's cache folder."""
    if chosen := os.environ.get("HVDTRAIN_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "data"


def require_positive(**values: int) -> None:
    """Raises DataError for the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} must be at least 1, got {value}.")
