"""A gradient tape that averages over the ranks."""

from typing import Any

import tensorflow as tf

from hvdtrain.keras.reduction import Reduction


def DistributedGradientTape(tape: tf.GradientTape, **options: Any) -> tf.GradientTape:  # noqa: N802
    """The same tape, whose `gradient` from now on gives averages over the ranks; options as for the optimizer.

    Sources may be Keras's variables or TensorFlow's, nested or single. Eagerly every gradient is averaged on its
    own, which is slow: write the loop in a `tf.function`.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight**2
        >>> float(hvd.DistributedGradientTape(tape).gradient(loss, weight))
        6.0
    """
    reduction, plain = Reduction(**options), tape.gradient

    def gradient(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = plain(target, sources, *args, **kwargs)
        averaged = reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, averaged)

    tape.gradient = gradient
    return tape
