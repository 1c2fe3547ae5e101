"""What `watch` shows of a run and of its job in SLURM at one moment."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from hvdtrain.core.wording import duration
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.record import reader
from hvdtrain.record.history import NOT_VALUES, Launch, Record
from hvdtrain.record.reader import ENDED, RecordedRun
from hvdtrain.tools.report.model import step_time
from hvdtrain.tools.report.results import best, chosen, words
from hvdtrain.untrusted import number, one_line, text, unix_time, whole

LONGEST = 400
BAR = 24
HOSTS = 4
RECENT = 20
"""The time left is estimated from so many log lines."""
EVENTS = 5
KILLED = "its processes ended without a message: killed, or its node was lost"
FIELDS = ("%T", "%r", "%V", "%S", "%L", "%N", "%Z")
WAITING = {"PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
GONE = "GONE"
"""The state of a job that squeue knows no longer."""
Row = tuple[str, str]


@dataclass(frozen=True)
class Job:
    """A job as squeue describes it. What is not known is empty."""

    number: str
    state: str = ""
    """As RUNNING; empty where SLURM has not answered."""
    reason: str = ""
    submit: str = ""
    """When it was submitted."""
    start: str = ""
    """When it started, or is expected to start."""
    left: str = ""
    """What is left of its time limit."""
    nodes: str = ""
    folder: str = ""
    """The folder in which it was submitted."""

    @classmethod
    def requested(cls, number: str) -> "Job":
        """The job as squeue describes it now."""
        try:
            return cls(number, *slurm.query(number, *FIELDS))
        except SlurmError as error:
            return cls(number, GONE if error.cause == "gone" else "")

    @property
    def is_waiting(self) -> bool:
        """Whether the job will start, or start again."""
        return self.state in WAITING

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state == GONE


@dataclass(frozen=True)
class Frame:
    """A run and its job at one moment, as far as they are known."""

    run: RecordedRun | None = None
    job: Job | None = None
    state: str = "unknown"

    @property
    def is_over(self) -> bool:
        """Whether neither the run nor another start of it can change what is shown."""
        if self.job and self.job.is_waiting:  # queued again
            return False
        if self.state == "finished":
            return True
        if self.job and self.job.state:  # a job that still runs may start the training again
            return self.job.is_over and self.state != "running"  # a run that was killed looks so for a while
        return self.state in (*ENDED, "killed")

    @property
    def is_bad(self) -> bool:
        """Whether the run failed or was killed."""
        return self.state in {"failed", "killed"}


def frame(run: RecordedRun | None, job: Job | None, now: float) -> Frame:
    """The frame of a run and its job."""
    if not run:
        return Frame(job=job)
    return Frame(run, job, reader.state_of(run, now, lambda: job.is_over if job and job.state else None))


def rows(seen: Frame, now: float) -> Iterator[Row]:
    """The rows to show, as label and text; "" is left out."""
    run, job = seen.run, seen.job
    if run:
        name = run.recipe_name or text(run.program.get("model"))
        yield "run", " in ".join(part for part in (name, str(run.path)) if part)
        yield "state", _state(seen, run, now)
    if job:
        yield "job", _job(job, now)
    if not run:
        return
    yield "ranks", _ranks(run)
    yield "progress", _progress(run, seen.state, now)
    yield "training", _training(run)
    yield "validation", _validation(run)
    yield "best", _best(run)
    yield "slowest", _slowest(run.launch) if run.launch else ""
    if saved := reader.newest_checkpoint(run.path):
        yield "checkpoint", f"of step {saved[0]}, {_ago(saved[1], now)}"
    for index, event in enumerate(_events(run)):
        yield "" if index else "events", event
    gaps = [f"no {gap.name}" if gap.is_absent else f"{gap.name} cannot be read" for gap in run.gaps]
    yield "missing", ", ".join(dict.fromkeys(gaps))


def _state(seen: Frame, run: RecordedRun, now: float) -> str:
    ago = _ago(run.last_sign, now) if run.last_sign else ""
    if seen.state == "running":
        return f"running, last record {ago}" if ago else "running"
    if seen.state == "unknown":
        return "unknown"
    early = f"ended early, {run.ended}" if run.ended else ""
    error = KILLED if seen.state == "killed" else run.error if seen.state != "finished" else early
    return f"{seen.state} {ago}".rstrip() + (f": {error}" if error else "")


def _job(job: Job, now: float) -> str:
    state = "ended" if job.is_over else job.state.lower()
    parts = [f"{job.number}: {state or 'SLURM has not answered yet'}"]
    if job.is_waiting:
        parts += [f"reason {job.reason}"] if job.reason and job.reason != "None" else []
        submitted, start = _time(job.submit), _time(job.start)
        parts += [f"submitted {_ago(submitted, now)}"] if submitted else []
        parts += [
            f"expected to start in {duration(max(0.0, start - now), rough=True)}" if start else "start not known yet"
        ]
    elif job.state and not job.is_over:
        parts += [f"{job.left} left of its time limit"] if job.left else []
        parts += [f"on {job.nodes}"] if job.nodes else []
    return ", ".join(parts)


def _time(when: str) -> float | None:
    try:
        return datetime.fromisoformat(when).timestamp()
    except (ValueError, OverflowError):  # N/A
        return None


def _ago(when: float, now: float) -> str:
    return f"{duration(max(0.0, now - when), rough=True)} ago"


def _ranks(run: RecordedRun) -> str:
    if not run.ranks:
        return ""
    hosts = list(dict.fromkeys(run.launch.hosts)) if run.launch else []
    named = ", ".join(hosts[:HOSTS]) + (f" and {len(hosts) - HOSTS} more" if hosts[HOSTS:] else "")
    launcher = text(run.launch.about.get("launcher")) if run.launch else ""
    parts = [f"{run.ranks} on {named}" if hosts else str(run.ranks), launcher, run.engine, run.framework]
    return ", ".join(part for part in parts if part)


def _progress(run: RecordedRun, state: str, now: float) -> str:
    step, total = run.step, run.total_steps
    if not total:
        return f"step {step}" if step else ""
    share = min(1.0, step / total)
    bar = "#" * round(share * BAR) + "." * (BAR - round(share * BAR))
    left = seconds_left(run) if state == "running" else None
    passed = max(0.0, now - run.last_sign) if run.last_sign else 0.0
    shown = "" if left is None else f"  {duration(max(0.0, left - passed), rough=True)} left"
    return f"step {step} of {total}  {share:.0%}  {bar}{shown}"


def seconds_left(run: RecordedRun) -> float | None:
    """Seconds from the last record to the end, by recent log lines; None where unknown."""
    steps, epochs = run.recent_of("step"), run.recent_of("epoch")
    total, batch, an_epoch = run.total_steps, whole(run.plan.get("global_batch"), 1), run.steps_per_epoch
    rates = [rate for record in steps[-RECENT:] if (rate := number(record.get("examples_per_second")))]
    if not total or not batch or not an_epoch or not rates:
        return None
    reported, made = (max((whole(record["step"]) or 0 for record in of[-1:]), default=0) for of in (epochs, steps))
    validations = 0 if reported >= total else math.ceil(total / an_epoch) - reported // an_epoch
    left = max(0, total - max(reported, made))
    return left * batch / statistics.median(rates) + validations * _pause(steps, epochs)


def _pause(steps: Sequence[Record], epochs: Sequence[Record]) -> float:
    """Seconds from an epoch's last step to its report; 0 where they are not known."""
    logged = {whole(record["step"]): record for record in steps}
    for epoch in reversed(epochs):
        if step := logged.get(whole(epoch["step"])):
            began, ended = unix_time(step.get("time")), unix_time(epoch.get("time"))
            return max(0.0, ended - began) if began and ended else 0.0
    return 0.0


