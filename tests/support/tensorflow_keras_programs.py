"""Keras's part of programs.py. One rank alone trains each case with plain Keras, on the batch of RANKS ranks."""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow_keras_refusals import eagerly, refusals  # noqa: F401

import hvdtrain.keras as ours
from hvdtrain.keras import averaging, fault_tolerance
from hvdtrain.tensorflow.moments import global_moments

ours.init()
ours.init()

from tensorflow_keras_data import reads, roles  # noqa: E402, F401
from tensorflow_keras_losses import exact, noted  # noqa: E402, F401 (which knows the rank)

RANKS = 2  # whose batch a single process trains on
STEPS, SHARE, EPOCHS = 12, 4, 2
RANK, SIZE = ours.rank(), ours.size()
ALONE = SIZE == 1

draw = np.random.RandomState(0)
IMAGES = draw.randn(STEPS, RANKS, SHARE, 6, 6, 2).astype("f")
VALUES = draw.randn(STEPS, RANKS, SHARE, 1).astype("f")
WORDS = draw.randint(0, 50, (STEPS, RANKS, SHARE, 5))
OVERFLOWS = VALUES.copy()
OVERFLOWS[3, RANKS - 1] = 1e30


def own(table: np.ndarray) -> np.ndarray:
    """This rank's examples; those of all ranks, step by step, where it is alone."""
    return (table if ALONE else table[:, RANK]).reshape(-1, *table.shape[3:])


@dataclass
class Case:
    """A training by fit. `options` are the distributed optimizer's."""

    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    options: Callable[[keras.Model], dict[str, Any]] = lambda model: {}
    compiled: dict[str, Any] = field(default_factory=lambda: {"jit_compile": False})
    x: np.ndarray = field(default_factory=lambda: IMAGES)
    y: np.ndarray = field(default_factory=lambda: VALUES)
    policy: str = "float32"
    epochs: int = EPOCHS


def network(norm: Callable[[], layers.Layer] | None = None) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            *([norm()] if norm else []),
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(1),
        ]
    )


def embedding() -> keras.Model:
    return keras.Sequential(
        [layers.Input((5,), dtype="int32"), layers.Embedding(50, 3), layers.Flatten(), layers.Dense(1)]
    )


def unbuilt() -> keras.Model:
    start = keras.initializers.GlorotUniform
    return keras.Sequential(
        [
            layers.Flatten(),
            layers.Dense(8, activation="tanh", kernel_initializer=start(3 + RANK)),
            layers.Dense(1, kernel_initializer=start(4 + RANK)),
        ]
    )


def dropout() -> keras.Model:
    return keras.Sequential([layers.Input((6, 6, 2)), layers.Flatten(), layers.Dropout(0.5), layers.Dense(1)])


def norm() -> layers.Layer:
    return layers.BatchNormalization() if ALONE else ours.SyncBatchNormalization()


def sgd(**more: Any) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.SGD(0.05, momentum=0.9, **more)


def loss_scaled(**more: Any) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.LossScaleOptimizer(sgd(**more)(), initial_scale=2.0**10)


CASES = {
    "fit": Case(network, sgd()),
    "thawed later": Case(network, sgd(), epochs=1),
    "auto": Case(network, sgd(), compiled={}),
    "auto on a GPU": Case(network, sgd(), compiled={}),
    "eagerly": Case(network, sgd(), compiled={"run_eagerly": True}, epochs=1),
    "several steps a call": Case(network, sgd(), compiled={"steps_per_execution": 5}),
    "adamw": Case(network, lambda: keras.optimizers.AdamW(1e-2, use_ema=True, ema_overwrite_frequency=5)),
    "sync batch norm": Case(lambda: network(norm), sgd()),
    "sync batch norm, float64": Case(lambda: network(norm), sgd(), policy="float64"),
    "batch norm": Case(lambda: network(layers.BatchNormalization), sgd()),
    "dropout": Case(dropout, lambda: keras.optimizers.Adam(1e-2)),
    "built by a batch": Case(unbuilt, sgd()),
    "accumulating": Case(network, sgd(gradient_accumulation_steps=3, global_clipnorm=0.1)),
    "accumulating, each step": Case(
        network,
        sgd(gradient_accumulation_steps=3, global_clipnorm=0.1),
        lambda model: {"groups": [model.trainable_variables[1:4]]},
    ),
    "sparse": Case(embedding, lambda: keras.optimizers.Adagrad(0.1), x=WORDS),
    "sparse as dense": Case(embedding, sgd(), lambda model: {"sparse_as_dense": True}, x=WORDS),
    "float16": Case(network, loss_scaled(), policy="mixed_float16"),
    "float16 overflow": Case(network, loss_scaled(), y=OVERFLOWS, policy="mixed_float16"),
    "float16 accumulating": Case(
        network, loss_scaled(gradient_accumulation_steps=3), y=OVERFLOWS, policy="mixed_float16"
    ),
}


