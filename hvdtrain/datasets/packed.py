"""ImageNet packed into shards by `python -m hvdtrain pack`, and read at random by offset, or shard after shard.

Sample k is sample k of the folder that was packed, so a run reads the same images in the same steps as from the folder.

A set can be copied once a node to a local disk or to /dev/shm, in which other users may write too. So the copy is in a
folder that only this user can open, and which is reached by its descriptor.
"""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import math
import os
import shlex
import shutil
import threading
import time
import weakref
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.datasets.base import SHOWN, Dataset, Reduced, digest, sha256
from hvdtrain.datasets.images import MOST_BYTES, MOST_CLASSES, Encoded, Sides, dataset
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.errors import DataError, PlanError
from hvdtrain.untrusted import one_line

INDEX = "index.npz"
VERSION = 1
SPLITS = ("train", "val")
ENTRY = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("crc32", "<u4")])
"""A sample: the number of its shard, the offset and size of its image there, its class, and the image's CRC by zlib."""
NO_INDEX = f"no index of version {VERSION}"
NAME_MAX = 255
MOST_OF = {"about": 1 << 26, **dict.fromkeys(SPLITS, 1 << 29)}
"""The most bytes of each array; a split of ImageNet-21k takes 340 MB."""
MOST_SIDE = 1 << 16
MOST_HEADER = 1000
"""The most characters of an array's header; those that we write have 200."""
REMEDY = "pack the set again, or copy it whole."
COPIERS = 8
BLOCK = 1 << 23
MOST_NAMED = 5
"""How many copies of other sets are named where the disk is full."""


class Files:
    """Shards by number. Each is opened once in a process; a pickled copy opens them again."""

    def __init__(self, paths: tuple[Path, ...], owner: int | None = None) -> None:
        """The `owner`, if given, is the only user whose files are read, where others could replace them by theirs."""
        self.paths, self._owner = paths, owner
        self._lock, self._open = threading.Lock(), dict[int, int]()
        self._ahead: frozenset[int] = frozenset()
        weakref.finalize(self, _close, self._open)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.paths, self._owner)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """The bytes at that place of a shard; fewer at the end of the file. Raises OSError."""
        return os.pread(self._descriptor(shard), size, offset)

    def expect(self, shards: frozenset[int]) -> None:
        """Has the system read ahead those shards that were not in the last call."""
        for shard in shards - self._ahead:
            os.posix_fadvise(self._descriptor(shard), 0, 0, os.POSIX_FADV_WILLNEED)
        self._ahead = shards

    def _descriptor(self, shard: int) -> int:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = _opened(self.paths[shard], self._owner)
            return self._open[shard]


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _opened(path: Path, owner: int | None) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise DataError(
            f"{path} cannot be opened ({error.strerror}): raise `ulimit -n`, or pack into fewer, larger shards."
        ) from None
    if owner is not None and (found := os.fstat(descriptor).st_uid) != owner:
        os.close(descriptor)
        raise DataError(f"{path} must be a file of uid {owner}, got one of uid {found}: name another cache_dir.")
    return descriptor


@dataclass(frozen=True, eq=False)
class Packed(Encoded):
    """The images of one split in its shards."""

    files: Files
    entries: NDArray[np.void]
    """The samples, [n] of type ENTRY."""
    is_by_shard: bool
    """Whether samples are numbered shard after shard, and each shard is read ahead; else as in the packed folder."""

    def in_order(self, indices: NDArray[np.int64]) -> Sequence[int]:
        entries = self.entries[indices]
        if self.is_by_shard:
            self.files.expect(frozenset(np.unique(entries["shard"]).tolist()))
        return np.lexsort((entries["offset"], entries["shard"])).tolist()  # type: ignore[no-any-return]

    def encoded(self, index: int) -> bytes:
        shard, offset, size, _, crc32 = self.entries[index].tolist()
        content = self.files.read(shard, offset, size)
        if zlib.crc32(content) != crc32:
            raise DataError(f"{self.location(index)} is damaged: {REMEDY}")
        return content

    def location(self, index: int) -> str:
        entry = self.entries[index]
        return f"{self.files.paths[entry['shard']]} at byte {entry['offset']}"

    def digest(self) -> str:
        return digest(*(self.entries[column] for column in ("label", "size", "crc32")))


def is_in(data_dir: Path) -> bool:
    """Whether the folder holds a packed set."""
    return (data_dir / INDEX).is_file()


@dataclass(frozen=True)
class _Index:
    """The content of a set's index."""

    classes: int
    names: tuple[str, ...]
    shards: dict[str, dict[str, int]]
    """For each split {file name: bytes}."""
    entries: dict[str, NDArray[np.void]]
    """For each split its samples, [n] of type ENTRY."""
    reduced: Reduced


