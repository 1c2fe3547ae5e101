"""What a model computes with beside its weights: TensorFlow's own variables, constants and vocabularies of layers."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash

from hvdtrain.core import sharing
from hvdtrain.errors import AgreementError
from hvdtrain.ranks.agreement import MOST_NAMED
from hvdtrain.run.loop import Engine
from hvdtrain.tensorflow.networks import seed_states
from hvdtrain.untrusted import one_line

ROWS = 4
OF_A_CALL = {"_losses", "_losses_override"}
ADAPTED = {"mean", "variance"}
"""What Normalization computes of its weights."""


def variables(model: keras.Model) -> dict[str, tf.Variable]:
    """The tf.Variables that layers hold and Keras does not count as weights, by path."""
    known = {id(each.value) for each in model.variables}
    return {path: each for path, each in _held(model) if isinstance(each, tf.Variable) and id(each) not in known}


def constants(model: keras.Model) -> dict[str, str]:
    """A digest of each array, tensor and vocabulary that a layer holds, by path."""
    return {path: _digest(each) for path, each in _held(model) if not isinstance(each, tf.Variable)}


def refresh(model: keras.Model) -> bool:
    """What layers have computed of weights follows those that were loaded or broadcast. Returns whether any has."""
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)]
    for layer in norms:
        layer.finalize_state()
    return bool(norms)


def check_outputs(compute: Callable[[Any], Any], batch: Any, model: keras.Model, engine: Engine, host: str) -> None:
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
    before = [(each, each.numpy()) for each in (*model.non_trainable_variables, *variables(model).values())]

    def restore() -> None:
        for each, value in before:
            each.assign(value)

    outputs: list[np.ndarray] = []
    with contextlib.suppress(Exception):
        for _ in range(2):
            restore()
            for seed in seed_states(model):
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
