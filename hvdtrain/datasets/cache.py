"""A packed set copied once a node to a folder of its own: a local disk, or /dev/shm, its memory."""

import contextlib
import fcntl
import hashlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain.datasets.shards import INDEX
from hvdtrain.errors import DataError

COPIERS = 8


def on_node(data_dir: Path, cache_dir: Path) -> Path:
    """The folder under cache_dir that holds a copy of the set: complete or not at all.

    Whichever process of the node comes first copies it, the others wait; a copy left by another job is taken as it is.
    Raises DataError where it does not fit or cannot be copied.
    """
    try:
        index = hashlib.sha256((data_dir / INDEX).read_bytes()).hexdigest()
        folder = cache_dir / f"hvdtrain-{index[:16]}"
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f".{folder.name}.lock").open("w") as lock:
            # Held by an open file: the system gives it up for a process that dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _copy(data_dir, folder)
    except OSError as error:
        raise DataError(
            f"{data_dir} cannot be copied to cache_dir {cache_dir} ({error.strerror or error}): name a folder of this "
            "node's own disk, or leave cache_dir out."
        ) from None
    return folder


def _copy(data_dir: Path, folder: Path) -> None:
    paths = [path for path in data_dir.iterdir() if path.is_file()]
    size, free = sum(path.stat().st_size for path in paths), shutil.disk_usage(folder.parent).free
    if size > free:
        raise DataError(
            f"cache_dir {folder.parent} must have room for the {size / 1e6:,.1f} MB of {data_dir}, got "
            f"{free / 1e6:,.1f} MB: name a larger disk, or leave cache_dir out."
        )
    _remove_half_copies(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        copied = Path(scratch, "set")
        copied.mkdir()
        with ThreadPoolExecutor(COPIERS, "copy") as pool:
            for _ in pool.map(lambda path: shutil.copyfile(path, copied / path.name), paths):
                pass
        copied.rename(folder)


def _remove_half_copies(folder: Path) -> None:
    """Of processes that were killed: whoever holds the lock is the only one that copies."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(left)
