"""Programs of tensorflow_keras_programs.py that hvdtrain.keras refuses."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvdtrain.keras as ours
from hvdtrain.errors import HvdtrainError


def eagerly(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program, for whose few steps tracing would take longer than computing."""

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        tf.config.run_functions_eagerly(True)
        try:
            return program(*args, **kwargs)
        finally:
            tf.config.run_functions_eagerly(False)

    return run


class Apart(keras.callbacks.Callback):
    """Changes a weight by the rank's number."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.weights[0].assign_add([[0.1 * ours.rank()]] * 2)


TRACED = {"an older function", "XLA", "XLA, accumulating", "XLA in a loop", "XLA, synchronised", "XLA, broadcast"}


def refusals(names: list[str]) -> dict[str, str]:
    """The error of each of these programs."""
    results = {}
    for name in names:
        keras.config.set_dtype_policy("mixed_float16" if "float16" in name else "float32")
        try:
            (REFUSED[name] if name in TRACED else eagerly(REFUSED[name]))()
            results[name] = "taken"
        except HvdtrainError as error:
            results[name] = f"{type(error).__name__}: {error}"
    keras.config.set_dtype_policy("float32")
    return results


def tiny_fit(optimizer: Any, *callbacks: Any, **compiled: Any) -> keras.Model:
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    model.compile(optimizer, "mse", **compiled)
    fit_again(model, *callbacks)
    return model


def fit_again(model: keras.Model, *callbacks: Any, **more: Any) -> None:
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=list(callbacks), **more)


def stock() -> Any:
    """An optimizer as Horovod 0.28.1 changes it, seen from Keras 3."""
    return type("SGD", (keras.optimizers.SGD,), {"_allreduce_grads": None})(0.1, name="sgd")


def plain() -> Any:
    return keras.optimizers.SGD(0.1, name="sgd")


def own_xla_step() -> None:
    weight = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = weight**2
        return ours.DistributedGradientTape(tape).gradient(loss, weight)

    step()


def xla_sync_batch_norm() -> None:
    layer = ours.SyncBatchNormalization()
    layer.build((None, 2))
    tf.function(lambda: layer(tf.ones((3, 2)), training=True), jit_compile=True)()


def older_function() -> None:
    model = tiny_fit(plain())
    ours.BroadcastCallback().set_model(model)
    fit_again(model)
    ours.DistributedOptimizer(model.optimizer)
    fit_again(model, ours.BroadcastCallback())


def under_a_strategy() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        tiny_fit(ours.DistributedOptimizer(plain()), ours.WarmupCallback(0.1))


def validated_by_one() -> None:
    model = tiny_fit(ours.DistributedOptimizer(plain()))
    valid = (np.ones((4, 2)), np.ones((4, 1))) if ours.rank() == 0 else None
    fit_again(model, ours.BroadcastCallback(), ours.MetricAverageCallback(), validation_data=valid)


def endless() -> None:
    def batches() -> Iterator[Any]:
        yield np.ones((4, 2)), np.ones((4, 1))

    model = tiny_fit(ours.DistributedOptimizer(plain()))
    model.fit(batches(), verbose=0, callbacks=[ours.WarmupCallback(0.1)])


def deciding(early: Any, averaged_last: bool = True) -> None:
    """A callback that reads the logs before they are those of all ranks; the losses are 0.25 and 2.25."""
    model = keras.Sequential(
        [layers.Input((2,)), layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.25))]
    )
    model.compile(ours.DistributedOptimizer(plain()), "mse")
    x, average = np.ones((4, 2)) * (1 - 2 * ours.rank()), ours.MetricAverageCallback()
    callbacks = [early, average] if averaged_last else [average, early]
    model.fit(x, np.ones((4, 1)), epochs=9, verbose=0, callbacks=[ours.BroadcastCallback(), *callbacks])


class LeavesEarly(keras.callbacks.Callback):
    """Ends the epoch of rank 1 after one step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = ours.rank() == 1


def left_early() -> None:
    model = tiny_fit(ours.DistributedOptimizer(plain()))
    fit_again(model, ours.MetricAverageCallback(), ours.BroadcastCallback(), LeavesEarly(), batch_size=1)


