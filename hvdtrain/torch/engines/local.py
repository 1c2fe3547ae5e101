"""The engine of one process: every verb is the identity."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch


class LocalEngine:
    """One rank alone; see `Engine` for the verbs."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def broadcast(self, tensors: dict[str, torch.Tensor], facts: Any) -> Any:
        return facts

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def applying(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return nullcontext()

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return row[None]

    def close(self) -> None:
        pass
