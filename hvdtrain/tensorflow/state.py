"""A training state as named variables: what a checkpoint holds and what rank 0 broadcasts."""

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.run.checkpoint import Checkpoint
from hvdtrain.tensorflow.sgd import SGD, Scaler


def variables(model: keras.Model, optimizer: SGD) -> dict[str, tf.Variable]:
    """Every variable of the state by name: `model.LAYER.NAME`, `momentum.LAYER.NAME`."""
    state = {f"model.{_name(weight)}": weight.value for weight in model.weights}
    names = [_name(weight) for weight in model.trainable_weights] if optimizer.momentum else []
    return state | {f"momentum.{name}": of for name, of in zip(names, optimizer.momentum, strict=True)}


def _name(weight: keras.Variable) -> str:
    return weight.path.replace("/", ".")


class State:
    """A training state; see `hvdtrain.run.loop.State`."""

    def __init__(self, model: keras.Model, optimizer: SGD, scaler: Scaler) -> None:
        self.tensors, self.scaler = variables(model, optimizer), scaler

    def load(self, checkpoint: Checkpoint) -> None:
        for name, variable in self.tensors.items():
            variable.assign(checkpoint.array(name, tuple(variable.shape)))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.tensors.items()}
