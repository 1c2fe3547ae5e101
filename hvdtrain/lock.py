"""A lock between a user's processes on one node, which shows whether its holder makes progress."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

PATIENCE_SECONDS = 300.0
"""That a holder may do nothing that can be seen; longer than a parallel file system is usually away."""
POLL_SECONDS = 0.1


class Lock:
    """Held: `progress` is called as the work proceeds, so that the processes that wait keep waiting."""

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
    """Another user's would be held for ever; a second link would have us write to a file of another name."""
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
