"""The one training loop: when to train, validate, log, compare replicas, checkpoint and stop, in every framework."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hvdtrain.core.progress import Extent, Progress, due
from hvdtrain.core.sharing import Totals
from hvdtrain.ranks import agreement
from hvdtrain.ranks.slow import Clocks, Waiting
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.record.checkpoint import Checkpoint, Layout
from hvdtrain.record.reporter import Events
from hvdtrain.record.schema import taken
from hvdtrain.record.writer import Checkpointing
from hvdtrain.run.run import BaseRun, Run

EXTENT = ("global_batch", "train_examples", "epochs", "max_steps")
"""What an epoch's steps follow from."""
BYTES_A_SECOND = 2e7
"""Of the state of which rank 0 reads the gradients for their norm: a hundredth of what a slow processor can read, so
that it takes no part of the time that could be measured."""


class Engine(Waiting, Protocol):
    """What the loop needs of a collective library. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    device: Any
    notes: tuple[str, ...]
    """Lines for the log."""

    def broadcast(self, tensors: Any, metadata: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's JSON value `metadata`."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""


class State(Protocol):
    """A training state: weights, momentum and statistics by name, and the loss scale."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The live ones, not copies."""

    @property
    def scaler(self) -> Any:
        """float16's loss scale, as torch.amp.GradScaler: its `state_dict` is empty in another precision."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Makes what an optimizer makes only at its first update, as a checkpoint of this layout holds it; `values` are
        those of `values()` then. Raises CheckpointError."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Copies the checkpoint's arrays into the tensors. Raises CheckpointError."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The tensors as they are now."""

    def snapshot(self) -> Mapping[str, np.ndarray]:
        """Copies of the tensors as they are now, on the host. The next call overwrites them."""

    def values(self) -> Mapping[str, Any]:
        """What of an optimizer's state is no array: JSON values by name."""

    def numbers(self) -> Mapping[str, Any]:
        """What an update follows from beside tensors: LR, momentum and betas of each group, loss scale, updates."""


class Replica(Protocol):
    """A rank's copy of the training, whoever makes the updates."""

    @property
    def engine(self) -> Engine: ...

    @property
    def state(self) -> State: ...

    def events(self, folder: Path, first_step: int) -> Events:
        """TensorBoard's writer, of a run that makes this step next."""

    def totals(self) -> Totals:
        """Of this rank's examples since the last call."""

    def gradient_norm(self) -> float | None:
        """Of the averaged gradients of the last update, before they are clipped; None where it is not known.
        TensorFlow's is that of the first update after the call before."""

    def average_statistics(self) -> None:
        """BatchNorm's running statistics become their mean over the ranks."""

    def fingerprints(self) -> Sequence[int]:
        """64 bits of the weights of each of this rank's replicas."""

    def settings(self) -> Mapping[str, Any]:
        """How its framework computes: TF32, deterministic algorithms, types."""

    def after_first_step(self) -> Sequence[str]:
        """Lines of the log on what the first step has shown. Every rank calls it."""


class Trainer(Replica, Protocol):
    """One framework: a model with its data, its updates and its validation."""

    def batches(self, progress: Progress) -> Iterator[Any]:
        """This rank's local batch of each global batch that is left of the epoch."""

    def update(self, batch: Any, lr: float, step: int) -> None:
        """Forward, backward, averaged gradients and the update after `step` others."""

    def validate(self) -> Totals:
        """Of this rank's examples of the validation set."""

    def profiled(self, note: Callable[[str], None]) -> AbstractContextManager[Any]:
        """Around all updates: profiles them where the recipe asks for it; `note` writes a line of the log."""


R_co = TypeVar("R_co", bound=Replica, covariant=True)


