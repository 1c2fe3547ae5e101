"""Builds a recipe's model; shares and compares what ranks must have in common beside the trained weights.

Layers may hold variables of TensorFlow's, constants and vocabularies, which Keras does not count as weights.
"""

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import safetensors.numpy
import tensorflow as tf
import xxhash
from keras.layers import BatchNormalization

from hvdtrain.core import sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.user_code import MODELS
from hvdtrain.datasets import Dataset
from hvdtrain.errors import AgreementError, RecipeError
from hvdtrain.ranks.agreement import MOST_NAMED
from hvdtrain.tensorflow import gpt, networks, private
from hvdtrain.tensorflow.engines import Engine, graph
from hvdtrain.tensorflow.networks import POLICIES
from hvdtrain.tensorflow.resnet import BatchNorm, ResNet, real_type
from hvdtrain.untrusted import one_line

ROWS = 4
"""How many examples the ranks compare their outputs for."""
VARIABLES = "variables.safetensors"
OF_A_CALL = {"_losses", "_losses_override"}
ADAPTED = {"mean", "variance"}
"""Attributes that Normalization computes from its weights."""


def build(recipe: Recipe, dataset: Dataset, engine: Engine | None) -> keras.Model:
    """The recipe's network, whose weights depend only on the recipe's seed.

    linear: [n, 1] -> [n, 1], starting at 0. resnet50, resnet101: images [n, height, width, 3] -> logits [n, classes];
    layers have the names of torchvision's modules. gpt: see `hvdtrain.tensorflow.gpt`, for all others
    `hvdtrain.tensorflow.networks`. Without an engine it has no layer of hvdtrain's, and is for inference. Raises
    RecipeError.
    """
    if recipe.model not in MODELS:
        model = networks.build(recipe, dataset)
        if engine:
            networks.replace_batch_norms(model, recipe, engine.sum_tensor)
        elif isinstance(model, networks.InceptionV3):
            return keras.Model(model.input, model.output.logits, name=model.name)
        return model
    networks.set_precision("float32")  # these layers are given theirs
    if recipe.model == "linear":
        policy = POLICIES[recipe.precision]
        x = keras.Input((1,), dtype=real_type(policy))
        y = keras.layers.Dense(1, kernel_initializer="zeros", dtype=policy, name="linear")(x)
        return keras.Model(x, y)
    if recipe.model == "gpt":
        return gpt.model(recipe, dataset)
    if dataset.classes is None:
        raise RecipeError(f"model {recipe.model} needs a data set that has classes; take one of your own.")
    return ResNet(dataset.classes, recipe, engine).model()


def seed(states: Sequence[tf.Variable], number: int, step: int, engine: Engine) -> None:
    """Makes the random numbers of Dropout and other layers a function of the step, so that a resumed run draws the same
    ones; `states`: see `networks.seed_states`."""
    for index, state in enumerate(states):
        for replica, copy in enumerate(engine.copies(state), engine.rank * engine.replicas):
            copy.assign([hash((number, step, replica, index)) % 2**32, 0])


def average_statistics(model: keras.Model, engine: Engine) -> None:
    """Makes all replicas hold one model: BatchNorm's running statistics become their mean over the replicas, and other
    weights that are not trained become rank 0's."""
    share_weights(model, engine, "rank_0")
    _set_means(_statistics(model), engine, engine.copies)


def own_weights(model: keras.Model) -> dict[str, tf.Variable]:
    """By path, the weights and the layers' tf.Variables that are neither trained nor statistics of BatchNorm."""
    ours = set(map(id, _statistics(model)))
    rest = {weight.path: weight.value for weight in model.non_trainable_weights if id(weight.value) not in ours}
    return rest | held_variables(model)


def share_weights(model: keras.Model, engine: Engine, how: Literal["average", "rank_0"]) -> None:
    """Makes `own_weights` equal on all ranks: the mean over the ranks of floating-point ones, or rank 0's."""
    others = own_weights(model)
    means = {path: each for path, each in others.items() if how == "average" and each.dtype.is_floating}
    rest = {path: each for path, each in others.items() if path not in means}
    if rest and engine.size > 1:
        engine.broadcast(rest, None)
    _set_means(list(means.values()), engine)


def _statistics(model: keras.Model) -> list[tf.Variable]:
    norms = [layer for layer in private.layers(model) if isinstance(layer, BatchNorm | BatchNormalization)]
    return [weight.value for layer in norms for weight in (layer.moving_mean, layer.moving_variance)]


