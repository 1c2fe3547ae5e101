"""How a step runs on a rank's replicas of the model: on one, or on those of a tf.distribute strategy."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow.engines import Engine

# AutoGraph would only cost time: what depends on a tensor says so with tf.cond.
graph = functools.partial(tf.function, autograph=False)

Inputs = tuple[Any, ...]
"""What one replica computes on: a micro-batch, in validation with its weight."""
Change = Callable[[list[tf.Tensor]], None]


class Replication:
    """One replica with plain variables; the engines over tf.distribute override what differs.

    `combine`, `update` and `keep` are called by every replica, inside what `replicate` made.
    """

    rank: int
    size: int
    replicas = 1
    """How many this rank has; each reads a local batch of the plan's."""
    serves = False
    """Whether this rank only computes what rank 0 requests, and has no loop of its own."""

    @property
    def world(self) -> tuple[int, int]:
        """Rank and size as the library has them."""
        return self.rank, self.size

    def scope(self) -> AbstractContextManager[Any]:
        """Around whatever makes variables."""
        return contextlib.nullcontext()

    def replicate(self, step: Callable[..., None], relaxed: bool = False) -> Callable[..., None]:
        """`on_all(inputs, *same)`: a graph of step(*inputs[i], *same) on every replica i of this rank.
        `relaxed`: the sizes of batches vary."""
        compiled = graph(step, reduce_retracing=relaxed)

        def on_all(inputs: Sequence[Inputs], *same: tf.Tensor) -> None:
            compiled(*inputs[0], *same)

        return on_all

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        """The replicas' own of a variable, once all that was requested is computed; one where they share it."""
        return (variable,)

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The replicas' tensors, combined as the recipe's reduction says."""
        raise NotImplementedError

    def update(self, change: Change, tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the combined tensors: once for every copy of the variables that it changes."""
        change(self.combine(tensors))

    def keep(self, change: Change, tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the replica's own tensors; where replicas share their variables, once, with the mean."""
        change(tensors)


class OneReplica(Replication):
    """Of an engine that joins ranks with plain variables, or of one process."""

    def __init__(self, engine: Engine) -> None:
        self.rank, self.size, self._engine = engine.rank, engine.size, engine

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._engine.combine(tensors)


def replication_of(engine: Engine) -> Replication:
    """An engine over tf.distribute is its own."""
    return engine if isinstance(engine, Replication) else OneReplica(engine)
