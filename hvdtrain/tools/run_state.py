"""How a run stands: one rule for every tool that reads its folder."""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

ENDED = ("finished", "failed", "stopped")
QUIET = 30.0
"""Seconds without a record after which one looks whether the run's processes are still there."""
SILENT = 900.0
"""Seconds without a sign of life, or SILENT_PART of the time so far, after which a run that has not ended was killed,
where nobody can look: it writes at the latest after a hundredth of its time, but a log line may be long in coming."""
SILENT_PART = 0.1


def state_of(
    folder: Path,
    now: float,
    *,
    status: str,
    end: str | None,
    host: str,
    seconds: float,
    written: float,
    is_job_over: Callable[[], bool | None],
) -> str:
    """finished, failed, stopped, running, killed (its processes are gone or silent, and no end is recorded), unknown.

    By status.json's state; the last launch's end, "" where it has recorded none, None without a launch; rank 0's host;
    for how many seconds that launch has run; when the newest record was written; whether the job is over, None where
    there is none, or SLURM does not say.
    """
    for recorded in (status, end or ""):
        if recorded in ENDED:
            return recorded
    if status != "running" and end is None:
        return "unknown"
    silent = now - written
    if silent < QUIET:
        return "running"
    if host == socket.gethostname():
        return "running" if _is_held(folder) else "killed"
    if (is_over := is_job_over()) is None:
        is_over = silent >= max(SILENT, SILENT_PART * seconds)
    return "killed" if is_over else "running"


def _is_held(folder: Path) -> bool:
    """Whether a process of this host holds the folder. Looks, and takes no lock that a run could miss."""
    try:
        status = (folder / ".lock").stat()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return True
    mark = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    return mark in locks or _is_open(folder / ".lock")


def _is_open(file: Path) -> bool:
    """Whether a process of this user has it open: a file system may have no locks."""
    lock = str(file.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # somebody else's, or it has ended
            if any(str(each.readlink()) == lock for each in (process / "fd").iterdir()):
                return True
    return False
