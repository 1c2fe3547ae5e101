"""A run of somebody's own program, whoever's loop it has: its folder, its log and what its checkpoints say."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.core.compatibility import Framework
from hvdtrain.core.progress import Progress
from hvdtrain.core.settings import MTBF, OwnIntervals
from hvdtrain.core.totals import Totals
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import DivergedError, HvdtrainError, LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.world import joined
from hvdtrain.record import handover, trackers
from hvdtrain.record.folder import Identity, ResumePoint, hold, resume_point
from hvdtrain.record.reporter import Events, OwnReporter, Reporter
from hvdtrain.record.schema import news_of
from hvdtrain.record.trackers import Trackers
from hvdtrain.run.ending import Ending, begin, end
from hvdtrain.run.engine import Opened, explained
from hvdtrain.run.loop import Hooks
from hvdtrain.run.main import connect, record_launch
from hvdtrain.run.run import BaseRun
from hvdtrain.untrusted import one_line

RESERVED = {"kind", "step", "epoch", "seconds", "time"}
"""Of a record in metrics.jsonl."""
LONGEST_REASON = 500
ELSEWHERE = {"data", "groups", "loops", "began", "stopped", "ended"}
"""Of a program's metadata, what ranks compare by other names, or what each may say in its own words."""


class Program(Protocol):
    """What a run is asked for beside its tensors."""

    @property
    def identity(self) -> str:
        """What two runs must share to exchange checkpoints."""

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint."""

    @property
    def lr(self) -> float:
        """The learning rate now."""

    def metadata(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it beside tensors, as JSON."""


@dataclass(frozen=True)
class OwnRun(BaseRun):
    """What the loop's hooks need of a program's run."""

    intervals: OwnIntervals
    program: Program

    def agreed(self) -> dict[str, Any]:
        of_program = dict(self.program.metadata())
        of_data = agreement.named("data", of_program["data"])
        of_training = {name: value for name, value in of_program.items() if name not in ELSEWHERE}
        return {**of_data, **agreement.named("training", {**asdict(self.intervals), **of_training})}

    def metadata(self, *given: Any) -> dict[str, Any]:
        return {**super().metadata(*given), "program": self.program.metadata()}

    def _opened(self, folder: Path, events: Events | None, step: int, to_trackers: Trackers) -> Reporter:
        return OwnReporter(folder, events, step, trackers=to_trackers)

    def check_finite(self, totals: Totals, step: int) -> None:
        if not math.isfinite(totals.loss):
            raise DivergedError(
                f"the training loss is {totals.loss} at step {step}; lower the learning rate (now "
                f"{self.program.lr:g}), warm it up, or clip the gradients."
            )


def open_own(
    path: Path,
    program: Program,
    framework: Framework,
    engine: str,
    intervals: OwnIntervals,
    ending: Ending,
    names: tuple[str, ...] = ("tensorboard",),
) -> OwnRun:
    """The program's run; rank 0 holds its folder, and has its checkpoint. `names`: its trackers.
    Raises HvdtrainError."""
    trackers.check(names)
    check_intervals(intervals)
    about = {"framework": framework, "engine": engine, "ranks": ending.topology.size, "model": program.identity}
    identity = Identity(
        path.name,
        framework,
        program.identity,
        (f"run         {path.name}: {program.identity}",),
        {"run.json": json.dumps(about, indent=1)},
        program.state_bytes,
        intervals.keep_checkpoints,
    )
    folder, resume = None, ResumePoint()
    if ending.topology.is_rank_0:
        ending.begin_another()
        folder = hold(path)
        resume = resume_point(folder, identity)
        record_launch(ending.world, folder, framework, engine, resume)
        handover.write(os.environ, "run", run=str(folder.path.absolute()), step=resume.step, ranks=about["ranks"])
    ending.began, ending.folder = True, folder
    return OwnRun(identity, intervals, engine, (), folder, resume, ending.world, program, trackers=names)


def check_intervals(intervals: OwnIntervals) -> None:
    """Raises LoopError."""
    for name, value in asdict(intervals).items():
        if isinstance(value, str) and (name, value) != ("checkpoint_every_steps", "auto"):
            also = " or 'auto'" if name == "checkpoint_every_steps" else ""
            raise LoopError(f"{name} must be a number{also}, got {value!r}.")
        if name == "mtbf_hours" and value is not None and not 0 < value < math.inf:
            raise LoopError(f"mtbf_hours must be greater than 0, got {value}.")
        if name != "mtbf_hours" and isinstance(value, int) and value < 1:
            raise LoopError(f"{name} must be at least 1, got {value}.")
    if intervals.checkpoint_every_steps == "auto" and intervals.mtbf_hours is None:
        raise LoopError(f"checkpoint_every_steps='auto' needs {MTBF}.")