def trainings(names: list[str]) -> dict[str, Any]:
    """The results of each case: weights, optimizer state, history and others."""
    return {name: training(name) for name in names}


def training(name: str) -> dict[str, Any]:
    case = CASES[name]
    if ALONE and name == "batch norm":
        return {"weights": by_hand(case)}
    # Ranks other than 0 start from other weights.
    keras.utils.set_random_seed(7 if RANK == 0 else 1000 + RANK)
    precision(case.policy)
    model = case.model()
    if name == "thawed later":  # only the head learns before
        model.layers[0].trainable = False
        fit(name, case, model)
        model.layers[0].trainable, model.layers[-1].trainable = True, False
    optimizer, history = fit(name, case, model)
    precision("float32")
    results = {
        "weights": flat(model.weights),
        "state": flat(optimizer.variables),
        "seeds": flat([v for v in model.variables if "seed" in v.path]),
        "history": history.history,
        "jit": model.jit_compile,
    }
    if case.policy == "mixed_float16":
        results |= {"scale": float(optimizer.dynamic_scale), "updates": int(optimizer.iterations)}
    return results


def fit(name: str, case: Case, model: keras.Model) -> Any:
    """The optimizer that has trained the model, and Keras's history."""
    optimizer = case.optimizer()
    with pretended_gpu(name.endswith("GPU")):
        callbacks = []
        if not ALONE:
            optimizer = ours.DistributedOptimizer(optimizer, **case.options(model))
            callbacks = [ours.BroadcastCallback(), ours.MetricAverageCallback()]
        # By its name Keras makes a metric within the step, which is then traced a second time.
        metric = "mae" if name == "fit" else keras.metrics.MeanAbsoluteError()
        model.compile(optimizer, "mse", metrics=[metric], **case.compiled)
        return optimizer, model.fit(
            own(case.x),
            own(case.y),
            batch_size=SHARE * (RANKS if ALONE else 1),
            epochs=case.epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )


def precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")


class pretended_gpu:  # noqa: N801
    """Makes Keras believe that it is on a GPU, where "auto" means XLA."""

    def __init__(self, wanted: bool) -> None:
        self.real, self.wanted = tf.config.list_physical_devices, wanted

    def __enter__(self) -> None:
        gpu = type("GPU", (), {"device_type": "GPU", "name": "pretended"})
        if self.wanted:
            tf.config.list_physical_devices = lambda kind=None: self.real(kind) if kind else [*self.real(), gpu]

    def __exit__(self, *error: object) -> None:
        tf.config.list_physical_devices = self.real


def by_hand(case: Case) -> list[float]:
    """The weights of one process that averages the ranks' gradients and moving statistics in every step."""
    keras.utils.set_random_seed(7)
    model, optimizer = case.model(), case.optimizer()
    optimizer.build(model.trainable_variables)
    statistics = model.non_trainable_variables
    for step in [*range(STEPS)] * case.epochs:
        before = [v.numpy() for v in statistics]
        gradients, moved = [], []
        for rank in range(RANKS):
            for variable, value in zip(statistics, before, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(case.x[step, rank], training=True) - case.y[step, rank]) ** 2)
            gradients.append(tape.gradient(loss, model.trainable_variables))
            moved.append([v.numpy() for v in statistics])
        for variable, values in zip(statistics, zip(*moved, strict=True), strict=True):
            variable.assign(np.mean(values, 0))
        optimizer.apply([sum(g) / RANKS for g in zip(*gradients, strict=True)], model.trainable_variables)
    return flat(model.weights)


