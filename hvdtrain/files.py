"""Files that are written whole, read within bounds, and locked.

A file is whole under its name or not there at all, after a power cut too: it is written under a temporary name, synced
and renamed, and its folder is synced.
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
"""The most bytes that a small file may have."""
DEPTH = 20
"""The most levels of lists and mappings in a JSON file."""
DIGITS = 20
"""The most digits of a whole number in a JSON file."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{16}\.tmp")


def expanded(path: str, key: str) -> str:
    """The path with environment variables ($NAME, ${NAME}) and ~ replaced by their values.

    Raises RecipeError, which names the recipe's `key`, where a variable is not set or empty.
    """

    def value(found: re.Match[str]) -> str:
        if text := os.environ.get(found[1] or found[2]):
            return text
        unset = RecipeError(f"{key} needs the environment variable {found[0]}, which is not set; export it.")
        unset.everywhere = False  # another node may have it
        raise unset

    return with_home(VARIABLE.sub(value, path))


def with_home(path: str) -> str:
    """The path with ~ or ~NAME replaced by that home folder; unchanged where there is no such home."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path's own raises there


def write(path: Path, text: str) -> None:
    """Replaces the content of `path`: a reader sees the old text or the new one. Raises OSError."""
    with replacing(path) as file:
        file.write(text)


def write_before_exit(path: Path, text: str) -> None:
    """Like `write`, but the text is visible before it is synced, for a process that may be killed within moments.

    A busy disk takes seconds to sync. A power cut in these seconds may leave the file empty. On a full disk the text
    takes the room of the old one. Raises OSError.
    """
    try:
        with _removed(temporary(path)) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "w", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
    sync(path, path.parent)


@contextlib.contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Opens a file of text or bytes that replaces `path` once the block ends without an error. Raises OSError."""
    with _removed(temporary(path)) as unfinished:
        with unfinished.open("xb" if binary else "x", encoding=None if binary else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move(unfinished, path)


@contextlib.contextmanager
def new_folder(path: Path, mode: int = 0o777, *, aside: Path | None = None) -> Iterator[Path]:
    """Makes a folder to fill with files, which becomes `path` once the block ends without an error.

    What was at `path` before is renamed to `aside`; where `aside` is None, a file or a filled folder there raises
    OSError.
    """
    with _removed(temporary(path)) as unfinished:
        unfinished.mkdir(mode)
        yield unfinished
        sync(*unfinished.iterdir(), unfinished)
        if aside and (path.exists() or path.is_symlink()):
            remove(aside)
            path.rename(aside)  # not synced, so that the name is missing for as short a time as possible
        move(unfinished, path)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The path, of the same name in a folder of its own, at which a library may write what becomes `path` once the
    block ends without an error. Raises FileExistsError where something is at `path` already; OSError."""
    with _removed(temporary(path)) as folder:
        folder.mkdir(0o700)
        yield folder / path.name
        sync(folder / path.name)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it is there already", str(path))
        (folder / path.name).rename(path)
        sync(path.parent)


def create_private(path: Path, content: bytes) -> None:
    """Creates a file that only this user can read, unless it is there already. Raises OSError.

    Where several processes create it at once, all of them find the content of one.
    """
    with _removed(temporary(path)) as unfinished:
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
        sync(path.parent)


@contextlib.contextmanager
def _removed(unfinished: Path) -> Iterator[Path]:
    """The path of a file or folder, which is removed at the end of the block if it is still there."""
    try:
        yield unfinished
    finally:
        remove(unfinished)


def move(path: Path, to: Path) -> None:
    """Renames a file within its folder, and syncs the folder. Raises OSError where `to` is a folder with files."""
    path.replace(to)
    sync(to.parent)


def temporary(path: Path, token: str = "") -> Path:
    """A hidden path beside `path`, which `sweep` recognises. Without a `token` no other call returns the same path."""
    return path.with_name(f".{path.name.lstrip('.')}.{token or f'{os.getpid()}-{secrets.token_hex(8)}'}.tmp")


def sweep(folder: Path, name: str = "*") -> None:
    """Removes temporary files that killed processes have left. Only the one writer of these files may call it."""
    for left in sorted(folder.glob(f".{name}.*.tmp")):
        if TEMPORARY.fullmatch(left.name):
            remove(left)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it can. A folder gets a temporary name first: nobody sees half of it."""
    doomed = path if TEMPORARY.fullmatch(path.name) else temporary(path)
    with contextlib.suppress(OSError):
        path.rename(doomed)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            doomed.unlink()


def make_folder(path: Path, *, must_be_new: bool = False) -> None:
    """Makes the folder and its parents, and syncs them. Raises OSError, also where it must be new and is there."""
    if path.is_dir() and not must_be_new:
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=not must_be_new)
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Waits until these files and folders are written to the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems cannot sync a folder, and need not
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """This user's folder of mode 0700, made where it is missing.

    The path given leads to it by its descriptor, even if somebody renames or replaces the folder meanwhile. Raises
    OSError, also where another user made it first, or put a link in its place.
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
    """Raises PermissionError unless `status` is that of a folder which only this user can open."""
    is_folder, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
    if not is_folder or status.st_uid != os.geteuid() or mode & 0o077:
        held = f"{'a folder' if is_folder else 'something else'} of uid {status.st_uid} with mode {mode:o}"
        raise PermissionError(f"{path} must be a folder of uid {os.geteuid()} with mode 700, got {held}")


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or to root, so that no other user chooses its content."""
    return status.st_uid in {os.geteuid(), 0}


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[IO[bytes]]:
    """Opens a regular file for reading, but no pipe or device, whose reading may never end.

    Set `follow` to False in a folder that another user may have filled: its links may lead to files that this user
    cannot read. Raises OSError, ValueError.
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


def read_bytes(path: Path, most: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file. Raises OSError, and ValueError where it has more than `most` bytes."""
    with opened(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it must have at most {most:,} bytes")
    return content


def read(path: Path, most: int = LIMIT, *, follow: bool = True) -> str:
    """The text of a small file. Raises OSError, and ValueError where it is larger than `most` bytes or not UTF-8."""
    return read_bytes(path, most, follow=follow).decode()


def read_json(path: Path, *, follow: bool = True) -> Any:
    """The value in a small JSON file. Raises OSError, and the ValueErrors of `read` and `parse_json`."""
    return parse_json(read(path, follow=follow))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for other text, deep nesting or a very long number."""
    try:
        value = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


PATIENCE_SECONDS = 300.0
"""Seconds that the holder of a lock may show no progress. A parallel file system rarely hangs for so long."""
POLL_SECONDS = 0.1
Progress = Callable[[], None]
"""The function with which the holder of a lock reports that it still works, so that others keep waiting."""


@contextlib.contextmanager
def held(
    path: Path, shown: Path | None = None, patience: float | None = None, waiting: Callable[[], None] = lambda: None
) -> Iterator[Progress]:
    """Holds a lock, the file `path`, for what only one process at a time may do. Messages show the path `shown`.

    Calls `waiting` once where another process holds the lock. The system releases it when its holder dies. Raises
    DataError where its holder has shown no progress for `patience` seconds, by default PATIENCE_SECONDS, and OSError
    where the file system has no locks, or the file belongs to another user, who might hold it for ever.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, "the lock is another user's")
        if not _takes(descriptor):
            waiting()
            _wait(descriptor, shown or path, PATIENCE_SECONDS if patience is None else patience)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield lambda: os.utime(descriptor)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, shown: Path, patience: float) -> None:
    seen, since = -1, time.monotonic()
    while not _takes(descriptor):
        if (touched := os.fstat(descriptor).st_mtime_ns) != seen:
            seen, since = touched, time.monotonic()
        elif time.monotonic() - since > patience:
            holder = one_line(os.pread(descriptor, 100, 0).decode("ascii", "replace"))
            raise DataError(
                f"{shown} is held by process {holder}, without any progress for {patience:.0f} s: end that "
                "process, or name another folder."
            )
        time.sleep(POLL_SECONDS)


def _takes(descriptor: int) -> bool:
    """Whether this process now holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # CIFS raises the latter
        return False
    return True
