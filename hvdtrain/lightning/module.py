"""A recipe as a LightningModule: its network, loss, optimiser and LR, and exact sums of what it has seen."""

import contextlib
from typing import Any

import torch
from lightning.pytorch import LightningModule

from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.torch import models, optimizers
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.counts import Counts
from hvdtrain.torch.meter import Meter
from hvdtrain.torch.objective import Objective, Seen
from hvdtrain.torch.state import lr_ratios, set_lr


class RecipeModule(LightningModule):
    """The network of a plan's recipe on the engine's device, trained as hvdtrain.torch trains it.

    `progress` counts the updates; each update's LR is set before it, in the open.

    Examples:
        >>> import hvdtrain.lightning as hl  # `plan` is a Plan, `engine` an open engine of hvdtrain.torch
        >>> module = hl.RecipeModule(plan, classes=10, engine=engine)  # doctest: +SKIP
    """

    def __init__(self, plan: Plan, classes: int | None, engine: Engine) -> None:
        super().__init__()
        self.plan, self.classes, self.progress, self.lr = plan, classes, Progress(), plan.peak_lr
        recipe = plan.recipe
        self.model = models.build(recipe, classes, engine)
        made = optimizers.make(recipe, self.model, plan.peak_lr, recipe.fused_optimizer)
        _, self.optimizer = engine.wrap(self.model, made)
        self.lr_ratios = lr_ratios(self.optimizer, plan.peak_lr)
        self.ema = Ema(self.model, recipe.ema_decay) if recipe.ema_decay else None
        self._averaged = contextlib.ExitStack()
        self._engine, self._is_last, self._counts = engine, True, Counts(engine)
        self.objective, self.meter = Objective(recipe), Meter(engine.device)
        self.objective.classes = classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def forward(self, *x: Any, **named: Any) -> Any:
        return self.model(*x, **named)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch, which its loader has put there."""
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
        """Of a micro-batch; only with an update's last one the ranks communicate."""
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
        """One update, of the micro-batches of this rank's local batch."""
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
