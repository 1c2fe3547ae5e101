"""A recipe trained by Lightning's Trainer: a run from the first broadcast to the last checkpoint."""

import contextlib
import logging
import os
import signal
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from hvdtrain.core.recipe import Recipe
from hvdtrain.lightning.data import RecipeDataModule
from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.lightning.module import RecipeModule
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.torch import models
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.opening import engine_of
from hvdtrain.torch.state import State
from hvdtrain.torch.trainer import Replica


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    with engine_of(run) as engine, quiet():
        fit(run, engine)


def fit(run: Run, engine: Engine) -> None:
    """Trains what is left of the run over an open engine."""
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
            except SystemExit:  # what Lightning makes of Ctrl-C
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
    """Leaves a batch as it was read: its floats have the run's type already, and autocast takes care of the rest."""

    def convert_input(self, data: Any) -> Any:
        return data


class _Mixed(_Read, MixedPrecision): ...


class _Double(_Read, DoublePrecision): ...


@contextlib.contextmanager
def quiet() -> Any:
    """Silences Lightning's tips: they are about what the run has settled already."""
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

    # The loop's collectives stand in hooks that Lightning calls on every rank: on a rank without validation examples
    # it skips those around validation.

    def __init__(self, loop: Loop[Replica], module: RecipeModule) -> None:
        self.loop, self.module = loop, module
        self._step = loop.progress.step
        self._terminate = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own handler would broadcast in the middle of a step; the world has noticed the signal already.
        if callable(self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            signal.siginterrupt(signal.SIGTERM, False)

    def on_train_epoch_start(self, *_: Any) -> None:
        models.training_mode(self.module.model, self.loop.recipe)
        self.loop.begin_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        """After a micro-batch; only the last one makes an update."""
        if self.loop.progress.step != self._step:
            self._step = self.loop.progress.step
            self.loop.trainer.share_buffers()
            self.loop.after_update(self.module.lr)

    def on_train_epoch_end(self, *_: Any) -> None:
        """After validation."""
        self.loop.finish_epoch(self.module.meter.take())
        self.module.progress = self.loop.progress