def flat(variables: list[Any]) -> list[float]:
    """All values as one list; float64 holds each of them exactly."""
    return np.concatenate([np.zeros(0), *(np.ravel(np.asarray(v, "f8")) for v in variables)]).tolist()


def updates(adasum: bool) -> dict[str, list[float]]:
    """Two weights after an update of lr 1 from 0, where rank r's gradients are r + 1 and 10 (r + 1)."""
    results = {}
    own_gradients = [tf.fill((1, 1), RANK + 1.0), tf.fill((1, 1), 10.0 * (RANK + 1))]
    rows = tf.IndexedSlices(own_gradients[1], tf.constant([0], tf.int64), tf.constant([1, 1], tf.int64))
    cases: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "average": ({}, own_gradients),
        "sum": ({"op": ours.Sum}, own_gradients),
        "predivided": ({"gradient_predivide_factor": 2.0}, own_gradients),
        "compressed": ({"compression": ours.Compression.fp16}, own_gradients),
        "compressed, the sum too large": (
            {"compression": ours.Compression.fp16},
            [tf.fill((1, 1), 40960.0 + 16384 * RANK), own_gradients[1]],
        ),
        "one group": ({"groups": 1}, own_gradients),
        "more groups than weights": ({"groups": 3}, own_gradients),
        "a list of groups": ({"groups": "both"}, own_gradients),
        "the same gradient twice": ({}, own_gradients[:1] * 2),
        "without a gradient": ({}, [None, own_gradients[1]]),
        "sparse": ({}, [own_gradients[0], rows]),
        "sparse in a group": ({"groups": 1}, [own_gradients[0], rows]),
        "sparse as dense": ({"sparse_as_dense": True, "groups": 1}, [own_gradients[0], rows]),
        "local layer": ({"local_layers": "second"}, own_gradients),
        "sparse local layer": ({"local_layers": "second"}, [own_gradients[0], rows]),
    }
    if adasum:  # of parallel gradients: their average
        cases["adasum"] = ({"op": ours.Adasum}, own_gradients)
    for name, (options, gradients) in cases.items():
        model = keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2)])
        model.build((None, 1))
        marks = {"both": [model.trainable_variables], "second": model.layers[1:]}
        optimizer = ours.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            **{key: marks[value] if isinstance(value, str) else value for key, value in options.items()},
        )
        optimizer.build(model.trainable_variables)
        (tf.function(optimizer.apply) if name == "average" else optimizer.apply)(gradients)
        results[name] = flat(model.weights)
    return results


def loops() -> dict[str, list[float]]:
    """The weights after the user's steps, by the way in which these are written."""
    return {
        "graph": loop(tf.function, nested=False),
        "eager": loop(lambda step: step, nested=False),
        "nested": loop(tf.function, nested=True),
    }


def loop(compiled: Callable[[Any], Any], nested: bool) -> list[float]:
    """The weights after a user's loop, whose sources are Keras's variables, or nested ones of TensorFlow's."""
    keras.utils.set_random_seed(7 if RANK == 0 else 1000 + RANK)
    model, optimizer = network(norm), sgd()()
    optimizer.build(model.trainable_variables)
    *body, head = model.trainable_variables
    sources = {"head": head.value, "body": [v.value for v in body]} if nested else [*body, head]

    @compiled
    def step(x: tf.Tensor, y: tf.Tensor, first: bool) -> None:
        if first:  # as Horovod's own examples do it, within the first step
            ours.broadcast_variables([model.weights, optimizer.variables])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = ours.DistributedGradientTape(tape).gradient(loss, sources)
        optimizer.apply([*gradients["body"], gradients["head"]] if nested else gradients, [*body, head])

    batches = zip(*(np.split(own(table), STEPS) for table in (IMAGES, VALUES)), strict=True)
    for number, (x, y) in enumerate(batches):
        step(tf.constant(x), tf.constant(y), number == 0)
    return flat(model.weights)


