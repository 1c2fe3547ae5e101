"""Engines: one collective library each, behind the same few verbs."""

from typing import Any, Protocol

import numpy as np
import tensorflow as tf


class Engine(Protocol):
    """What the training loop asks of a collective library. Every verb is called by every rank, in one order."""

    rank: int
    size: int
    device: str

    def broadcast(self, variables: dict[str, tf.Variable], facts: Any) -> Any:
        """Overwrites `variables` in place with rank 0's; returns rank 0's picklable `facts`."""

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The ranks' tensors, combined as the recipe's reduction says. In a graph each sets out once it is ready."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same inside a graph."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
