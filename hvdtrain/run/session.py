"""A run of a program of the user's, with its own loop or a framework's `fit`: from joining the ranks to its end."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hvdtrain.core.compatibility import Framework
from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.settings import MTBF, UserIntervals
from hvdtrain.core.sharing import Sum, Totals
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import AgreementError, DivergedError, HvdtrainError, LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.world import joined
from hvdtrain.record import handover, trackers
from hvdtrain.record.folder import Identity, ResumePoint, hold, resume_point
from hvdtrain.record.schema import news_of
from hvdtrain.run.ending import Ending, begin, end
from hvdtrain.run.engine import Opened, explained
from hvdtrain.run.loop import Hooks, R_co, Replica
from hvdtrain.run.main import connect, record_launch
from hvdtrain.run.run import BaseRun
from hvdtrain.untrusted import one_line

RESERVED = {"kind", "step", "epoch", "seconds", "time"}
"""Keys that each record of metrics.jsonl has."""
LONGEST_REASON = 500
Best = tuple[str | None, str | None]
"""Which reported number is highest, or which is lowest, in the best checkpoint."""
ELSEWHERE = {"data", "groups", "loops", "began", "stopped", "ended"}
"""Keys of a program's metadata that ranks compare under other names, or that each rank may have for itself."""


AReplica = TypeVar("AReplica", bound=Replica)