def single_source() -> list[float]:
    """The averaged gradient of (rank + 1) w for a single source w."""
    weight = keras.Variable(np.ones(2), dtype="float32")
    with ours.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum((RANK + 1.0) * weight)
    return tape.gradient(loss, weight).numpy().tolist()


def started() -> dict[str, list[float]]:
    """Variables of three types after a broadcast from the last rank: nested, and a single one."""
    variables = {
        "whole": keras.Variable(2**53 + RANK, dtype="int64"),
        "pair": [keras.Variable([0.1 + RANK] * 2, dtype="float64"), tf.Variable([RANK + 0.5])],
    }
    ours.broadcast_variables(variables, root_rank=SIZE - 1)
    single = keras.Variable([float(RANK)])
    ours.broadcast_variables(single, SIZE - 1)
    return {"whole": int(variables["whole"].numpy()), "pair": flat(variables["pair"]), "single": flat([single])}


def moments(offset: float) -> dict[str, float]:
    """The largest differences of global_moments to NumPy's on all ranks' values: unequal local batches, one empty."""
    results = {}

    def of(masked: bool, dtype: str) -> Any:
        return tf.function(
            lambda x, mask: global_moments(x, [0, 1], add, mask if masked else None),
            input_signature=[tf.TensorSpec((None, 7, 4), kind) for kind in (dtype, "bool")],
        )

    add = tf.identity if ALONE else averaging.sum_over_ranks
    for dtype in ("float32", "float64"):
        functions = {masked: of(masked, dtype) for masked in (False, True)}
        for name, local_batches in {"unequal": (3, 5), "empty": (0, 4)}.items():
            values = np.random.RandomState(1).randn(sum(local_batches), 7, 4) + offset
            begin = sum(local_batches[:RANK])
            mine = tf.constant(values[begin : begin + local_batches[RANK]] if not ALONE else values, dtype)
            marked = np.random.RandomState(2).rand(*values.shape) < 0.6
            mask = tf.constant(marked[begin : begin + local_batches[RANK]] if not ALONE else marked)
            typed = values.astype(dtype).astype("f8")
            for masked, in_graph in functions.items():
                take = np.ma.masked_array(typed, ~marked) if masked else typed
                with tf.GradientTape() as tape:
                    tape.watch(mine)
                    mean, variance, count = in_graph(mine, mask)
                    goal = tf.reduce_sum(tf.sin(mean) + variance**2)
                gradient = tape.gradient(goal, mine)
                n, m, v = (
                    take.reshape(-1, 4).count(0) if masked else len(typed) * 7,
                    take.mean((0, 1)),
                    take.var((0, 1)),
                )
                # Every rank's goal is the same one, and all of them are summed.
                right = SIZE * (np.cos(m) + 4 * v * (typed - m)) / n * (marked if masked else 1)
                right = right if ALONE else right[begin : begin + local_batches[RANK]]
                key = f"{dtype} {name}{' masked' * masked}"
                results[key] = {
                    "mean": float(np.abs(mean - m).max() / max(1, offset)),
                    "variance": float(np.abs(variance - v).max()),
                    "count": float(np.abs(count - n).max()),
                    "gradient": float(np.abs(gradient - right).max()) if right.size else 0.0,
                    "dtype": mean.dtype.name,
                    "shape": [*mean.shape, *variance.shape, *count.shape],
                }
    return results


def masked_norm() -> dict[str, Any]:
    """BatchNorm's outputs and moving statistics for masked sequences; those of all ranks where this one is alone."""
    x = np.random.RandomState(3).randn(RANKS * 3, 5, 2).astype("f") + 10
    mask = np.random.RandomState(4).rand(RANKS * 3, 5) < 0.5
    own_rows = slice(None) if ALONE else slice(3 * RANK, 3 * RANK + 3)
    layer = norm()
    out = layer(x[own_rows], training=True, mask=tf.constant(mask[own_rows]))
    again = type(layer).from_config(layer.get_config())
    return {
        "out": out.numpy().tolist(),
        "statistics": flat(layer.weights),
        "config": again.get_config() == layer.get_config(),
    }


