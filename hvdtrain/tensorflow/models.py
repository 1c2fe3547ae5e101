"""A recipe's model: how it is built, and what of it, beside the weights that are trained, ranks must share.

Layers may hold TensorFlow's own variables, constants and vocabularies, which Keras does not count as weights.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
import xxhash
from keras.layers import BatchNormalization

from hvdtrain.core import sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.user_code import MODELS
from hvdtrain.datasets import Dataset
from hvdtrain.errors import AgreementError, RecipeError
from hvdtrain.ranks.agreement import MOST_NAMED
from hvdtrain.run import loop
from hvdtrain.tensorflow import networks
from hvdtrain.tensorflow.engines import Engine, graph
from hvdtrain.tensorflow.networks import POLICIES
from hvdtrain.tensorflow.resnet import BatchNorm, ResNet, real_type
from hvdtrain.untrusted import one_line

ROWS = 4
OF_A_CALL = {"_losses", "_losses_override"}
ADAPTED = {"mean", "variance"}
"""What Normalization computes of its weights."""


def build(recipe: Recipe, dataset: Dataset, engine: Engine) -> keras.Model:
    """The recipe's network, its weights drawn from the recipe's seed alone.

    linear: [n, 1] -> [n, 1], starting at 0. resnet50, resnet101: images [n, height, width, 3] -> logits [n, classes].
    Layers are named as torchvision names its modules. Any other: see `hvdtrain.tensorflow.networks`. Raises
    RecipeError.
    """
    if recipe.model not in MODELS:
        model = networks.build(recipe, dataset)
        networks.replace_batch_norms(model, recipe, engine.sum_tensor)
        return model
    networks.set_precision("float32")  # these layers are given theirs
    if recipe.model == "linear":
        policy = POLICIES[recipe.precision]
        x = keras.Input((1,), dtype=real_type(policy))
        y = keras.layers.Dense(1, kernel_initializer="zeros", dtype=policy, name="linear")(x)
        return keras.Model(x, y)
    if dataset.classes is None:
        raise RecipeError(f"model {recipe.model} needs a data set that has classes; take one of your own.")
    return ResNet(dataset.classes, recipe, engine).model()


def average_statistics(model: keras.Model, engine: Engine) -> None:
    """Sets BatchNorm's running statistics to the mean over the replicas, and other weights that are not trained to rank
    0's, so that all of them hold one model."""
    share_weights(model, engine, "rank_0")
    _set_means(_statistics(model), engine, engine.copies)


def own_weights(model: keras.Model) -> dict[str, tf.Variable]:
    """What no gradient trains and is no BatchNorm's statistics, by path: weights, and tf.Variables of layers."""
    ours = set(map(id, _statistics(model)))
    rest = {weight.path: weight.value for weight in model.non_trainable_weights if id(weight.value) not in ours}
    return rest | held_variables(model)


def share_weights(model: keras.Model, engine: Engine, how: Literal["average", "rank_0"]) -> None:
    """Gives all ranks one value of `own_weights`: their mean over the ranks, where they are fractions, or rank 0's."""
    others = own_weights(model)
    means = {path: each for path, each in others.items() if how == "average" and each.dtype.is_floating}
    rest = {path: each for path, each in others.items() if path not in means}
    if rest and engine.size > 1:
        engine.broadcast(rest, None)
    _set_means(list(means.values()), engine)


def unlike_weights(others: dict[str, tf.Variable], ranks: tuple[int, int], sum_over_ranks: sharing.Sum) -> list[str]:
    """The paths of those that differ between ranks (this one's number, how many there are). Every rank calls it."""
    if ranks[1] == 1 or not others:
        return []
    row = [fingerprint.python_function([each]).numpy() for each in others.values()]  # graphs would take seconds
    rows = sharing.gather(np.array(row, dtype=np.int64), *ranks, sum_over_ranks)
    return [path for path, is_one in zip(others, (rows == rows[0]).all(0), strict=True) if not is_one]


def _statistics(model: keras.Model) -> list[tf.Variable]:
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, BatchNorm | BatchNormalization)]
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
    """64 bits that change when any bit of the variables does."""
    total = tf.zeros((), tf.int64)
    for variable in variables:
        words = _words(variable)
        # Odd, different factors: a swap of two values shows, and so does every single changed bit.
        factors = tf.range(1, 2 * tf.size(words, tf.int64), 2)
        total = total * 1_000_003 + tf.reduce_sum(tf.cast(words, tf.int64) * factors)
    return total


def _words(variable: tf.Variable) -> tf.Tensor:
    """The variable's bits as integers of 32 bits at most, which times an even difference of factors keep their sign."""
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
    """What layers have computed of weights follows those that were loaded or broadcast. Returns whether any has."""
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)]
    for layer in norms:
        layer.finalize_state()
    return bool(norms)


def check_outputs(
    compute: Callable[[Any], Any], batch: Any, model: keras.Model, engine: loop.Engine, host: str
) -> None:
    """Compares what every rank computes, in inference, of the first rows of rank 0's batch; outputs that are not
    repeatable are not compared. Every rank calls it; the model's state stays.

    Raises AgreementError on every rank, naming those that compute something else than rank 0.
    """
    if engine.size == 1:
        return
    leaves = [np.asarray(each)[:ROWS] for each in keras.tree.flatten(batch)]
    packed = io.BytesIO()
    np.savez(packed, *(each.astype("S") if each.dtype == object else each for each in leaves))
    content = sharing.bytes_from_rank_0(packed.getvalue() if engine.rank == 0 else b"", engine.sum)
    rows = list(np.load(io.BytesIO(content), allow_pickle=False).values())
    own = _repeatable(lambda: compute(keras.tree.pack_sequence_as(batch, list(map(tf.constant, rows)))), model)
    first = np.frombuffer(sharing.bytes_from_rank_0(own.tobytes() if engine.rank == 0 else b"", engine.sum))
    apart = float(abs(own - first).max(initial=0) / abs(first).max(initial=1e-30)) if own.shape == first.shape else 1.0
    of_ranks = sharing.of_ranks([one_line(host), apart, own.size], engine.rank, engine.size, engine.sum)
    is_exact = model.compute_dtype in {"float32", "float64"} and not tf.config.list_logical_devices("GPU")  # TF32
    limit = 1e-5 if is_exact else 1e-1
    others = [f"rank {rank} on {its} ({by:.2g} apart)" for rank, (its, by, _) in enumerate(of_ranks) if by > limit]
    if others and all(size for _, _, size in of_ranks):
        raise AgreementError(
            f"of the same examples and weights the model computes something else on {', '.join(others[:MOST_NAMED])} "
            "than on rank 0: a layer holds something that is no weight, as a constant that was made of this rank's "
            "data; make it of the same data on every rank."
        )


def _repeatable(compute: Callable[[], Any], model: keras.Model) -> np.ndarray:
    """All numbers of the outputs, float64; none where they differ from call to call or cannot be computed."""
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
    """Variables, arrays, tensors and vocabularies in the attributes of layers, by path."""
    for layer in model._flatten_layers():
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


def flat(held: Any) -> list[Any]:
    if isinstance(held, Mapping | list | tuple):  # a Mapping of Keras's may have keys that cannot be sorted
        return [each for inner in (held.values() if isinstance(held, Mapping) else held) for each in flat(inner)]
    return [held]


def _digest(held: Any) -> str:
    array = np.asarray(held)
    array = array.astype(str) if array.dtype == object else array
    return f"{array.dtype} {list(array.shape)} {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())}"
