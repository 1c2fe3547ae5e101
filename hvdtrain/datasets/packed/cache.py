"""A packed set copied once a node to a folder of its own: a local disk, or /dev/shm, its memory.

Others may write beside that folder: all lies in one that is the user's alone, and is reached by its descriptor.
"""

import contextlib
import os
import shlex
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain import files
from hvdtrain.datasets.base import sha256
from hvdtrain.datasets.packed import shards
from hvdtrain.datasets.packed.shards import INDEX, REMEDY
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.errors import DataError

COPIERS = 8
BLOCK = 1 << 23
MOST_NAMED = 5
"""Of the copies of other sets that fill the disk."""


def on_node(data_dir: Path, cache_dir: Path) -> Path:
    """The folder cache_dir/hvdtrain-UID/HASH that holds a copy of the set, each of its files whole or not there.

    Whichever process of the node comes first copies it, the others wait; a copy left by another job of the same user is
    taken as it is, once what a cleaner took of it is copied anew. Raises DataError where it does not fit or cannot be
    copied, or the folder is not the user's alone.
    """
    sizes = _sizes(data_dir / INDEX)
    try:
        digest = sha256(data_dir / INDEX)
        name, own = digest[:16], cache_dir / f"hvdtrain-{os.geteuid()}"
        cache_dir.mkdir(parents=True, exist_ok=True)
        with files.own_folder(own) as folder:
            copy = folder / name
            with contextlib.suppress(FileNotFoundError):
                files.require_private(own / name, copy.lstat())
            if _lacking(copy, sizes):
                with files.held(copy.with_name(f".{name}.lock"), own / f".{name}.lock") as held:
                    if lacking := _lacking(copy, sizes):
                        files.sweep(copy.parent, name)  # whoever holds the lock is the only one that copies
                        _require_room(data_dir, own, copy, sum(lacking.values()))
                        _copy(data_dir, digest, copy, lacking, held)
    except OSError as error:
        raise DataError(
            f"{data_dir} cannot be copied to cache_dir {cache_dir} ({error.strerror or error}): name a folder of this "
            "node's own disk, or leave cache_dir out."
        ) from None
    return own / name


def _sizes(index: Path) -> dict[str, int]:
    """The files of a set, as its index has them: {name: bytes}."""
    with as_data_error(index, REMEDY):
        splits = shards.read_index(index).shards.values()
        return {INDEX: index.stat().st_size, **{name: size for split in splits for name, size in split.items()}}


def _lacking(folder: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Of those files the ones that are not there, or are of another size."""
    paths = {name: folder / name for name in sizes}
    there = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    return {name: size for name, size in sizes.items() if there.get(name) != size}


def _require_room(data_dir: Path, own: Path, copy: Path, size: int) -> None:
    """Raises DataError, which names what else of ours is there."""
    if size <= (free := shutil.disk_usage(copy.parent).free):
        return
    named, remedy = dict[str, str](), ""
    for path in sorted(path for path in copy.parent.iterdir() if path.is_dir() and path.name != copy.name)[:MOST_NAMED]:
        held = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        days = (time.time() - path.stat().st_mtime) / 86400
        named[str(own / path.name)] = f"{own.name}/{path.name} ({held / 1e6:,.1f} MB, {days:.0f} days old)"
    if named:
        remedy = f"where no job needs them, remove copies of other sets, {', '.join(named.values())}: "
        remedy += f"{shlex.join(['rm', '-r', *named])}; or "
    raise DataError(
        f"cache_dir {own.parent} must have room for the {size / 1e6:,.1f} MB of {data_dir}, got "
        f"{free / 1e6:,.1f} MB: {remedy}name a larger disk, or leave cache_dir out."
    )


def _copy(data_dir: Path, digest: str, copy: Path, lacking: dict[str, int], held: files.Lock) -> None:
    """Those files, under their names once they are whole; a job that reads what lay there keeps what it has opened."""
    if wrong := list(_lacking(data_dir, lacking)):
        raise DataError(f"{data_dir / wrong[0]} is missing, or not as long as {INDEX} has it: {REMEDY}")
    with contextlib.nullcontext(copy) if copy.is_dir() else files.new_folder(copy, 0o700) as copied:
        files.sweep(copied)
        with ThreadPoolExecutor(COPIERS, "copy") as pool:
            for _ in pool.map(lambda name: _copy_file(data_dir / name, copied / name, held), lacking):
                pass
        if sha256(copied / INDEX) != digest:
            files.remove(copied / INDEX)
            raise DataError(f"{data_dir / INDEX} changed while it was copied: start again.")


def _copy_file(source: Path, dest: Path, held: files.Lock) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    unfinished = files.temporary(dest)
    try:
        with source.open("rb") as read, os.fdopen(os.open(unfinished, flags, 0o600), "wb") as written:
            while block := read.read(BLOCK):
                written.write(block)
                held.progress()
        files.sync(unfinished)
        files.move(unfinished, dest)
    finally:
        files.remove(unfinished)
