"""The verbs of every engine whose ranks have one replica each, and plain variables."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow.engines import Share

# AutoGraph would only cost time: what depends on a tensor says so with tf.cond.
graph = functools.partial(tf.function, autograph=False)


class OneReplica:
    """See `Engine` for the verbs."""

    rank = 0
    size = 1
    replicas = 1
    notes: tuple[str, ...] = ()
    serves = False

    @property
    def place(self) -> tuple[int, int]:
        return self.rank, self.size

    def scope(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def replicate(self, step: Callable[..., None], relaxed: bool = False) -> Callable[..., None]:
        compiled = graph(step, reduce_retracing=relaxed)

        def on_all(shares: Sequence[Share], *same: tf.Tensor) -> None:
            compiled(*shares[0], *same)

        return on_all

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        return (variable,)

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors

    def update(self, change: Callable[[list[tf.Tensor]], None], tensors: list[tf.Tensor]) -> None:
        change(self.combine(tensors))

    def keep(self, change: Callable[[list[tf.Tensor]], None], tensors: list[tf.Tensor]) -> None:
        change(tensors)

    def is_lost(self, error: Exception) -> bool:
        return False
