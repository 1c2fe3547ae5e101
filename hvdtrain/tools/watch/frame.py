"""A run folder -> what can be said of the run now, whatever the folder holds."""

import contextlib
import functools
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain import files
from hvdtrain.record import checkpoint
from hvdtrain.tools import run_state
from hvdtrain.tools.watch.job import Job
from hvdtrain.tools.watch.tail import Record, json_of, last_of, last_records, mapping, number, text, whole

FILES = ("status.json", "metrics.jsonl", "recipe.yaml", "run.json", "plan.json", "launches.jsonl", "checkpoints")
"""A run's folder has one of them."""
RECENT = 20
"""Log lines whose pace the time left is estimated by."""
EVENTS = 5
KILLED = "its processes ended without a message: killed, or its node was lost"
BEGIN = ("launch", "world")
"""Kinds of the records with which a launch begins."""

T = TypeVar("T")


@dataclass(frozen=True)
class Slowest:
    """A rank whose steps take longest, without its waiting for others."""

    rank: int
    host: str
    seconds: float
    median: float
    """Of all ranks."""


@dataclass(frozen=True)
class Frame:
    """A run now. A value that is not known is None, or empty."""

    folder: Path | None = None
    job: Job | None = None
    state: str = ""
    error: str = ""
    recipe: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Of the last launch."""
    step: int | None = None
    total: int | None = None
    epochs: int | None = None
    last: Record = field(default_factory=dict)
    """The last log line's."""
    validation: Record = field(default_factory=dict)
    """The last epoch's."""
    seconds_left: float | None = None
    """From the last record on."""
    written: float | None = None
    """When that was written."""
    slowest: Slowest | None = None
    events: tuple[Record, ...] = ()
    checkpoint: tuple[int, float] | None = None
    """The newest one's step, and when it was written."""
    missing: tuple[str, ...] = ()
    """What the folder has not, or cannot be read."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        if self.job and self.job.is_waiting:  # queued again
            return False
        if self.state == "finished":
            return True
        if self.job and self.job.state:  # a job that still runs may start the training again
            return self.job.is_over and self.state != "running"  # until it is sure that it was killed
        return self.state in (*run_state.ENDED, "killed")

    @property
    def is_bad(self) -> bool:
        """Whether the run failed or was killed."""
        return self.state in {"failed", "killed"}


def read(folder: Path | None, job: Job | None, now: float) -> Frame:
    """Never raises for what the folder holds."""
    if not folder:
        return Frame(job=job)
    reader = _Reader(folder)
    nothing: Record = {}
    status = reader.get("status.json", json_of, nothing)
    is_own = os.path.exists(folder / "run.json")  # noqa: PTH110 - which raises nothing
    about = reader.get("run.json" if is_own else "plan.json", json_of, nothing)
    plan = nothing if is_own else about
    metrics = reader.get("metrics.jsonl", last_records, list[Record]())
    launches = _timed(reader.get("launches.jsonl", last_records, list[Record]()))
    steps = [record for record in metrics if record.get("kind") == "step" and whole(record, "step") is not None]
    epochs = [record for record in metrics if record.get("kind") == "epoch"]
    begun = {kind: reader.get("launches.jsonl", functools.partial(last_of, kind=kind), nothing) for kind in BEGIN}
    is_of_it = (number(begun["world"], "time") or math.inf) >= (number(begun["launch"], "time") or 0.0)
    launch = {**begun["launch"], **(begun["world"] if is_of_it else nothing)}
    hosts = launch.get("hosts")
    times = [when for record in (*metrics[-1:], *launches[-1:], status) if (when := number(record, "time"))]
    counts = [made for record in (*steps[-1:], *epochs[-1:], status) if (made := whole(record, "step")) is not None]
    epochs_planned, total = whole(mapping(plan.get("schedule")), "epochs"), whole(plan, "total_steps")
    end = None
    if launch:
        end = text(launches[-1], "state") if launches and launches[-1].get("kind") == "end" else ""
    state = run_state.state_of(
        folder,
        now,
        status=text(status, "state"),
        end=end,
        host=str(hosts[0]) if isinstance(hosts, list) and hosts else "",
        seconds=max((number(record, "clock") or 0.0 for record in launches[-1:]), default=0.0),
        written=max(times, default=written(folder)),
        is_job_over=lambda: job.is_over if job and job.state else None,
    )
    return Frame(
        folder=folder,
        job=job,
        state="" if state == "unknown" else state,
        error=KILLED if state == "killed" else text(status, "error"),
        recipe=text(about, "model") if is_own else reader.get("recipe.yaml", _recipe, ""),
        launch=launch or {"ranks": about.get("size"), **about},
        step=max(counts) if counts else None,
        total=total,
        epochs=epochs_planned,
        last=steps[-1] if steps else {},
        validation=next((record for record in reversed(epochs) if _is_validation(record)), {}),
        seconds_left=seconds_left(plan, steps, epochs),
        written=max(times, default=None),
        slowest=slowest(launches, launch),
        events=_events(launches),
        checkpoint=_checkpoint(folder),
        missing=tuple(reader.missing),
    )


def written(folder: Path) -> float:
    """When one of the run's files was last written, seconds since 1970."""
    times = [0.0]
    for name in FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


