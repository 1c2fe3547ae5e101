"""What a recipe's run promises, for anybody's module under Lightning's Trainer."""

import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from hvdtrain.core.progress import OwnSampling
from hvdtrain.core.settings import OwnEngineSettings, OwnIntervals
from hvdtrain.errors import LoopError
from hvdtrain.lightning.decisions import Decisions
from hvdtrain.lightning.program import Program, set_restarting
from hvdtrain.run.loop import Hooks
from hvdtrain.run.session import Ranks, end_early, has_ended, in_own_words, open_own, report_logged
from hvdtrain.terminal import STOP_SIGNALS
from hvdtrain.torch import devices
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.meter import Meter
from hvdtrain.torch.objective import Seen
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
        self.folder, self._best, self._insecure = Path(folder), (highest, lowest), insecure_rendezvous
        self._intervals = OwnIntervals(
            log_every_steps,
            guard_every_steps,
            checkpoint_every_epochs,
            checkpoint_every_steps,
            keep_checkpoints,
            mtbf_hours,
        )
        self._ranks: Ranks | None = None
        self._engine: Engine | None = None
        self._hooks: Hooks[Replica] | None = None
        self._lr, self._settled, self._is_due = 0.0, True, False
        """`_is_due`: whether what follows an update is: Lightning's other hooks and a validation come before it."""
        self._is_epoch_over = False

    def join_ranks(self, engine: str) -> None:
        """Joins the failure detector; the strategy calls it before its library starts."""
        self._ranks = Ranks("torch", engine, insecure=self._insecure)

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
        strategy: Any = trainer.strategy
        if not self._ranks:
            if trainer.world_size > 1:
                raise LoopError(
                    f"FaultTolerance needs the ranks of strategy='horovod' or hl.RankDDPStrategy(), got "
                    f"{type(strategy).__name__}; give the Trainer one of them."
                )
            self.join_ranks("local")
        assert self._ranks
        devices.take_threads(self._ranks.world.topology)
        self._engine = engine = _engine(self._ranks, strategy.root_device)
        self._ranks.opened(engine, engine.rank, engine.size)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._ranks and self._engine
        self._program = program = Program(trainer, pl_module)
        program.check()
        replica = Replica(self._engine, pl_module, program.state, Meter(self._engine.device))  # type: ignore[arg-type]
        with in_own_words("FaultTolerance"):
            run = open_own(self.folder, program, "torch", self._ranks.name, self._intervals, self._ranks.ending)
            self._hooks = hooks = Hooks(run, replica, OwnSampling(0, 0, self._engine.size))
            if hooks.resumed_from and (news := program.restore(hooks.resumed_from["program"], hooks.progress)):
                hooks.note(news)
        hooks.extent = OwnSampling(0, 0, self._engine.size, epochs=program.epochs, max_steps=program.max_steps)
        self._limit = trainer.limit_train_batches  # type: ignore[attr-defined]
        self._has_ended = has_ended(hooks, program.asked)
        if self._has_ended:
            trainer.limit_train_batches = 0  # type: ignore[attr-defined]
        if self._ranks.name == "ddp":
            cast("DdpEngine", self._engine).watch(pl_module)
        if program.data:
            program.data.follow(lambda: hooks.progress, hooks.clocks.read)
        for line in program.unkept(str(self.folder)):
            hooks.note(line)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handlers would stop each rank by itself, and queue the job again by themselves.
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)
        self._started.extent = self._extent(trainer)
        self._started.check_extent()
        self._started.begin_epoch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)
        self._started.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_due:
            self._is_due = False
            self._started.after_update(self._lr)
        self._program.begin_batch()
        self._started.extent = self._extent(trainer)  # which a callback may have changed for this epoch
        engine, self._lr = self._started.trainer.engine, self._program.lr
        if batch_idx % trainer.accumulate_grad_batches == 0:
            seed = self._program.data.seed if self._program.data else 0
            devices.seed(seed, self._started.progress.step, engine.rank, engine.device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started.trainer.engine.finish()  # which notes how long DistributedDataParallel's backward has waited

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch; only the last one makes an update."""
        hooks, passes = self._started, trainer.accumulate_grad_batches
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            count = hooks.extent.global_batch // (hooks.trainer.engine.size * passes) or 1
            # Lightning has divided it by the micro-batches, but for a module that optimizes by hand.
            factor = passes if pl_module.automatic_optimization else 1
            seen = getattr(trainer.strategy, "seen", None)
            hooks.trainer.meter.add(Seen(loss.detach().reshape(()) * factor, count, {"loss": seen} if seen else {}))
        self._settled = False
        if (batch_idx + 1) % passes == 0 or trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            hooks.progress.advance(hooks.extent)
            self._settled = hooks.progress.is_done(hooks.extent) or hooks.progress.is_epoch_done(hooks.extent)
            self._is_due = not self._settled
            if self._settled:
                hooks.after_update(self._lr)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._hooks:
            self._hooks.run.world.expect_steps(False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After validation; Lightning's other hooks and the schedulers have the epoch's end before `_end_epoch`."""
        hooks = self._started
        set_restarting(trainer, False)  # else a resumed epoch's end does not reach ReduceLROnPlateau
        self._is_due = False
        if not self._settled:
            self._settled = True
            hooks.settle(self._lr)
        for line in self._program.of_part():
            hooks.note(line)
        self._is_epoch_over = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hooks = self._started
        if self._is_epoch_over and not hooks.progress.is_done(hooks.extent):
            self._program.ended = end_early(hooks, self._program.asked, self._program.why())
        self._end_epoch(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_ended:
            trainer.limit_train_batches = self._limit  # type: ignore[attr-defined]
            self._program.take_average()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not self._ranks:
            return
        if self._hooks:
            self._hooks.finish()
        self._close(None)
        self._ranks.left()
        self._ranks = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the process for an error that a user can meet; another one is Lightning's to raise."""
        if not self._ranks:
            return
        self._close(exception)
        for logger in trainer.loggers:
            logger.finalize("failed")
        ranks, self._ranks = self._ranks, None
        ranks.failed(exception)

    @property
    def _started(self) -> Hooks[Replica]:
        assert self._hooks
        return self._hooks

    def _extent(self, trainer: Trainer) -> OwnSampling:
        """How far the Trainer goes: in examples where the data's order is known, else in updates."""
        if math.isinf(trainer.num_training_batches):
            raise LoopError(
                "the training data have no length, so the ranks could not agree on an epoch's end; give "
                "Trainer(limit_train_batches=N)."
            )
        program, size, passes = self._program, self._started.trainer.engine.size, trainer.accumulate_grad_batches
        data = program.data
        batch = data.batch_size * passes // data.sampling.accumulation_steps if data else 1
        steps = math.ceil(trainer.num_training_batches / passes)
        return OwnSampling(batch, batch * steps, size, epochs=program.epochs, max_steps=program.max_steps)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._is_epoch_over:
            self._is_epoch_over, hooks = False, self._started
            logged = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            score = report_logged(hooks, logged, self._best)
            hooks.end_epoch(hooks.progress.after_steps(hooks.extent), score)

    def _close(self, error: BaseException | None) -> None:
        if self._hooks:
            self._hooks.close(type(error) if error else None)
            if self._program.data:
                self._program.data.follow()


def _engine(ranks: Ranks, device: torch.device) -> "Engine":
    """The collective library that the strategy has started, as the run's hooks need it."""
    if ranks.name == "horovod":
        from hvdtrain.torch.engines.horovod import HorovodEngine  # which imports Horovod

        engine = HorovodEngine(OwnEngineSettings(), None)
        engine.device = device
        return engine
    if ranks.name == "ddp":
        from hvdtrain.torch.engines.ddp import DdpEngine

        return DdpEngine(OwnEngineSettings(), ranks.world.topology, device)
    return LocalEngine(device)