class Program(Protocol):
    """What a run is asked for beside its tensors."""

    @property
    def identity(self) -> str:
        """What two runs must share to exchange checkpoints."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint."""

    @property
    def lr(self) -> float:
        """The learning rate now."""

    def metadata(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it beside tensors, as JSON."""

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """Takes what `metadata` has given; a line of the log on what is another now, else empty. Raises
        CheckpointError and LoopError."""


@dataclass(frozen=True)
class UserRun(BaseRun):
    """What the loop's hooks need of a program's run."""

    intervals: UserIntervals
    program: Program

    def agreed(self) -> dict[str, Any]:
        of_program = dict(self.program.metadata())
        of_data = agreement.named("data", of_program["data"])
        of_training = {name: value for name, value in of_program.items() if name not in ELSEWHERE}
        return {**of_data, **agreement.named("training", {**asdict(self.intervals), **of_training})}

    def metadata(self, *given: Any) -> dict[str, Any]:
        return {**super().metadata(*given), "program": self.program.metadata()}

    def check_finite(self, totals: Totals, step: int) -> None:
        if not math.isfinite(totals.loss):
            raise DivergedError(
                f"the training loss is {totals.loss} at step {step}; lower the learning rate (now "
                f"{self.program.lr:g}), warm it up, or clip the gradients."
            )


def open_program(
    path: Path,
    program: Program,
    framework: Framework,
    engine: str,
    intervals: UserIntervals,
    ending: Ending,
    names: tuple[str, ...] = ("tensorboard",),
) -> UserRun:
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
        record_launch(ending, folder, framework, engine, resume)
        handover.write(os.environ, "run", run=str(folder.path.absolute()), step=resume.step, ranks=about["ranks"])
    ending.began = True
    return UserRun(
        identity, intervals, engine, (), folder, resume, ending.world, ending.journal, program, trackers=names
    )


def intervals_of(arguments: Mapping[str, Any]) -> UserIntervals:
    """The intervals among the arguments of a call, by name."""
    return UserIntervals(**{each.name: arguments[each.name] for each in fields(UserIntervals)})


def check_intervals(intervals: UserIntervals) -> None:
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
    """A line where a resumed run's data are others than its checkpoint's; see `schema.news_of`. Raises LoopError where
    the epoch cannot go on with another batch size or seed, CheckpointError."""
    for name in ("batch_size", "seed"):
        if progress.sample and before.get(name) != now.get(name):
            raise LoopError(
                f"this epoch began with {name} {before.get(name, 'of its own')}, got {now.get(name, 'none')}; it can "
                "change only between epochs, or in another folder."
            )
    return news_of(before, now, progress)


@contextlib.contextmanager
def in_programs_words(taker: str) -> Iterator[None]:
    """A program has no flags: what remedies say of --output is said of the folder that `taker` is given."""
    try:
        yield
    except HvdtrainError as error:
        error.args = (re.sub(r"give (another|a writable) --output", rf"give {taker} \1 folder", str(error)),)
        raise


Among = tuple[tuple[int, int], str, Sum]
"""A rank's number and how many there are, its host, and the sum over them: what a comparison needs."""


def check_next(
    kind: str,
    epoch: int | None,
    lrs: Mapping[str, Any],
    among: Among,
    logged: Mapping[str, float] | None = None,
) -> None:
    """Compares what the ranks have decided at an epoch's end: which is the next one, None for the end, and with which
    LRs. `logged`: what a rank may have decided by, which is named too where they differ. Raises AgreementError."""
    decided = agreement.named(kind, {"next epoch": epoch, **lrs})
    try:
        agreement.check(decided, *among)
    except AgreementError:
        if logged is None:
            raise
        by = agreement.named(kind, logged)
        raise AgreementError(agreement.differences({**decided, **by}, *among)) from None


class UserHooks(Hooks[R_co]):
    """What is due in a loop of the user's, or in somebody's `fit`, where nobody knows an epoch's last step before it is
    made. `best`: the metric that the best checkpoint has most of, or least of."""

    def __init__(self, run: UserRun, trainer: R_co, extent: UserSampling, best: Best = (None, None)) -> None:
        super().__init__(run, trainer, extent)
        if self.resumed_from and (news := run.program.restore(self.resumed_from["program"], self.progress)):
            self.note(news)
        self.best = best
        self.is_settled = True
        """Whether what is due at the end of an epoch's steps is done."""
        self._due_lr: float | None = None
        """The LR of a step of which what is due is not done yet."""

    def step(self, lr: float) -> None:
        """Counts an update; what is due after it is done by `after_step`."""
        self.progress.advance(self.extent)
        self.is_settled = self.progress.is_done(self.extent) or self.progress.is_epoch_done(self.extent)
        self._due_lr = lr

    def after_step(self) -> None:
        """What is due after the newest step, once; see `after_update`."""
        lr, self._due_lr = self._due_lr, None
        if lr is not None:
            self.after_update(lr)

    def end_steps(self, lr: float) -> None:
        """What is due after an epoch's last update, where nobody knew that it was the last."""
        self._due_lr = None
        if not self.is_settled:
            self.is_settled = True
            self.run.world.expect_steps(False)
            self._log(lr)
            self.trainer.average_statistics()
            self.journal.enter("validation")

    def report(self, values: Mapping[str, float]) -> None:
        """Writes the numbers of an epoch into log and files."""
        if self.reporter:
            self.reporter.values(self.progress.step, self.progress.epoch + 1, values)

    def end_logged_epoch(self, logged: Mapping[str, float]) -> None:
        """What is due once an epoch of somebody's `fit` has logged its numbers."""
        progress = self.progress
        train = {"train_loss": progress.train.mean_loss} if progress.train.count else {}
        values = {name: value for name, value in {**train, **logged}.items() if name not in RESERVED}
        self.report(values)
        highest, lowest = self.best
        name = highest or lowest
        if name and name not in values:
            self.note(f"{name}, which decides on the best checkpoint, was not logged in this epoch")
        score = None if not name or name not in values else values[name] if highest else -values[name]
        self.end_epoch(progress.after_steps(self.extent), score)

    def end_early(self, asked: Mapping[str, Any], why: str) -> dict[str, Any]:
        """The training ends with this epoch, before the last that it was asked for, as numbers by name. Returns what
        its program's metadata hold of that as "ended"; the checkpoint is written at the epoch's end."""
        self.note(f"ended after epoch {self.progress.epoch + 1}, before the last: {why}")
        self.end_here()
        return {"asked": dict(asked), "why": why}

    def end_here(self) -> None:
        """No epoch is left after this one."""
        self.extent = replace(self.extent, epochs=min(self.extent.epochs, self.progress.epoch))  # type: ignore[arg-type]

    def has_ended(self, asked: Mapping[str, Any]) -> bool:
        """Whether the folder's training has ended, the same being asked of it as now: a line says so, and no step is
        left. On all ranks alike."""
        progress, before = self.progress, self.resumed_from.get("program", {}).get("ended") or {}
        is_early = before.get("asked") == asked
        if not is_early and not (self.resumed_from and self.is_over):
            return False
        why = one_line(before.get("why"), LONGEST_REASON) if is_early else "no epoch is left"
        self.note(
            f"this folder's training has ended with epoch {progress.epoch}, step {progress.step} ({why}), and nothing "
            "is trained; more epochs train on, another folder begins anew"
        )
        self.end_here()
        return True


class FitSession(Generic[AReplica]):
    """A run in somebody else's `fit`, and this process among its ranks: from before their collective library starts
    until the training ends, in whatever way. It may be used for one `fit` after the other."""

    def __init__(self, folder: str | Path, best: Best, intervals: UserIntervals, *, insecure: bool) -> None:
        self.folder, self._best, self._intervals, self._insecure = Path(folder), best, intervals, insecure
        self.engine = ""
        """What hvdtrain calls the collective library."""
        self.hooks: UserHooks[AReplica] | None = None
        """From when the run is open until the training ends."""
        self._ending: Ending | None = None
        self._library: Opened | None = None
        self._stack = contextlib.ExitStack()

    @property
    def is_joined(self) -> bool:
        """Whether this process is among its ranks, for a training that has not ended."""
        return self._ending is not None

    @property
    def ending(self) -> Ending:
        assert self._ending
        return self._ending

    @property
    def started(self) -> UserHooks[AReplica]:
        """The hooks of the run, which is open."""
        assert self.hooks
        return self.hooks

    def join(self, framework: Framework, engine: str) -> None:
        """Joins the failure detector. Ends the process where a rank refused or did not come."""
        try:
            self._ending = ending = begin(insecure=self._insecure)
        except HvdtrainError as error:
            end(error.exit_code)
        self._framework, self.engine, self._library = framework, engine, None
        self._stack.enter_context(ending)
        try:
            ending.journal.enter("rendezvous")
            connect(ending.world, ENGINES[engine])
            self._stack.enter_context(joined(ending.world, framework, engine, os.environ))
        except BaseException as error:
            self.failed(error)
            raise

    def opened(self, library: Opened) -> None:
        """The collective library has started. Raises WorldError where it sees other ranks."""
        self._library, world = library, self.ending.world
        self.ending.journal.enter("model")
        agreement.check_world(world.topology, library.rank, library.size, ENGINES[self.engine].title)
        world.exchange(library.sum)

    def begin(self, program: Program, replica: AReplica, extent: UserSampling) -> UserHooks[AReplica]:
        """Opens the run, and continues it from its folder's last checkpoint. Raises HvdtrainError."""
        run = open_program(self.folder, program, self._framework, self.engine, self._intervals, self.ending)
        self.hooks = UserHooks(run, replica, extent, self._best)
        return self.hooks

    def left(self) -> None:
        """The training has ended well; the library stays. Raises OutputError."""
        if self.hooks:
            self.hooks.finish()
        self._close(None)
        self._ending = None
        self._stack.close()

    def failed(self, error: BaseException) -> None:
        """The training ends with this error, which the other ranks learn. Where a user can meet it, it is reported in
        one line, and the process ends with its exit code."""
        ending, self._ending = self.ending, None
        self._close(error)
        if self._library:
            if isinstance(error, Exception) and self._library.is_lost(error):
                error = explained(ending.world, self._library, error)
            self._library.close()
        if self._stack.__exit__(type(error), error, error.__traceback__):
            end(ending.code)

    def _close(self, error: BaseException | None) -> None:
        if self.hooks:
            self.hooks.close(type(error) if error else None)
            self.hooks = None
