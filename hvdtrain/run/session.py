"""The run of a user's program that has its own loop or calls a framework's `fit`: from joining the ranks to the end."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hvdtrain.core.compatibility import Framework
from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.recipe import Recipe, of_program
from hvdtrain.core.settings import MTBF
from hvdtrain.engines import Engine
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import AgreementError, HvdtrainError, LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.world import joined
from hvdtrain.record import trackers
from hvdtrain.record.folder import Identity, ResumePoint, hold, resume_point
from hvdtrain.record.schema import news_of
from hvdtrain.run.engine import explained
from hvdtrain.run.loop import Communicator, Hooks, R_co
from hvdtrain.run.process import RankProcess, end, start
from hvdtrain.run.run import BaseRun
from hvdtrain.run.samples import Samples
from hvdtrain.run.setup import connect, record_launch
from hvdtrain.run.trainer import Replica
from hvdtrain.terminal import SCREEN
from hvdtrain.untrusted import one_line

RESERVED = {"kind", "step", "epoch", "seconds", "time"}
"""The keys of every record of metrics.jsonl, which no logged value may have for its name."""
INTERVALS = (
    *("log_every_steps", "check_replicas_every_steps", "checkpoint_every_epochs", "checkpoint_every_steps"),
    *("keep_checkpoints", "mtbf_hours", "sample_check"),
)
"""The keys of a recipe that a program gives."""
LONGEST_REASON = 500
"""The most characters of the reason for which a run was stopped."""
Best = tuple[str | None, str | None]
"""The metric that is highest in the best checkpoint, or the one that is lowest."""
NOT_COMPARED = {"data", "groups", "loops", "began", "ended", "beside"}
"""The keys of a program's metadata that are compared under other names, or that may differ between ranks."""


AReplica = TypeVar("AReplica", bound=Replica)


