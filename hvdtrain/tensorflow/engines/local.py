"""The engine of one process: every method is the identity."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.engines.registry import Setup
from hvdtrain.tensorflow.engines import Engine, take_device


class LocalEngine(Engine):
    """One rank alone; see `Engine` for the methods."""

    rank = 0
    size = 1
    notes: tuple[str, ...] = ()

    def __init__(self, device: str) -> None:
        self.device = device

    @classmethod
    def open(cls, setup: Setup) -> "LocalEngine":
        return cls(take_device(setup))

    @property
    def waited(self) -> float | None:
        return None

    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        return metadata

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        pass