class Hooks(Generic[R_co]):
    """What a run does after every update and every epoch, whose loop it may be: its recipe's, Lightning's, or one of
    the user's own."""

    def __init__(self, run: BaseRun, trainer: R_co, extent: Extent) -> None:
        self.run, self.extent = run, extent
        self.trainer, self.engine, self.journal = trainer, trainer.engine, run.journal
        self._compared = (0, 0)
        """Step and epoch at which replicas were compared last."""
        self.progress = self._begin()
        self.journal.step, self._made_steps = self.progress.step, False
        if run.folder:
            self.journal.record("world", hosts=run.world.hosts())
        self.checkpointing = Checkpointing(run.folder, run.intervals, self.progress.step, self.engine.sum)
        self.reporter = run.reporter(self.progress.step, self.engine.device, trainer.events, self.engine.notes)
        self._logged = time.monotonic()
        self.clocks = Clocks(self.engine, run.world.slow)
        self._code, before = agreement.code(), self.resumed_from.get("code", {})
        if changed := [name for name, digest in self._code.items() if before.get(name, digest) != digest]:
            self.note(f"the code of {', '.join(changed)} has changed since the checkpoint of step {self.progress.step}")

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left."""
        return self.progress.is_over(self.extent)

    def begin_epoch(self) -> None:
        self.checkpointing.pause()
        self.journal.enter("training" if self._made_steps else "first_step")
        self.run.world.expect_steps(True)
        self.clocks.begin_step()
        if self.reporter:
            self.reporter.begin_epoch(self.progress, self.extent)
        self._logged = time.monotonic()

    def after_update(self, lr: float) -> None:
        """What is due after an update, which `progress` has counted. Raises StoppedError where the ranks agree to stop,
        DivergedError, ReplicaError."""
        progress, extent, intervals = self.progress, self.extent, self.run.intervals
        self.checkpointing.stepped()
        if not self._made_steps:
            self._made_steps = True
            self.journal.enter("training")
        if self.reporter:
            self.reporter.stepped(progress, extent)
        done = progress.is_done(extent)
        last = done or progress.is_epoch_done(extent)
        self.clocks.end_step()
        stopping = self.run.world.stops_at(progress.step)
        checkpoint_due = stopping or self.checkpointing.due(progress.step)
        if last or checkpoint_due or due(progress.sample // extent.global_batch, intervals.log_every_steps):
            self._log(lr)
        if progress.step == 1 or done or due(progress.step, intervals.guard_every_steps):
            self.check_replicas()
        if progress.step == 1:
            for line in self.trainer.after_first_step():
                self.note(line)
                self.journal.event("note", line)
        if last or checkpoint_due:  # before validation and checkpoints, as every rank then holds one model
            self.trainer.average_statistics()
        if checkpoint_due and not last:
            self.write_checkpoint(None)
        if last:
            self.run.world.expect_steps(False)
            self.journal.enter("validation")
        if stopping and not last:
            with self.journal.within("checkpoint"):
                self.checkpointing.wait()
            raise self.run.world.stopped(progress.step)
        self.clocks.begin_step()

    def end_epoch(self, after: Progress, valid_score: float | None) -> None:
        """What is due once an epoch is reported: the run continues at `after`."""
        done, intervals = self.progress.is_done(self.extent), self.run.intervals
        self.progress = after
        inside = self.checkpointing.due(after.step)
        if done or inside or due(after.epoch, intervals.checkpoint_every_epochs):
            self.write_checkpoint(valid_score)

    def check_replicas(self) -> None:
        """Raises ReplicaError where the weights differ between devices or ranks, or what the next update follows from
        between ranks."""
        marks, step = self.trainer.fingerprints(), self.progress.step
        agreement.check_devices(marks, step, self.run.devices)
        values = self._agreed() if self.engine.size > 1 else {}
        agreement.check_replicas(marks[0], values, step, self._ranks, self.run.topology.host, self.engine.sum)
        self._compared = step, self.progress.epoch
        self.journal.replica_checks += 1

    @property
    def _ranks(self) -> tuple[int, int]:
        return self.engine.rank, self.engine.size

    def _agreed(self) -> dict[str, Any]:
        """What must be equal on all ranks whenever replicas are compared."""
        progress = self.progress
        position = {"step": progress.step, "epoch": progress.epoch, "example of the epoch": progress.sample}
        return agreement.named("training", {**position, **self.trainer.state.numbers()}) | self.run.agreed()

    def _check_begin(self) -> None:
        """Before anything is broadcast. Raises AgreementError."""
        if self.engine.size == 1:
            return
        tensors = self.trainer.state.tensors.items()
        layout = {name: f"{getattr(each.dtype, 'name', each.dtype)} {list(each.shape)}" for name, each in tensors}
        process = agreement.of_process(self.trainer.settings(), self.engine.rank, self.engine.sum)
        numbers = agreement.named("training", self.trainer.state.numbers())
        values = {**process, **agreement.named("model", layout), **numbers, **self.run.agreed()}
        agreement.check(values, self._ranks, self.run.topology.host, self.engine.sum)

    def check_extent(self) -> None:
        """Of a loop whose data say how many steps there are. Raises AgreementError where other ranks' say otherwise."""
        extent = {name: getattr(self.extent, name) for name in EXTENT}
        values = self.run.agreed() | agreement.named("training", extent)
        agreement.check(values, self._ranks, self.run.topology.host, self.engine.sum)

    @takes_long
    def write_checkpoint(self, valid_score: float | None) -> None:
        """Copies the whole state, on rank 0, and begins to write it beside training. Raises OutputError of the
        checkpoint before, which it waits for."""
        state, step = self.trainer.state, self.progress.step
        if self._compared != (step, self.progress.epoch):  # what is resumed from is what all ranks have
            self.check_replicas()
        self.journal.mark(step, always=True)
        self.journal.event("checkpoint", f"checkpoint of step {step}", step=step)
        with self.journal.within("checkpoint"):
            news = self.checkpointing.write(step, state, lambda: self._metadata(valid_score))
        if news:
            self.note(news)

    def note(self, text: str) -> None:
        """A line of the log, on rank 0."""
        if self.reporter:
            self.reporter.note(text)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Around all epochs: reports the run's end, and closes its files."""
        with self.reporter or contextlib.nullcontext():
            try:
                yield
                self.finish()
            except BaseException:
                self.checkpointing.leave()
                raise

    def finish(self) -> None:
        """Reports that the run has come to its end, its last checkpoint being whole. Raises OutputError."""
        self.journal.enter("checkpoint")
        self.checkpointing.wait()
        self.journal.enter("end")
        self.run.finish(self.reporter, self.progress.step, is_over=self.is_over)

    def close(self, error: type[BaseException] | None) -> None:
        """Ends a loop of the user's own: its reports, as that error has ended them. May be called twice."""
        self.checkpointing.leave()
        if self.reporter:
            self.reporter.__exit__(error)
            self.reporter = None

    def _metadata(self, valid_score: float | None) -> dict[str, Any]:
        state = self.trainer.state
        meta = self.run.metadata(self.progress, state.scaler.state_dict(), state.values(), valid_score)
        return {**meta, "code": self._code}

    def _begin(self) -> Progress:
        """Rank 0's weights, or its checkpoint's, on every rank."""
        self._check_begin()
        state, found, meta = self.trainer.state, self.run.resume.checkpoint, None
        if found:
            meta = {**found.meta, "layout": found.layout}
        meta = self.engine.broadcast({}, meta)
        self.resumed_from: Mapping[str, Any] = meta or {}
        if meta:  # before the tensors: all ranks then have the same
            with taken(meta["step"]):
                state.start(meta["layout"], meta.get("optimizer", {}))
        if found:
            state.load(found)
        self.engine.broadcast(state.tensors, None)
        if meta is None:
            return Progress()
        if meta["scaler"]:  # empty where the checkpoint's run had another precision
            state.scaler.load_state_dict(meta["scaler"])
        return Progress.of(meta)

    def _log(self, lr: float) -> None:
        progress = self.progress
        self.journal.step = progress.step
        totals = self.trainer.totals().over_ranks(self.engine.sum)
        progress.train += totals
        self.run.check_finite(totals, progress.step)
        if self.reporter and totals.count:
            seconds = time.monotonic() - self._logged
            apart = self.run.identity.checkpoint_bytes / BYTES_A_SECOND
            norm = self.trainer.gradient_norm() if self.journal.is_due("gradient_norm", apart) else None
            self.reporter.steps(progress.step, progress.epoch + 1, totals, lr, seconds, norm)
        self._logged = time.monotonic()
        self.journal.mark(progress.step)


