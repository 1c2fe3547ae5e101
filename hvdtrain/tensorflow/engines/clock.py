"""How long a rank waits for others inside a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Clock:
    """Seconds from when this rank has all of its tensors until all of the ranks' combined ones are there, added up.

    Only the clock waits for the last tensor: each is communicated once it is ready, while backward computes others.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._seconds = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    @property
    def seconds(self) -> float:
        """Once all steps that were requested are computed."""
        # Variable.numpy() takes four times as long.
        handle = self._seconds.handle
        return float(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy())

    def around(self, combine: Callable[[Any], list[Any]], tensors: Sequence[Any]) -> list[Any]:
        """`combine(tensors)`, measured; None among them is left out. Inside a graph, or eagerly."""
        began = _time_after(tensors)
        combined = combine(tensors)
        # The system's clock, which may be set back.
        self._seconds.assign_add(tf.maximum(_time_after(combined) - began, 0.0))
        return combined


def _time_after(tensors: Sequence[Any]) -> tf.Tensor:
    with tf.device("/CPU:0"), tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.timestamp()
