"""What is measured while a run trains: sums kept on the devices, and TensorFlow's profiler."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.core.totals import Totals
from hvdtrain.errors import RecipeError
from hvdtrain.tensorflow.sgd import norm_of
from hvdtrain.tensorflow.variables import add, put

Metric = tuple[tf.Tensor, tf.Tensor]
"""A sum, and how many were added up."""


class Seen(NamedTuple):
    """A batch's mean loss, how many examples it has, and its metrics."""

    loss: tf.Tensor
    count: tf.Tensor
    metrics: dict[str, Metric]


class Meter:
    """Sums of loss, examples and metrics, kept on the device so that a step waits for nothing."""

    MOST = 30
    """Metrics: the variable is made before the first graph gives their names."""

    def __init__(self, copies_of: Callable[[tf.Variable], Sequence[tf.Variable]]) -> None:
        self._copies_of = copies_of
        self._names: list[str] | None = None
        self._sums = tf.Variable(tf.zeros(2 + 2 * self.MOST, tf.float64), trainable=False)

    def add(self, seen: Seen, weight: tf.Tensor | float = 1.0) -> None:
        """A batch; `weight` 0 leaves it out. Within a graph. Raises RecipeError where its metrics have other names than
        those of another graph, or are too many."""
        self._take_names(sorted(seen.metrics))
        numbers = [seen.loss, seen.count, *(number for name in self._names or () for number in seen.metrics[name])]
        loss, count, *rest = (tf.cast(number, tf.float64) for number in numbers)
        unused = self._sums.shape[0] - len(numbers)
        add(self._sums, tf.pad(tf.stack([loss * count, count, *rest]) * weight, [[0, unused]]))

    def take(self) -> Totals:
        """The sums of all replicas of this rank so far; they start again at 0."""
        copies = self._copies_of(self._sums)
        loss, count, *rest = sum(copy.numpy() for copy in copies).tolist()
        for copy in copies:
            copy.assign(tf.zeros_like(copy))
        return Totals(loss, count, dict(zip(self._names or (), zip(rest[::2], rest[1::2], strict=True), strict=False)))

    def _take_names(self, names: list[str]) -> None:
        if len(names) > self.MOST:
            raise RecipeError(f"a step may have {self.MOST} metrics at most, got {len(names)}; give fewer.")
        self._names = names if self._names is None else self._names
        if names != self._names:
            raise RecipeError(
                f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
                f"{', '.join(self._names) or 'none'}."
            )


class GradientNorm:
    """The common norm of an update's gradients, of the first update after each `take`."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):  # a condition that lies on a GPU would be waited for in every step
            self._is_wanted = tf.Variable(False, trainable=False)
            self._norm = tf.Variable(float("nan"), trainable=False)

    def measure(self, gradients: list[tf.Tensor]) -> None:
        """Within a graph: notes their norm, if it is wanted."""

        def note() -> None:
            put(self._norm, tf.cast(norm_of(gradients), tf.float32))
            put(self._is_wanted, tf.constant(False))

        tf.cond(self._is_wanted, note, lambda: None)

    def take(self) -> float | None:
        """The last one that was noted; None before. From now on the next one is wanted."""
        norm = float(self._norm.numpy())
        self._is_wanted.assign(True)
        return None if math.isnan(norm) else norm


class Trace:
    """TensorFlow's profiler over ten steps, once the first five have warmed up; `folder` None traces nothing."""

    FIRST, STEPS = 5, 10

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._steps, self._running = folder, 0, False

    def step(self) -> None:
        self._steps += 1
        if self._folder and self._steps == self.FIRST:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True
        elif self._steps == self.FIRST + self.STEPS:
            self.close()

    def close(self) -> None:
        if self._running:
            tf.profiler.experimental.stop()
        self._running = False
