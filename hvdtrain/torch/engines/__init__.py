"""Engines: one collective library each, behind the same few verbs."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch


class Engine(Protocol):
    """What the training loop asks of a collective library. Every verb is called by every rank, in one order."""

    rank: int
    size: int
    device: torch.device

    def broadcast(self, tensors: dict[str, torch.Tensor], facts: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's picklable `facts`."""

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer whose gradients are averaged over the ranks while backward runs."""

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits until every gradient is the averaged one; only then may they be clipped."""

    def applying(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Around `optimizer.step()` after `finish`: nothing is averaged a second time."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """The ranks' rows [n] as [size, n], on every rank; no gradient flows through."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