class Loop(Hooks[R_co]):
    """One rank's way through a recipe's run. Lightning, which has a loop of its own, calls the hooks from its own."""

    run: Run

    def __init__(self, run: Run, trainer: R_co) -> None:
        self.recipe, self.plan = run.recipe, run.plan
        super().__init__(run, trainer, run.plan)

    def train(self: "Loop[Trainer]") -> None:
        """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
        with self.reported(), self.trainer.profiled(self.note):
            while not self.is_over:
                for _ in self.epoch():
                    pass
                self.finish_epoch(self.trainer.validate())

    def epoch(self: "Loop[Trainer]") -> Iterator[None]:
        """Trains what is left of the epoch; yields after every update."""
        self.begin_epoch()
        for batch in self.clocks.read(self.trainer.batches(self.progress)):
            lr = self.progress.lr(self.plan)
            self.trainer.update(batch, lr, self.progress.step)
            self.progress.advance(self.plan)
            self.after_update(lr)
            yield
            if self.progress.is_done(self.plan):
                break

    def finish_epoch(self, own: Totals) -> None:
        """What is due after validation; `own`: the totals of this rank's examples."""
        progress, valid = self.progress, own.over_ranks(self.engine.sum)
        if self.reporter:
            self.reporter.epoch(progress.step, progress.epoch + 1, progress.train, valid)
        ended = progress.is_epoch_done(self.plan)
        after = progress.next_epoch(self.plan, valid.mean_loss) if ended else progress
        self.end_epoch(after, valid.score)

    def fitted_line(self) -> tuple[float, float] | None:
        """Slope and intercept of the linear model; None of another."""
        if self.recipe.model != "linear":
            return None
        slope, intercept = (
            array.item() for name, array in self.trainer.state.arrays().items() if name.startswith("model.")
        )
        return slope, intercept

    def finish(self) -> None:
        if self.reporter and (line := self.fitted_line()):
            self.note(f"fitted line: y = {line[0]:.4f} x + {line[1]:.4f}")
        super().finish()
