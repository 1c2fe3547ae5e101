"""Losses that are (sum, count): divided so that the ranks' averaged gradients are those of all sums by all counts."""

from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.torch.engines import Engine


@torch.no_grad()
def mean_count(count: Any, engine: Engine) -> torch.Tensor:
    """The mean of the ranks' counts, which each rank's sum is divided by; 1 where all are 0. Every rank calls it."""
    mean = torch.zeros(1, dtype=torch.float64, device=engine.device) + count
    engine.average(mean, "hvdtrain.count")()
    return mean.where(mean != 0, 1)[0]


class Counts:
    """Of the micro-batches of one update."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counts: list[Any] = []

    def divided(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """What to differentiate of a micro-batch. Every rank calls it."""
        if not self._counts:
            self._first = mean_count(count, self._engine)
        self._counts.append(count)
        return (total / self._first).to(total.dtype)

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends the update: of several micro-batches the averaged gradients are divided by all counts, not the first."""
        if len(self._counts) > 1:
            factor = self._first / mean_count(sum(self._counts), self._engine)
            for gradient in (each.grad for each in parameters if each.grad is not None):
                gradient.mul_(factor.to(gradient.device))
        self._counts.clear()
