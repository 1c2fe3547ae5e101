"""Exact metrics: sums over examples, added over steps and ranks, divided once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdtrain.errors import DivergedError


@dataclass(frozen=True)
class Totals:
    """Sums over examples; divided once, after they were added over steps and ranks."""

    loss: float
    correct: float
    count: float

    def over_ranks(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> "Totals":
        """The totals of all ranks. Every rank must call it."""
        loss, correct, count = sum_over_ranks(np.array([self.loss, self.correct, self.count]))
        return Totals(float(loss), float(correct), float(count))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.loss + other.loss, self.correct + other.correct, self.count + other.count)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        """Fraction of examples whose highest logit is the right one (top-1)."""
        return self.correct / self.count


def check_finite(totals: Totals, step: int, peak_lr: float) -> None:
    """Raises DivergedError where the loss of all ranks is no longer a number."""
    if not math.isfinite(totals.loss):
        raise DivergedError(
            f"the training loss is {totals.loss} at step {step}; lower the LR (peak {peak_lr:g}), lengthen the "
            "warm-up, or set --clip-norm."
        )
