"""Programs of tensorflow_keras_programs.py with less usual losses and optimizers. Each is trained on
the batch of all ranks, on one process by plain Keras."""

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, optimizers

import hvdtrain.keras as ours

RANK, SIZE = ours.rank(), ours.size()
STEPS, BATCH, LENGTH = 4, 8, 6
SHORT = 3
"""How many of 8 examples the first rank has where the ranks' batches are unequal."""

draw = np.random.RandomState(0)
TOKENS = draw.randint(1, 20, (STEPS, BATCH, LENGTH)) * (np.arange(LENGTH) < draw.randint(1, 7, (STEPS, BATCH, 1)))
TOKENS[0, :4] = 0  # so that one rank counts no token
VALUES = draw.randn(STEPS, BATCH, LENGTH).astype("f4")
CLASSES = np.where(draw.rand(STEPS, BATCH) < 0.4, 9, TOKENS.sum(2) % 3)
WEIGHTS = draw.rand(STEPS, BATCH).astype("f4")
TARGETS = VALUES.mean(2, keepdims=True)


def dense(*more: layers.Layer) -> keras.Model:
    return keras.Sequential([layers.Input((LENGTH,)), layers.Dense(8, "tanh"), *more, layers.Dense(3)])


def masked() -> keras.Model:
    return keras.Sequential(
        [layers.Input((LENGTH,), dtype="int32"), layers.Embedding(20, 4, mask_zero=True), layers.Dense(3)]
    )


def two_outputs() -> keras.Model:
    x = layers.Input((LENGTH,), dtype="int32")
    words = layers.Embedding(20, 4, mask_zero=True)(x)
    flat = layers.Flatten()(layers.Embedding(20, 3)(x))
    return keras.Model(x, [layers.Dense(3, name="words")(words), layers.Dense(1, name="flat")(flat)])


class LateBuilt(keras.Model):
    """A model that makes its weights in the first call, with a nested layer."""

    def __init__(self) -> None:
        super().__init__()
        norm = layers.BatchNormalization(synchronized=True, renorm=True)
        self.body = keras.Sequential([layers.Dense(8, kernel_initializer=start(1)), norm])
        self.head = layers.Dense(3, kernel_initializer=start(2))

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        mean, variance = keras.ops.moments(x, [0], synchronized=True)
        return self.head(self.body((x - mean) / (1 + variance) if training else x, training=training))