class Program(Protocol):
    """What is trained, beside its tensors."""

    @property
    def identity(self) -> str:
        """What two runs must have in common to exchange checkpoints."""

    @property
    def state_bytes(self) -> int:
        """The size of a checkpoint in bytes."""

    @property
    def lr(self) -> float:
        """The learning rate now, of the first group of parameters."""

    @property
    def lr_groups(self) -> int:
        """How many groups of parameters have learning rates, 1 where these are the same."""

    def metadata(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it beside tensors, as JSON."""

    def curve_line(self, size: int) -> str:
        """Why the curve depends on the number of ranks; see `hvdtrain.core.network.curve_line`."""

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """Continues from what `metadata` returned for a checkpoint. Returns a line for the log about what has changed
        since, or "". Raises CheckpointError and LoopError."""


@dataclass(frozen=True)
class UserRun(BaseRun):
    """The run of a user's program."""

    program: Program

    def agreed(self) -> dict[str, Any]:
        of_program = dict(self.program.metadata())
        of_data = agreement.named("data", of_program["data"])
        of_training = {name: value for name, value in of_program.items() if name not in NOT_COMPARED}
        intervals = {name: getattr(self.recipe, name) for name in INTERVALS}
        return {**of_data, **agreement.named("training", intervals | of_training)}

    def metadata(self, *given: Any) -> dict[str, Any]:
        # By now it may have more layers than when the run was opened.
        return {**super().metadata(*given), "model": self.program.identity, "program": self.program.metadata()}

    def _remedy(self) -> str:
        return f"lower the learning rate (now {self.program.lr:g}), warm it up, or clip the gradients"


def open_program(
    path: Path,
    program: Program,
    framework: Framework,
    engine: str,
    intervals: Recipe,
    process: RankProcess,
    best: Best,
    names: tuple[str, ...] = ("tensorboard",),
) -> UserRun:
    """The program's run. Rank 0 locks its folder, and finds the checkpoint there. `names`: the trackers.
    Raises HvdtrainError."""
    trackers.check_installed(names)
    check_intervals(intervals)
    about = {"framework": framework, "engine": engine, "ranks": process.topology.size, "model": program.identity}
    about |= dict(zip(("highest", "lowest"), best, strict=True))
    named = next((f"{kind} {about[kind]}" for kind in ("highest", "lowest") if about[kind]), "")
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
    if process.topology.is_rank_0:
        process.close_run()
        folder = hold(path)
        resume = resume_point(folder, identity)
        record_launch(process, folder, framework, engine, resume)
    process.began = True
    more: Any = {"trackers": names, "best": named}
    return UserRun(identity, intervals, engine, (), folder, resume, process.world, process.journal, program, **more)


def intervals_of(arguments: Mapping[str, Any]) -> Recipe:
    """The intervals among the arguments of a call, which are given by name."""
    return of_program(**{name: arguments[name] for name in INTERVALS})


def check_intervals(intervals: Recipe) -> None:
    """Raises LoopError."""
    for name in INTERVALS:
        value = getattr(intervals, name)
        if name == "sample_check":
            Samples(value)
            continue
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
    """A line for the log where the data have changed since the checkpoint; see `schema.news_of`. Raises
    CheckpointError, and LoopError where batch size or seed have changed inside an epoch."""
    for name in ("batch_size", "seed", *(name for name in now if name.startswith("set "))):
        if progress.sample and before.get(name) != now.get(name):
            raise LoopError(
                f"this epoch began with {name} {before.get(name, 'of its own')}, got {now.get(name, 'none')}; it can "
                "change only between epochs, or in another folder."
            )
    return news_of(before, now, progress)


def check_next(
    kind: str,
    epoch: int | None,
    lrs: Mapping[str, Any],
    among: Communicator,
    logged: Mapping[str, float] | None = None,
) -> None:
    """Compares what the ranks have decided at an epoch's end: the next epoch (None: the training ends) and its LRs.
    `logged`: the values that the decision may follow from, which the message then names too. Raises AgreementError."""
    decided = agreement.named(kind, {"next epoch": epoch, **lrs})
    try:
        agreement.check_values(decided, *among)
    except AgreementError:
        if logged is None:
            raise
        by = agreement.named(kind, logged)
        raise AgreementError(agreement.differences({**decided, **by}, *among)) from None


class UserHooks(Hooks[R_co]):
    """What is due in a user's loop or in a framework's `fit`, which may end an epoch after any step. `best`: the metric
    that is highest or lowest in the best checkpoint."""

    def __init__(self, run: UserRun, trainer: R_co, length: UserSampling, best: Best = (None, None)) -> None:
        super().__init__(run, trainer, length)
        self._trained = run.program
        if self.reporter:
            self.reporter.of_groups = lambda: (
                f" (first of {groups} groups)" if (groups := run.program.lr_groups) > 1 else ""
            )
        self.news = run.program.restore(self.resumed_from["program"], self.progress) if self.resumed_from else ""
        """What the program gives otherwise than its run began with."""
        if self.news:
            self.note(self.news)
        if curve := run.program.curve_line(self.engine.size):
            self.note(line := f"the curve {curve}")
            self.journal.event("note", line)  # from which the report has it
        self.best = best
        self.is_settled = True
        """Whether everything that is due after an epoch's last step is done."""
        self._pending_lr: float | None = None
        """The LR of the last step, until `after_step` has done what is due after it."""

    def step(self, lr: float) -> None:
        """Counts an update. `after_step` does what is due after it."""
        self.progress.advance(self.length)
        self.is_settled = self.progress.is_done(self.length) or self.progress.is_epoch_done(self.length)
        self._pending_lr = lr

    def after_step(self) -> None:
        """Does what is due after the last step, unless it is done already; see `after_update`."""
        lr, self._pending_lr = self._pending_lr, None
        if lr is not None:
            self.after_update(lr)

    def end_steps(self, lr: float) -> None:
        """Does what is due after an epoch's last step, where it was not known to be the last."""
        self._pending_lr = None
        if not self.is_settled:
            self.is_settled = True
            self.run.world.expect_steps(False)
            self.step_log.write(self.progress, lr)
            self.trainer.average_statistics()
            self.journal.enter("validation")

    def report(self, values: Mapping[str, float]) -> None:
        """Writes an epoch's metrics into the log and the files."""
        if self.reporter:
            self.reporter.values(self.progress.step, self.progress.epoch + 1, values)

    def end_logged_epoch(self, logged: Mapping[str, float]) -> None:
        """Reports the metrics that `fit` has logged of an epoch, notes where the one that decides on the best
        checkpoint is missing, and ends the epoch."""
        progress = self.progress
        train = {"train_loss": progress.train.mean_loss} if progress.train.count else {}
        values = {name: value for name, value in {**train, **logged}.items() if name not in RESERVED}
        self.report(values)
        highest, lowest = self.best
        name = highest or lowest
        if name and name not in values:
            known = ", ".join(values)
            self.note(f"{name}, which decides on the best checkpoint, was not logged as one number, but {known} were")
        score = None if not name or name not in values else values[name] if highest else -values[name]
        self.end_epoch(progress.after_steps(self.length), score)

    def end_early(self, asked: Mapping[str, Any], why: str) -> dict[str, Any]:
        """Ends the training with this epoch, earlier than the limits `asked`, numbers by name, say. Returns the
        program's metadata "ended", for the checkpoint at the epoch's end."""
        self.progress.ended = one_line(why, LONGEST_REASON)
        return dict(asked)

    def refuse_others(self) -> None:
        """To be called where nothing is left to train. Raises LoopError where the program is not that of the run."""
        before, now = (each["data"] for each in (self.resumed_from["program"], self._trained.metadata()))
        unlike = [
            f"{key} {now[key]}, not {before[key]}"
            for key in ("seed", "batch_size")
            if {key} <= before.keys() & now.keys() and before[key] != now[key]
        ]
        settings = [self.news] * ("this run began with" in self.news)  # else of changed data, which a run may have
        if news := "; ".join([*unlike, *settings]):
            raise LoopError(f"nothing would be trained, as another run has finished in this folder: {news}.")

    def has_ended(self, asked: Mapping[str, Any]) -> bool:
        """Whether the folder's training has ended already, under the same limits `asked`. Then a line in the log says
        so, and no step is left. It is the same on all ranks."""
        progress = self.progress
        if self.resumed_from.get("program", {}).get("ended") != asked:
            progress.ended = ""
        if not (self.resumed_from and self.is_over):
            return False
        self.refuse_others()
        why = one_line(progress.ended, LONGEST_REASON) or "no epoch is left"
        self.note(
            f"this folder's training has ended with epoch {progress.epoch}, step {progress.step} ({why}), and nothing "
            "is trained; more epochs train on, another folder begins anew"
        )
        return True


class FitSession(Generic[AReplica]):
    """A run in a framework's `fit`, from before the collective library starts until the training ends, well or not.
    The object may serve several calls of `fit`, one after the other."""

    def __init__(self, folder: str | Path, best: Best, intervals: Recipe, *, insecure: bool) -> None:
        self.folder, self._best, self._intervals, self._insecure = Path(folder), best, intervals, insecure
        self.engine = ""
        """The engine's name."""
        self.hooks: UserHooks[AReplica] | None = None
        """The hooks of the run, from `begin` until the training ends."""
        self._process: RankProcess | None = None
        self._library: Engine | None = None
        self._stack = contextlib.ExitStack()

    @property
    def is_joined(self) -> bool:
        """Whether this process has joined the other ranks for a training that has not ended."""
        return self._process is not None

    @property
    def process(self) -> RankProcess:
        assert self._process
        return self._process

    @property
    def started(self) -> UserHooks[AReplica]:
        """The hooks of the run, which has begun."""
        assert self.hooks
        return self.hooks

    def join(self, framework: Framework, engine: str) -> None:
        """Joins the failure detector. Ends the process where a rank was refused or did not come."""
        try:
            self._process = process = start(insecure=self._insecure)
        except HvdtrainError as error:
            end(error.exit_code)
        process.output = "folder to FaultTolerance"
        self._framework, self.engine, self._library = framework, engine, None
        self._stack.enter_context(process)
        try:
            process.journal.enter("rendezvous")
            connect(process.world, ENGINES[engine])
            self._stack.enter_context(joined(process.world, framework, engine, os.environ))
        except BaseException as error:
            self.failed(error)
            raise

    def opened(self, library: Engine) -> None:
        """To be called once the collective library has started. Raises WorldError where it reports other ranks."""
        self._library, world = library, self.process.world
        self.process.journal.enter("model")
        SCREEN.waiting("before the training")
        agreement.check_world(world.topology, library.rank, library.size, ENGINES[self.engine].title)
        world.exchange(library.sum)

    def begin(self, program: Program, replica: AReplica, length: UserSampling) -> UserHooks[AReplica]:
        """Opens the run, which continues from its folder's last checkpoint. Raises HvdtrainError."""
        run = open_program(
            self.folder, program, self._framework, self.engine, self._intervals, self.process, self._best
        )
        self.hooks = UserHooks(run, replica, length, self._best)
        return self.hooks

    def left(self) -> None:
        """To be called when the training has ended well; the collective library stays open. Raises OutputError."""
        if self.hooks:
            self.hooks.finish()
        self._close(None)
        self._process = None
        self._stack.close()

    def failed(self, error: BaseException) -> None:
        """To be called when an error ends the training: it is reported to the other ranks. An error that a user can
        fix is one line on stderr, and ends the process with its exit code."""
        process, self._process = self.process, None
        self._close(error)
        if self._library:
            if isinstance(error, Exception) and self._library.is_lost(error):
                error = explained(process.world, self._library, error)
            self._library.close()
        if self._stack.__exit__(type(error), error, error.__traceback__):
            end(process.code)

    def _close(self, error: BaseException | None) -> None:
        if self.hooks:
            self.hooks.close(type(error) if error else None)
            self.hooks = None
