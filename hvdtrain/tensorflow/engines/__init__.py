"""Engines: one collective library each, behind the same few verbs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np
import tensorflow as tf

from hvdtrain.engines import Setup

Share = tuple[tf.Tensor, ...]
"""What one replica computes on."""

LOST = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip
"""What tf.distribute raises where another task is gone."""


class Engine(Protocol):
    """What the training loop asks of a collective library.

    A rank has one replica of the model, or several on devices of its own. Verbs are called by every rank, in one
    order; `combine`, `sum_tensor`, `update` and `keep` by every replica, inside what `replicate` made.
    """

    rank: int
    size: int
    device: str
    """Where this rank's batches are put."""
    replicas: int
    """How many this rank has; each reads a share of the plan's."""
    notes: tuple[str, ...]
    """What the run reports of this engine at its start."""
    serves: bool
    """Whether this rank only computes what the chief asks for, and has no loop of its own."""

    @classmethod
    def open(cls, setup: Setup) -> Self:
        """The engine, joined with the other ranks and bound to its devices. Raises HvdtrainError."""

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size as the library has them."""

    def scope(self) -> AbstractContextManager[Any]:
        """Around whatever makes variables."""

    def replicate(self, step: Callable[..., None], relaxed: bool = False) -> Callable[..., None]:
        """`on_all(shares, *same)`: a graph of step(*share, *same) on every replica of this rank, each with its own.
        `relaxed`: the sizes of batches vary."""

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        """The replicas' own of a variable, once all that was asked for is computed; one where they share it."""

    def broadcast(self, variables: dict[str, tf.Variable], facts: Any) -> Any:
        """Overwrites `variables` in place with rank 0's; returns rank 0's picklable `facts`."""

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The replicas' tensors, combined as the recipe's reduction says. In a graph each sets out once it is ready."""

    def update(self, change: Callable[[list[tf.Tensor]], None], tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the combined tensors: once for every copy of the variables that it changes."""

    def keep(self, change: Callable[[list[tf.Tensor]], None], tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the replica's own tensors; where replicas share their variables, once, with the mean."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' tensors, inside a graph."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error says that another rank is gone."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
