"""Mean and variance of the global batch."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

SumOverRanks = Callable[[tf.Tensor], tf.Tensor]
"""Adds a tensor over the ranks."""


def masked_moments(
    x: tf.Tensor, axes: Sequence[int], sum_over_ranks: SumOverRanks, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and biased variance as Keras's BatchNormalization takes them, whose mask lacks the last dimension."""
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))
    mean, variance, _ = global_moments(x, axes, sum_over_ranks, mask)
    return mean, variance


def global_moments(
    x: tf.Tensor, axes: Sequence[int], sum_over_ranks: SumOverRanks, mask: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean, biased variance and number of the values of x over `axes` and all ranks: x's dtype, its shape without
    `axes`.

    With a boolean `mask` (x's shape) only the values that it marks count. A rank may have none.
    Squared deviations from each rank's own mean are combined, so that no large sums are subtracted from one
    another: Chan, Golub, LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """

    def kept(values: tf.Tensor) -> tf.Tensor:
        return values if mask is None else tf.where(mask, values, tf.zeros([], x.dtype))

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> Any:
        sums = tf.reduce_sum(kept(x), axes, keepdims=True)
        count = tf.reduce_sum(kept(tf.ones_like(x)), axes, keepdims=True)
        own_mean = tf.math.divide_no_nan(sums, count)
        squares = tf.reduce_sum(kept(tf.square(x - own_mean)), axes, keepdims=True)

        global_count, global_sums = tf.unstack(sum_over_ranks(tf.stack([count, sums])))
        mean = tf.math.divide_no_nan(global_sums, global_count)
        global_squares = sum_over_ranks(squares + count * tf.square(own_mean - mean))
        variance = tf.math.divide_no_nan(global_squares, global_count)

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            # By hand: what goes through own_mean cancels, and would leave its rounding.
            all_ranks = sum_over_ranks(tf.stack([of_mean, of_variance]))
            a, b = tf.unstack(tf.math.divide_no_nan(all_ranks, global_count))
            return kept(a + 2 * b * (x - mean))

        return (mean, variance, global_count), gradient

    mean, variance, count = moments(x)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes), tf.squeeze(count, axes)
