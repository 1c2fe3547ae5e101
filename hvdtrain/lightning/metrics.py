"""Exact metrics: sums and counts, added over the ranks and divided once."""

from typing import Any

import torch
from torchmetrics import Metric


class ExactAccuracy(Metric):
    """The fraction of examples whose highest logit is the right one (top-1), in whole numbers up to the division.

    Over the ranks of `strategy="horovod"` and of ddp alike; exact where no example is read twice, as UnpaddedSampler
    sees to.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> accuracy = hl.ExactAccuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> float(accuracy.compute())
        0.5
    """

    higher_is_better = True
    full_state_update = False
    correct: torch.Tensor
    count: torch.Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """A batch: logits [n, classes] and labels [n]."""
        self.correct += (logits.argmax(1) == labels).sum()
        self.count += len(labels)

    def compute(self) -> torch.Tensor:
        return self.correct.double() / self.count
