"""`python -m hvdtrain watch [RUN]`: a run, queued or running, at the terminal until it ends."""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import pydantic
import tyro

from hvdtrain import untrusted
from hvdtrain.core import flags
from hvdtrain.errors import RecipeError
from hvdtrain.run.folder import RUNS
from hvdtrain.tools.watch import frame, job, picture
from hvdtrain.tools.watch.frame import Frame
from hvdtrain.tools.watch.job import NUMBER, Squeue

SECONDS = 1.0
"""Between two looks into the folder."""
FILES = ("status.json", "metrics.jsonl", "recipe.yaml", "run.json", "plan.json", "launches.jsonl", "checkpoints")
"""A run's folder has one of them."""
QUIET = 30.0
"""Seconds without a record after which a run that holds its folder no more was killed."""


class Target:
    """A run, a job, or both."""

    def __init__(self, folder: Path | None, number: str | None) -> None:
        self.folder, self._squeue = folder, Squeue(number) if number else None

    def frame(self, *, waits: bool = False) -> Frame:
        """What can be said now. `waits` for SLURM's answer."""
        answer = self._squeue.job(waits=waits) if self._squeue else None
        if not self.folder and answer:
            self.folder = of_job(answer.number, Path(answer.folder) if answer.folder else Path())
        seen = frame.read(self.folder, answer)
        if not self._squeue and seen.state == "running" and (number := _job_of(seen)):
            self._squeue = Squeue(number)
            return self.frame(waits=waits)
        if seen.state == "running" and _was_killed(seen):
            return frame.killed(seen)
        return seen


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Shows a run until it ends: progress, time left, slowest rank, last events, the SLURM job's state.

    The exit code is 0, or 1 where the run failed.
    """

    run: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(help="run folder, or a SLURM job's number; left out: the newest run in runs/", metavar="RUN"),
    ] = ""
    once: Annotated[bool, tyro.conf.arg(help="print it once and end, as where the output is no terminal")] = False


def main(argv: Sequence[str]) -> int:
    """Shows the run; the exit code. Raises RecipeError where there is none."""
    options = flags.parse(Options, "python -m hvdtrain watch", argv)
    watched = find(options.run)
    try:
        if options.once or not sys.stdout.isatty():
            return _once(watched)
        return _live(watched)
    except KeyboardInterrupt:
        return 0


def _once(watched: Target) -> int:
    from rich.console import Console

    frame = watched.frame(waits=True)
    Console().print(picture.of(frame, time.time()))
    return int(frame.state == "failed")


def _live(watched: Target) -> int:
    from rich.live import Live

    frame = watched.frame()
    with Live(picture.of(frame, time.time(), live=True), auto_refresh=False) as live:
        while not frame.is_over:
            time.sleep(SECONDS)
            frame = watched.frame()
            live.update(picture.of(frame, time.time(), live=not frame.is_over), refresh=True)
    return int(frame.state == "failed")


def find(text: str) -> Target:
    """The target that a person names. Raises RecipeError."""
    if not text:
        found = newest(RUNS.glob("*/*"))
        if not found:
            raise RecipeError(f"there is no run in {RUNS}/ here; name a run folder or a job of SLURM.")
        return Target(found, None)
    folder = Path(text)
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):
            raise RecipeError(f"{untrusted.quoted(text)} cannot be read; ask its owner, or watch a run of your own.")
        if not _is_run(folder):
            raise RecipeError(f"{untrusted.quoted(text)} is no run folder: it has none of {', '.join(FILES[:3])}.")
        return Target(folder, None)
    if NUMBER.fullmatch(text):
        found = of_job(text, Path())
        if not found and not job.requested(text).state:
            raise RecipeError(f"job {text} has no folder in {RUNS}/ here, and no SLURM answers; name a run folder.")
        return Target(found, text)
    raise RecipeError(f"RUN must be a run folder or a job's number, got {untrusted.quoted(text)}.")


def of_job(number: str, folder: Path) -> Path | None:
    """The newest run of that job, below the folder it was submitted in."""
    of_array = number.partition("_")[0]
    pattern = re.compile(rf"({re.escape(number)}|{of_array})(-\d+)?")
    found = [path for path in (folder / RUNS).glob(f"*/{of_array}*") if pattern.fullmatch(path.name)]
    return newest(found)


def newest(folders: Iterable[Path]) -> Path | None:
    """The run folder that was written to last."""
    runs = [path for path in folders if _is_run(path)]
    return max(runs, key=_written, default=None)


def _is_run(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in FILES)  # noqa: PTH110 - which raises nothing


def _written(folder: Path) -> float:
    times = [0.0]
    for name in FILES:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _job_of(seen: Frame) -> str | None:
    described = seen.launch.get("job")
    number = described.get("id") if isinstance(described, dict) else None
    return number if isinstance(number, str) and NUMBER.fullmatch(number) else None


def _was_killed(seen: Frame) -> bool:
    """Whether it ended without a message: its job is gone, or rank 0 was on this host and holds the folder no more."""
    if seen.written is None or time.time() - seen.written < QUIET:
        return False
    if seen.job and seen.job.state:
        return seen.job.is_over
    hosts = seen.launch.get("hosts")
    is_here = isinstance(hosts, list) and hosts[:1] == [socket.gethostname()]
    return bool(is_here and seen.folder and not _is_held(seen.folder))


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