def _training(run: RecordedRun) -> str:
    last = (run.recent_of("step") or [{}])[-1]
    epoch, epochs = whole(last.get("epoch")), run.epochs
    parts = [f"epoch {epoch}" + (f" of {epochs}" if epochs else "")] if epoch is not None else []
    parts += [f"{label} {_value(last[name])}" for name, label in (("loss", "loss"), ("lr", "LR")) if name in last]
    rates = ((number(last.get(f"{unit}_per_second")), unit) for unit in ("tokens", "examples"))
    return "  ".join(parts + [f"{rate:.1f} {unit}/s" for rate, unit in rates if rate is not None][:1])


def _validation(run: RecordedRun) -> str:
    """The metrics of the last epoch, first the one that decides on the best checkpoint."""
    for record in reversed(run.recent_of("epoch")):
        known = {
            *NOT_VALUES,
            "train_loss",
            "seconds",
            "valid_examples",
            "valid_tokens",
            "train_examples",
            "train_tokens",
        }
        shown = [name for name in record if name not in known and (run.program or name.startswith("valid_"))]
        first = chosen(run)
        names = sorted(shown, key=lambda name: name != first)
        values = ", ".join(f"{name.removeprefix('valid_')} {_value(record[name])}" for name in names[:6])
        if values:
            return f"epoch {whole(record.get('epoch'))}: {values}"
    return ""


def _best(run: RecordedRun) -> str:
    """The metric that decides on the best checkpoint, as far as its records were read."""
    found = best(run)
    return (
        f"{words(found[0])} {found[1]:.4g} at epoch {found[2]}" if found and found[2] != run.metrics.last_epoch else ""
    )


def _value(value: Any) -> str:
    known = number(value)
    return "not finite" if known is None else f"{known:.4g}"


def _slowest(launch: Launch) -> str:
    """The rank whose steps take longest without waiting for others."""
    if not launch.times or len(launch.times[-1].ranks) < 2:
        return ""
    times = launch.times[-1]
    if not np.isfinite(times.own).any():
        return "not known"
    seconds = np.nan_to_num(times.own)
    slowest = int(seconds.argmax())
    of_step = f"{step_time(seconds[slowest])} of its own a step; the median rank {step_time(np.median(seconds))}"
    return f"{launch.name_of(times.ranks[slowest])}: {of_step}"


def _events(run: RecordedRun) -> list[str]:
    """The last events, without checkpoints, of which the newest has a row of its own."""
    found = []
    for launch in run.launches:
        events = [(event.at, event.kind, event.text) for event in launch.events if event.kind != "checkpoint"]
        events += [(launch.clock, launch.end.state, launch.end.text)] if launch.end else []
        found += [(launch.time and launch.time + at, kind, message) for at, kind, message in events]
    return [
        f"{clock(when) + '  ' if when else ''}{kind}  {one_line(message, LONGEST)}".rstrip()
        for when, kind, message in found[-EVENTS:]
    ]


def clock(when: float) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))