class Form(keras.metrics.Metric):
    """A metric of the user's, of the outputs of a batch and of a state with one or two numbers."""

    def __init__(self, name: str, begin: list[float], update: Any, result: Any) -> None:
        super().__init__(name=name)
        self.begin, self.update, self.of = begin, update, result
        self.state, self.listed = self.add_weight((len(begin),), "zeros", name="state"), list[float]()

    def reset_state(self) -> None:
        self.state.assign(self.begin)
        self.listed.clear()

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        self.state.assign(self.update(self.state.value, tf.cast(y > 0.5, "float32"), out, self))

    def result(self) -> Any:
        return self.of(self.state, self)


def grown(metric: Form, out: tf.Tensor) -> None:
    metric.listed.append(float(tf.reduce_sum(out)))


def forms() -> list[Form]:
    """Sums whose result is the variable, nested or an array, or that begin with 1; maxima and minima; and what no rule
    merges: means of batches, lists, random numbers."""
    total, drawing = tf.reduce_sum, keras.random.SeedGenerator(5)
    return [
        Form("value", [0.0], lambda s, y, out, of: s + total(y * out), lambda s, of: s),
        Form(
            "nested", [0.0], lambda s, y, out, of: s + total(y), lambda s, of: {"a": {"deep": s[0], "flat": s[0] / 2}}
        ),
        Form("array", [0.0, 0.0], lambda s, y, out, of: s + tf.stack([total(out), total(out**2)]), lambda s, of: s * 2),
        Form("from one", [1.0], lambda s, y, out, of: s + total(out), lambda s, of: 1 / s[0]),
        Form("high", [-np.inf], lambda s, y, out, of: tf.maximum(s, tf.reduce_max(out - y)), lambda s, of: s[0]),
        Form("low", [np.inf], lambda s, y, out, of: tf.minimum(s, tf.reduce_min(out - y)), lambda s, of: s[0]),
        Form(
            "of batches",
            [0.0, 0.0],
            lambda s, y, out, of: s + tf.stack([tf.reduce_mean(out), 1]),
            lambda s, of: s[0] / s[1],
        ),
        Form("kept", [0.0], lambda s, y, out, of: grown(of, out) or s, lambda s, of: sum(of.listed)),
        Form(
            "drawn",
            [0.0],
            lambda s, y, out, of: s + total(out) * keras.random.uniform((), seed=drawing),
            lambda s, of: s[0],
        ),
    ]


@eagerly
def formed() -> dict[str, Any]:
    """The metrics of each form, of unequal parts, and the lines that name them."""
    draw = np.random.RandomState(5)
    x, y = draw.rand(40, 3).astype("f"), draw.rand(40, 1).astype("f")
    part = slice(None) if ALONE else (slice(0, 16), slice(16, None))[RANK]
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1, activation="sigmoid")])
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(optimizer if ALONE else ours.DistributedOptimizer(optimizer), "mse", metrics=forms())
    callbacks = [] if ALONE else [ours.BroadcastCallback(), ours.MetricAverageCallback()]
    data = tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(20 if ALONE else 8 + 4 * RANK)
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        logs = model.fit(data, epochs=1, verbose=0, callbacks=callbacks).history
        evaluated = model.evaluate(data, verbose=0, callbacks=callbacks, return_dict=True)
    flatly = {name: flat([value]) for name, value in evaluated.items()}
    return {
        "fit": {name: flat([value[-1]]) for name, value in logs.items()},
        "evaluate": flatly,
        "lines": lines.getvalue(),
    }


