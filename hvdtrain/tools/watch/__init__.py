"""`python -m hvdtrain watch [RUN]`: a run, queued or running, at the terminal until it ends."""

import os
import re
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


class Target:
    """A run, a job, or both."""

    def __init__(self, folder: Path | None, number: str | None) -> None:
        self.folder, self._squeue = folder, Squeue(number) if number else None

    def frame(self, *, waits: bool = False) -> Frame:
        """What can be said now. `waits` for SLURM's answer."""
        answer = self._squeue.job(waits=waits) if self._squeue else None
        if not self.folder and answer:
            self.folder = of_job(answer.number, Path(answer.folder) if answer.folder else Path())
        seen = frame.read(self.folder, answer, time.time())
        if not self._squeue and seen.state in {"running", "killed"} and (number := _job_of(seen)):
            self._squeue = Squeue(number)
            return self.frame(waits=waits)
        return seen


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Shows a run until it ends: progress, time left, slowest rank, last events, the SLURM job's state.

    The exit code is 0, or 1 where the run failed or was killed.
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
    return int(frame.is_bad)


def _live(watched: Target) -> int:
    from rich.live import Live

    frame = watched.frame()
    with Live(picture.of(frame, time.time(), live=True), auto_refresh=False) as live:
        while not frame.is_over:
            time.sleep(SECONDS)
            frame = watched.frame()
            live.update(picture.of(frame, time.time(), live=not frame.is_over), refresh=True)
    return int(frame.is_bad)


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
            lacks = ", ".join(frame.FILES[:3])
            raise RecipeError(f"{untrusted.quoted(text)} is no run folder: it has none of {lacks}.")
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
    return max(runs, key=frame.written, default=None)


def _is_run(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in frame.FILES)  # noqa: PTH110 - which raises nothing


def _job_of(seen: Frame) -> str | None:
    described = seen.launch.get("job")
    number = described.get("id") if isinstance(described, dict) else None
    return number if isinstance(number, str) and NUMBER.fullmatch(number) else None
