"""What is measured while a run trains: sums kept on the devices, and TensorFlow's profiler."""

from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from hvdtrain.core.totals import Totals
from hvdtrain.tensorflow.variables import add


class Meter:
    """Sums of loss, right answers and examples, kept on the device so that a step waits for nothing."""

    def __init__(self, copies_of: Callable[[tf.Variable], Sequence[tf.Variable]]) -> None:
        self._copies_of = copies_of
        self._sums = tf.Variable(tf.zeros(3, tf.float64), trainable=False)

    def add(self, loss: tf.Tensor, correct: tf.Tensor, count: tf.Tensor | int, weight: tf.Tensor | float = 1.0) -> None:
        """A batch: mean loss, right answers, examples; `weight` 0 leaves it out. Within a graph."""
        count = tf.cast(count, tf.float64)
        sums = tf.stack([tf.cast(loss, tf.float64) * count, tf.cast(correct, tf.float64), count])
        add(self._sums, sums * weight)

    def take(self) -> Totals:
        """The sums of all replicas of this rank so far; they start again at 0."""
        copies = self._copies_of(self._sums)
        totals = Totals(*sum(copy.numpy() for copy in copies).tolist())
        for copy in copies:
            copy.assign(tf.zeros_like(copy))
        return totals


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
