"""`python -m hvdtrain watch [RUN]`: a run, queued or running, at the terminal until it ends."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import tyro

from hvdtrain.core import flags
from hvdtrain.errors import RecipeError
from hvdtrain.record.folder import RUNS
from hvdtrain.record.progress_line import duration
from hvdtrain.tools.watch import frame, job
from hvdtrain.tools.watch.frame import Frame
from hvdtrain.tools.watch.job import GONE, NUMBER, Job, Squeue
from hvdtrain.tools.watch.tail import Record, number, text, whole
from hvdtrain.untrusted import one_line, printable, quoted

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS = 1.0
"""Between two looks into the folder."""
LABEL = 12
LONGEST = 400
BAR = 24
HOSTS = 4
STYLES = {"stopped": "bold yellow", "failed": "bold red", "killed": "bold red"} | dict.fromkeys(
    ("running", "finished"), "bold green"
)
Row = tuple[str, str]


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
    Console().print(drawn(frame, time.time()))
    return int(frame.is_bad)


def _live(watched: Target) -> int:
    from rich.live import Live

    frame = watched.frame()
    with Live(drawn(frame, time.time(), live=True), auto_refresh=False) as live:
        while not frame.is_over:
            time.sleep(SECONDS)
            frame = watched.frame()
            live.update(drawn(frame, time.time(), live=not frame.is_over), refresh=True)
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
            raise RecipeError(f"{quoted(text)} cannot be read; ask its owner, or watch a run of your own.")
        if not _is_run(folder):
            lacks = ", ".join(frame.FILES[:3])
            raise RecipeError(f"{quoted(text)} is no run folder: it has none of {lacks}.")
        return Target(folder, None)
    if NUMBER.fullmatch(text):
        found = of_job(text, Path())
        if not found and not job.requested(text).state:
            raise RecipeError(f"job {text} has no folder in {RUNS}/ here, and no SLURM answers; name a run folder.")
        return Target(found, text)
    raise RecipeError(f"RUN must be a run folder or a job's number, got {quoted(text)}.")


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


def drawn(frame: Frame, now: float, *, live: bool = False) -> "RenderableType":
    """For rich; `live`: it is shown until the run ends, and moves with every look."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows(frame, now):
        style = STYLES.get(frame.state, "") if label == "state" else ""
        table.add_row(label, Text(printable(value, LONGEST), style=style))
    if live:
        table.add_row("now", Text(f"{_clock(now)}; Ctrl-C ends this display, not the run", style="dim"))
    return table


def rows(frame: Frame, now: float) -> list[Row]:
    """Label and text of each row."""
    return [(label, value) for label, value in _rows(frame, now) if value]


def _rows(frame: Frame, now: float) -> Iterator[Row]:
    yield "run", " in ".join(part for part in (frame.recipe, str(frame.folder or "")) if part)
    yield "state", _state(frame, now)
    if frame.job:
        yield "job", _job(frame.job, now)
    yield "ranks", _ranks(frame.launch)
    yield "progress", _progress(frame, now)
    yield "training", _training(frame)
    yield "validation", _validation(frame.validation)
    yield "slowest", _slowest(frame)
    if frame.checkpoint:
        step, when = frame.checkpoint
        yield "checkpoint", f"of step {step}, {duration(max(0.0, now - when))} ago"
    for index, event in enumerate(frame.events):
        yield "events" if index == 0 else "", _event(event)
    if frame.folder:
        yield "missing", ", ".join(frame.missing)


def _state(frame: Frame, now: float) -> str:
    if not frame.state:
        return "" if not frame.folder else "unknown"
    ago = f"{duration(max(0.0, now - frame.written))} ago" if frame.written else ""
    if frame.state == "running":
        return f"running, last record {ago}" if ago else "running"
    why = f": {one_line(frame.error, LONGEST)}" if frame.error else ""
    return f"{frame.state} {ago}".rstrip() + why


def _job(job: Job, now: float) -> str:
    state = "ended" if job.state == GONE else job.state.lower()
    parts = [f"{job.number}: {state or 'SLURM has not answered yet'}"]
    if job.is_waiting:
        parts += [f"reason {job.reason}"] if job.reason and job.reason != "None" else []
        submitted, start = _seconds(job.submit), _seconds(job.start)
        parts += [f"submitted {duration(max(0.0, now - submitted))} ago"] if submitted else []
        parts += [f"expected to start in {duration(max(0.0, start - now))}" if start else "start not known yet"]
    elif job.state and job.state != GONE:
        parts += [f"{job.left} left of its time limit"] if job.left else []
        parts += [f"on {job.nodes}"] if job.nodes else []
    return ", ".join(parts)


def _seconds(when: str) -> float | None:
    try:
        return datetime.fromisoformat(when).timestamp()
    except (ValueError, OverflowError):  # N/A
        return None


def _ranks(launch: Mapping[str, Any]) -> str:
    count = whole(launch, "ranks")
    if not count:
        return ""
    listed = launch.get("hosts")
    hosts = list(dict.fromkeys(map(str, listed))) if isinstance(listed, list) else []
    named = ", ".join(hosts[:HOSTS]) + (f" and {len(hosts) - HOSTS} more" if hosts[HOSTS:] else "")
    parts = [f"{count} on {named}" if hosts else str(count)]
    return ", ".join(parts + [value for name in ("launcher", "engine", "framework") if (value := text(launch, name))])


def _progress(frame: Frame, now: float) -> str:
    step, total = frame.step, frame.total
    if step is None:
        return ""
    if not total:
        return f"step {step}"
    share = min(1.0, step / total)
    bar = "#" * round(share * BAR) + "." * (BAR - round(share * BAR))
    left = ""
    if frame.state == "running" and frame.seconds_left is not None:
        passed = max(0.0, now - frame.written) if frame.written else 0.0
        left = f"  {duration(max(0.0, frame.seconds_left - passed))} left"
    return f"step {step} of {total}  {share:.0%}  {bar}{left}"


def _training(frame: Frame) -> str:
    epoch, last = whole(frame.last, "epoch"), frame.last
    parts = [f"epoch {epoch}" + (f" of {frame.epochs}" if frame.epochs else "")] if epoch is not None else []
    for name, label in (("loss", "loss"), ("lr", "LR")):
        if name in last:
            parts.append(f"{label} {_number(last, name)}")
    rate = number(last, "examples_per_second")
    return "  ".join(parts + ([f"{rate:.1f} examples/s"] if rate is not None else []))


def _validation(record: Record) -> str:
    names = [name for name in record if name.startswith("valid_") and name != "valid_examples"]
    values = ", ".join(f"{name.removeprefix('valid_')} {_number(record, name)}" for name in names[:6])
    return f"epoch {whole(record, 'epoch')}: {values}" if values else ""


def _number(record: Record, name: str) -> str:
    value = number(record, name)
    return "not finite" if value is None else f"{value:.4g}"


def _slowest(frame: Frame) -> str:
    slow = frame.slowest
    if not slow:
        return ""
    host = f" on {slow.host}" if slow.host else ""
    return f"rank {slow.rank}{host}: {_step(slow.seconds)} of its own a step; the median rank {_step(slow.median)}"


def _step(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _event(event: Record) -> str:
    when = number(event, "time")
    clock = f"{_clock(when)}  " if when and 0 <= when < 1e11 else ""
    name = text(event, "event") or text(event, "state")
    return f"{clock}{name}  {one_line(text(event, 'text'), LONGEST)}".rstrip()


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
