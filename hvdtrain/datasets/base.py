"""The interface of data sets: two splits that are read by index, and what a model must know of them."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

DRAWS = 8
"""How many uniform numbers in [0, 1) may augment a sample."""
AHEAD = 2
"""Batches that each reader reads before they are needed."""
SMALL = 2**18
"""Bytes that a processor copies in some 20 microseconds."""
SHOWN = 200
"""The most characters of a file's content in a message."""
Read = TypeVar("Read")


class Split(Protocol):
    """Samples that are read by index, from any thread, and, after pickling, from other processes.

    A split may also have a method `digest() -> str`, as the built-in ones do: a digest of the list of its samples; and
    `labels`, int64 [N], the class of each.
    """

    def __len__(self) -> int:
        """The number of samples."""

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        """The samples at these n indices, as new arrays (x, y).

        x is uint8 [n, height, width, 3] and y is int64 [n]; for a regression both are float32 [n, 1]. The draws, in
        [0, 1) and of shape [n, DRAWS], augment the samples: the same index and draws give the same bytes in every
        process. None leaves the samples as they are. Raises DataError for a damaged file.
        """


IGNORED = -100
"""The label that counts for nothing, as in PyTorch's cross_entropy."""


class TextData(NamedTuple):
    """What is known of a text that is given as tokens."""

    vocabulary: int
    """The number of token ids, from 0."""
    end: int | None = None
    """The id of the token that ends a document; None where the files do not say it."""
    tokens_per_byte: float | None = None
    """Tokens of the validation file for a byte of its text; None where that is not known."""
    tokenizer: str = ""
    """bytes, or the path of a tokenizer.json; "" where the files do not say it."""


class Reduced(NamedTuple):
    """How images were reduced: to a shorter side in pixels, 0 where they were not, as JPEGs of a quality."""

    shorter_side: int = 0
    quality: int = 0

    def __str__(self) -> str:
        """A line for the user; "" where images were not reduced."""
        side, quality = self
        return f"pictures reduced to a shorter side of {side} at quality {quality}" if side else ""


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split, and what a model and its input pipeline must know of them."""

    name: str
    train: Split
    valid: Split
    classes: int | None
    """The number of classes; None for a regression."""
    sample_shape: tuple[int, ...]
    """The shape of a training x. A validation x has the same, but for the crop size of ImageNet."""
    mean: tuple[float, ...]
    """The mean of each channel, of pixels scaled to [0, 1]; () for a regression."""
    std: tuple[float, ...]
    shards: tuple[int, ...] = ()
    """The number of training samples in each shard, where they are numbered shard after shard; else ()."""
    items: tuple[int, ...] = ()
    """The number of training samples in each item, where they are computed item by item; else ()."""
    draws: int = DRAWS
    """How many uniform numbers augment each sample."""
    names: tuple[str, ...] = ()
    """The names of the classes, by label; () where they have none."""
    notes: tuple[str, ...] = ()
    """Lines about the data for the user: which files are not read, how images were changed."""
    reduced: Reduced = field(default_factory=Reduced)
    """How images were reduced as they were packed."""
    text: TextData | None = None
    """What is known of a text, whose x and y are token ids, int64 [n, T], and y is -100 where nothing is predicted."""
    by_index: bool = False
    """Whether the order of an epoch is computed by index, as for more examples than memory has room to permute. Then
    `draws` is 0."""

    def contents(self) -> dict[str, Any]:
        """What must be the same on all ranks, and when a run is resumed, as JSON values by name."""
        splits = {"training": self.train, "validation": self.valid}
        digests = {f"{kind} list": split.digest() for kind, split in splits.items() if hasattr(split, "digest")}
        counts = {f"{kind} examples": len(split) for kind, split in splits.items()}
        names = {"class names": list(self.names)} if self.names else {}
        reduced = {"pictures": str(self.reduced)} if self.reduced.shorter_side else {}
        return {**counts, "classes": self.classes, **names, **digests, **reduced}


@dataclass(frozen=True, eq=False)
class Arrays:
    """A split in memory, which is not augmented."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        return self.x[indices], self.y[indices]

    def bytes_of(self, rows: int) -> int:
        return self.x[:rows].nbytes

    @property
    def labels(self) -> np.ndarray:
        return self.y

    def digest(self) -> str:
        return digest(self.x, self.y)


def is_read_at_once(split: Any, requests: Sequence[Any]) -> bool:
    """Whether such a batch is read in less time than it takes to wake a thread that reads ahead: of arrays, whose
    `bytes_of` says how many bytes so many rows have."""
    return bool(requests) and hasattr(split, "bytes_of") and split.bytes_of(len(requests[0][0])) <= SMALL


def read_ahead(read: Callable[[Any], Read], requests: Iterable[Any], readers: int) -> Iterator[Read]:
    """What `read` returns for each request, in order. So many threads read ahead, and end with the iterator; without
    any, each request is read when it is needed. Raises what `read` raises, in the request's place."""
    if not readers:
        yield from map(read, requests)
        return
    pool, ahead = ThreadPoolExecutor(readers, "read"), deque[Future[Read]]()
    try:
        for request in requests:
            ahead.append(pool.submit(read, request))
            if len(ahead) > AHEAD * readers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def digest(*arrays: np.ndarray) -> str:
    """A digest of 64 bits, in hexadecimal, of the types, shapes and values of the arrays."""
    found = xxhash.xxh3_64()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def default_data_dir() -> Path:
    """The folder $HVDTRAIN_DATA, or else hvdtrain/data in the user's cache folder."""
    if chosen := os.environ.get("HVDTRAIN_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "data"