class _Reader:
    """Reads the folder's files, and keeps a word on each that is not there or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[str]()

    def get(self, name: str, read: Callable[[Path], T], default: T) -> T:
        """What is read of the file; the default where that fails."""
        try:
            return read(self.folder / name)
        except FileNotFoundError:
            self._add(f"no {name}")
        except (OSError, ValueError):
            self._add(f"{name} cannot be read")
        return default

    def _add(self, line: str) -> None:
        if line not in self.missing:
            self.missing.append(line)


def seconds_left(plan: Mapping[str, Any], steps: Sequence[Record], epochs: Sequence[Record]) -> float | None:
    """From the last record on: steps by recent log lines, validations by the last one's time."""
    total, batch, an_epoch = (whole(plan, name) for name in ("total_steps", "global_batch", "steps_per_epoch"))
    rates = [rate for record in steps[-RECENT:] if (rate := number(record, "examples_per_second"))]
    if not total or not batch or not an_epoch or not rates:
        return None
    made = max(whole(record, "step") or 0 for record in (*steps[-1:], *epochs[-1:]))
    reported = max((whole(record, "step") or 0 for record in epochs[-1:]), default=0)
    validations = -(-total // an_epoch) - reported // an_epoch
    if reported >= total:
        validations = 0
    left = max(0, total - made) * batch / statistics.median(rates)
    return left + validations * (_pause(steps, epochs) or 0.0)


def _pause(steps: Sequence[Record], epochs: Sequence[Record]) -> float | None:
    """From an epoch's last step to its report."""
    for epoch in reversed(epochs):
        for step in reversed(steps):
            if step.get("step") == epoch.get("step"):
                began, ended = number(step, "time"), number(epoch, "time")
                return max(0.0, ended - began) if began and ended else None
    return None


def slowest(launches: Sequence[Record], launch: Mapping[str, Any]) -> Slowest | None:
    """By the last record of all ranks' steps."""
    record = _last(launches, "ranks")
    columns = [record.get(name) for name in ("computing", "reading")]
    computing, reading = ([_seconds(value) for value in c] if isinstance(c, list) else [] for c in columns)
    reading += [0.0] * (len(computing) - len(reading))
    own = [a + b for a, b in zip(computing, reading, strict=False)]
    if len(own) < 2:
        return None
    index, listed, hosts = own.index(max(own)), record.get("of"), launch.get("hosts")
    rank = index
    if isinstance(listed, list) and index < len(listed) and isinstance(listed[index], int):
        rank = listed[index]
    host = ""
    if isinstance(hosts, list) and whole(launch, "ranks") == len(hosts) and 0 <= rank < len(hosts):
        host = str(hosts[rank])
    return Slowest(rank, host, own[index], statistics.median(own))


def _seconds(value: object) -> float:
    return number({"": value}, "") or 0.0


def _timed(launches: Sequence[Record]) -> list[Record]:
    """The records, each with a time: that of its launch's beginning and its clock."""
    began, found = None, list[Record]()
    for record in launches:
        if record.get("kind") == "launch":
            began = number(record, "time")
        clock = number(record, "clock")
        found.append({"time": began + clock, **record} if began is not None and clock is not None else record)
    return found


def _last(records: Sequence[Record], kind: str) -> Record:
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def _events(launches: Sequence[Record]) -> tuple[Record, ...]:
    found = [record for record in launches if record.get("kind") in ("event", "end")]
    # A run writes many checkpoints; the newest has a line of its own.
    return tuple(record for record in found if record.get("event") != "checkpoint")[-EVENTS:]


def _is_validation(record: Record) -> bool:
    return any(name.startswith("valid_") and name != "valid_examples" for name in record)


def _checkpoint(folder: Path) -> tuple[int, float] | None:
    with contextlib.suppress(OSError, ValueError):
        newest = checkpoint.committed(folder / "checkpoints")[-1:]
        for path in newest:
            return int(path.name.rpartition("-")[2]), path.stat().st_mtime
    return None


def _recipe(path: Path) -> str:
    """The recipe's name, from the first line that a run writes there."""
    found = re.match(r"# (.+), resolved\n", files.read(path, follow=False))
    return found[1] if found else ""