def load(data_dir: Path, sides: Sides, is_by_shard: bool, cache_dir: Path | None) -> Dataset:
    """The packed set in the folder. By shard, training samples are numbered in the order in which the shards hold them.

    With a cache_dir, the shards of a copy are read, but not its index. Raises DataError where the index is damaged, or
    a shard is missing or has another size, and PlanError where every validation image would be enlarged again.
    """
    with as_data_error(data_dir / INDEX, REMEDY):
        index = read_index(data_dir / INDEX)
    if 0 < (side := index.reduced.shorter_side) < sides.valid_resize:
        raise PlanError(
            f"valid_resize must be at most {side}, to which the pictures of {data_dir} were reduced, got "
            f"{sides.valid_resize}: it would enlarge them again; lower it, or pack with --shorter-side "
            f"{sides.valid_resize}."
        )
    folder, owner = (on_node(data_dir, cache_dir), os.geteuid()) if cache_dir else (data_dir, None)
    with as_data_error(data_dir / INDEX, REMEDY):
        for split in SPLITS:
            _check(folder, data_dir / INDEX, split, index)
    entries = index.entries
    if is_by_shard:
        entries["train"] = entries["train"][np.lexsort((entries["train"]["offset"], entries["train"]["shard"]))]

    def packed(split: str, resize: int, crop: int) -> Packed:
        files = Files(tuple(folder / name for name in index.shards[split]), owner)
        labels = entries[split]["label"].astype(np.int64)
        return Packed(labels, resize, crop, index.names, files, entries[split], is_by_shard and split == "train")

    whole = dataclasses.replace(dataset(packed, index.classes, sides), reduced=index.reduced)
    if not is_by_shard:
        return whole
    counts = np.bincount(entries["train"]["shard"], minlength=len(index.shards["train"]))
    return dataclasses.replace(whole, shards=tuple(counts.tolist()))


def read_index(path: Path) -> _Index:
    """The index in the file. May raise any exception where the file is damaged."""
    with files.opened(path) as file, zipfile.ZipFile(file) as members:
        text, *rows = (_array(members, name, path.stat().st_size) for name in MOST_OF)
    _require(text.dtype.kind == "U" and all(each.dtype == ENTRY and each.ndim == 1 for each in rows), NO_INDEX)
    about, entries = json.loads(str(text)), dict(zip(SPLITS, rows, strict=True))
    classes, names = about["classes"], about["names"]
    _require(type(about["version"]) is int and about["version"] == VERSION, NO_INDEX)
    _require(type(classes) is int and 0 < classes <= MOST_CLASSES, f"classes must be 1 to {MOST_CLASSES:,}")
    _require(type(names) is list and all(type(name) is str for name in names), "a class has no name")
    shards = {split: dict(about["shards"][split]) for split in SPLITS}
    for name, length in itertools.chain.from_iterable(lengths.items() for lengths in shards.values()):
        _require(_is_file_name(name) and type(length) is int and length >= 0, f"{one_line(name, SHOWN)} is no shard")
    reduced = Reduced(*(about.get(name, 0) for name in Reduced._fields))
    _require(all(type(each) is int and 0 <= each <= MOST_SIDE for each in reduced), "no size of reduced pictures")
    return _Index(classes, tuple(names), shards, entries, reduced)


def _array(members: zipfile.ZipFile, name: str, whole: int) -> NDArray[Any]:
    """An array of the archive. numpy.load would allocate the memory that a header announces, however short the file."""
    member = members.getinfo(f"{name}.npy")
    most, announced = min(whole, MOST_OF[name]), max(member.file_size, member.compress_size)
    is_plain = member.compress_type == zipfile.ZIP_STORED and announced <= most
    _require(is_plain, f"{name} must be stored uncompressed, in at most {most:,} bytes, got {announced:,}")
    content = members.read(member)
    file = io.BytesIO(content)
    _require(np.lib.format.read_magic(file) == (1, 0), NO_INDEX)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MOST_HEADER)
    return np.frombuffer(content, dtype, math.prod(shape), file.tell()).reshape(shape)


def _is_file_name(name: str) -> bool:
    return "/" not in name and name not in {"", ".", ".."} and name.isprintable() and len(os.fsencode(name)) <= NAME_MAX


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _check(folder: Path, path: Path, split: str, index: _Index) -> None:
    """Raises DataError where a shard is missing or has another size, or an entry points outside of its shard."""
    sizes, entries = np.array(list(index.shards[split].values()), np.uint64), index.entries[split]
    if not (
        len(entries) >= len(sizes)
        and len(entries)
        and entries["shard"].max() < len(sizes)
        # A sum of offset and size could exceed 2 ** 64, and so be small again.
        and (entries["offset"] <= sizes[entries["shard"]]).all()
        and (entries["size"] <= sizes[entries["shard"]] - entries["offset"]).all()
        and entries["size"].max() <= MOST_BYTES
        and entries["label"].max() < index.classes
    ):
        raise DataError(f"{path} is damaged ({split} points outside of its shards or classes): {REMEDY}")
    remedy = REMEDY if folder == path.parent else f"remove {folder}, and the next run copies the set again."
    for name, size in index.shards[split].items():
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: {remedy}")
        if (found := (folder / name).stat().st_size) != size:
            raise DataError(f"{folder / name} must hold {size} bytes, got {found}: {remedy}")