def take_data(before: Mapping[str, Any], now: Mapping[str, Any], progress: Progress) -> str:
    """A line where a resumed run's data are others than its checkpoint's; see `resume.news_of`. Raises LoopError where
    the epoch cannot go on with another batch size or seed, CheckpointError."""
    for name in ("batch_size", "seed"):
        if progress.sample and before.get(name) != now.get(name):
            raise LoopError(
                f"this epoch began with {name} {before.get(name, 'of its own')}, got {now.get(name, 'none')}; it can "
                "change only between epochs, or in another folder."
            )
    return news_of(before, now, progress)


def end_early(hooks: Hooks[Any], asked: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The training ends with this epoch, before the last that it was asked for, as numbers by name. Returns what its
    program's metadata hold of that as "ended"; the checkpoint is written by the `end_epoch` that follows."""
    hooks.note(f"ended after epoch {hooks.progress.epoch + 1}, before the last: {why}")
    end_here(hooks)
    return {"asked": dict(asked), "why": why}


def end_here(hooks: Hooks[Any]) -> None:
    """No epoch is left after this one."""
    hooks.extent = replace(hooks.extent, epochs=min(hooks.extent.epochs, hooks.progress.epoch))  # type: ignore[type-var]


def has_ended(hooks: Hooks[Any], asked: Mapping[str, Any]) -> bool:
    """Whether the folder's training has ended, the same being asked of it as now: a line says so, and no step is left.
    On all ranks alike."""
    progress, before = hooks.progress, hooks.resumed_from.get("program", {}).get("ended") or {}
    is_early = before.get("asked") == asked
    if not is_early and not (hooks.resumed_from and hooks.is_over):
        return False
    why = one_line(before.get("why"), LONGEST_REASON) if is_early else "no epoch is left"
    hooks.note(
        f"this folder's training has ended with epoch {progress.epoch}, step {progress.step} ({why}), and nothing is "
        "trained; more epochs train on, another folder begins anew"
    )
    end_here(hooks)
    return True


def report_logged(hooks: Hooks[Any], logged: Mapping[str, float], best: tuple[str | None, str | None]) -> float | None:
    """Reports the mean training loss of an epoch and what was logged in it. `best`: the metric that the best checkpoint
    has most of, or least of. Returns that number, negative for the least; None where it was not logged."""
    progress = hooks.progress
    train = {"train_loss": progress.train.mean_loss} if progress.train.count else {}
    values = {name: value for name, value in {**train, **logged}.items() if name not in RESERVED}
    if isinstance(hooks.reporter, OwnReporter):
        hooks.reporter.values(progress.step, progress.epoch + 1, values)
    highest, lowest = best
    name = highest or lowest
    if name and name not in values:
        hooks.note(f"{name}, which decides on the best checkpoint, was not logged in this epoch")
    return None if not name or name not in values else values[name] if highest else -values[name]


@contextlib.contextmanager
def in_own_words(taker: str) -> Iterator[None]:
    """A program has no flags: what remedies say of --output is said of the folder that `taker` is given."""
    try:
        yield
    except HvdtrainError as error:
        error.args = (re.sub(r"give (another|a writable) --output", rf"give {taker} \1 folder", str(error)),)
        raise


class Ranks:
    """This process among its ranks, for a loop that somebody else's `fit` makes: from before their collective library
    starts until the training ends, in whatever way."""

    def __init__(self, framework: Framework, engine: str, *, insecure: bool) -> None:
        """Joins the failure detector. Ends the process where a rank refused or did not come."""
        try:
            world = begin(insecure=insecure)
        except HvdtrainError as error:
            end(error.exit_code)
        self.name, self.world, self.ending = engine, world, Ending(world)
        self._library: Opened | None = None
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.ending)
        try:
            world.launch.enter("rendezvous")
            connect(world, ENGINES[engine])
            self._stack.enter_context(joined(world, framework, engine, os.environ))
        except BaseException as error:
            self.failed(error)
            raise

    def opened(self, library: Opened, rank: int, size: int) -> None:
        """The collective library has started, and sees `rank` of `size`. Raises WorldError."""
        self._library = library
        self.world.launch.enter("model")
        agreement.check_world(self.world.topology, rank, size, ENGINES[self.name].title)
        self.world.exchange(library.sum)

    def left(self) -> None:
        """The training has ended well; the library stays."""
        self._stack.close()

    def failed(self, error: BaseException) -> None:
        """The training ends with this error, which the other ranks learn. Where a user can meet it, it is reported in
        one line, and the process ends with its exit code."""
        if self._library:
            if isinstance(error, Exception) and self._library.is_lost(error):
                error = explained(self.world, self._library, error)
            self._library.close()
        if self._stack.__exit__(type(error), error, error.__traceback__):
            end(self.ending.code)
