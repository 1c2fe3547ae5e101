"""FaultTolerance: a user's module under Lightning's Trainer resumes and ends as a recipe's run does."""

import signal
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import UserSampling
from hvdtrain.errors import LoopError
from hvdtrain.lightning import private
from hvdtrain.lightning.decisions import Decisions
from hvdtrain.lightning.program import Program, stopped_by, take_average, unkept
from hvdtrain.run.process import end
from hvdtrain.run.session import FitSession, intervals_of
from hvdtrain.terminal import SCREEN, STOP_SIGNALS
from hvdtrain.torch.engines import Engine, seed, take_threads
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.trainer import Replica


class FitReplica(Replica):
    """The replica that a Trainer trains."""

    model: Any
    remedy = "compute it there of self.all_gather(...) or self.trainer.strategy.reduce(...), which are over all ranks"
    program: Program
    note: Any = None
    """Writes the line of the log on the first loss that was left out; None once it has."""

    def totals(self) -> Totals:
        """Their loss is not finite where the weights are not; other losses that are not finite are left out."""
        totals, left_out, self.program.left_out = super().totals(), float(self.program.left_out), 0
        if self.engine.sum(np.array([left_out]))[0]:
            if not all(each.isfinite().all() for each in self.model.parameters()):
                return Totals(float("nan"), totals.count, totals.metrics)
            self.note = self.note and self.note("a loss is not finite and the weights are: no mean has such losses")
        return totals

    def learns(self) -> Hashable:
        return getattr(self.model.trainer.strategy, "learning", ())

    def watch(self, enabled: bool) -> None:
        self.model.trainer.strategy.is_watched = enabled

    @property
    def cause(self) -> str:
        return getattr(self.model.trainer.strategy, "cause", "weights")


class RankCallback(Callback):
    """A callback that joins the run's ranks before `fit` begins, and leaves them when it ends."""

    _session: FitSession[Replica]
    _engine: Engine
    _program: Program
    """What is trained, from when `fit` starts."""

    def join_ranks(self, engine: str) -> None:
        """Joins the failure detector; the strategy calls it before its library starts."""
        self._session.join("torch", engine)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [each for each in trainer.callbacks if each is not self]
        if trainer.fast_dev_run:
            rank_zero_info("fast_dev_run: FaultTolerance does nothing")
            trainer.callbacks = others
            return
        # Before all others: it saves the state with which a batch, an epoch and the end begin.
        trainer.callbacks = sorted([self, *others], key=lambda each: not isinstance(each, Decisions))
        if not self._session.is_joined:
            if trainer.world_size > 1:
                if trainer.is_global_zero:
                    got = f"got {type(trainer.strategy).__name__}; give the Trainer one of them."
                    rule = "FaultTolerance needs the ranks of strategy='horovod' or hl.RankDDPStrategy()"
                    print(f"LoopError: {rule}, {got}", file=sys.stderr, flush=True)
                end(LoopError.exit_code)
            self.join_ranks("local")
        if SCREEN.display == "lines" and trainer.progress_bar_callback:  # whose repaints a launcher would tear
            trainer.progress_bar_callback.disable()
        take_threads(self._session.process.topology)
        strategy, is_alone = trainer.strategy, self._session.engine == "local"
        self._engine = LocalEngine(strategy.root_device) if is_alone else strategy.library
        self._session.opened(self._engine)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._session.is_joined:
            self._release()
            self._session.left()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the process for an error that a user can fix. Lightning raises any other one."""
        if self._session.is_joined:
            self._release()
            for logger in trainer.loggers:
                logger.finalize("failed")
            self._session.failed(exception)

    def _release(self) -> None:
        """Lets the data follow Lightning's count of epochs again."""
        if self._session.hooks and self._program.data:
            self._program.data.follow()


