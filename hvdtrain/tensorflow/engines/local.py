"""The engine of one process: every verb is the identity."""

from typing import Any, Self

import numpy as np
import tensorflow as tf

from hvdtrain.engines import Setup
from hvdtrain.tensorflow import devices
from hvdtrain.tensorflow.engines.one_replica import OneReplica


class LocalEngine(OneReplica):
    """One rank alone; see `Engine` for the verbs."""

    def __init__(self, device: str) -> None:
        self.device = device

    @classmethod
    def open(cls, setup: Setup) -> Self:
        return cls(devices.take(setup))

    def broadcast(self, variables: dict[str, tf.Variable], facts: Any) -> Any:
        return facts

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def close(self) -> None:
        pass
