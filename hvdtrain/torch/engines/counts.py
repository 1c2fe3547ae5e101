"""Losses that are (sum, count): divided so that the ranks' averaged gradients are those of all sums by all counts."""

from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.torch.engines import Engine


@torch.no_grad()
def mean_count(count: Any, engine: Engine) -> torch.Tensor:
    """The mean of the ranks' counts. Every rank calls it."""
    mean = torch.zeros(1, dtype=torch.float64, device=engine.device) + count
    engine.average(mean, "hvdtrain.count")()
    return mean[0]


def divisor(mean: torch.Tensor) -> torch.Tensor:
    """What each rank's sum is divided by: the mean of the counts, or 1 where all are 0."""
    return mean.where(mean != 0, 1)


class Counts:
    """Of the micro-batches of one update."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._means: list[torch.Tensor] = []

    def mean(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """A mean over all ranks, of an update without further micro-batches. Every rank calls it."""
        return (total / divisor(mean_count(count, self._engine))).to(total.dtype)

    def divided(self, total: torch.Tensor, count: Any, times: int = 1) -> torch.Tensor:
        """The mean of a micro-batch; its gradients are that many `times` those that `finish` divides at last. Every
        rank calls it."""
        self._means.append(mean_count(count, self._engine))
        share = total / divisor(self._means[0]) * times
        return (share + (total / divisor(self._means[-1]) - share).detach()).to(total.dtype)

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends the update: of several micro-batches the averaged gradients are divided by all counts, not the first."""
        if len(self._means) > 1:
            factor = divisor(self._means[0]) / divisor(sum(self._means))  # type: ignore[arg-type]
            for gradient in (each.grad for each in parameters if each.grad is not None):
                gradient.mul_(factor.to(gradient.device))
        self._means.clear()