def index_of(
    classes: int, names: tuple[str, ...], splits: dict[str, tuple[dict[str, int], NDArray[np.void]]], reduced: Reduced
) -> dict:
    """The arrays of an index, for `numpy.savez`. `splits` gives shards {name: bytes} and samples, [n] of type ENTRY."""
    shards = {split: lengths for split, (lengths, _) in splits.items()}
    about = {"version": VERSION, "classes": classes, "names": names, "shards": shards}
    about |= reduced._asdict() if reduced.shorter_side else {}
    return {"about": np.array(json.dumps(about)), **{split: entries for split, (_, entries) in splits.items()}}


def on_node(data_dir: Path, cache_dir: Path) -> Path:
    """The folder cache_dir/hvdtrain-UID/HASH with a copy of the set, in which each file is whole or missing.

    The first process of a node makes the copy, and the others wait for it. A copy that another job of the user left is
    used again; files of it that were deleted meanwhile are copied again. Raises DataError where the copy does not fit
    or cannot be made, or other users can open the folder.
    """
    sizes = _sizes(data_dir / INDEX)
    try:
        digest = sha256(data_dir / INDEX)
        name, of_user = digest[:16], cache_dir / f"hvdtrain-{os.geteuid()}"
        cache_dir.mkdir(parents=True, exist_ok=True)
        with files.own_folder(of_user) as folder:
            copy = folder / name
            with contextlib.suppress(FileNotFoundError):
                files.require_private(of_user / name, copy.lstat())
            if _lacking(copy, sizes):
                with files.held(copy.with_name(f".{name}.lock"), of_user / f".{name}.lock") as progress:
                    if lacking := _lacking(copy, sizes):
                        files.sweep(copy.parent, name)  # only the holder of the lock copies
                        _require_room(data_dir, of_user, copy, sum(lacking.values()))
                        _copy(data_dir, digest, copy, lacking, progress)
    except OSError as error:
        raise DataError(
            f"{data_dir} cannot be copied to cache_dir {cache_dir} ({error.strerror or error}): name a folder of this "
            "node's own disk, or leave cache_dir out."
        ) from None
    return of_user / name


def _sizes(index: Path) -> dict[str, int]:
    """The files of a set with their sizes according to its index: {name: bytes}."""
    with as_data_error(index, REMEDY):
        splits = read_index(index).shards.values()
        return {INDEX: index.stat().st_size, **{name: size for split in splits for name, size in split.items()}}


def _lacking(folder: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Those of the files {name: bytes} that are missing in the folder, or have another size there."""
    paths = {name: folder / name for name in sizes}
    there = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    return {name: size for name, size in sizes.items() if there.get(name) != size}


def _require_room(data_dir: Path, of_user: Path, copy: Path, size: int) -> None:
    """Raises DataError where the disk has less room than `size`; it names the user's copies of other sets."""
    if size <= (free := shutil.disk_usage(copy.parent).free):
        return
    named, remedy = dict[str, str](), ""
    for path in sorted(path for path in copy.parent.iterdir() if path.is_dir() and path.name != copy.name)[:MOST_NAMED]:
        held = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        days = (time.time() - path.stat().st_mtime) / 86400
        named[str(of_user / path.name)] = f"{of_user.name}/{path.name} ({held / 1e6:,.1f} MB, {days:.0f} days old)"
    if named:
        remedy = f"where no job needs them, remove copies of other sets, {', '.join(named.values())}: "
        remedy += f"{shlex.join(['rm', '-r', *named])}; or "
    raise DataError(
        f"cache_dir {of_user.parent} must have room for the {size / 1e6:,.1f} MB of {data_dir}, got "
        f"{free / 1e6:,.1f} MB: {remedy}name a larger disk, or leave cache_dir out."
    )


def _copy(data_dir: Path, digest: str, copy: Path, lacking: dict[str, int], progress: files.Progress) -> None:
    """Copies the lacking files, each under its name once it is whole. A job that reads an old one keeps it open."""
    if wrong := list(_lacking(data_dir, lacking)):
        raise DataError(f"{data_dir / wrong[0]} is missing, or not as long as {INDEX} has it: {REMEDY}")
    with contextlib.nullcontext(copy) if copy.is_dir() else files.new_folder(copy, 0o700) as copied:
        files.sweep(copied)
        with ThreadPoolExecutor(COPIERS, "copy") as pool:
            list(pool.map(lambda name: _copy_file(data_dir / name, copied / name, progress), lacking))
        if sha256(copied / INDEX) != digest:
            files.remove(copied / INDEX)
            raise DataError(f"{data_dir / INDEX} changed while it was copied: start again.")


def _copy_file(source: Path, dest: Path, progress: files.Progress) -> None:
    with source.open("rb") as read, files.replacing(dest, binary=True) as written:
        os.fchmod(written.fileno(), 0o600)
        while block := read.read(BLOCK):
            written.write(block)
            progress()
