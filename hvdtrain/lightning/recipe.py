"""A recipe that Lightning's Trainer trains: its module, its data, and its run."""

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.lightning.data import Batches
from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.torch import models, optimizers
from hvdtrain.torch.averaging import Counts
from hvdtrain.torch.data import Loader
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.objective import Objective, Seen
from hvdtrain.torch.state import State, lr_ratios, set_lr
from hvdtrain.torch.trainer import Meter, Replica, engine_of


class RecipeModule(LightningModule):
    """The network of a plan's recipe on the engine's device, trained as hvdtrain.torch trains it.

    `progress` counts the updates. The LR is set before each update.

    Examples:
        >>> import hvdtrain.lightning as hl  # `plan` is a Plan, `engine` an open engine of hvdtrain.torch
        >>> module = hl.RecipeModule(plan, classes=10, engine=engine)  # doctest: +SKIP
    """

    def __init__(self, plan: Plan, classes: int | None, engine: Engine) -> None:
        super().__init__()
        self.plan, self.classes, self.progress, self.lr = plan, classes, Progress(), plan.schedule.peak_lr
        recipe = plan.recipe
        self.model = models.build(recipe, classes, engine)
        made = optimizers.make(recipe, self.model, plan.schedule.peak_lr, recipe.fused_optimizer)
        _, self.optimizer = engine.wrap(self.model, made)
        self.lr_ratios = lr_ratios(self.optimizer, plan.schedule.peak_lr)
        self.ema = Ema(self.model, recipe.ema_decay) if recipe.ema_decay else None
        self._averaged = contextlib.ExitStack()
        self._engine, self._is_last, self._counts = engine, True, Counts(engine)
        self.objective, self.meter = Objective(recipe, engine), Meter(engine.device)
        self.objective.classes = classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def forward(self, *x: Any, **named: Any) -> Any:
        return self.model(*x, **named)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch as it is: its loader has put it on the device."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The mean loss of this rank's local batch, times its weight in the mean over all ranks."""
        self._is_last = (batch_idx + 1) % self.plan.recipe.accumulation_steps == 0
        loss, seen = self._loss(batch, training=True)
        if "loss" not in seen.metrics:
            return loss * self.plan.weight(seen.count)
        # Lightning divides it by the number of micro-batches.
        return self._counts.divided(loss, seen.metrics["loss"][1], self.plan.recipe.accumulation_steps)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of a micro-batch. Ranks communicate only in that of an update's last one."""
        with contextlib.nullcontext() if self._is_last else self._engine.pause():
            super().backward(loss, *args, **kwargs)
        if self._is_last:
            self._engine.finish()
            self._counts.finish(self.model.parameters())

    def on_validation_start(self) -> None:
        if self.ema:
            self._averaged.enter_context(self.ema.swapped_in())

    def on_validation_end(self) -> None:
        self._averaged.close()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, training=False)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """One update, from the micro-batches of this rank's local batch."""
        self.lr = self.progress.lr(self.plan)
        set_lr(self.optimizer, self.lr, self.lr_ratios)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema:
            self.ema.update()
        self.progress.advance(self.plan)

    def _loss(self, batch: Any, training: bool) -> tuple[torch.Tensor, Seen]:
        inputs = self.objective.inputs(batch)
        with self.objective.explained(self._engine.is_lost):
            out = self.objective.forward(self.model, inputs)
            loss, seen = self.objective.measure(out, batch, training)
        self.meter.add(seen)
        return loss, seen


class RecipeDataModule(LightningDataModule):
    """The data of a recipe's run: in each epoch, what is left of it by the module's `progress`.

    Examples:
        >>> import hvdtrain.lightning as hl  # `module` is a RecipeModule, `dataset` its data set
        >>> data = hl.RecipeDataModule(module, dataset, rank=0, device=torch.device("cpu"))  # doctest: +SKIP
        >>> trainer.fit(module, data)  # doctest: +SKIP
    """

    def __init__(self, module: RecipeModule, dataset: Dataset, rank: int, device: torch.device) -> None:
        super().__init__()
        self._module, self._dataset, self._rank = module, dataset, rank
        self._loader = Loader(module.plan.recipe, dataset, device)
        self.read: Callable[[Iterator[Any]], Iterator[Any]] = iter
        """The training batches pass through it: a run's clock."""
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> Batches:
        plan, progress = self._module.plan, self._module.progress
        _, requests = train_requests(plan, progress, self._rank)
        limit = plan.recipe.max_steps
        left = requests if limit is None else requests[: (limit - progress.step) * plan.recipe.accumulation_steps]
        return Batches(len(left), lambda: self.read(self._loader.batches(self._dataset.train, left)))

    def val_dataloader(self) -> Batches:
        requests = valid_requests(self._module.plan, self._rank)
        return Batches(len(requests), lambda: self._loader.batches(self._dataset.valid, requests))


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    with engine_of(run) as engine, quiet():
        fit(run, engine)


