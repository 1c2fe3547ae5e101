"""A recipe as a LightningModule: its network, loss, optimiser and LR, and exact sums of what it has seen."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from hvdtrain.metrics import Totals
from hvdtrain.plan import Plan
from hvdtrain.progress import Progress
from hvdtrain.torch import models, state
from hvdtrain.torch.data import Pair
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.step import mean_loss, sgd


class RecipeModule(LightningModule):
    """The network of a plan's recipe on the engine's device, trained as hvdtrain.torch trains it.

    `progress` says which update comes next; its LR is set before each update, in the open.
    """

    def __init__(self, plan: Plan, classes: int | None, engine: Engine) -> None:
        super().__init__()
        self.plan, self.classes, self.progress, self.lr = plan, classes, Progress(), plan.peak_lr
        recipe = plan.recipe
        self.model = models.build(recipe, classes, engine)
        self.optimizer = sgd(recipe, self.model, plan.peak_lr, recipe.fused_optimizer)
        state.start_momentum(self.optimizer)
        self.seen, self.validated = Sums(engine.device), Sums(engine.device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Pair, batch_idx: int) -> torch.Tensor:
        """The mean loss of this rank's share, times what the share counts in the mean over all ranks."""
        return self._loss(batch, self.seen, self.plan.recipe.label_smoothing) * self.plan.weight(len(batch[1]))

    def validation_step(self, batch: Pair, batch_idx: int) -> None:
        self._loss(batch, self.validated)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """One update, from the parts of this rank's share."""
        self.lr = self.progress.lr(self.plan, self.progress.sample)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.progress.step += 1
        self.progress.sample += self.plan.global_batch

    def _loss(self, batch: Pair, sums: "Sums", smoothing: float = 0.0) -> torch.Tensor:
        x, y = batch
        out = self(x)
        loss = mean_loss(out, y, smoothing)
        sums.add(loss, out, y)
        return loss


class Sums:
    """Sums of loss, right answers and examples, kept on the device so that a step waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
        """A batch: mean loss, outputs [n, classes] and labels [n] (or both [n, 1]: no right or wrong)."""
        self._sums[0] += loss.detach() * len(y)
        if y.dim() == 1:
            self._sums[1] += (out.detach().argmax(1) == y).sum()
        self._sums[2] += len(y)

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        totals = Totals(*self._sums.tolist())
        self._sums.zero_()
        return totals
