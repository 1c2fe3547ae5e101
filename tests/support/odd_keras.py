"""Odd Keras models, optimizers and trainings, made from a seed, by plain Keras and in each way of hvdtrain's.

`python odd_keras.py FOLDER`: FOLDER/given.json holds the `way` ("plain", "fit", "tolerant" or "recipe"), the `seeds`,
and `left`: 1 where each is left after a random epoch and started again, 2 where it is only left. What became of each
seed goes to FOLDER/rank-R.json: every weight of the trained model, or what refused it.

A batch is the whole set, in whatever order: one process and N ranks then see the same examples in each step.
"""

import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from captured import captured, each_seed, lasts
from keras import layers, ops
from odd_drawn import epochs_of
from odd_keras_kinds import oddities

import hvdtrain.keras as hvd
from hvdtrain.keras import fault_tolerance
from hvdtrain.run.loop import Loop
from hvdtrain.tensorflow.trainer import Trainer, open_engine

EXAMPLES, STEPS, LR = 12, 4, 0.05
OURS = hvd.DistributedOptimizer, hvd.SyncBatchNormalization
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "Nadam", "Ftrl", "Adadelta", "Adafactor")


class Odd(layers.Layer):
    """A layer with unused weights, weights without dimensions, and weights that the forward pass changes."""

    def __init__(self, has: set[str]) -> None:
        super().__init__(name="odd")
        self.has = has
        if "scalar" in has:
            self.scalar = self.add_weight(name="scalar", shape=(), initializer=keras.initializers.Constant(1.5))
        if "never used" in has:
            self.unused = self.add_weight(name="unused", shape=(3,))
        if "counter" in has:
            self.calls = self.add_weight(name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False)
        if "average" in has:
            self.average = self.add_weight(name="average", shape=(6,), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if "added loss" in self.has:
            self.add_loss(0.1 * ops.mean(ops.square(x)))
        if "scalar" in self.has:
            x = x * self.scalar
        if "counter" in self.has:
            if training:
                self.calls.assign_add(1)
            x = x * (1 + 0.01 * ops.cast(self.calls, x.dtype))
        if "average" in self.has and training:
            self.average.assign(0.9 * self.average + 0.1 * ops.mean(x, 0))
        return x


class Stepped(keras.Model):
    """A model with a train_step of its own, which doubles each gradient."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([None if each is None else 2 * each for each in gradients], self.trainable_variables)
        return {"loss": loss}


class Late(keras.Model):
    """A model that makes its weights in its first call."""

    def __init__(self, has: set[str], norm: Any) -> None:
        super().__init__(name="late")
        self.parts = Parts(has, norm)
        for name, each in vars(self.parts).items():
            if isinstance(each, layers.Layer):
                setattr(self, name, each)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.parts(x, training)


class Parts:
    """The layers and their order."""

    def __init__(self, has: set[str], norm: Any) -> None:
        self.has = has
        given: dict[str, Any] = {"kernel_constraint": keras.constraints.MaxNorm(0.6)} if "constraint" in has else {}
        given |= {"kernel_regularizer": keras.regularizers.L2(0.05)} if "regularizer" in has else {}
        self.first, self.second = (layers.Dense(6, "tanh", name=name, **given) for name in ("first", "second"))
        self.odd, self.last = Odd(has), layers.Dense(1, name="last")
        if "frozen" in has:
            self.second.trainable = False
        if "embedding" in has:
            self.embedding = layers.Embedding(5, 6, name="embedding")
        if has & {"norm", "norm in inference"}:
            self.norm = norm(name="norm")
            self.norm.trainable = "norm in inference" not in has
        if "float32" in has:
            self.narrow = layers.Dense(6, dtype="float32", name="narrow")
        if "recurrent" in has:
            self.recurrent = layers.GRU(6, name="recurrent")
        if "two outputs" in has:
            self.other = layers.Dense(2, name="other")

    def __call__(self, x: Any, training: Any = None) -> Any:
        x = x["in"]["x"] if "nested" in self.has else x
        how = {} if training is None else {"training": training}
        h = self.second(self.first(x))
        if "tied" in self.has:
            h = self.second(h)
        if "embedding" in self.has:
            h = h + self.embedding(ops.cast(x[:, 0] > 0, "int32"))
        if hasattr(self, "norm"):
            h = self.norm(h, **how)
        if "float32" in self.has:
            h = h + ops.cast(self.narrow(h), h.dtype)
        if "recurrent" in self.has:
            h = self.recurrent(ops.reshape(h, (-1, 3, 2)))
        h = self.odd(h, **how)
        return {"y": self.last(h), "other": self.other(h)} if "two outputs" in self.has else self.last(h)


def net(seed: int, norm: Any = layers.BatchNormalization) -> keras.Model:
    has = oddities(seed)
    keras.utils.set_random_seed(seed)
    if "subclass" in has:
        return Late(has, norm)
    x = keras.Input((4,), name="x", dtype="float64")
    given = {"in": {"x": x}} if "nested" in has else x
    return (Stepped if "train_step" in has else keras.Model)(given, Parts(has, norm)(given))


def data(seed: int) -> Any:
    """(x, y), or (x, y, weights)."""
    has, draw = oddities(seed), np.random.default_rng(0)
    x = draw.normal(size=(EXAMPLES, 4))
    y: Any = x.sum(1, keepdims=True)
    y = {"y": y, "other": x[:, :2]} if "two outputs" in has else y
    weights = draw.random(EXAMPLES)
    if "sample weights" in has and "two outputs" in has:
        weights = {"y": weights, "other": weights[::-1].copy()}
    return ({"in": {"x": x}} if "nested" in has else x, y, *([weights] if "sample weights" in has else []))


def whole(seed: int) -> Any:
    """The data set of a recipe, for training and validation."""
    return data(seed), data(seed)


def optimizer(learning_rate: float, seed: int) -> keras.optimizers.Optimizer:
    has = oddities(seed)
    rate: Any = (
        keras.optimizers.schedules.ExponentialDecay(learning_rate, 2, 0.5) if "scheduled" in has else learning_rate
    )
    if "plain sgd" in has:
        return keras.optimizers.SGD(rate, momentum=0.9)
    kind = random.Random(-seed).choice(OPTIMIZERS)
    more: dict[str, Any] = dict.fromkeys(has & {"clipnorm", "clipvalue", "global_clipnorm"}, 0.3)
    more |= {"use_ema": True, "ema_momentum": 0.9} if "use_ema" in has else {}
    more |= {"gradient_accumulation_steps": 2} if "accumulated" in has else {}
    made = getattr(keras.optimizers, kind)(rate, weight_decay=0.1, **more)
    if "excluded from decay" in has:
        made.exclude_from_weight_decay(var_names=["bias"])
    return made


def error(y: Any, out: Any, weights: Any = None) -> Any:
    loss = ops.mean(ops.square(out - y), -1)
    return ops.mean(loss if weights is None else loss * weights)


def step(model: Any, batch: Any) -> Any:
    """The step of a recipe, with the losses of `compile`."""
    x, y, *weights = batch
    out = model(x)
    if isinstance(y, dict):
        pairs = [(y[name], out[name], *(each[name] for each in weights)) for name in ("y", "other")]
        loss = error(*pairs[0]) + 0.5 * error(*pairs[1])
    else:
        loss = error(y, out, *weights)
    return loss + sum(model.losses)


def given_weights(seed: int, folder: Path) -> Path:
    """A file of other weights and counts than the model is made with, which each rank writes alike."""
    path, model = folder.with_name(f"{folder.name}.weights.h5"), called(seed, layers.BatchNormalization)
    model.set_weights([each + np.ones_like(each) for each in model.get_weights()])
    model.save_weights(written := path.with_name(f"{hvd.rank()}-{path.name}"))
    keras.utils.clear_session()  # no name may tell that there was another model
    return written.replace(path)


def called(seed: int, norm: Any) -> keras.Model:
    """The model, which has all its weights."""
    model = net(seed, norm)
    model(keras.tree.map_structure(lambda each: tf.constant(each[:1]), data(seed)[0]))
    return model


def compiled(seed: int, folder: Path, wrapped: Any = None, norm: Any = layers.BatchNormalization, **how: Any) -> Any:
    has, made = oddities(seed), optimizer(LR, seed)
    if "given weights" in has:
        path = given_weights(seed, folder)
        model = called(seed, norm)
        model.load_weights(path)
    else:
        model = net(seed, norm)
    if "no decay by key" in has:  # as the recipe's key does
        made.exclude_from_weight_decay(var_names=["bias"])
    for layer in model._flatten_layers() if "frozen by key" in has else ():
        if layer.name == "first":  # as the recipe's key does
            layer.trainable = False
    given: dict[str, Any] = {"loss": {"y": "mse", "other": "mse"}, "loss_weights": {"y": 1.0, "other": 0.5}}
    given = given if "two outputs" in has else {"loss": "mse"}
    model.compile(wrapped(made) if wrapped else made, **given, jit_compile=False, **how)
    return model


def plain(seed: int, folder: Path, lasts: tuple[int, ...]) -> keras.Model:
    """Trains with plain Keras."""
    model, epochs = compiled(seed, folder, run_eagerly=True), epochs_of(seed, STEPS)
    model.fit(*data(seed)[:2], EXAMPLES, epochs, 0, sample_weight=(*data(seed), None)[2], shuffle=False)
    return model


def fit(seed: int, folder: Path, lasts: tuple[int, ...]) -> keras.Model:
    """Trains with fit on several ranks."""
    model, batches = compiled(seed, folder, *OURS), hvd.GlobalBatches(data(seed), EXAMPLES)
    disturb(model)
    model.fit(batches, epochs=epochs_of(seed, STEPS), verbose=0, callbacks=[hvd.BroadcastCallback()])
    return model


def tolerant(seed: int, folder: Path, lasts: tuple[int, ...]) -> keras.Model:
    """Trains with FaultTolerance; `lasts`: the epochs after which the training is started again."""
    for last in (min(each, epochs_of(seed, STEPS)) for each in lasts):
        keras.utils.clear_session()  # as if it were another process
        fault_tolerance.TRAINED.clear()
        model = compiled(seed, folder, *OURS)
        model(keras.tree.map_structure(lambda each: tf.constant(each[:1]), data(seed)[0]))
        disturb(model)
        batches = hvd.GlobalBatches(data(seed), EXAMPLES)
        model.fit(batches, epochs=last, verbose=0, callbacks=[hvd.FaultTolerance(folder, batches)])
    return model


def disturb(model: keras.Model) -> None:
    """Changes the weights on the other ranks, which must begin with those of rank 0."""
    if hvd.rank() and model.built:
        for weight in model.trainable_weights:
            weight.assign(weight + 1)


def with_tensorflow(run: Any) -> keras.Model:
    engine = open_engine(run)  # and leaves it open for the next
    run.world.exchange(engine.sum)
    trainer = Trainer(run, engine)
    Loop(run, trainer).train()
    return trainer.model


def recipe(seed: int, folder: Path, lasts: tuple[int, ...]) -> keras.Model:
    """Trains by a recipe that names the model."""
    has, made = oddities(seed), []
    argv = [str(Path(__file__).with_name("odd_keras.yaml"))]
    for key in ("model", "dataset", "optimizer"):
        if not (key == "optimizer" and "plain sgd" in has):
            argv += [f"--{key}-args", f"seed={seed}"]
    argv += ["--optimizer", "sgd", "--momentum", "0.9"] if "plain sgd" in has else []
    argv += ["--batch-norm", "sync"] if has & {"norm", "norm in inference"} else []
    argv += ["--buffers", "average"] if "average" in has else []
    argv += ["--freeze", "first"] if "frozen by key" in has else []
    argv += ["--no-weight-decay", "bias"] if "no decay by key" in has else []
    argv += ["--init-from", str(given_weights(seed, folder))] if "given weights" in has else []
    argv += ["--gradient-noise"] if seed % 2 and hvd.size() > 1 else []
    patience = epochs_of(seed, STEPS) - 1  # the first epoch's value is the best, as none is better by so much
    argv += ["--stop-patience", str(patience), "--stop-min-delta", "1e9"] if patience + 1 < STEPS else []
    argv += ["--engine", "horovod" if hvd.size() > 1 else "local", "--output", str(folder)]
    for last in lasts:
        ended = captured("tensorflow", [*argv, "--max-steps", str(last)], lambda run: made.append(with_tensorflow(run)))
        if ended["code"]:
            raise Ended(ended["err"].strip() or ended["code"])
    return made[-1]


class Ended(Exception):
    """The error that ended a recipe's run."""


def became(way: str, seed: int, folder: Path, left: int) -> Any:
    keras.utils.clear_session()
    try:
        model = globals()[way](seed, folder, lasts(random.Random(seed), left, STEPS))
    except (SystemExit, Exception) as error:
        return f"{type(error).__name__}: {error}"
    named = {weight.path.removeprefix("late/"): np.asarray(weight).tolist() for weight in model.weights}
    return {name: value for name, value in named.items() if "seed_generator" not in name}


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    hvd.init()
    each_seed(became, hvd.rank())
