"""The LR of every update: how it follows the batch, rises and decays."""

import math
from dataclasses import dataclass
from typing import Literal


def peak_lr(
    base_lr: float, base_batch_size: int | None, global_batch: int, rule: Literal["none", "linear", "sqrt"]
) -> float:
    """The LR after warm-up: `base_lr`, times k (linear) or sqrt(k) with k = global_batch / base_batch_size.

    Linear: Goyal et al. 2017, arXiv:1706.02677. Square root: Krizhevsky 2014, arXiv:1404.5997.
    """
    if rule == "none" or base_batch_size is None:
        return base_lr
    ratio = global_batch / base_batch_size
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


@dataclass(frozen=True)
class Plateau:
    """The state of a plateau schedule: the lowest validation loss, the epochs since then, and the drops so far."""

    best: float = math.inf
    waited: int = 0
    drops: int = 0

    def observe(self, valid_loss: float, patience: int) -> "Plateau":
        """The state after one more epoch. The LR drops after more than `patience` epochs in which no loss was below the
        best by a ten-thousandth, as in PyTorch's ReduceLROnPlateau."""
        if valid_loss < self.best * (1 - 1e-4):
            return Plateau(valid_loss, 0, self.drops)
        if self.waited < patience:
            return Plateau(self.best, self.waited + 1, self.drops)
        return Plateau(self.best, 0, self.drops + 1)


@dataclass(frozen=True)
class Schedule:
    """The LR of every update, as a function of the epochs done before it."""

    peak_lr: float
    steps_per_epoch: int
    epochs: float
    """At how many epochs cosine has ended."""
    warmup_epochs: float = 0.0
    decay: Literal["constant", "step", "cosine", "plateau"] = "constant"
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    patience: int = 10
    floor: float = 0.0
    """The fraction of `peak_lr` at which cosine ends."""

    def lr(self, epoch: float, plateau: Plateau | None = None) -> float:
        """The LR of the update after `epoch` epochs, which may be a fraction.

        It rises linearly during the warm-up, whose last update has `peak_lr`. The decay counts epochs from the start of
        training; cosine counts them from the end of the warm-up.
        """
        warmed = epoch + 1 / self.steps_per_epoch
        if self.warmup_epochs and warmed <= self.warmup_epochs:
            return self.peak_lr * warmed / self.warmup_epochs
        return self.peak_lr * self._decay(epoch, plateau or Plateau())

    def after_epoch(self, plateau: Plateau, epochs_done: int, valid_loss: float) -> Plateau:
        """The plateau's state after `epochs_done` epochs. Losses of the warm-up do not count."""
        if self.decay != "plateau" or epochs_done <= self.warmup_epochs:
            return plateau
        return plateau.observe(valid_loss, self.patience)

    def _decay(self, epoch: float, plateau: Plateau) -> float:
        # The epoch is a sum of fractions: without the slack, 29.999999999 would miss milestone 30.
        slack = 0.5 / self.steps_per_epoch
        if self.decay == "step":
            return self.factor ** sum(epoch + slack >= milestone for milestone in self.milestones)
        if self.decay == "cosine":
            span = self.epochs - self.warmup_epochs
            done = (epoch - self.warmup_epochs) / span if span else 1.0
            falls = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
            return self.floor + (1 - self.floor) * falls
        if self.decay == "plateau":
            return self.factor**plateau.drops
        return 1.0
