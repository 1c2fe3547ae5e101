"""`python -m hvdtrain watch [RUN]`: shows a queued or running run until it ends."""

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pydantic

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.errors import RecipeError
from hvdtrain.record import reader
from hvdtrain.record.folder import RUNS
from hvdtrain.record.reader import ENDED, FILES, JOB
from hvdtrain.tools.watch.frame import LONGEST, Frame, Job, clock, frame, rows
from hvdtrain.untrusted import printable, quoted

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS = 1.0
"""Seconds between two reads of the folder."""
REQUEST_SECONDS = 10.0
"""Seconds between two requests to SLURM."""
LABEL = 12
STYLES = {"stopped": "bold yellow", "left": "bold yellow", "failed": "bold red", "killed": "bold red"} | dict.fromkeys(
    ("running", "finished"), "bold green"
)


class Target:
    """A run, a job of SLURM with squeue's newest answer on it, or both."""

    def __init__(self, folder: Path | None, number: str | None) -> None:
        self.folder, self._job = folder, Job(number) if number else None
        self._thread, self._next = threading.Thread(), 0.0

    def frame(self, *, waits: bool = False) -> Frame:
        """The frame of this moment; `waits` for SLURM's answer."""
        if waits:
            self._request()
        elif self._job and not self._thread.is_alive() and time.monotonic() >= self._next:
            self._next = time.monotonic() + REQUEST_SECONDS
            # By a thread, as a busy controller is slow; Ctrl-C does not wait for it.
            self._thread = threading.Thread(target=self._request, daemon=True)
            self._thread.start()
        answer = self._job
        if not self.folder and answer:
            self.folder = of_job(answer.number, Path(answer.folder) if answer.folder else Path())
        run = reader.read(self.folder, recent=True) if self.folder else None
        seen = frame(run, answer, time.time())
        if run and run.job_id and not answer and seen.state not in ENDED:
            self._job = Job(run.job_id)
            return self.frame(waits=waits)
        return seen

    def _request(self) -> None:
        self._job = self._job and Job.requested(self._job.number)


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Shows a run until it ends: progress, time left, slowest rank, last events, the SLURM job's
    state.

    The exit code is 0, or 1 where the run failed or was killed.
    """

    run: Annotated[
        str,
        Flag(
            help="run folder, or a SLURM job's number; left out: the newest run in runs/",
            metavar="RUN",
            is_positional=True,
        ),
    ] = ""
    once: Annotated[bool, Flag("print it once and end, as where the output is no terminal")] = False


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

    seen = watched.frame(waits=True)
    Console().print(drawn(seen, time.time()))
    return int(seen.is_bad)


def _live(watched: Target) -> int:
    from rich.live import Live

    seen = watched.frame()
    with Live(drawn(seen, time.time(), live=True), auto_refresh=False) as live:
        while not seen.is_over:
            time.sleep(SECONDS)
            seen = watched.frame()
            live.update(drawn(seen, time.time(), live=not seen.is_over), refresh=True)
    return int(seen.is_bad)


def find(text: str) -> Target:
    """The run or job that a person names. Raises RecipeError where there is none."""
    if not text:
        found = newest(RUNS.glob("*/*"))
        if not found:
            raise RecipeError(f"there is no run in {RUNS}/ here; name a run folder or a job of SLURM.")
        return Target(found, None)
    folder = Path(text)
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):
            raise RecipeError(f"{quoted(text)} cannot be read; ask its owner, or watch a run of your own.")
        if reader.written(folder) is None:
            lacks = ", ".join(FILES[:3])
            found = newest(itertools.chain(folder.glob("*"), folder.glob("*/*")))
            names = f" The newest run in it: python -m hvdtrain watch {printable(str(found), 200)}" if found else ""
            raise RecipeError(f"{quoted(text)} is no run folder: it has none of {lacks}.{names}")
        return Target(folder, None)
    if JOB.fullmatch(text):
        found = of_job(text, Path())
        if not found and not Job.requested(text).state:
            raise RecipeError(f"job {text} has no folder in {RUNS}/ here, and no SLURM answers; name a run folder.")
        return Target(found, text)
    raise RecipeError(f"RUN must be a run folder or a job's number, got {quoted(text)}.")


def of_job(number: str, folder: Path) -> Path | None:
    """The newest run of that job, below the folder that it was submitted in."""
    of_array = number.partition("_")[0]
    pattern = re.compile(rf"({re.escape(number)}|{of_array})(-\d+)?")
    found = [path for path in (folder / RUNS).glob(f"*/{of_array}*") if pattern.fullmatch(path.name)]
    return newest(found)


def newest(folders: Iterable[Path]) -> Path | None:
    """The run folder that was written to last."""
    times = {path: when for path in folders if (when := reader.written(path)) is not None}
    return max(times, key=times.__getitem__, default=None)


def drawn(seen: Frame, now: float, *, live: bool = False) -> "RenderableType":
    """The frame as a table of rich; `live`: with the time and how to end the display."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows(seen, now):
        style = STYLES.get(seen.state, "") if label == "state" else ""
        if value:
            table.add_row(label, Text(printable(value, LONGEST), style=style))
    if live:
        table.add_row("now", Text(f"{clock(now)}; Ctrl-C ends this display, not the run", style="dim"))
    return table
