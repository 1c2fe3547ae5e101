"""TensorFlow's part of programs.py."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optimizer_reference as reference
import tensorflow as tf

from hvdtrain import datasets
from hvdtrain.core import user_code
from hvdtrain.core.optimizers import settings
from hvdtrain.core.recipe import load
from hvdtrain.errors import CheckpointError
from hvdtrain.record.reporter import Events
from hvdtrain.run.options import parse_run
from hvdtrain.tensorflow import models, optimizers, resnet
from hvdtrain.tensorflow.__main__ import train  # noqa: F401
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.objective import NAMED
from hvdtrain.tensorflow.state import Ema, State
from hvdtrain.tensorflow.trainer import Trainer, open_engine  # noqa: F401


def horovod(recipe: str = "linear", **overrides: Any) -> Engine:
    """Horovod's engine for a recipe; joins the ranks the first time."""
    from hvdtrain.tensorflow.engines.horovod import HorovodEngine

    return HorovodEngine(load(recipe, overrides), None)


def local() -> Engine:
    return Engine("/CPU:0")


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    """A training's whole state, by name."""
    return trainer.state.arrays()


def parameters(trainer: Trainer) -> int:
    """The number of trained parameters."""
    return sum(int(np.prod(weight.shape)) for weight in trainer.weights)


def flip_a_bit(trainer: Trainer) -> None:
    """Changes the last bit of the linear model's weight."""
    weight = trainer.weights[0].numpy()
    weight.view(np.int32)[0] ^= 1
    trainer.weights[0].assign(weight)


def results_of(engine: Engine) -> dict[str, Any]:
    """The results of each method of an engine on this rank, as plain lists."""
    half = engine.combine([tf.fill((2,), tf.constant(40_000.0, tf.float16))])  # the sum of two is too large for it
    of_graphs = {
        "average of float16": half[0].numpy().tolist(),
        "sum in a graph": summed(engine),
        "updates": updates(engine),
    }
    return {"rank and size": [engine.rank, engine.size], **collectives(engine), **of_graphs}


def collectives(engine: Engine) -> dict[str, Any]:
    """The results of an engine's sums and broadcasts on this rank."""
    rank = engine.rank
    arrays = {
        "sum of float64": np.array([rank + 1.0, 0.125 * rank]),
        "sum of float32": np.array([rank + 1.0], np.float32),
        "sum of int64": np.array([2**62 + 1 if rank == 0 else -rank, 2**53 * rank + 1]),
        "sum of a table": np.full((2, 3), rank + 1.0),
        "sum of another shape": np.arange(7.0),
    }
    values = {
        "scalar": rank + 7,
        "counts": np.full(3, 2**53 + 1 + rank),
        "weights": np.full((2, 2), rank + 0.5, np.float32),
        "doubles": np.full(2, rank + 0.1),
    }
    results: dict[str, Any] = {name: engine.sum(array).tolist() for name, array in arrays.items()}
    with engine.scope():
        kept = {name: tf.Variable(value, trainable=False) for name, value in values.items()}
    results["metadata"] = engine.broadcast(kept, {"step": 3 + rank, "best": None, "text": "é" * (rank + 1)})
    results["no metadata"] = engine.broadcast({}, None if rank == 0 else {"step": 1})
    results["broadcast"] = {name: variable.numpy().tolist() for name, variable in kept.items()}
    return results


