"""A lock between a user's processes on one node, which shows whether its holder gets on."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

PATIENCE_SECONDS = 300.0
"""That a holder may do nothing that can be seen; longer than a parallel file system is usually away."""
POLL_SECONDS = 0.1


class Lock:
    """Held: `progress` is called as the work gets on, so that the processes that wait go on waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self) -> None:
        os.utime(self._descriptor)


@contextlib.contextmanager
def held(path: Path, shown: Path | None = None) -> Iterator[Lock]:
    """Around what one process at a time may do; the lock is a file at that path, which messages show otherwise.

    The system gives it up for a process that dies. Raises DataError where its holder has shown no progress for
    PATIENCE_SECONDS, and OSError where the file system has no locks, or the file is another user's.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _require_own(os.fstat(descriptor))
        _wait(descriptor, shown or path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield Lock(descriptor)
    finally:
        os.close(descriptor)


def _require_own(status: os.stat_result) -> None:
    """Another user's would be held for ever; a second link would have us write to a file of another name."""
    if status.st_uid != os.geteuid() or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "the lock is another user's")


def _wait(descriptor: int, shown: Path) -> None:
    seen, since = -1, time.monotonic()
    while not _is_taken(descriptor):
        if (touched := os.fstat(descriptor).st_mtime_ns) != seen:
            seen, since = touched, time.monotonic()
        elif time.monotonic() - since > PATIENCE_SECONDS:
            holder = one_line(os.pread(descriptor, 100, 0).decode("ascii", "replace"))
            raise DataError(
                f"{shown} is held by process {holder}, without any progress for {PATIENCE_SECONDS:.0f} s: end that "
                "process, or name another folder."
            )
        time.sleep(POLL_SECONDS)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