class Evaluates(keras.callbacks.Callback):
    """Evaluates on other data in an epoch, and at its end, as programs do for a curve of their own."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.evaluate(np.ones((4, 1)), np.full((4, 1), 199.0), verbose=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(np.ones((4, 1)), np.full((4, 1), 199.0), verbose=0)


@eagerly
def evaluates(folder: str) -> float:
    """The run's training loss, 1, in an epoch with evaluations; the one metric that decides is misspelt."""
    model = keras.Sequential([layers.Input((1,)), layers.Dense(1, kernel_initializer="zeros")])
    model.compile(ours.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mae")
    data = ours.GlobalBatches((np.ones((16, 1)), np.ones((16, 1))), batch_size=4)
    run = ours.FaultTolerance(f"{folder}/evaluates", data, lowest="val_los")
    callbacks = [run, Evaluates(), ours.MetricAverageCallback()]
    model.fit(data, epochs=1, validation_data=(np.ones((4, 1)), np.ones((4, 1))), verbose=0, callbacks=callbacks)
    lines = Path(f"{folder}/evaluates/metrics.jsonl").read_text().splitlines()
    return next(each["train_loss"] for each in map(json.loads, lines) if "train_loss" in each)


@eagerly
def metrics(folder: str) -> dict[str, Any]:
    """The metrics of unequal local batches, while the LR is 0."""
    draw = np.random.RandomState(5)
    sizes = {"train": (23, 9), "valid": (4, 13)}
    local_batches = {}
    for kind, counts in sizes.items():
        x, y = draw.randn(sum(counts), 3).astype("f"), draw.randint(0, 2, (sum(counts), 1)).astype("f")
        own_rows = slice(None) if ALONE else slice(sum(counts[:RANK]), sum(counts[: RANK + 1]))
        local_batches[kind] = (x[own_rows] + (x[own_rows, :1] > 0), y[own_rows])
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1, activation="sigmoid")])
    optimizer = keras.optimizers.SGD(0.0)
    kinds = keras.metrics
    seen: dict[str, Any] = {"own": [], "later": []}

    def before(epoch: int, logs: dict[str, Any]) -> None:
        logs["unknown"] = float(RANK)
        seen["own"].append(dict(logs))
        seen["states"] = flat(model.metrics_variables)

    def after(epoch: int, logs: dict[str, Any]) -> None:
        seen["later"].append(dict(logs))
        seen["undisturbed"] = seen["states"] == flat(model.metrics_variables)

    model.compile(
        optimizer if ALONE else ours.DistributedOptimizer(optimizer),
        "binary_crossentropy",
        metrics=["accuracy", kinds.AUC(), kinds.RootMeanSquaredError(), kinds.F1Score(threshold=0.5), kinds.R2Score()],
        weighted_metrics=["mae"],
    )
    batch = 32 if ALONE else 8 + 4 * RANK  # 3 steps of 8, or 1 of 12
    steps = 1 if ALONE else 3
    data = tf.data.Dataset.from_tensor_slices(local_batches["train"]).batch(
        batch if ALONE else -(-len(local_batches["train"][0]) // steps)
    )
    history = model.fit(
        data,
        validation_data=tf.data.Dataset.from_tensor_slices(local_batches["valid"]).batch(3),
        validation_freq=2,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(on_epoch_end=before),
            *([] if ALONE else [ours.BroadcastCallback(), ours.MetricAverageCallback()]),
            keras.callbacks.LambdaCallback(on_epoch_end=after),
            keras.callbacks.ModelCheckpoint(f"{folder}/best-{RANK}.keras", monitor="val_loss", save_best_only=True),
        ],
    )
    plain = json.loads(
        json.dumps({"history": history.history, **seen}, default=lambda value: np.asarray(value).tolist())
    )
    parts = tf.data.Dataset.from_tensor_slices(local_batches["valid"]).batch(3)
    ours_too = [] if ALONE else [ours.BroadcastCallback(), ours.MetricAverageCallback()]
    evaluated = model.evaluate(parts, callbacks=ours_too, return_dict=True, verbose=0)
    in_order = model.evaluate(parts, callbacks=ours_too, verbose=0)
    predicted = model.predict(parts, callbacks=ours_too, verbose=0)
    return {
        **plain,
        "stored": Path(f"{folder}/best-{RANK}.keras").exists(),
        "evaluated": {name: flat([value]) for name, value in evaluated.items()},
        "in order": flat([np.hstack([np.ravel(value) for value in in_order])]),
        "predicted": len(predicted) == len(local_batches["valid"][0]),
    }


