"""ImageNet packed into shards by `python -m hvdtrain pack`: read at random by offset, or shard after shard.

Sample k is the folder's sample k, so that a run sees the same pictures in the same steps as from the folder.
"""

import dataclasses
import errno
import json
import os
import threading
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.base import Dataset
from hvdtrain.datasets.imagenet import Encoded, check_sides, dataset, resize_beside
from hvdtrain.errors import DataError

INDEX = "index.npz"
VERSION = 1
SPLITS = ("train", "val")
ENTRY = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("crc32", "<u4")])
"""One sample: the number of its shard, its picture's first byte and bytes there, its class, zlib's CRC of the bytes."""
REMEDY = "pack the set again, or copy it whole."


class Files:
    """Shards by number, each opened once in a process; a pickled copy opens its own."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self._lock, self._open = threading.Lock(), dict[int, int]()
        self._ahead: frozenset[int] = frozenset()
        weakref.finalize(self, _close, self._open)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.paths,)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Those bytes, fewer at the file's end. Raises OSError."""
        return os.pread(self._descriptor(shard), size, offset)

    def expect(self, shards: frozenset[int]) -> None:
        """Has the system read ahead all of those shards that the last call did not name."""
        for shard in shards - self._ahead:
            os.posix_fadvise(self._descriptor(shard), 0, 0, os.POSIX_FADV_WILLNEED)
        self._ahead = shards

    def _descriptor(self, shard: int) -> int:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = _opened(self.paths[shard])
            return self._open[shard]


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise DataError(
            f"{path} cannot be opened ({error.strerror}): raise `ulimit -n`, or pack into fewer, larger shards."
        ) from None


@dataclass(frozen=True, eq=False)
class Packed(Encoded):
    """The pictures of one split in its shards."""

    files: Files
    entries: NDArray[np.void]
    """[n] of ENTRY."""
    is_by_shard: bool
    """Whether samples are numbered shard after shard and each shard is read ahead, rather than as the folder's."""

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if self.is_by_shard:
            self.files.expect(frozenset(np.unique(self.entries["shard"][indices]).tolist()))
        return super().read(indices, draws)

    def encoded(self, index: int) -> bytes:
        shard, offset, size, _, crc32 = self.entries[index].tolist()
        content = self.files.read(shard, offset, size)
        if zlib.crc32(content) != crc32:
            raise DataError(f"{self.place(index)} is damaged: {REMEDY}")
        return content

    def place(self, index: int) -> str:
        entry = self.entries[index]
        return f"{self.files.paths[entry['shard']]} at byte {entry['offset']}"


def is_in(data_dir: Path) -> bool:
    """Whether the folder holds a packed set."""
    return (data_dir / INDEX).is_file()


def load(data_dir: Path, train_crop: int, valid_resize: int, valid_crop: int, is_by_shard: bool = False) -> Dataset:
    """The packed set in that folder; by shard, the training samples are numbered in the order they lie there.

    Raises DataError where the index is damaged, or a shard is missing or not as long as it was.
    """
    check_sides(train_crop, valid_resize, valid_crop)
    path = data_dir / INDEX
    try:
        with np.load(path) as index:
            about = json.loads(str(index["about"]))
            entries = {split: index[split] for split in SPLITS}
            if about["version"] != VERSION or any(rows.dtype != ENTRY for rows in entries.values()):
                raise ValueError(f"no index of version {VERSION}")
            classes, names = int(about["classes"]), tuple(about["names"])
            shards = {split: dict(about["shards"][split]) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): {REMEDY}") from None
    for split in SPLITS:
        _check(data_dir, split, shards[split], entries[split], classes)
    if is_by_shard:
        entries["train"] = entries["train"][np.lexsort((entries["train"]["offset"], entries["train"]["shard"]))]

    def packed(split: str, resize: int, crop: int, is_by_shard: bool) -> Packed:
        labels, files = (
            entries[split]["label"].astype(np.int64),
            Files(tuple(data_dir / name for name in shards[split])),
        )
        return Packed(labels, resize, crop, names, files, entries[split], is_by_shard)

    whole = dataset(
        packed("train", resize_beside(train_crop, valid_resize, valid_crop), train_crop, is_by_shard),
        packed("val", valid_resize, valid_crop, False),
        classes,
    )
    counts = np.bincount(entries["train"]["shard"], minlength=len(shards["train"])) if is_by_shard else np.zeros(0, int)
    return dataclasses.replace(whole, shards=tuple(counts.tolist()))


def _check(data_dir: Path, split: str, shards: dict[str, int], entries: NDArray[np.void], classes: int) -> None:
    """Raises DataError where a shard is not as the index has it, or an entry points outside of it."""
    for name, size in shards.items():
        path = data_dir / name
        if not path.is_file():
            raise DataError(f"{path} is missing: {REMEDY}")
        if (found := path.stat().st_size) != size:
            raise DataError(f"{path} must hold {size} bytes, got {found}: {REMEDY}")
    sizes, numbers = np.array(list(shards.values()), np.uint64), entries["shard"]
    if not (
        len(entries)
        and numbers.max() < len(sizes)
        and (entries["offset"] + entries["size"] <= sizes[numbers]).all()
        and entries["label"].max() < classes
    ):
        raise DataError(f"{data_dir / INDEX} is damaged ({split} points outside of its shards or classes): {REMEDY}")


def index_of(classes: int, names: tuple[str, ...], splits: dict[str, tuple[dict[str, int], NDArray[np.void]]]) -> dict:
    """What `numpy.savez` puts into the index: for each split its shards {name: bytes} and the samples [n] of ENTRY."""
    shards = {split: lengths for split, (lengths, _) in splits.items()}
    about = {"version": VERSION, "classes": classes, "names": names, "shards": shards}
    return {"about": np.array(json.dumps(about)), **{split: entries for split, (_, entries) in splits.items()}}