def _set_means(
    weights: list[tf.Variable],
    engine: Engine,
    copies_of: Callable[[tf.Variable], Sequence[tf.Variable]] = lambda variable: (variable,),
) -> None:
    copies = list(zip(*map(copies_of, weights), strict=True))
    if engine.size * len(copies) < 2:
        return
    flat = np.sum([np.concatenate([np.ravel(each.numpy()) for each in copy]) for copy in copies], axis=0)
    mean = engine.sum(flat) / flat.dtype.type(engine.size * len(copies))
    parts = np.split(mean, np.cumsum([math.prod(weight.shape) for weight in weights])[:-1])
    for weight, part in zip(weights, parts, strict=True):
        weight.assign(part.reshape(weight.shape))


@graph
def fingerprint(variables: list[tf.Variable]) -> tf.Tensor:
    """A digest of 64 bits, which changes when any bit of the variables changes."""
    total = tf.zeros((), tf.int64)
    for variable in variables:
        words = _words(variable)
        # Odd, different factors: they show a swap of two values, and every single changed bit.
        factors = tf.range(1, 2 * tf.size(words, tf.int64), 2)
        total = total * 1_000_003 + tf.reduce_sum(tf.cast(words, tf.int64) * factors)
    return total


def _words(variable: tf.Variable) -> tf.Tensor:
    """The variable's bits as integers of at most 32 bits, whose products with the factors fit into 64 bits."""
    if variable.dtype.size >= 4:
        return tf.reshape(tf.bitcast(variable, tf.int32), [-1])
    word = tf.cast(variable, tf.uint8) if variable.dtype.size == 1 else tf.bitcast(variable, tf.int16)
    return tf.cast(tf.reshape(word, [-1]), tf.int32)


def held_variables(model: keras.Model) -> dict[str, tf.Variable]:
    """The tf.Variables that layers hold and Keras does not count as weights, by path."""
    known = {id(each.value) for each in model.variables}
    return {path: each for path, each in _held(model) if isinstance(each, tf.Variable) and id(each) not in known}


def held_constants(model: keras.Model) -> dict[str, str]:
    """A digest of each array, tensor and vocabulary that a layer holds, by path."""
    return {path: _digest(each) for path, each in _held(model) if not isinstance(each, tf.Variable)}


def refresh(model: keras.Model) -> bool:
    """Lets layers compute again what they derive from weights, after these were loaded or broadcast. Returns whether
    any layer does."""
    norms = [layer for layer in private.layers(model) if isinstance(layer, keras.layers.Normalization)]
    for layer in norms:
        layer.finalize_state()
    return bool(norms)


def check_outputs(
    compute: Callable[[Any], Any],
    batch: Any,
    model: keras.Model,
    ranks: tuple[int, int],
    host: str,
    sum_over_ranks: sharing.Sum,
) -> None:
    """Compares the ranks' outputs, in inference, for the first rows of rank 0's batch, where outputs are repeatable.

    Every rank calls it; `ranks`: its own number, and how many there are. The model's state is as before. Raises
    AgreementError on every rank, naming those whose outputs differ from rank 0's.
    """
    rank, size = ranks
    if size == 1:
        return
    leaves = [np.asarray(each)[:ROWS] for each in keras.tree.flatten(batch)]
    packed = io.BytesIO()
    np.savez(packed, *(each.astype("S") if each.dtype == object else each for each in leaves))
    content = sharing.bytes_from_rank_0(packed.getvalue() if rank == 0 else b"", sum_over_ranks)
    rows = list(np.load(io.BytesIO(content), allow_pickle=False).values())
    own = _repeatable(lambda: compute(keras.tree.pack_sequence_as(batch, list(map(tf.constant, rows)))), model)
    first = np.frombuffer(sharing.bytes_from_rank_0(own.tobytes() if rank == 0 else b"", sum_over_ranks))
    apart = float(abs(own - first).max(initial=0) / abs(first).max(initial=1e-30)) if own.shape == first.shape else 1.0
    of_ranks = sharing.of_ranks([one_line(host), apart, own.size], *ranks, sum_over_ranks)
    is_exact = model.compute_dtype in {"float32", "float64"} and not tf.config.list_logical_devices("GPU")  # TF32
    limit = 1e-5 if is_exact else 1e-1
    others = [f"rank {r} on {its} ({by:.2g} apart)" for r, (its, by, _) in enumerate(of_ranks) if by > limit]
    if others and all(size for _, _, size in of_ranks):
        raise AgreementError(
            f"of the same examples and weights the model computes something else on {', '.join(others[:MOST_NAMED])} "
            "than on rank 0: a layer holds something that is no weight, as a constant that was made of this rank's "
            "data; make it of the same data on every rank."
        )


