"""Odd trainings under Keras's fit, made from a seed: several steps an epoch, masks, weights, callbacks in any order.

`python odd_keras_fits.py FOLDER`: FOLDER/given.json holds the `way` ("plain", "fit" or "tolerant"), the `seeds`, and
`left`: the signal that each gets at a random step, after SIGTERM to be started again. What became of each seed goes to
FOLDER/rank-R.json: the weights, the history and what evaluate gives, or what refused it.

Plain Keras reads the order that GlobalBatches reads, which it looks up.
"""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow
import kept_callbacks
import keras
import numpy as np
import tensorflow as tf
from captured import each_seed, trained_or_refused
from keras import callbacks, layers, ops
from odd_keras_kinds import CALLBACKS, OTHERS, OWN_METRICS, fits

import hvdtrain.keras as hvd
from hvdtrain.keras import fault_tolerance

EXAMPLES, BATCH, EPOCHS = 26, 8, 4
STEPS = EXAMPLES // BATCH
MORE_STEPS = (2, 5)
"""What a program's `steps_per_epoch` may be."""
FIRST = 1
"""The epoch that a program with an `initial_epoch` begins with."""
VALIDATED = {"validation", "validation weights", "validation steps"}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam")


class Two(keras.Model):
    """Trains its last layer with an optimizer of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out, weight)
        last = self.layers[-1].trainable_variables
        rest = [each for each in self.trainable_variables if all(each is not one for one in last)]
        of_rest, of_last = tape.gradient(loss, [rest, last])
        self.optimizer.apply(of_rest, rest)
        self.second.apply(of_last, last)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return self.compute_metrics(x, y, out, weight)


class InOrder(keras.utils.PyDataset):
    """Global batches for plain Keras: `steps` of them an epoch."""

    def __init__(self, data: Any, order: list[np.ndarray], first: int, steps: int) -> None:
        super().__init__()
        self.data, self.order, self.epoch, self.steps = data, order, first - 1, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Any:
        return tuple(each[self.order[max(0, self.epoch) * self.steps + index]] for each in self.data)

    def on_epoch_begin(self) -> None:
        self.epoch += 1


class ByIndex:
    """A source of examples."""

    def __init__(self, data: tuple[np.ndarray, ...]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(each[index] for each in self.data)


def order_of_steps() -> list[np.ndarray]:
    """The examples that GlobalBatches reads, by step."""
    batches = hvd.GlobalBatches((np.arange(EXAMPLES),), BATCH)
    return [batches[step][0] for step in range(max(STEPS, *MORE_STEPS) * EPOCHS)]


class Own(keras.metrics.Metric):
    """A metric of one's own, in one of the forms that a result may have."""

    def __init__(self, form: str) -> None:
        super().__init__(name=form.replace(" ", "_"))
        self.form = form
        shape = (2,) if form == "own array" else ()
        self.first = np.inf if form == "own minimum" else 0.0
        self.kept = self.add_variable(shape, keras.initializers.Constant(self.first), name="kept")
        self.count = self.add_variable((), "zeros", name="count")

    def reset_state(self) -> None:
        super().reset_state()
        self.kept.assign(ops.full_like(self.kept, self.first))

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        size = ops.abs(out)
        if self.form == "own maximum":
            self.kept.assign(ops.maximum(self.kept, ops.max(size)))
        elif self.form == "own minimum":
            self.kept.assign(ops.minimum(self.kept, ops.min(size)))
        elif self.form == "own array":
            self.kept.assign_add(ops.sum(ops.reshape(size, (-1, 2)), 0))
        else:
            weights = ops.ones_like(size[..., 0]) if sample_weight is None else ops.cast(sample_weight, size.dtype)
            self.kept.assign_add(ops.sum(size[..., 0] * weights))
            self.count.assign_add(ops.sum(weights))

    def result(self) -> Any:
        if self.form == "own dictionary":
            return {"sum": self.kept + 0.0, "of each": self.kept / self.count}
        if self.form == "own value":
            return self.kept / self.count
        return self.kept if self.form == "own variable" else self.kept + 0.0


class OwnLoss(keras.losses.Loss):
    """A mean over examples."""

    def call(self, y: Any, out: Any) -> Any:
        return ops.mean(ops.abs(out - y) + 0.5 * ops.square(out - y), -1)