class OwnStep(keras.Model):
    """A model that logs another number under the loss's name."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        super().train_step(data)
        return {"loss": tf.constant(10.0 * RANK), "steps": tf.constant(1.0)}


@eagerly
def own_step() -> dict[str, list[float]]:
    """The averaged logs of a user's train_step."""
    model = OwnStep()
    model.compile(ours.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    history = model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[ours.MetricAverageCallback()])
    return history.history


@eagerly
def folds() -> list[list[float]]:
    """The weights of two models fitted with one list of callbacks; the second one is evaluated first."""
    callbacks = [ours.BroadcastCallback(), ours.MetricAverageCallback()]
    found = []
    for fold in range(2):
        keras.utils.set_random_seed(7 + fold + 100 * RANK)
        normal = layers.Normalization()
        normal.adapt(own(IMAGES) + RANK)
        model = keras.Sequential([layers.Input((6, 6, 2)), normal, layers.Flatten(), layers.Dense(1)])
        model.compile(ours.DistributedOptimizer(sgd()()), "mse")
        if fold == 1:
            model.evaluate(own(IMAGES)[:8], own(VALUES)[:8], callbacks=callbacks, verbose=0)
        model.fit(own(IMAGES)[:8], own(VALUES)[:8], batch_size=4, epochs=1, callbacks=callbacks, verbose=0)
        found.append(flat([*model.weights, model(IMAGES[0, 0])]))
    return found


def again(folder: str) -> dict[str, Any]:
    """The epochs that each fit of one program has trained, under FaultTolerance."""
    epochs: list[int] = []
    data = ours.GlobalBatches((IMAGES.reshape(-1, 6, 6, 2), VALUES.reshape(-1, 1)), batch_size=8)
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))

    def fit(model: keras.Model, run: Any, **more: Any) -> dict[str, Any]:
        epochs.clear()
        stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=2, restore_best_weights=True)
        callbacks = [stop, ours.MetricAverageCallback(), run, seen]
        if "initial_epoch" in more:
            del callbacks[0]
        model.fit(data, callbacks=callbacks, verbose=0, **more)
        ours.allreduce(tf.constant(0.0))  # rank 0 has written it
        status = json.loads((Path(run.folder) / "status.json").read_text())["state"]
        return {"epochs": [*epochs], "status": status, "weights": flat(model.weights)}

    def made() -> keras.Model:
        keras.utils.set_random_seed(7)
        model = network()
        model.compile(ours.DistributedOptimizer(sgd()()), "mse")
        return model

    first, run, late = made(), ours.FaultTolerance(f"{folder}/again"), made()
    later = ours.FaultTolerance(f"{folder}/late", data)
    found = {
        "stopped early": fit(first, run, epochs=9),
        "the same": fit(first, run, epochs=9),
        "more": fit(first, run, epochs=11),
        "from the fifth": fit(late, later, epochs=7, initial_epoch=5),
        "from the fifth again": fit(late, later, epochs=7, initial_epoch=5),
        "none": fit(late, later, epochs=7, initial_epoch=7),
    }
    try:
        fit(made(), run, epochs=9)
    except SystemExit as ended:
        found["another model"] = ended.code
    return found