def summed(engine: Engine) -> list[float]:
    """The ranks' numbers r + 1 added up, and the gradient by the own one of the ranks' (r + 1) * sum."""

    @tf.function(autograph=False)
    def graph(own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = engine.sum_tensor(own)
            loss = total * (engine.rank + 1.0)
        return total, tape.gradient(loss, own)

    return [float(number) for number in graph(tf.constant(engine.rank + 1.0))]


def updates(engine: Engine) -> list[list[float]]:
    """Gradient and weight after each of two updates of lr 1; rank r's gradient is r + 1, then 10 (r + 1)."""
    weight = tf.Variable(0.0, dtype=tf.float64)

    @tf.function(autograph=False)
    def step(factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = weight * factor * (engine.rank + 1.0)
        (gradient,) = engine.combine([tape.gradient(loss, weight)])
        weight.assign_sub(gradient)
        return gradient

    factors = (tf.constant(factor, tf.float64) for factor in (1.0, 10.0))
    return [[float(step(factor)), float(weight)] for factor in factors]


def adasum() -> list[float]:
    """Adasum's combination of two ranks' changes of the weights, which are orthogonal."""
    engine = horovod(reduction="adasum")
    change = tf.constant([[-1.0, 0.0], [0.0, -1.0]])[engine.rank]
    (combined,) = tf.function(engine.combine, autograph=False)([change])
    return combined.numpy().tolist()


def batch_norm(recipes: dict[str, dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    """The results of each recipe's BatchNorm for this rank's local batches, step by step."""
    engine = horovod()
    return {name: normalised(engine, overrides, values) for name, overrides in recipes.items()}


def normalised(engine: Engine, overrides: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    recipe = load("digits", overrides)
    layer = resnet.BatchNorm("bn", recipe, engine)
    real = tf.float64 if recipe.precision == "float64" else tf.float32
    x, g = (np.split(np.array(values[name]), engine.size, 1)[engine.rank] for name in ("x", "g"))
    layer.build(x.shape[1:])
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        getattr(layer, name).assign(values[name])

    @tf.function(autograph=False)
    def step(x: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(tf.cast(x, layer.compute_dtype), training=True)
            loss = tf.reduce_sum(tf.cast(out, real) * g)
        return out, tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    results: dict[str, Any] = {"out": [], "x gradient": [], "gamma gradient": [], "beta gradient": []}
    for one_x, one_g in zip(x, g, strict=True):
        out, gradients = step(tf.constant(one_x, real), tf.constant(one_g, real))
        for name, tensor in zip(results, (out, *gradients), strict=True):
            results[name].append(tensor.numpy().tolist())
    results["dtype"] = out.dtype.name
    models.average_statistics(tf.keras.Sequential([layer]), engine)
    results["moving_mean"], results["moving_variance"] = (v.numpy().tolist() for v in layer.non_trainable_weights)
    results["evaluated"] = layer(tf.constant(x[0], layer.compute_dtype), training=False).numpy().tolist()
    return results


def sgd_steps(options: dict[str, dict[str, Any]], start: list[float], gradients: list[Any], lrs: list[float]) -> Any:
    """The variable after every update, for each choice of options."""
    results: dict[str, Any] = {}
    for name, chosen in options.items():
        variable = tf.Variable(start, dtype=tf.float64)
        optimizer = optimizers.SGD(settings(load("linear", chosen)), [variable])
        descend = tf.function(optimizer.descend, autograph=False)
        results[name] = []
        for gradient, lr in zip(gradients, lrs, strict=True):
            descend([tf.constant(gradient, tf.float64)], tf.constant(lr, tf.float64))
            results[name].append(variable.numpy().tolist())
    return results


def optimizer_steps(cases: list[str]) -> dict[str, Any]:
    """For each case of the reference, and each precision, the weights after its updates, and their average."""
    results: dict[str, Any] = {}
    for case in cases:
        for precision in ("float32", "float64"):
            weights = [keras.Variable(start, dtype=precision, name=name) for name, start in reference.START.items()]
            variables = [weight.value for weight in weights]
            optimizer = optimizers.make(load("linear", reference.CASES[case]), weights)
            ema = Ema(variables, reference.EMA_DECAY, local())

            @functools.partial(tf.function, autograph=False)
            def update(gradients: list[tf.Tensor], lr: tf.Tensor, optimizer: Any = optimizer, ema: Ema = ema) -> None:
                optimizer.descend(gradients, lr)
                ema.update()

            followed = []
            for gradients, lr in zip(reference.GRADIENTS, reference.LRS, strict=True):
                update([tf.constant(one, precision) for one in gradients.values()], tf.constant(lr, precision))
                followed.append([variable.numpy() for variable in variables])
            with ema.swapped_in():
                averages = [variable.numpy().tolist() for variable in variables]
            results[f"{case} {precision}"] = {
                "followed": [[array.tolist() for array in arrays] for arrays in followed],
                "averages": averages,
                "as before": all(np.array_equal(a, b) for a, b in zip(followed[-1], variables, strict=True)),
            }
    return results


def clipping(gradients: list[list[float]], norms: list[float]) -> list[list[list[float]]]:
    """The clipped gradients, for each norm."""
    tensors = [tf.constant(gradient, tf.float64) for gradient in gradients]
    return [[clipped.numpy().tolist() for clipped in optimizers.clipped(tensors, norm)] for norm in norms]


def scaling(finite: list[bool], interval: int) -> dict[str, Any]:
    """The scaler's state at first, and scale and steps without an overflow after each update."""
    scaler = optimizers.Scaler(enabled=True)
    first = scaler.state_dict()
    scaler.INTERVAL = interval
    results = []
    for was_finite in finite:
        scaler.update(tf.constant(was_finite))
        state = scaler.state_dict()
        results.append([state["scale"], state["_growth_tracker"]])
    another = optimizers.Scaler(enabled=True)
    another.load_state_dict(scaler.state_dict())
    kept = another.state_dict()
    return {"first": first, "then": results, "kept": [kept["scale"], kept["_growth_tracker"]]}


def fingerprints() -> dict[str, dict[str, Any]]:
    """By dtype: how many fingerprints the flips of every single bit gave, how many flips; the swaps not seen."""
    results = {}
    for dtype in (np.float16, np.float32, np.float64):
        word = f"i{np.dtype(dtype).itemsize}"
        arrays = [np.array([[1.0, -1.0, 2.0], [0.0, -0.0, -2.0]], dtype), np.zeros(2, dtype)]
        variables = [tf.Variable(array) for array in arrays]

        def mark(variables: list[tf.Variable] = variables) -> int:
            return int(models.fingerprint(variables).numpy())

        before = mark()
        seen, flips, unseen = {before}, 0, []
        for variable, array in zip(variables, arrays, strict=True):
            bits = array.reshape(-1).view(word.replace("i", "u"))
            for index in range(bits.size):
                for bit in range(8 * array.itemsize):
                    bits[index] ^= bits.dtype.type(1 << bit)
                    variable.assign(array)
                    seen.add(mark())
                    bits[index] ^= bits.dtype.type(1 << bit)
                    flips += 1
            variable.assign(array)
        flat = arrays[0].reshape(-1)
        for i in range(6):
            for j in range(i):
                flat[[i, j]] = flat[[j, i]]
                variables[0].assign(arrays[0])
                unseen += [[i, j]] if mark() == before else []
                flat[[i, j]] = flat[[j, i]]
        variables[0].assign(arrays[0])
        results[np.dtype(dtype).name] = {"seen": len(seen), "flips": flips, "unseen": unseen, "same": mark() == before}
    return results


WHOLE = resnet.BLOCKS


@contextlib.contextmanager
def whole_networks() -> Iterator[None]:
    """Builds the whole ResNet50 until the end of the block."""
    small, resnet.BLOCKS = resnet.BLOCKS, WHOLE
    yield
    resnet.BLOCKS = small


@whole_networks()
def networks(classes: list[int]) -> dict[str, Any]:
    """Trainable parameters for two numbers of classes; for the last one each weight's shape, standard deviation and
    largest value; and the sides of the maps after each stem and at the network's end."""

    def of(stem: str, number: int) -> keras.Model:
        return resnet.ResNet(number, load("digits", {"stem": stem}), local()).model()

    results: dict[str, Any] = {"trainable": [], "maps": []}
    of_stem = {stem: of(stem, number) for stem, number in zip(("cifar", "imagenet"), classes, strict=True)}
    for model in of_stem.values():
        results["trainable"].append(sum(int(np.prod(weight.shape)) for weight in model.trainable_weights))
    arrays = {weight.path: weight.numpy() for weight in model.weights}
    results["weights"] = {
        name: [array.shape, float(array.std()), float(np.abs(array).max())] for name, array in arrays.items()
    }
    for stem, side in (("cifar", 8), ("cifar", 32), ("imagenet", 64)):
        model = of_stem[stem]
        ends = [model.get_layer("layer1.0.conv1").input, model.layers[-2].input]
        maps = tf.keras.Model(model.input, ends)(tf.zeros((1, side, side, 3)))
        results["maps"].append([stem, side, *(one.shape[1] for one in maps)])
    return results


def seeds() -> list[bool]:
    """Whether two models of one seed begin with the same weights, and two of different seeds."""
    first = []
    for seed in (1, 1, 2):
        tf.random.set_seed(len(first))
        model = models.build(load("digits", {"seed": seed}), datasets.load("digits"), local())
        first.append([model.get_layer(name).kernel.numpy() for name in ("conv1", "layer2.0.conv3", "fc")])
    return [all(np.array_equal(a, b) for a, b in zip(first[0], other, strict=True)) for other in first[1:]]


def frozen() -> dict[str, float]:
    """How far a step of training moved each kind of weight of a network with frozen BatchNorm."""
    model = models.build(load("digits", {"batch_norm": "frozen"}), datasets.load("digits"), local())
    layer = model.get_layer("bn1")
    model(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), training=True)
    return {
        "moving_mean": float(np.abs(layer.moving_mean.numpy()).max()),
        "moving_variance": float(np.abs(layer.moving_variance.numpy() - 1).max()),
        "trainable": float(any(weight is layer.gamma for weight in model.trainable_weights)),
    }


def constants() -> list[bool]:
    """Whether a model with a vocabulary takes a checkpoint of the same model, of another vocabulary's, of none's."""
    states = []
    for words in (["a"], ["b"], []):
        lookup = [keras.layers.StringLookup(vocabulary=words)] if words else []
        model = keras.Sequential([keras.layers.Input((1,), dtype="string" if words else "float32"), *lookup])
        states.append(State(model, {}, optimizers.Scaler(enabled=False)))
    taken = [False] * len(states)
    for index, each in enumerate(states):
        with contextlib.suppress(CheckpointError):
            states[0].start({}, each.values())
            taken[index] = True
    return taken


def events(folder: str) -> None:
    """An event file from step 7 on, closed."""
    writer = Events(Path(folder), 7, "tensorflow")
    writer.add_scalar("loss", 0.5, 7)
    writer.flush()
    writer.add_scalar("loss", 0.25, 8)
    writer.add_scalar("lr", 1.0, 8)
    writer.close()


def smoothed(logits: list[list[float]], labels: list[int], smoothings: list[float]) -> list[float]:
    """The training loss of the logits for each smoothing."""
    out, y = tf.constant(logits, tf.float64), tf.constant(labels, tf.int64)
    return [float(tf.reduce_mean(NAMED["cross_entropy"](out, y, smoothing))) for smoothing in smoothings]


def named_losses(cases: list[Any]) -> list[float]:
    """The loss of that name for each case's outputs and targets."""
    given = [(NAMED[name], tf.constant(np.array(out)), tf.constant(np.array(y))) for name, out, y in cases]
    return [float(tf.reduce_mean(loss(out, y))) for loss, out, y in given]


def plain_fits(cases: dict[str, list[str]]) -> dict[str, list[float]]:
    """Of recipes whose batch is the whole set, the losses of plain Keras's fit with the same model, loss and LR."""
    found = {}
    for name, argv in cases.items():
        chosen = parse_run("", argv, "tensorflow")[0]
        (x, y), _ = user_code.load(chosen.dataset, "dataset")()
        keras.utils.set_random_seed(chosen.seed)
        model = user_code.load(chosen.model, "model")(**chosen.model_args)
        named = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = user_code.load(chosen.loss, "loss") if ":" in chosen.loss else named
        model.compile(keras.optimizers.SGD(chosen.base_lr, momentum=chosen.momentum), loss)
        fitted = model.fit(x, y, batch_size=len(x), epochs=chosen.epochs, shuffle=False, verbose=0)
        found[name] = fitted.history["loss"]
    return found
