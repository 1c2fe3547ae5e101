"""Engines: one collective library each, behind the same few verbs."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Engine(Protocol):
    """What the training loop asks of a collective library. Every verb is called by every rank, in one order."""

    rank: int
    size: int
    device: torch.device
    notes: tuple[str, ...]
    """What the run tells of this engine at its start."""

    def broadcast(self, tensors: dict[str, torch.Tensor], facts: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's picklable `facts`."""

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """The network to call and the optimizer to step: gradients are averaged over the ranks while backward runs."""

    def outputs(self, network: Any, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The outputs of each part of this rank's share, in turn; backward through one comes before the next is
        asked for. Gradients are averaged with the last one's."""

    def finish(self) -> None:
        """Waits until every gradient is the averaged one; only then may they be clipped."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """The ranks' rows [n] as [size, n], on every rank; no gradient flows through."""

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether the error says that another rank is gone."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
