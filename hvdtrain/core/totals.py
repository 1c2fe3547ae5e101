"""Exact metrics: sums over examples, added over steps and ranks, divided once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.errors import DivergedError


@dataclass(frozen=True)
class Totals:
    """Sums over examples; divided once, after they were added over steps and ranks."""

    loss: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name: a sum, and how many were added up. `acc1` is top-1 accuracy: examples whose highest logit is right."""

    def over_ranks(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> "Totals":
        """The totals of all ranks. Every rank must call it, with the same metrics."""
        names = sorted(self.metrics)
        own = [self.loss, self.count, *(number for name in names for number in self.metrics[name])]
        loss, count, *rest = sum_over_ranks(np.array(own)).tolist()
        return Totals(loss, count, dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True)))

    def __add__(self, other: "Totals") -> "Totals":
        sums = {
            name: (a + c, b + d)
            for name in {**self.metrics, **other.metrics}
            for (a, b), (c, d) in [(self.metrics.get(name, NONE), other.metrics.get(name, NONE))]
        }
        return Totals(self.loss + other.loss, self.count + other.count, sums)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count

    @property
    def means(self) -> dict[str, float]:
        """Each metric over all its examples; without those that had none."""
        return {name: total / count for name, (total, count) in self.metrics.items() if count}

    @property
    def score(self) -> float:
        """What the best checkpoint has most of: accuracy where there is one, else the negative loss."""
        return self.means.get("acc1", -self.mean_loss)


NONE = 0.0, 0.0


def check_finite(totals: Totals, step: int, peak_lr: float) -> None:
    """Raises DivergedError where the loss of all ranks is no longer a number."""
    if not math.isfinite(totals.loss):
        raise DivergedError(
            f"the training loss is {totals.loss} at step {step}; lower the LR (peak {peak_lr:g}), lengthen the "
            "warm-up, or set --clip-norm."
        )
