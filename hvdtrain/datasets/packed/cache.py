"""A packed set copied once a node to a folder of its own: a local disk, or /dev/shm, its memory.

Others may write beside that folder: all lies in one that is the user's alone, and is reached by its descriptor.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain import files, lock
from hvdtrain.datasets.base import sha256
from hvdtrain.datasets.packed.shards import INDEX
from hvdtrain.errors import DataError

COPIERS = 8
BLOCK = 1 << 23


def on_node(data_dir: Path, cache_dir: Path) -> Path:
    """The folder cache_dir/hvdtrain-UID/HASH that holds a copy of the set: complete or not at all.

    Whichever process of the node comes first copies it, the others wait; a copy left by another job of the same user is
    taken as it is. Raises DataError where it does not fit or cannot be copied, or the folder is not the user's alone.
    """
    try:
        digest = sha256(data_dir / INDEX)
        name, own = digest[:16], cache_dir / f"hvdtrain-{os.geteuid()}"
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _opened(own) as folder:
            copy = _within(folder) / name
            if not copy.is_dir():
                with lock.held(copy.with_name(f".{name}.lock"), own / f".{name}.lock") as held:
                    if not copy.is_dir():
                        _copy(data_dir, digest, copy, cache_dir, held)
            _require_own(own / name, copy.lstat())
    except OSError as error:
        raise DataError(
            f"{data_dir} cannot be copied to cache_dir {cache_dir} ({error.strerror or error}): name a folder of this "
            "node's own disk, or leave cache_dir out."
        ) from None
    return own / name


@contextlib.contextmanager
def _opened(own: Path) -> Iterator[int]:
    """The user's own folder, made where it is missing."""
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    _require_own(own, own.lstat())
    descriptor = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(own, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _require_own(folder: Path, status: os.stat_result) -> None:
    """Another user who made it first, or put a link in its place, can stop us, and no more."""
    is_folder, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
    if not is_folder or status.st_uid != os.geteuid() or mode & 0o077:
        held = f"{'a folder' if is_folder else 'something else'} of uid {status.st_uid} with mode {mode:o}"
        raise DataError(
            f"{folder} must be a folder of uid {os.geteuid()} with mode 700, got {held}: have it removed, or name "
            "another cache_dir."
        )


def _within(folder: int) -> Path:
    """The open folder, wherever its name leads by now."""
    return Path(f"/proc/self/fd/{folder}")


def _copy(data_dir: Path, digest: str, copy: Path, cache_dir: Path, held: lock.Lock) -> None:
    paths = [path for path in data_dir.iterdir() if path.is_file()]
    size, free = sum(path.stat().st_size for path in paths), shutil.disk_usage(copy.parent).free
    if size > free:
        raise DataError(
            f"cache_dir {cache_dir} must have room for the {size / 1e6:,.1f} MB of {data_dir}, got "
            f"{free / 1e6:,.1f} MB: name a larger disk, or leave cache_dir out."
        )
    files.sweep(copy.parent, copy.name)  # whoever holds the lock is the only one that copies
    with files.new_folder(copy, 0o700) as copied:
        with ThreadPoolExecutor(COPIERS, "copy") as pool:
            for _ in pool.map(lambda path: _copy_file(path, copied / path.name, held), paths):
                pass
        if sha256(copied / INDEX) != digest:
            raise DataError(f"{data_dir / INDEX} changed while it was copied: start again.")


def _copy_file(source: Path, dest: Path, held: lock.Lock) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with source.open("rb") as read, os.fdopen(os.open(dest, flags, 0o600), "wb") as written:
        while block := read.read(BLOCK):
            written.write(block)
            held.progress()
