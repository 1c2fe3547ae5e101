"""Exact sums of what a rank has seen."""

import torch

from hvdtrain.core.totals import Totals


class Meter:
    """Sums of loss, right answers and examples, kept on the device so that a step waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
        """A batch: mean loss, outputs [n, classes] and labels [n] (or both [n, 1]: no right or wrong)."""
        count = len(y)
        self._sums[0] += loss.detach() * count
        if y.dim() == 1:
            self._sums[1] += (out.detach().argmax(1) == y).sum()
        self._sums[2] += count

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        totals = Totals(*self._sums.tolist())
        self._sums.zero_()
        return totals
