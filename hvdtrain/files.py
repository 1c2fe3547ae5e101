"""Atomic writes: a file is whole under its name or not there at all, after a power cut too.

It is written under a temporary name, synced and renamed, and the folder is synced. Reading is bounded.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import one_line

LIMIT = 1 << 20
"""The most bytes of a small file."""
DEPTH = 20
DIGITS = 20
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{16}\.tmp")


def expanded(path: str, key: str) -> str:
    """The path with $NAME and ${NAME} of this process's environment, and ~ as the home. Raises RecipeError, naming the
    `key`, where a variable is not set or empty."""

    def value(found: re.Match[str]) -> str:
        if text := os.environ.get(found[1] or found[2]):
            return text
        unset = RecipeError(f"{key} needs the environment variable {found[0]}, which is not set; export it.")
        unset.everywhere = False  # another node may have it
        raise unset

    return with_home(VARIABLE.sub(value, path))


def with_home(path: str) -> str:
    """The path with ~ and ~NAME as the home that they stand for, and as it is where there is none."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path's own raises there


def write(path: Path, text: str) -> None:
    """Replaces `path` by a text: a reader sees the old text or the new one. Raises OSError."""
    with replacing(path) as file:
        file.write(text)


def write_before_exit(path: Path, text: str) -> None:
    """As `write`, for a process that may be killed within moments: visible at once, synced later. Raises OSError.

    A busy disk takes seconds to sync. A power cut within them may leave the file empty.
    """
    unfinished = temporary(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        remove(unfinished)
        raise
    sync(path, path.parent)


@contextlib.contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write, of text or bytes, which replaces `path` once the block ends well. Raises OSError."""
    unfinished = temporary(path)
    try:
        with unfinished.open("xb" if binary else "x", encoding=None if binary else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move(unfinished, path)
    except BaseException:
        remove(unfinished)
        raise


@contextlib.contextmanager
def new_folder(path: Path, mode: int = 0o777, *, aside: Path | None = None) -> Iterator[Path]:
    """A folder to fill with files, which becomes `path` once the block ends well; what was there becomes `aside`.

    Raises OSError, also where a file or a filled folder is there by then and `aside` is None.
    """
    unfinished = temporary(path)
    try:
        unfinished.mkdir(mode)
        yield unfinished
        sync(*unfinished.iterdir(), unfinished)
        if aside and (path.exists() or path.is_symlink()):
            remove(aside)
            path.rename(aside)  # not synced: for a reader, the name is missing as briefly as can be
        move(unfinished, path)
    finally:
        remove(unfinished)


def create_private(path: Path, content: bytes) -> None:
    """A file for this user alone; of processes that create it at once, one does. Raises OSError."""
    unfinished = temporary(path)
    try:
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
        sync(path.parent)
    finally:
        remove(unfinished)


def move(path: Path, to: Path) -> None:
    """Renames a file within its folder, and syncs the folder. Only a file or an empty folder is replaced.
    Raises OSError."""
    path.replace(to)
    sync(to.parent)


def temporary(path: Path, token: str = "") -> Path:
    """A hidden name beside `path` that no other process or call uses, unless with the same token; `sweep` knows it."""
    return path.with_name(f".{path.name.lstrip('.')}.{token or f'{os.getpid()}-{secrets.token_hex(8)}'}.tmp")


def sweep(folder: Path, name: str = "*") -> None:
    """Removes what killed processes have left of files of that name. To be called by their only writer."""
    for left in sorted(folder.glob(f".{name}.*.tmp")):
        if TEMPORARY.fullmatch(left.name):
            remove(left)


def remove(path: Path) -> None:
    """Removes a file or a folder where it can, the folder whole: a half-deleted one has a temporary name."""
    doomed = path if TEMPORARY.fullmatch(path.name) else temporary(path)
    with contextlib.suppress(OSError):
        path.rename(doomed)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            doomed.unlink()


def make_folder(path: Path) -> None:
    """Makes the folder and those it lies in, each synced into the one above. Raises OSError."""
    if path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def make_new_folder(path: Path) -> None:
    """As `make_folder`, for a folder that must not be there. Raises OSError."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir()
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Waits until these files and folders are on the disk as they are now. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems sync no folder, and need none
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """This user's folder of mode 0700, made where it is missing; by its descriptor, wherever its name leads by then.

    Raises OSError, also where another user made it first, or put a link in its place.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        require_private(path, os.fstat(descriptor))
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def require_private(path: Path, status: os.stat_result) -> None:
    """Raises PermissionError where that is not the status of a folder that is this user's alone."""
    is_folder, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
    if not is_folder or status.st_uid != os.geteuid() or mode & 0o077:
        held = f"{'a folder' if is_folder else 'something else'} of uid {status.st_uid} with mode {mode:o}"
        raise PermissionError(f"{path} must be a folder of uid {os.geteuid()} with mode 700, got {held}")


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's: what another user's holds, that user chooses."""
    return status.st_uid in {os.geteuid(), 0}


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[IO[bytes]]:
    """Opens a regular file to read: a pipe would be waited for, a device never ends. Raises OSError, ValueError.

    `follow`: False in a folder that another user may have filled, whose links may lead to files that he cannot read.
    """
    more = os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    if not follow and path.is_symlink():
        raise ValueError("it is a link, which is not followed")
    with open(path, "rb", opener=lambda _, flags: os.open(path, flags | more)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if not follow and status.st_nlink > 1 and status.st_uid != path.parent.stat().st_uid:
            raise ValueError("it is another user's file, linked here")
        yield file


def read(path: Path, limit: int = LIMIT, *, follow: bool = True) -> str:
    """The text of a file of at most `limit` bytes. Raises OSError, and ValueError where it is larger or not UTF-8."""
    with opened(path, follow=follow) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB")
    return content.decode()


def read_bytes(path: Path, most: int) -> bytes:
    """A regular file's bytes. Raises OSError, ValueError with the rule where it is another kind of file or larger."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it must have at most {most:,} bytes")
    return data


def read_json(path: Path, *, follow: bool = True) -> Any:
    """The value in a small JSON file. Raises OSError, and ValueError where it is no JSON, large or deep."""
    return parse_json(read(path, follow=follow))


def parse_json(text: str) -> Any:
    """The value of a JSON text whose numbers and depth are bounded. Raises ValueError."""
    try:
        value = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    return value


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError("it is nested too deeply")


PATIENCE_SECONDS = 300.0
"""Seconds that the holder of a lock may show no progress; longer than a parallel file system is usually away."""
POLL_SECONDS = 0.1


class Lock:
    """A lock that is held. Its holder calls `progress` as the work proceeds, so that those who wait keep waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self) -> None:
        os.utime(self._descriptor)


@contextlib.contextmanager
def held(
    path: Path, shown: Path | None = None, patience: float | None = None, waiting: Callable[[], None] = lambda: None
) -> Iterator[Lock]:
    """Around what one process at a time may do; the lock is a file at that path, or as `shown` in messages.

    Calls `waiting` once where another process holds it. The system releases it for a process that dies. Raises
    DataError where its holder has shown no progress for `patience` seconds, by default PATIENCE_SECONDS, and OSError
    where the file system has no locks, or the file is another user's.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _require_own(os.fstat(descriptor))
        if not _is_taken(descriptor):
            waiting()
            _wait(descriptor, shown or path, PATIENCE_SECONDS if patience is None else patience)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield Lock(descriptor)
    finally:
        os.close(descriptor)


def _require_own(status: os.stat_result) -> None:
    """Raises PermissionError for another user's lock, which might be held for ever, and for a file with a
    second link."""
    if status.st_uid != os.geteuid() or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "the lock is another user's")


def _wait(descriptor: int, shown: Path, patience: float) -> None:
    seen, since = -1, time.monotonic()
    while not _is_taken(descriptor):
        if (touched := os.fstat(descriptor).st_mtime_ns) != seen:
            seen, since = touched, time.monotonic()
        elif time.monotonic() - since > patience:
            holder = one_line(os.pread(descriptor, 100, 0).decode("ascii", "replace"))
            raise DataError(
                f"{shown} is held by process {holder}, without any progress for {patience:.0f} s: end that "
                "process, or name another folder."
            )
        time.sleep(POLL_SECONDS)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter is CIFS's
        return False
    return True
