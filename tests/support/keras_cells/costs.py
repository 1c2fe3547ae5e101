"""Losses, metrics and steps."""

import keras
import tensorflow as tf


def loss(out, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, out))


def keras_order(y_true, y_pred):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


class Scored(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def right(out, y):
    return tf.cast(tf.argmax(out, -1) == y, tf.float32)


def right_of_class_0(out, y):
    zero = y == 0
    return tf.math.count_nonzero(zero & (tf.argmax(out, -1) == y)), tf.math.count_nonzero(zero)


def step(model, batch):
    x, y = batch
    out = model(x)
    return loss(out, y), {"right": right(out, y)}


def token_step(model, batch):
    return loss(model(batch["tokens"], training=model.training)["logits"], batch["label"])


def vector(out, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, out)


def plain(out, y):
    return 0.5


def turned(y, out):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, out))


def without_gradient(out, y):
    return loss(tf.stop_gradient(out), y)


def of_batch(out, y):
    return tf.reduce_mean(out)


def listed(model, batch):
    return loss(model(batch[0]), batch[1]), [1]


ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def kept(out, y):
    """The sum of the losses of all classes but 0, and their number."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, out)
    return tf.reduce_sum(tf.where(y > 0, losses, 0)), tf.math.count_nonzero(y)


def kept_step(model, batch):
    out = model(batch[0])
    return kept(out, batch[1]), {"kept": (tf.math.count_nonzero(batch[1]), tf.size(batch[1]))}


def ratio(out, y):
    total, count = kept(out, y)
    return total / tf.cast(count, total.dtype)


def scaled(learning_rate):
    return keras.optimizers.SGD(learning_rate, loss_scale_factor=8.0)


no_number = (lambda out, y: tf.reduce_sum(out, 0)), (lambda sums: sums)


class Changed(keras.metrics.Mean):
    """One whose states need not add up."""

    def update_state(self, y, out):
        super().update_state(tf.reduce_max(out))