def data(has: set[str], examples: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(x, y), or (x, y, weights)."""
    draw = np.random.default_rng(seed)
    if "zero masked" in has:
        x = draw.integers(0, 4, (examples, 5))
        y = np.stack([x, x**2], -1) / 9.0
    elif "masking" in has:
        x = draw.normal(size=(examples, 5, 4)) * draw.integers(0, 2, (examples, 5, 1))
        y = x[..., :2]
    else:
        x = draw.normal(size=(examples, 4))
        y = x[:, :2]
    if "class weights" in has:
        y = (x.sum(-1) > 0.5).astype(int)
    if "ignored class" in has:
        y = np.where(x[:, 0] > 0.3, -1, x.sum(-1) > 0.5)
    weights = draw.random(y.shape[: y.ndim - 1 or 1])
    return (x, y, weights) if has & {"sample weights", "validation weights"} else (x, y)


def net(has: set[str], seed: int, ours: bool) -> keras.Model:
    keras.utils.set_random_seed(seed)
    if "zero masked" in has:
        x = keras.Input((5,), dtype="int32")
        h = layers.Embedding(4, 6, mask_zero=True)(x)
    else:
        h = x = keras.Input((5, 4) if "masking" in has else (4,))
        h = layers.Masking()(x) if "masking" in has else h
        if "adapted" in has:
            normal = layers.Normalization()
            normal.adapt(data(has, EXAMPLES, hvd.rank())[0])
            h = normal(h)
    kernel = keras.constraints.MaxNorm(0.6) if "constraint" in has else None
    h = layers.Dense(6, "tanh", kernel_constraint=kernel)(h)
    if "synchronized norm" in has:
        h = layers.BatchNormalization(synchronized=ours)(h)
    if "dropout" in has:
        h = layers.Dropout(0.3)(h)
    return (Two if "two optimizers" in has else keras.Model)(x, layers.Dense(2)(h))


def optimizer(has: set[str], seed: int) -> keras.optimizers.Optimizer:
    more: dict[str, Any] = {"global_clipnorm": 0.3} if "global_clipnorm" in has else {}
    more |= {"use_ema": True, "ema_momentum": 0.8} if any("Swap" in each for each in has) else {}
    more |= {"gradient_accumulation_steps": 2} if "accumulated" in has else {}
    return getattr(keras.optimizers, random.Random(-seed).choice(OPTIMIZERS))(0.05, **more)


def compiled(has: set[str], seed: int, ours: bool) -> keras.Model:
    model = net(has, seed, ours)
    wrapped = hvd.DistributedOptimizer if ours else lambda made: made
    if "two optimizers" in has:
        model.second = wrapped(keras.optimizers.SGD(0.02, momentum=0.5))
        model.second.build(model.layers[-1].trainable_variables)
    reduction = "sum" if "summed" in has else "sum_over_batch_size"
    reduction = "mean_with_sample_weight" if "mean by weights" in has else reduction
    loss: Any = (OwnLoss if "own loss" in has else keras.losses.MeanSquaredError)(reduction=reduction)
    metrics: list[Any] = ["mae"]
    if has & {"class weights", "ignored class"}:
        ignored = -1 if "ignored class" in has else None
        loss, metrics = keras.losses.SparseCategoricalCrossentropy(True, ignored, reduction=reduction), ["accuracy"]
    weighted = metrics if "weighted metrics" in has else None
    model.compile(
        wrapped(optimizer(has, seed)), loss, metrics=[*metrics, *(Own(each) for each in OWN_METRICS if each in has)],
        weighted_metrics=weighted, jit_compile=False, run_eagerly=not ours,
    )  # fmt: skip
    return model


class Left(callbacks.Callback):
    """Sends this process the signal in that step, counted from the first."""

    def __init__(self, step: int, number: int) -> None:
        super().__init__()
        self.step, self.number = step, number

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == hvd.size() - 1 and self.model.optimizer.iterations == self.step:
            os.kill(os.getpid(), self.number)


def made(has: set[str], folder: Path) -> list[callbacks.Callback]:
    """Keras's callbacks, by name."""
    monitored = "val_loss" if has & VALIDATED else "loss"
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"of-rank-{hvd.rank()}"
    kinds: dict[str, Any] = {
        "SwapEMAWeights": callbacks.SwapEMAWeights,
        "SwapEMAWeights in epochs": lambda: callbacks.SwapEMAWeights(swap_on_epoch=True),
        "EarlyStopping": lambda: callbacks.EarlyStopping(monitored, 0.1, patience=1),
        "EarlyStopping restoring": lambda: callbacks.EarlyStopping(
            monitored, 0.1, patience=1, restore_best_weights=True
        ),
        "ReduceLROnPlateau": lambda: callbacks.ReduceLROnPlateau(monitored, 0.5, patience=1, min_delta=0.1),
        "LearningRateScheduler": lambda: callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.7 if epoch else lr),
        "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(f"{mine}.keras", monitored, save_best_only=True),
        "TerminateOnNaN": callbacks.TerminateOnNaN,
        "CSVLogger": lambda: callbacks.CSVLogger(f"{mine}.csv", append=True),
        "LambdaCallback": lambda: callbacks.LambdaCallback(on_epoch_end=scale),
    }
    kinds |= {name: getattr(callbacks, name) for name in OTHERS}
    kinds["BackupAndRestore"] = lambda: callbacks.BackupAndRestore(f"{mine}-backup")
    kinds["RemoteMonitor"] = lambda: callbacks.RemoteMonitor("http://127.0.0.1:9")
    return [kinds[name]() for name in (*CALLBACKS, *OTHERS) if name in has]


