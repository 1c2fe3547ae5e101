"""A recipe that Lightning's Trainer trains: its module, its data, and its run."""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.datasets import Dataset
from hvdtrain.lightning import private
from hvdtrain.lightning.data import Batches
from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.step import autocast
from hvdtrain.torch.trainer import RecipeReplica


class RecipeModule(LightningModule):
    """The network of a plan's recipe on the engine's device, trained as hvdtrain.torch trains it.

    A batch is the micro-batches of one update, which `training_step` makes itself. `progress` counts the updates.

    Examples:
        >>> import hvdtrain.lightning as hl  # `plan` is a Plan, `engine` an open engine of hvdtrain.torch
        >>> module = hl.RecipeModule(plan, classes=10, engine=engine)  # doctest: +SKIP
    """

    def __init__(self, plan: Plan, classes: int | None, engine: Engine, *, is_new: bool = True) -> None:
        """`is_new`: whether the network begins with the weights that the recipe's `init_from` names."""
        super().__init__()
        self.automatic_optimization = False
        self.plan, self.progress, self.lr = plan, Progress(), plan.schedule.peak_lr
        self.replica = RecipeReplica(plan, classes, engine, is_new=is_new)
        self.model = self.replica.model
        self._averaged = contextlib.ExitStack()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.replica.step.optimizer

    def forward(self, *x: Any, **named: Any) -> Any:
        return self.model(*x, **named)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch as it is: its loader has put it on the device."""
        return batch

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> None:
        """One update, from the micro-batches of this rank's local batch."""
        self.lr = self.progress.lr(self.plan)
        self.replica.update(batch, self.lr, self.progress.step)
        self.progress.advance(self.plan)

    def on_validation_start(self) -> None:
        self._averaged.enter_context(self.replica.averaged())

    def on_validation_end(self) -> None:
        self._averaged.close()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with autocast(self.plan.recipe, self.replica.engine.device):
            self.replica.meter.add(self.replica.step.evaluate(batch))


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
        self.loader = Loader(module.plan.recipe, dataset, device)
        self.read: Callable[[Iterator[Any]], Iterator[Any]] = iter
        """The training batches pass through it: a run's clock."""
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> Batches:
        plan, progress = self._module.plan, self._module.progress
        updates, requests = train_requests(plan, progress, self._rank)
        limit, parts = plan.recipe.max_steps, plan.accumulation_steps
        steps = len(updates[: limit and limit - progress.step])

        def batches() -> Iterator[Any]:
            read = self.loader.batches(self._dataset.train, requests[: steps * parts])
            return self.read(zip(*[read] * parts, strict=True))

        return Batches(steps, batches)

    def val_dataloader(self) -> Batches:
        requests = valid_requests(self._module.plan, self._rank)
        return Batches(len(requests), lambda: self.loader.batches(self._dataset.valid, requests))


def fit(run: Run, engine: Engine) -> None:
    """Trains what is left of the run with an open engine. Every rank calls it. Raises HvdtrainError."""
    is_new, device = run.resume.checkpoint is None, engine.device
    module = RecipeModule(run.plan, run.dataset.classes, engine, is_new=is_new)
    loop = Loop(run, module.replica)
    module.progress = loop.progress
    data = RecipeDataModule(module, run.dataset, engine.rank, device)
    data.read = lambda batches: run.samples.read(loop.clocks.read(batches))
    data.loader.samples = run.samples
    with loop.reported():
        if loop.is_over:
            return
        trainer: Any = Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1 if device.type == "cpu" else [device.index],
            strategy=SingleDeviceStrategy(device=device),  # the module averages over the ranks, by the engine
            plugins=[RankEnvironment(run.topology)],
            max_epochs=run.recipe.epochs - loop.progress.epoch,
            callbacks=[RunCallback(loop, module)],
            reload_dataloaders_every_n_epochs=1,  # an epoch's samples follow from the run's progress
            use_distributed_sampler=False,
            barebones=True,  # the loop alone writes files and prints
            default_root_dir=os.devnull,  # else a job of SLURM's looks there for a checkpoint of Lightning's
        )
        # Lightning's own handler of SIGTERM would broadcast in the middle of a step; the world notices signals itself.
        private.signals(trainer).register_signal_handlers = lambda: None
        try:
            trainer.fit(module, data)
        except SystemExit:  # Lightning raises it after Ctrl-C
            raise KeyboardInterrupt from None


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

    def __init__(self, loop: Loop[RecipeReplica], module: RecipeModule) -> None:
        self.loop, self.module = loop, module

    def on_train_epoch_start(self, *_: Any) -> None:
        self.module.replica.begin_epoch(self.loop.progress.epoch)
        self.loop.begin_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        self.loop.after_update(self.module.lr)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """After validation."""
        replica = self.module.replica
        self.loop.finish_epoch(replica.step.objective.metrics.added_to(replica.totals()))
        self.module.progress = self.loop.progress
        trainer.should_stop = self.loop.is_over
