"""BatchNorm whose statistics are those of the global batch."""

from typing import Any

import keras
import tensorflow as tf

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

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        # Imported here: a saved model's evaluation needs no Horovod.
        from hvdtrain.keras.ranks import sum_over_ranks

        return masked_moments(inputs, self._reduction_axes, sum_over_ranks, mask)
