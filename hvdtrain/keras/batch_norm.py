"""BatchNorm whose statistics are those of the global batch."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn

from hvdtrain.errors import KerasError
from hvdtrain.tensorflow.moments import masked_moments


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras's BatchNormalization with mean and variance of the batch over all ranks; for a custom `tf.function`
    loop as for `fit`. XLA cannot compile it.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNormalization()
        >>> tuple(layer(tf.ones((2, 8, 8, 3)), training=True).shape)
        (2, 8, 8, 3)
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise KerasError(f"SyncBatchNormalization cannot be fused, got fused={fused}: leave it out.")
        super().__init__(**kwargs)
        self.supports_jit = False

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return _over_ranks(inputs, self._reduction_axes, mask)


def synchronize() -> None:
    """From now on `synchronized=True`, of Keras's BatchNormalization and ops.moments, means all ranks."""

    def moments(x: tf.Tensor, axes: Any, keepdims: bool) -> list[tf.Tensor]:
        shape = tf.shape(tf.reduce_sum(x, axes, keepdims=keepdims))
        return [tf.reshape(moment, shape) for moment in _over_ranks(x, axes, None)]

    def masked(layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
        together = layer.synchronized and mask is not None
        return _over_ranks(inputs, layer._reduction_axes, mask) if together else plain(layer, inputs, mask)

    plain = keras.layers.BatchNormalization._moments
    keras.layers.BatchNormalization._moments = masked
    nn._compute_moments_sync = moments


def _over_ranks(x: tf.Tensor, axes: Any, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    # Imported here: a saved model's evaluation needs no Horovod.
    from hvdtrain.keras.averaging import sum_over_ranks

    return masked_moments(x, axes, sum_over_ranks, mask)
