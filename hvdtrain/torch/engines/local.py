"""The engine of one process: every method is the identity."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hvdtrain.engines.registry import Setup
from hvdtrain.torch import devices
from hvdtrain.torch.engines import Forward
from hvdtrain.torch.objective import call


class LocalEngine:
    """One rank alone; see `Engine` for the methods."""

    rank = 0
    size = 1
    notes: tuple[str, ...] = ()
    waited = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def open(cls, setup: Setup) -> "LocalEngine":
        return cls(devices.take(setup))

    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        return metadata

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        return model, optimizer

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        return (forward(network, x) for x in inputs)

    def pause(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def bucket_bytes(self) -> int:
        return 0

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        return lambda: None

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def allreduce(self, tensor: torch.Tensor) -> None:
        pass

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return row[None]

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        pass