def _repeatable(compute: Callable[[], Any], model: keras.Model) -> np.ndarray:
    """The outputs as one float64 array, which is empty where they differ from call to call or cannot be computed."""
    before = [(each, each.numpy()) for each in (*model.non_trainable_variables, *held_variables(model).values())]

    def restore() -> None:
        for each, value in before:
            each.assign(value)

    outputs: list[np.ndarray] = []
    with contextlib.suppress(Exception):
        for _ in range(2):
            restore()
            for seed in networks.seed_states(model):
                seed.assign(tf.zeros_like(seed))
            outputs.append(np.concatenate([np.ravel(each).astype(float) for each in keras.tree.flatten(compute())]))
    restore()
    first, last = outputs[:1], outputs[1:]
    return first[0] if last and np.array_equal(first[0], last[0]) else np.zeros(0)


def _held(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """The variables, arrays, tensors and vocabularies in the layers' attributes, with their paths."""
    for layer in private.layers(model):
        path = layer.path or layer.name
        if hasattr(layer, "lookup_table"):
            yield f"{path}/vocabulary", np.asarray(layer.get_vocabulary()).astype(str)
        adapted = isinstance(layer, keras.layers.Normalization) and layer.input_mean is None
        for name, held in vars(layer).items():
            if name in OF_A_CALL or (adapted and name in ADAPTED):
                continue
            for index, each in enumerate([np.array(held)] if name == "bin_boundaries" else flat(held)):
                if isinstance(each, tf.Variable | np.ndarray) or hasattr(each, "_numpy"):
                    yield f"{path}/{name}{f'/{index}' if index else ''}", each


def objects(model: keras.Model) -> list[Any]:
    """The model, its layers, and the values in their attributes."""
    return [each for layer in private.layers(model) for each in (layer, *flat(list(vars(layer).values())))]


def own_objects(model: keras.Model, config: str) -> dict[str, str]:
    """By the names in the model's config, as JSON, the import paths of its classes and functions that Keras lacks."""
    kinds = [each if hasattr(each, "__qualname__") else type(each) for each in objects(model)]
    paths = {keras.saving.get_registered_name(each): f"{each.__module__}:{each.__qualname__}" for each in kinds}
    others = ("keras.", "tensorflow.", "builtins:", "hvdtrain.")
    return {name: path for name, path in paths.items() if json.dumps(name) in config and not path.startswith(others)}


def assets(model: keras.Model, given: Mapping[str, Any] | None = None) -> dict[str, dict[str, str]]:
    """By a layer's number, the files' texts of what Keras keeps beside a config and weights, as a vocabulary. What is
    `given` of them the layers load."""
    found = {}
    for number, layer in enumerate(private.layers(model)):
        texts = (given or {}).get(f"{number}", {})
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                Path(folder, Path(name).name).write_bytes(text.encode("utf-8", "surrogateescape"))
            if texts:
                layer.load_own_variables(safetensors.numpy.load_file(Path(folder, VARIABLES)))
                layer.load_assets(folder)
            elif given is None and hasattr(layer, "save_assets"):
                layer.save_own_variables(own := dict[str, Any]())
                arrays = {name: np.array(each, order="C") for name, each in own.items()}
                safetensors.numpy.save_file(arrays, Path(folder, VARIABLES))
                layer.save_assets(folder)
                kept = {each.name: each.read_bytes() for each in Path(folder).iterdir()}
                found[f"{number}"] = {name: each.decode("utf-8", "surrogateescape") for name, each in kept.items()}
    return found


def flat(held: Any) -> list[Any]:
    """The values in nested mappings, lists and tuples; Keras's mappings may have keys that cannot be sorted."""
    if isinstance(held, Mapping | list | tuple):
        return [each for inner in (held.values() if isinstance(held, Mapping) else held) for each in flat(inner)]
    return [held]


def _digest(held: Any) -> str:
    array = np.asarray(held)
    array = array.astype(str) if array.dtype == object else array
    return f"{array.dtype} {list(array.shape)} {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())}"