class FaultTolerance(RankCallback):
    """Resumes `Trainer.fit` where it was, also inside an epoch, and ends it in order.

    The folder's checkpoints hold weights, optimizers, schedulers, loss scale, position, Lightning's counters, and what
    callbacks, module and data module keep in Lightning's own; the same program continues from the newest. SIGTERM and
    a warning of the time limit end all ranks after the same step, with a checkpoint; after a warning the job is queued
    again. A rank that is lost or hangs is named, and ends the others. Replicas are compared. Log, metrics.jsonl and
    TensorBoard events are those of a recipe's run. The log says at the start what cannot be resumed with this Trainer.

    It goes with `strategy="horovod"`, RankDDPStrategy, or one process. Only the data of GlobalBatches continue inside
    an epoch. An HvdtrainError ends the process with one line and its exit code.

    Examples:
        >>> import torch
        >>> import hvdtrain.lightning as hl
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel  # or a module of yours
        >>> names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        >>> run = hl.FaultTolerance("runs/boring", checkpoint_every_steps=100)
        >>> trainer = Trainer(  # on several ranks strategy="horovod"
        ...     max_epochs=2, callbacks=[run], accelerator="cpu", **dict.fromkeys(names, False)
        ... )
        >>> trainer.fit(BoringModel(), hl.GlobalBatches(torch.randn(64, 32), batch_size=16))  # doctest: +ELLIPSIS
        INFO - ...
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        highest: str | None = None,
        lowest: str | None = None,
        log_every_steps: int = 20,
        check_replicas_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        sample_check: Literal["on", "off"] = "on",
        insecure_rendezvous: bool = False,
    ) -> None:
        """The best checkpoint, by the logged metric `highest` or `lowest`, is kept beside the newest ones.
        `checkpoint_every_steps` "auto" derives the interval from what a checkpoint costs and from `mtbf_hours`, the
        mean hours between failures of the job. `sample_check` off compares no examples of GlobalBatches,
        nor labels of other data loaders."""
        super().__init__()
        self.sample_check = sample_check
        self.folder, best = Path(folder), (highest, lowest)
        self._session = FitSession[Replica](folder, best, intervals_of(locals()), insecure=insecure_rendezvous)
        self._lr = 0.0
        self._is_epoch_over = False
        """Whether the last epoch's report and checkpoint are still due, after Lightning's other hooks."""

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        engine = self._engine
        self._program = program = Program(trainer, pl_module)
        program.check_program()
        replica = FitReplica(engine, pl_module, program.state)
        length = UserSampling(0, 0, engine.size, epochs=program.epochs, max_steps=program.max_steps)
        hooks = self._session.begin(program, replica, length)
        replica.program, replica.note = program, hooks.note
        self._limit = trainer.limit_train_batches
        self._has_ended = hooks.has_ended(program.asked)
        if self._has_ended:
            trainer.limit_train_batches = 0
        if self._session.engine == "ddp":
            engine.watch(pl_module)  # type: ignore[attr-defined]
        if program.data:
            samples = hooks.run.samples
            program.data.follow(lambda: hooks.progress, lambda batches: samples.read(hooks.clocks.read(batches)))
            program.data.samples = samples if program.data.samples.is_on else program.data.samples
        for line in unkept(program, str(self.folder)):
            hooks.note(line)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        # Lightning's handlers would stop each rank by itself, and queue the job again by themselves.
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)
            private.original_handlers(trainer).pop(number, None)  # which it would set again at the end
        hooks = self._session.started
        hooks.length = self._program.length(self._engine.size)
        hooks.comparison.length(hooks.length)
        hooks.begin_epoch()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._end_epoch(trainer)
        self._program.state.begin_callbacks()
        self._session.started.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        hooks, engine = self._session.started, self._engine
        self._program.state.begin_callbacks()
        hooks.after_step()  # only now, after Lightning's other hooks and a validation
        for line in self._program.state.lines():
            hooks.note(line)
        self._program.begin_batch()
        hooks.length = self._program.length(engine.size)  # which a callback may have changed for this epoch
        self._lr = self._program.lr
        if batch_idx % trainer.accumulate_grad_batches == 0:
            number = self._program.data.seed if self._program.data else 0
            seed(number, hooks.progress.step, engine.rank, engine.device)

    def on_after_backward(self, *_: Any) -> None:
        self._engine.finish()  # which measures how long the backward of DistributedDataParallel has waited

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each micro-batch; only an update's last one makes a step."""
        hooks, passes = self._session.started, trainer.accumulate_grad_batches
        if seen := self._program.seen(outputs, hooks.length.global_batch // (self._engine.size * passes) or 1):
            hooks.trainer.meter.add(seen)
        hooks.is_settled = False
        if (batch_idx + 1) % passes == 0 or private.is_last_batch(trainer):
            hooks.step(self._lr)
            if hooks.is_settled:
                hooks.after_step()

    def on_validation_start(self, *_: Any) -> None:
        if self._session.hooks:
            self._session.process.world.expect_steps(False)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """After validation, but before Lightning's other hooks and the schedulers; `_end_epoch` comes after them."""
        private.set_restarting(trainer, False)  # without it, ReduceLROnPlateau does not see the end of a resumed epoch
        self._session.started.end_steps(self._lr)
        for line in self._program.partly_logged():
            self._session.started.note(line)
        self._is_epoch_over = True

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        hooks, program = self._session.started, self._program
        if self._is_epoch_over and not hooks.progress.is_done(hooks.length):
            program.ended = hooks.end_early(program.asked, stopped_by(trainer))
        self._end_epoch(trainer)
        program.state.begin_callbacks()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._has_ended:
            trainer.limit_train_batches = self._limit
            self._program.state.begin_callbacks()
            take_average(trainer, pl_module)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._is_epoch_over:
            self._is_epoch_over = False
            logged = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            self._session.started.end_logged_epoch(logged)
