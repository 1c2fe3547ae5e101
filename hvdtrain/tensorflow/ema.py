"""An exponential moving average of the weights, which a run validates with."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from hvdtrain.tensorflow.engines.replication import Replication
from hvdtrain.tensorflow.variables import add, put


class Ema:
    """The average e = decay e + (1 - decay) w of every weight; it begins as the weights themselves."""

    def __init__(self, weights: list[tf.Variable], decay: float, replication: Replication) -> None:
        self._weights, self._weight, self._replication = weights, 1 - decay, replication
        self.averages = [tf.Variable(tf.convert_to_tensor(weight), trainable=False) for weight in weights]
        self._swap = replication.replicate(self._swap_own)

    def update(self) -> None:
        """Follows the weights, after an update of them. Within a graph."""
        for average, weight in zip(self.averages, self._weights, strict=True):
            add(average, (weight - average) * self._weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The averages in the model, until the block ends; the weights themselves are then as they were."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Between two steps: what was requested before is computed first."""
        self._replication.copies(self._weights[0])
        self._swap([()] * self._replication.replicas)
        self._replication.copies(self._weights[0])

    def _swap_own(self) -> None:
        self._replication.keep(self._swap_all, [])

    def _swap_all(self, _: list[tf.Tensor]) -> None:
        for average, weight in zip(self.averages, self._weights, strict=True):
            own, other = tf.identity(weight), tf.identity(average)
            put(weight, other)
            put(average, own)