class Second(keras.Model):
    """A model with a plain optimizer beside the distributed one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other = layers.Dense(1), [keras.optimizers.SGD(name="other")]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)


def second() -> None:
    model = Second()
    model.compile(ours.DistributedOptimizer(plain()), "mse")
    fit_again(model, ours.BroadcastCallback())


def looked_up() -> None:
    layer = layers.StringLookup(vocabulary=["a", "b"] if ours.rank() == 0 else ["b", "a"], output_mode="one_hot")
    model = keras.Sequential([layers.Input((1,), dtype="string"), layer, layers.Dense(1)])
    model.compile(ours.DistributedOptimizer(plain()), "mse")
    model.fit(tf.constant([["a"]] * 4), np.ones(4), callbacks=[ours.BroadcastCallback()], verbose=0)


def constant(from_dataset: bool) -> None:
    rank = float(ours.rank())
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1), layers.Lambda(lambda x: x + rank)])
    model.compile(ours.DistributedOptimizer(plain()), "mse")
    x, y = np.ones((4, 2)), np.ones((4, 1))
    data = (tf.data.Dataset.from_tensors((x, y)),) if from_dataset else (x, y)
    model.fit(*data, callbacks=[ours.BroadcastCallback()], verbose=0)


def another_world() -> None:
    real = dict(os.environ)
    for name in real:
        if name.startswith(("HOROVOD_", "OMPI_", "PMI", "PRTE")):
            del os.environ[name]
    os.environ |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4", "PMI_RANK": "0", "PMI_SIZE": "4"}
    try:
        ours.init()
    finally:
        os.environ.clear()
        os.environ.update(real)


REFUSED: dict[str, Callable[[], Any]] = {
    "twice": lambda: ours.DistributedOptimizer(ours.DistributedOptimizer(plain())),
    "accumulation in two places": lambda: ours.DistributedOptimizer(
        keras.optimizers.SGD(gradient_accumulation_steps=3), backward_passes_per_step=2
    ),
    "no pass": lambda: ours.DistributedOptimizer(plain(), backward_passes_per_step=0),
    "an unknown option": lambda: ours.DistributedGradientTape(tf.GradientTape(), average=True),
    "predivided sum": lambda: ours.DistributedOptimizer(plain(), gradient_predivide_factor=2.0, op=ours.Sum),
    "groups of Adasum": lambda: ours.DistributedOptimizer(plain(), groups=2, op=ours.Adasum),
    "stock wrapped": lambda: ours.DistributedOptimizer(stock()),
    "stock": lambda: tiny_fit(stock(), ours.BroadcastCallback()),
    "stock in float16": lambda: tiny_fit(stock(), ours.BroadcastCallback()),
    "plain, broadcast": lambda: tiny_fit(plain(), ours.BroadcastCallback()),
    "plain, metrics": lambda: tiny_fit(plain(), ours.MetricAverageCallback()),
    "plain, warm-up": lambda: tiny_fit(plain(), ours.WarmupCallback(0.1)),
    "an older function": older_function,
    "twice around a loss scale": lambda: ours.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(ours.DistributedOptimizer(plain()))
    ),
    "no optimizer": lambda: ours.DistributedOptimizer(None),
    "under a strategy": under_a_strategy,
    "XLA": lambda: tiny_fit(ours.DistributedOptimizer(plain()), ours.MetricAverageCallback(), jit_compile=True),
    "XLA, accumulating": lambda: tiny_fit(
        ours.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2)), jit_compile=True
    ),
    "XLA in a loop": own_xla_step,
    "XLA, synchronised": xla_sync_batch_norm,
    "XLA, broadcast": tf.function(lambda: ours.broadcast_variables(tf.Variable(1.0)), jit_compile=True),
    "validated by one rank": validated_by_one,
    "an unknown length": endless,
    "a stop of one rank": lambda: deciding(keras.callbacks.EarlyStopping("loss", baseline=1.0, patience=1)),
    "an LR of one rank": lambda: deciding(keras.callbacks.LearningRateScheduler(lambda _: 0.1 + ours.rank()), False),
    "an epoch that one rank leaves": left_early,
    "weights of one rank": lambda: tiny_fit(ours.DistributedOptimizer(plain()), ours.BroadcastCallback(), Apart()),
    "a second optimizer": second,
    "another vocabulary": looked_up,
    "another constant": lambda: constant(False),
    "another constant, from a data set": lambda: constant(True),
    "another world": another_world,
}  # fmt: skip
