"""Engines: one collective library each, behind the same few methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.engines.registry import Setup
from hvdtrain.ranks.slow import Waiting
from hvdtrain.torch.objective import call

Forward = Callable[[Any, Any], Any]


class Engine(Waiting, Protocol):
    """What the training loop needs of a collective library. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    device: torch.device
    notes: tuple[str, ...]
    """What the run reports of this engine at its start."""

    @classmethod
    def open(cls, setup: Setup) -> "Engine":
        """The engine, joined with the other ranks and bound to its devices. Raises HvdtrainError."""

    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's `metadata`, which JSON can hold."""

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """The network to call and the optimizer to step: gradients are averaged over the ranks while backward runs."""

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        """`forward(network, x)` for the inputs x of each of this rank's micro-batches, one by one; backward through one
        comes before the next is requested. Gradients are averaged with the last one's."""

    def pause(self) -> AbstractContextManager[None]:
        """Around the backward of all micro-batches but the last, where `outputs` is not called."""

    def finish(self) -> None:
        """Waits until every gradient is the averaged one; only then may they be clipped."""

    def bucket_bytes(self) -> int:
        """The most bytes of gradients that are best communicated as one message. Every rank calls it."""

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        """Begins to average the tensor [n] over the ranks, in place; the name is the same on all of them. What is
        returned waits for the average."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Adds the tensor over the ranks, in place, as one message: what a benchmark times."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """The ranks' rows [n] as [size, n], on every rank; no gradient flows through."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is lost."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
