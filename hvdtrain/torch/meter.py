"""Exact sums of what a rank has seen."""

import torch

from hvdtrain.core.totals import Totals
from hvdtrain.errors import RecipeError
from hvdtrain.torch.objective import Seen


class Meter:
    """Sums of loss, examples and metrics, kept on the device so that a step waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] | None = None
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, seen: Seen) -> None:
        """A batch. Raises RecipeError where its metrics have other names than those before it."""
        names = sorted(seen.metrics)
        if self._names is None:
            self._names = names
            self._sums = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=self._device)
        if names != self._names:
            raise RecipeError(
                f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
                f"{', '.join(self._names) or 'none'}; return the sum and count (0, 0) where there is nothing to report."
            )
        self._sums[0] += seen.loss * seen.count
        self._sums[1] += seen.count
        for index, name in enumerate(names):
            total, count = seen.metrics[name]
            self._sums[2 + 2 * index] += total
            self._sums[3 + 2 * index] += count

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        loss, count, *rest = self._sums.tolist()
        self._sums.zero_()
        return Totals(loss, count, dict(zip(self._names or (), zip(rest[::2], rest[1::2], strict=True), strict=True)))
