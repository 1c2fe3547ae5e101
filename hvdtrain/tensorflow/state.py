"""A training state as named variables, which a checkpoint holds and rank 0 broadcasts."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import CheckpointError
from hvdtrain.record.checkpoint import Checkpoint, Layout
from hvdtrain.tensorflow import models
from hvdtrain.tensorflow.engines import Engine, add, put
from hvdtrain.tensorflow.optimizers import Optimizer, Scaler
from hvdtrain.untrusted import one_line


class Ema:
    """The moving average e = decay e + (1 - decay) w of every weight; it begins with the weights themselves."""

    def __init__(self, weights: list[tf.Variable], decay: float, engine: Engine) -> None:
        self._weights, self._weight, self._engine = weights, 1 - decay, engine
        self.averages = [tf.Variable(tf.convert_to_tensor(weight), trainable=False) for weight in weights]
        self._swap = engine.replicate(lambda: engine.keep(self._swap_all, []))

    def update(self) -> None:
        """Updates the averages after an update of the weights. Called inside a graph."""
        for average, weight in zip(self.averages, self._weights, strict=True):
            add(average, (weight - average) * self._weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Puts the averages into the model until the block ends, then the weights as they were before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Exchanges weights and averages, after all steps that were requested before."""
        self._engine.copies(self._weights[0])
        self._swap([()] * self._engine.replicas)
        self._engine.copies(self._weights[0])

    def _swap_all(self, _: list[tf.Tensor]) -> None:
        for average, weight in zip(self.averages, self._weights, strict=True):
            own, other = tf.identity(weight), tf.identity(average)
            put(weight, other)
            put(average, own)


def variables(
    model: keras.Model,
    optimizer: Optimizer,
    ema: Ema | None = None,
    trained: Sequence[keras.Variable] | None = None,
) -> dict[str, tf.Variable]:
    """All variables of the state, by name: `model.LAYER.NAME` for weights and tf.Variables of layers, `SLOT.LAYER.NAME`
    (such as exp_avg.LAYER.NAME), `ema.LAYER.NAME`, and `SLOT` for what an optimizer keeps only once. `trained`: the
    weights that ever learn, where that changes."""
    state = of_model(model)
    names = [_name(weight.path) for weight in (model.trainable_weights if trained is None else trained)]
    for slot, kept in {**optimizer.state, **({"ema": ema.averages} if ema else {})}.items():
        if isinstance(kept, list):
            state |= {f"{slot}.{name}": of for name, of in zip(names, kept, strict=True)}
        else:
            state[slot] = kept
    return state


def of_model(model: keras.Model) -> dict[str, tf.Variable]:
    """The variables of the model by their names in a checkpoint."""
    found: dict[str, tf.Variable] = {}
    held = models.held_variables(model).items()
    for path, variable in [*((weight.path, weight.value) for weight in model.weights), *held]:
        name = f"model.{_name(path)}"
        while name in found:  # Keras may repeat the names of nested layers
            name += "_"
        found[name] = variable
    return found


def set_weights(model: keras.Model, checkpoint: Checkpoint, names: Iterable[str] = ()) -> None:
    """Gives the model the weights with which the checkpoint's run validates. `names`: the names of its variables in
    the checkpoint, where they are others than `of_model` gives. Raises CheckpointError."""
    own = of_model(model)
    for name, variable in zip(names or own, own.values(), strict=True):
        averaged = name.replace("model.", "ema.", 1)
        variable.assign(checkpoint.array(averaged if averaged in checkpoint.arrays else name, tuple(variable.shape)))
    models.refresh(model)


def _name(path: str) -> str:
    return path.replace("/", ".")


class State:
    """A training state; see `hvdtrain.record.writer.State`."""

    def __init__(self, model: keras.Model, tensors: dict[str, tf.Variable], scaler: Scaler) -> None:
        self.tensors, self.scaler = tensors, scaler
        self._constants = models.held_constants(model)
        self._held: dict[str, np.ndarray] = {}
        """The copies of the last snapshot, whose memory the next one uses again."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Makes no variable, as all are made already. Raises CheckpointError where layers hold other constants."""
        own = json.dumps(self._constants)
        if (of_then := values.get("constants", "{}")) != own:
            raise CheckpointError(
                "the checkpoint's model held other constants or vocabularies, which are no weights: "
                f"{one_line(of_then, 200)}, now {one_line(own, 200)}",
                remedy="make them of the same data, or give another {folder}",
            )

    def load(self, checkpoint: Checkpoint) -> None:
        for name, variable in self.tensors.items():
            variable.assign(checkpoint.array(name, tuple(variable.shape)))

    def share(self, engine: Any) -> None:
        """There is nothing else."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.tensors.items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        self._held = {name: self._copied(name, variable) for name, variable in self.tensors.items()}
        return dict(self._held)

    def _copied(self, name: str, variable: tf.Variable) -> np.ndarray:
        # numpy() would copy; on the CPU this is a view of the variable's own memory.
        now = np.asarray(memoryview(variable.read_value()))
        held = self._held.get(name)
        if held is None or held.dtype != now.dtype or held.shape != now.shape:
            held = np.empty_like(now)
        np.copyto(held, now)
        return held

    def values(self) -> dict[str, Any]:
        return {"constants": json.dumps(self._constants)} if self._constants else {}

    def numbers(self) -> dict[str, Any]:
        """The optimizer's single numbers, such as its count of updates; the loss scale; and layers' constants."""
        once = {name: each for name, each in self.tensors.items() if not (name.startswith("model.") or each.shape.rank)}
        kept = {name: each.numpy().item() for name, each in once.items()}
        return {**kept, **self.scaler.state_dict(), **self._constants}