class Pair(keras.Model):
    """A model that trains its layers with optimizers of its own, and does not use that of compile()."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first, self.last, self.factor = layers.Dense(3), layers.Dense(1), tf.Variable(1.0 + RANK)
        self.many = {"first": wrap(keras.optimizers.Adam(0.01)), "last": [wrap(keras.optimizers.SGD(0.1, 0.9))]}

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.first(x)) * self.factor

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for layer, optimizer in ((self.first, self.many["first"]), (self.last, self.many["last"][0])):
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return {"own": loss}


def pairs(folder: str) -> dict[str, Any]:
    """Weights after four epochs at once, and after two epochs that another model continues with two more."""
    x, y = IMAGES.reshape(-1, 6 * 6 * 2), VALUES.reshape(-1, 1)
    data = ours.GlobalBatches((x, y), batch_size=8)

    def fit(name: str, epochs: int) -> list[float]:
        keras.utils.clear_session()  # as in another process
        fault_tolerance.TRAINED.clear()
        keras.utils.set_random_seed(7 if RANK == 0 else 1000 + RANK)
        model = Pair(ours.DistributedOptimizer)
        model(x[:1])
        model.compile()
        tolerant = [ours.FaultTolerance(f"{folder}/{name}", data), ours.MetricAverageCallback()]
        model.fit(data, epochs=epochs, callbacks=tolerant, verbose=0)
        steps = [int(each.iterations) for each in (model.many["first"], model.many["last"][0])]
        return [*flat([*model.weights, model.factor]), *steps]

    return {"at once": fit("whole", 4), "first": fit("parts", 2), "resumed": fit("parts", 4)}


def warmups() -> dict[str, list[list[float]]]:
    """The LR of every batch, or call, by epoch."""
    return {"every batch": eagerly(warmup)(1), "two batches a call": warmup(2)}


def warmup(steps_per_execution: int) -> list[list[float]]:
    seen: list[list[float]] = []
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    model.compile(ours.DistributedOptimizer(keras.optimizers.SGD(0.3)), "mse", steps_per_execution=steps_per_execution)
    model.fit(
        np.ones((8, 2)),
        np.ones((8, 1)),
        batch_size=2,
        epochs=4,
        verbose=0,
        callbacks=[
            ours.WarmupCallback(0.8, warmup_epochs=2),
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: seen.append([]),
                on_train_batch_begin=lambda batch, logs: seen[-1].append(float(model.optimizer.learning_rate)),
            ),
        ],
    )
    return seen


def allreduces() -> dict[str, list[int]]:
    """How many gradients are communicated in each of six steps, of which every third one updates."""
    real, sent = averaging.hvd.allreduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent[-1] += 1
        return real(*args, **kwargs)

    averaging.hvd.allreduce = counted
    results = {}
    for name, options in {"at the update": {}, "each step": {"groups": [[]]}}.items():
        model, sent = network(), []
        optimizer = ours.DistributedOptimizer(sgd(gradient_accumulation_steps=3)(), **options)
        optimizer.build(model.trainable_variables)
        for _ in range(6):
            sent.append(0)
            optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
        results[name] = sent
    averaging.hvd.allreduce = real
    return results


def saved(folder: str) -> dict[str, Any]:
    """A training that continues from a stored model, beside one that was not interrupted."""
    keras.utils.set_random_seed(7)

    def fit(model: keras.Model, epochs: int) -> None:
        model.fit(own(IMAGES), own(VALUES), batch_size=SHARE, epochs=epochs, shuffle=False, verbose=0,
                  callbacks=[ours.BroadcastCallback()])  # fmt: skip

    def small() -> keras.Model:
        return keras.Sequential([layers.Input((6, 6, 2)), layers.Flatten(), norm(), layers.Dense(1)])

    model = small()
    start = model.get_weights()
    model.compile(ours.DistributedOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    fit(model, 1)
    path = f"{folder}/{RANK}.keras"
    model.save(path)
    again = keras.models.load_model(path)
    loaded = type(again.optimizer).__name__, isinstance(again.optimizer, averaging._Distributed)
    ours.DistributedOptimizer(again.optimizer)
    fit(again, 1)
    whole = small()
    whole.set_weights(start)
    whole.compile(ours.DistributedOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    fit(whole, 2)
    return {
        "loaded": loaded,
        "config": keras.optimizers.serialize(model.optimizer)
        == keras.optimizers.serialize(keras.optimizers.Adam.from_config(model.optimizer.get_config())),
        "continued": flat(again.weights),
        "uninterrupted": flat(whole.weights),
    }


def modules() -> list[str]:
    """The frameworks that this process holds."""
    return sorted({"torch", "tensorflow", "horovod"} & {name.partition(".")[0] for name in sys.modules})
