"""What a recipe's run promises, for anybody's module under Lightning's Trainer."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from hvdtrain.core.progress import UserSampling
from hvdtrain.errors import LoopError
from hvdtrain.lightning.decisions import Decisions
from hvdtrain.lightning.program import Program, set_restarting
from hvdtrain.run.session import FitSession, in_programs_words, intervals_of
from hvdtrain.terminal import STOP_SIGNALS
from hvdtrain.torch.engines import seed, take_threads
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.trainer import Replica

if TYPE_CHECKING:
    from hvdtrain.torch.engines import Engine
    from hvdtrain.torch.engines.ddp import DdpEngine


class FaultTolerance(Callback):
    """Resumes `Trainer.fit` where it was, also inside an epoch, and ends it in order.

    Weights, optimizers, schedulers, loss scale, position, Lightning's counters, and what callbacks, module and data
    module keep in Lightning's own checkpoints are in the folder's; the same program continues from the newest. SIGTERM
    and a warning of the time limit end all ranks after the same step, with a checkpoint; the job is queued again after
    a warning. A rank that is lost or hangs ends the others, by name. Replicas are compared. Log, metrics.jsonl and
    TensorBoard events are those of a recipe's run. What it cannot promise for this Trainer, it says at the start.

    It goes with `strategy="horovod"`, RankDDPStrategy, or one process; the data that continue inside an epoch are those
    of GlobalBatches. An HvdtrainError ends the process with one line and its exit code.

    Examples:
        >>> import torch
        >>> import hvdtrain.lightning as hl
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.nn import functional as F
        >>> class Line(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = torch.nn.Linear(1, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return F.mse_loss(self.model(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters(), lr=0.1)
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> data = hl.GlobalBatches((x, 2 * x), batch_size=16)
        >>> trainer = Trainer(  # on several ranks strategy="horovod"
        ...     max_epochs=2,
        ...     callbacks=[hl.FaultTolerance("runs/line", checkpoint_every_steps=100)],
        ...     accelerator="cpu",
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     enable_progress_bar=False,
        ...     enable_model_summary=False,
        ... )
        >>> trainer.fit(Line(), data)  # doctest: +ELLIPSIS
        INFO - ...
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        highest: str | None = None,
        lowest: str | None = None,
        log_every_steps: int = 20,
        guard_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        insecure_rendezvous: bool = False,
    ) -> None:
        """The best checkpoint, by the logged metric `highest` or `lowest`, is kept beside the newest. With
        `checkpoint_every_steps` auto the run decides, by what a checkpoint costs and `mtbf_hours`, the mean hours
        between failures of the job."""
        super().__init__()
        self.folder, best = Path(folder), (highest, lowest)
        self._session = FitSession[Replica](folder, best, intervals_of(locals()), insecure=insecure_rendezvous)
        self._lr = 0.0
        self._is_epoch_over = False
        """Whether an epoch is over whose report and checkpoint wait for Lightning's other hooks."""

    def join_ranks(self, engine: str) -> None:
        """Joins the failure detector; the strategy calls it before its library starts."""
        self._session.join("torch", engine)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: FaultTolerance does nothing")
            trainer.callbacks = others  # type: ignore[attr-defined]
            return
        # First of all: what it writes before a batch, an epoch and the end is the state that they begin with.
        comparing = [each for each in others if isinstance(each, Decisions)]
        trainer.callbacks = [*comparing, self, *(each for each in others if each not in comparing)]  # type: ignore[attr-defined]
        if not self._session.is_joined:
            if trainer.world_size > 1:
                raise LoopError(
                    f"FaultTolerance needs the ranks of strategy='horovod' or hl.RankDDPStrategy(), got "
                    f"{type(trainer.strategy).__name__}; give the Trainer one of them."
                )
            self.join_ranks("local")
        take_threads(self._session.ending.topology)
        strategy: Any = trainer.strategy
        is_alone = self._session.engine == "local"
        self._engine: Engine = LocalEngine(strategy.root_device) if is_alone else strategy.library()
        self._session.opened(self._engine)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self._engine
        self._program = program = Program(trainer, pl_module)
        program.check()
        with in_programs_words("FaultTolerance"):
            replica = Replica(engine, pl_module, program.state)
            hooks = self._session.begin(program, replica, UserSampling(0, 0, engine.size))
        hooks.extent = UserSampling(0, 0, engine.size, epochs=program.epochs, max_steps=program.max_steps)
        self._limit = trainer.limit_train_batches  # type: ignore[attr-defined]
        self._has_ended = hooks.has_ended(program.asked)
        if self._has_ended:
            trainer.limit_train_batches = 0  # type: ignore[attr-defined]
        if self._session.engine == "ddp":
            cast("DdpEngine", engine).watch(pl_module)
        if program.data:
            program.data.follow(lambda: hooks.progress, hooks.clocks.read)
        for line in program.unkept(str(self.folder)):
            hooks.note(line)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handlers would stop each rank by itself, and queue the job again by themselves.
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)
        hooks = self._session.started
        hooks.extent = self._program.extent(self._engine.size)
        hooks.check_extent()
        hooks.begin_epoch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)
        self._session.started.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        hooks, engine = self._session.started, self._engine
        hooks.after_step()  # only now: Lightning's other hooks and a validation come before it
        self._program.begin_batch()
        hooks.extent = self._program.extent(engine.size)  # which a callback may have changed for this epoch
        self._lr = self._program.lr
        if batch_idx % trainer.accumulate_grad_batches == 0:
            number = self._program.data.seed if self._program.data else 0
            seed(number, hooks.progress.step, engine.rank, engine.device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._engine.finish()  # which notes how long DistributedDataParallel's backward has waited

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch; only the last one makes an update."""
        hooks, passes = self._session.started, trainer.accumulate_grad_batches
        if seen := self._program.seen(outputs, hooks.extent.global_batch // (self._engine.size * passes) or 1):
            hooks.trainer.meter.add(seen)
        hooks.is_settled = False
        if (batch_idx + 1) % passes == 0 or trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            hooks.step(self._lr)
            if hooks.is_settled:
                hooks.after_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session.hooks:
            self._session.ending.world.expect_steps(False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After validation; Lightning's other hooks and the schedulers have the epoch's end before `_end_epoch`."""
        set_restarting(trainer, False)  # else a resumed epoch's end does not reach ReduceLROnPlateau
        self._session.started.end_steps(self._lr)
        for line in self._program.of_part():
            self._session.started.note(line)
        self._is_epoch_over = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hooks, program = self._session.started, self._program
        if self._is_epoch_over and not hooks.progress.is_done(hooks.extent):
            program.ended = hooks.end_early(program.asked, program.why())
        self._end_epoch(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_ended:
            trainer.limit_train_batches = self._limit  # type: ignore[attr-defined]
            self._program.take_average()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._session.is_joined:
            self._release()
            self._session.left()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the process for an error that a user can meet; another one is Lightning's to raise."""
        if self._session.is_joined:
            self._release()
            for logger in trainer.loggers:
                logger.finalize("failed")
            self._session.failed(exception)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._is_epoch_over:
            self._is_epoch_over = False
            logged = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            self._session.started.end_logged_epoch(logged)

    def _release(self) -> None:
        """The data are Lightning's to count again."""
        if self._session.hooks and self._program.data:
            self._program.data.follow()
