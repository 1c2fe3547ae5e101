"""A training state as named variables: what a checkpoint holds and what rank 0 broadcasts."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.checkpoint import Checkpoint
from hvdtrain.tensorflow.sgd import SGD


def variables(model: keras.Model, optimizer: SGD) -> dict[str, tf.Variable]:
    """Every variable of the state by name: `model.LAYER.NAME`, `momentum.LAYER.NAME`."""
    state = {f"model.{_name(weight)}": weight.value for weight in model.weights}
    names = [_name(weight) for weight in model.trainable_weights] if optimizer.momentum else []
    return state | {f"momentum.{name}": of for name, of in zip(names, optimizer.momentum, strict=True)}


def _name(weight: keras.Variable) -> str:
    return weight.path.replace("/", ".")


def load(state: dict[str, tf.Variable], checkpoint: Checkpoint) -> None:
    """Copies the checkpoint's arrays into the variables."""
    for name, variable in state.items():
        variable.assign(checkpoint.array(name, tuple(variable.shape)))


def snapshot(state: dict[str, tf.Variable], facts: dict[str, Any]) -> Checkpoint:
    """A checkpoint of the state as it is now."""
    return Checkpoint({name: variable.numpy() for name, variable in state.items()}, facts)