def start(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.GlorotUniform(seed)


def numbered() -> keras.Model:
    """A model whose layers have different names on every rank."""
    for _ in range(RANK):
        layers.BatchNormalization()
    return dense(layers.BatchNormalization(synchronized=True))


def entropy(**more: Any) -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(True, **more)


def sgd(**more: Any) -> optimizers.Optimizer:
    return optimizers.SGD(0.05, momentum=0.9, **more)


def trained(
    model: Callable[[], keras.Model] = dense,
    loss: Any = "mse",
    x: np.ndarray = VALUES,
    y: Any = TARGETS,
    weights: bool = False,
    optimizer: Any = sgd,
    unequal: bool = False,
    policy: str = "float32",
    wrapped: Callable[[Any], Any] = ours.DistributedOptimizer,
    **compiled: Any,
) -> dict[str, Any]:
    """Weights and history of a training, and the optimizer's class."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(5)
    network, given = model(), optimizer() if callable(optimizer) else optimizer
    network.compile(optimizers.get(given) if SIZE == 1 else wrapped(given), loss, jit_compile=False, **compiled)
    cut = SHORT if unequal else BATCH // 2
    rows = slice(None) if SIZE == 1 else [slice(cut), slice(cut, None)][RANK]

    def own(table: Any) -> Any:
        return (
            [own(each) for each in table] if isinstance(table, list) else table[:, rows].reshape(-1, *table.shape[2:])
        )

    history = network.fit(
        own(x),
        own(y),
        sample_weight=own(WEIGHTS) if weights else None,
        batch_size=len(own(x)) // STEPS,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[] if SIZE == 1 else [ours.BroadcastCallback(), ours.MetricAverageCallback()],
    ).history
    keras.config.set_dtype_policy("float32")
    flat = np.concatenate([np.ravel(np.asarray(weight, "f8")) for weight in network.weights])
    return {"weights": flat.tolist(), "history": history}


by_weights: dict[str, Any] = {"loss": losses.MeanSquaredError("mean_with_sample_weight"), "weights": True}
by_mask: dict[str, Any] = {"model": masked, "loss": entropy(), "x": TOKENS, "y": TOKENS % 3}
EXACT: dict[str, dict[str, Any]] = {
    "mask": by_mask,
    "mask, unequal local batches": by_mask | {"unequal": True},
    "ignored class": {"loss": entropy(ignore_class=9), "y": CLASSES},
    "sum": {"loss": losses.MeanSquaredError("sum"), "optimizer": lambda: sgd(clipnorm=1.0)},
    "no reduction": {"loss": losses.MeanSquaredError(None), "optimizer": lambda: sgd(clipnorm=1.0)},
    "weights": by_weights,
    "weights, eagerly": by_weights | {"run_eagerly": True},
    "weights, several steps a call": by_weights | {"steps_per_execution": 3},
    "weights, accumulating": by_weights | {"optimizer": lambda: sgd(gradient_accumulation_steps=2)},
    "two outputs": {
        "model": two_outputs,
        "loss": [entropy(), losses.MeanSquaredError("sum")],
        "loss_weights": [0.7, 0.1],
        "x": TOKENS,
        "y": [TOKENS % 3, TARGETS],
    },
    "synchronized": {"model": lambda: dense(layers.BatchNormalization(synchronized=True))},
    "synchronized, late": {"model": LateBuilt},
    "synchronized, numbered": {"model": numbered},
    "by name": {"optimizer": "adam"},
    "by configuration": {"optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.5}}},
    "loss scale outside": {"wrapped": lambda given: optimizers.LossScaleOptimizer(ours.DistributedOptimizer(given))},
    "float16 by compile": {
        "policy": "mixed_float16",
        "optimizer": lambda: sgd(gradient_accumulation_steps=2),
        "loss_weights": 0.01,  # neither overflows
    },
}


def exact(names: list[str]) -> dict[str, Any]:
    return {name: trained(**EXACT[name]) for name in names}


def dice(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    return 1 - 2 * tf.reduce_sum(y * p) / tf.reduce_sum(y * y + p * p)


def one_mean(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((y - p) ** 2)


def against_all(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    """A value for each word, which depends on all words of the batch."""
    return losses.sparse_categorical_crossentropy(y, p, True) / (1 + tf.reduce_max(tf.abs(p)))


class Penalty(layers.Layer):
    def __init__(self, of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.of = of

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(self.of(x**2))
        return x


class Drawn(layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + keras.random.normal(tf.shape(x))


NOTED: dict[str, dict[str, Any]] = {
    "dice": {"loss": dice},
    "one mean": {"loss": one_mean},
    "added sum": {"model": lambda: dense(Penalty(tf.reduce_sum))},
    "added mean": {"model": lambda: dense(Penalty(tf.reduce_mean))},
    "drawn": {"model": lambda: dense(Drawn())},
    "circle": {"loss": losses.Circle(), "y": TOKENS[::-1, :, 0] % 3},
    "mask across": by_mask | {"loss": against_all, "x": TOKENS[::-1], "y": TOKENS[::-1] % 3},
}


class Summed(keras.Model):
    """A model with a train_step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"summed": loss}


def summed() -> keras.Model:
    x = layers.Input((LENGTH,))
    return Summed(x, layers.Dense(3)(x))


def noted() -> dict[str, Any]:
    """Trains losses of which some print a line; whether that has drawn from Python's random numbers."""
    for case in (*NOTED.values(), {"unequal": True}, {"model": summed}):
        trained(**case)
    keras.utils.clear_session()  # and Keras's own random numbers
    model, state = dense(), random.getstate()
    for loss, weights in (("mse", None), (dice, None), (dice, WEIGHTS[0, :4])):  # with different structures of data
        if weights is None:
            model.compile(ours.DistributedOptimizer(sgd()), loss, jit_compile=False)
        given = {"callbacks": [ours.BroadcastCallback()], "epochs": 1, "verbose": 0}
        model.fit(VALUES[0, :4], TARGETS[0, :4], 4, sample_weight=weights, **given)
    return {"drew": random.getstate() != state}
