"""Engines: one collective library each, behind the same few methods."""

from typing import Protocol

import tensorflow as tf

from hvdtrain.engines.registry import Setup
from hvdtrain.run import loop

LOST = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip
"""What tf.distribute raises where another task is lost."""


class Engine(loop.Engine, Protocol):
    """What training needs of a collective library.

    Every rank calls the same methods in the same order; `combine` and `sum_tensor` inside a graph.
    """

    device: str
    """Where this rank's batches are put."""

    @classmethod
    def open(cls, setup: Setup) -> "Engine":
        """The engine, joined with the other ranks and bound to its devices. Raises HvdtrainError."""

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The ranks' tensors, combined as the recipe's reduction says. Each is communicated once it is ready."""

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the ranks' tensors."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is lost."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