def fit(run: Run, engine: Engine) -> None:
    """Trains what is left of the run with an open engine."""
    module = RecipeModule(run.plan, run.dataset.classes, engine)
    scaler = torch.amp.GradScaler(engine.device.type, enabled=run.recipe.precision == "float16")
    state = State(module.model, [module.optimizer], scaler, module.ema)
    same_statistics = run.recipe.batch_norm != "local"
    replica = Replica(
        engine, module.model, state, module.meter, same_statistics=same_statistics, buffers=run.recipe.buffers
    )
    replica.notes = module.objective.notes
    loop = Loop(run, replica)
    module.progress = loop.progress
    data = RecipeDataModule(module, run.dataset, engine.rank, engine.device)
    data.read = loop.clocks.read
    with loop.reported():
        if not loop.is_over:
            try:
                trainer_of(loop, module).fit(module, data)
            except SystemExit:  # Lightning raises it after Ctrl-C
                raise KeyboardInterrupt from None


def trainer_of(loop: Loop[Replica], module: RecipeModule) -> Trainer:
    """Lightning's Trainer for what is left of the run, where only the loop writes files and prints."""
    run, recipe, progress, engine = loop.run, loop.recipe, loop.progress, loop.trainer.engine
    return Trainer(
        accelerator="cpu" if engine.device.type == "cpu" else "gpu",
        devices=1 if engine.device.type == "cpu" else [engine.device.index],
        strategy=SingleDeviceStrategy(device=engine.device),  # the module averages over the ranks, by the engine
        plugins=[precision_of(recipe, engine.device, loop.trainer.state.scaler), RankEnvironment(run.topology)],
        max_epochs=recipe.epochs - progress.epoch,
        max_steps=recipe.max_steps - progress.step if recipe.max_steps else -1,
        accumulate_grad_batches=recipe.accumulation_steps,
        gradient_clip_val=recipe.clip_norm,
        benchmark=recipe.cudnn_benchmark,
        callbacks=[RunCallback(loop, module)],
        reload_dataloaders_every_n_epochs=1,  # an epoch's samples follow from the run's progress
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.devnull,  # else a job of SLURM's looks there for a checkpoint of Lightning's to begin with
    )


def precision_of(recipe: Recipe, device: torch.device, scaler: torch.amp.GradScaler) -> Precision:
    """Lightning's plugin for the recipe's precision."""
    match recipe.precision:
        case "bfloat16":
            return _Mixed("bf16-mixed", device.type)
        case "float16":
            return _Mixed("16-mixed", device.type, scaler)
        case "float64":
            return _Double()
    return Precision()


class _Read:
    """Leaves a batch as it was read: its floats have the run's type already, and autocast converts the rest."""

    def convert_input(self, data: Any) -> Any:
        return data


class _Mixed(_Read, MixedPrecision): ...


class _Double(_Read, DoublePrecision): ...


@contextlib.contextmanager
def quiet() -> Any:
    """Silences Lightning's tips, which are about things that the run has settled."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


class RunCallback(Callback):
    """The run's log, metrics and checkpoints: the same as those of hvdtrain.torch."""

    # The loop's collectives are in hooks that Lightning calls on every rank. It skips the hooks around validation on a
    # rank without validation examples.

    def __init__(self, loop: Loop[Replica], module: RecipeModule) -> None:
        self.loop, self.module = loop, module
        self._step = loop.progress.step
        self._terminate = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own handler would broadcast in the middle of a step, and the world notices signals by itself.
        if callable(self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            signal.siginterrupt(signal.SIGTERM, False)

    def on_train_epoch_start(self, *_: Any) -> None:
        models.training_mode(self.module.model, self.loop.recipe)
        self.loop.begin_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        """After each micro-batch; only an update's last one makes a step."""
        if self.loop.progress.step != self._step:
            self._step = self.loop.progress.step
            self.loop.trainer.share_buffers()
            self.loop.after_update(self.module.lr)

    def on_train_epoch_end(self, *_: Any) -> None:
        """After validation."""
        self.loop.finish_epoch(self.module.objective.metrics.added_to(self.module.meter.take()))
        self.module.progress = self.loop.progress
