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
        self._loss, self._count = self._zero(), 0
        self._metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, seen: Seen) -> None:
        """A batch. Raises RecipeError where its metrics have other names than those before it."""
        names = sorted(seen.metrics)
        if self._names is None:
            self._names = names
            self._metrics = {name: (self._zero(), self._zero()) for name in names}
        if names != self._names:
            raise RecipeError(
                f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
                f"{', '.join(self._names) or 'none'}; return the sum and count (0, 0) where there is nothing to report."
            )
        self._loss.add_(seen.loss, alpha=seen.count)
        self._count += seen.count
        for name, pair in seen.metrics.items():
            for total, of_batch in zip(self._metrics[name], pair, strict=True):
                total.add_(of_batch)

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        sums = [self._loss, *(total for pair in self._metrics.values() for total in pair)]
        loss, *rest = torch.stack(sums).tolist()
        metrics = dict(zip(self._metrics, zip(rest[::2], rest[1::2], strict=True), strict=True))
        totals = Totals(loss, self._count, metrics)
        self._count = 0
        for total in sums:
            total.zero_()
        return totals

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)