def scale(epoch: int, logs: dict[str, float]) -> None:
    """Logs another number."""
    logs["twice"] = 2.0 * logs["loss"] if "loss" in logs else 0.0


def of_rank(whole: tuple[np.ndarray, ...], ours: bool, seed: int) -> dict[str, Any]:
    """This rank's part of the examples in batches of 9, by a slice or a GlobalBatches; all where it is alone."""
    if ours and seed % 2:
        return {"x": hvd.GlobalBatches(ByIndex(whole) if seed % 4 > 1 else whole, 9 * hvd.size())}
    parts = (each[len(each) // hvd.size() * hvd.rank() :][: len(each) // hvd.size()] for each in whole)
    return {**dict(zip(("x", "y", "sample_weight"), parts, strict=False)), "batch_size": 9}


def listed(
    has: set[str], folder: Path, seed: int, first: list[Any], own: list[callbacks.Callback]
) -> list[callbacks.Callback]:
    """All callbacks, in an order that the seed determines; `first` are those of hvdtrain."""
    theirs = [*made(has, folder), *own]
    draw = random.Random(seed)
    draw.shuffle(theirs)
    average = [hvd.MetricAverageCallback()] if first else []
    return [*first, *theirs, *average] if "averaged last" in has else [*first, *average, *theirs]


def trained(way: str, seed: int, folder: Path, left: int = 0) -> dict[str, Any]:
    """The weights, and what Keras has logged."""
    has, ours = fits(seed), way != "plain"
    keras.utils.clear_session()  # as if it were another process
    fault_tolerance.TRAINED.clear()
    model = compiled(has, seed, ours)
    if hvd.rank():  # ranks begin with rank 0's
        for weight in model.trainable_weights:
            weight.assign(weight + 1)
    whole = data(has - {"validation weights"}, EXAMPLES)
    first = FIRST if "initial epoch" in has else 0
    steps = MORE_STEPS[seed % 2] if "steps per epoch" in has else STEPS
    order = np.split(np.arange(STEPS * BATCH), STEPS) * 2 * EPOCHS if "not shuffled" in has else ORDER
    batches: Any = InOrder(whole, order, first, steps)
    if ours:
        given: Any = ByIndex(whole) if "by index" in has else whole
        batches = hvd.GlobalBatches(given, BATCH, shuffle="not shuffled" not in has)
    every = random.Random(seed).choice([1, 2, 100])
    run = {
        "plain": lambda: [],
        "fit": lambda: [hvd.BroadcastCallback()],
        "tolerant": lambda: [hvd.FaultTolerance(folder, batches, checkpoint_every_steps=every)],
    }[way]()
    more: dict[str, Any] = {"class_weight": {0: 1.0, 1: 3.0}} if "class weights" in has else {}
    if "steps per epoch" in has and ours:
        more["steps_per_epoch"] = steps
    if has & VALIDATED:
        is_part = "validation steps" in has
        valid = of_rank(data(has - {"sample weights"}, 36 if is_part else 18, 7), ours, 1 if is_part else seed)
        more |= {"validation_steps": 2 // hvd.size()} if is_part else {}
        more["validation_batch_size"] = valid.pop("batch_size", None)
        more["validation_data"] = tuple(valid.values()) if len(valid) > 1 else valid["x"]
    kinds = kept_callbacks.drawn(seed) if "own callbacks" in has else []
    own = kept_callbacks.made(kinds, kept_callbacks.keras_adapter())
    used = listed(has, folder, seed, run, own)
    used += [Left(random.Random(seed).randrange(1, steps * (EPOCHS - 1)), left)] if left else []
    history = model.fit(batches, epochs=EPOCHS, initial_epoch=first, verbose=0, shuffle=False, callbacks=used, **more)
    weights = {weight.path: np.asarray(weight).tolist() for weight in model.weights}
    weights = {name: value for name, value in weights.items() if "seed_generator" not in name}
    if "evaluated" in has:
        average = [hvd.MetricAverageCallback()] if ours else []
        valid = of_rank(data(has - {"sample weights", "validation weights"}, 18, 8), ours, seed)
        found = model.evaluate(**valid, verbose=0, callbacks=average, return_dict=True)
        weights |= {f"evaluated {name}": np.asarray(value).tolist() for name, value in found.items()}
    if "predicted" in has:
        rows = {"x": hvd.GlobalBatches(whole, BATCH)} if ours else {"x": whole[0], "batch_size": BATCH}
        weights["predicted"] = model.predict(**rows, verbose=0).tolist()
    logs = {name: np.asarray(value).tolist() for name, value in history.history.items()}
    return {"weights": weights, "logs": {"epochs": history.epoch, **logs}, "own": kept_callbacks.results(own)}


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    hvd.init()
    horovod.tensorflow.shutdown = lambda: None  # by what is refused or stopped: a process cannot begin it a second time
    ORDER = order_of_steps() if hvd.size() == 1 else []
    each_seed(partial(trained_or_refused, trained), hvd.rank())
