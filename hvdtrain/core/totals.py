"""Exact metrics: sums over examples, added over steps and ranks, divided once."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.errors import DivergedError
from hvdtrain.untrusted import printable


@dataclass(frozen=True)
class Totals:
    """Sums over examples; divided once, after they were added over steps and ranks."""

    loss: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name: a sum, and how many were added up. `acc1` is top-1 accuracy: examples whose highest logit is right;
    `loss`, where the loss is no mean over examples, its sum and count."""

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
        total, count = self.metrics.get("loss", (self.loss, self.count))
        return total / count if count else math.nan

    @property
    def means(self) -> dict[str, float]:
        """Each metric over all its examples; without those that had none, and the loss."""
        return {name: total / count for name, (total, count) in self.metrics.items() if count and name != "loss"}

    @property
    def score(self) -> float:
        """What the best checkpoint has most of: accuracy where there is one, else the negative loss."""
        return self.means.get("acc1", -self.mean_loss)


PAIR = "where it divides a sum by a count, return (sum, count)"
"""What a loss that is no mean over examples may do."""


def of_halves(loss: str, measured: Callable[[slice], Any], examples: int, remedy: str = PAIR) -> list[str]:
    """What `no_mean` says of a batch of so many examples, where it can be halved; `measured` gives the loss of some of
    them: a mean, or (sum, count)."""

    def mean(*parts: slice) -> float:
        found = [(measured(part), part.stop - part.start) for part in parts]
        pairs = [of if isinstance(of, tuple) else (of * many, many) for of, many in found]
        total, count = (sum(map(float, of)) for of in zip(*pairs, strict=True))
        return total / count

    with contextlib.suppress(Exception):  # the loss may take whole batches alone
        whole, half = slice(0, examples), examples // 2
        return no_mean(loss, mean(whole), mean(whole), mean(slice(0, half), slice(half, examples)), remedy)
    return []


NONE = 0.0, 0.0
TOLERANCE = 1e-4
"""Relative: what rounding leaves between a batch's loss and the mean of its halves' is less."""


def no_mean(loss: str, whole: float, again: float, halves: float, remedy: str) -> list[str]:
    """A line of the log on a loss that is no mean over examples; none of one that is, or that is not repeatable.

    `whole` and `again` are a batch's, computed twice, `halves` the mean of its halves' by their examples (sums and
    counts added up and divided, where it gives them)."""
    limit = TOLERANCE * max(abs(whole), abs(halves))
    if abs(whole - again) > limit or not abs(whole - halves) > limit:
        return []
    return [
        f"loss {printable(loss, 200)} is no mean over examples ({whole:.5g} of the first batch, {halves:.5g} of its "
        f"halves): the result depends on the number of ranks; {remedy}"
    ]


def check_finite(totals: Totals, step: int, peak_lr: float) -> None:
    """Raises DivergedError where the loss of all ranks is no longer a number."""
    if not math.isfinite(totals.loss):
        raise DivergedError(
            f"the training loss is {totals.loss} at step {step}; lower the LR (peak {peak_lr:g}), lengthen the "
            "warm-up, or set --clip-norm."
        )
