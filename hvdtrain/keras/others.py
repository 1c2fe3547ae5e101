"""The callbacks of a `fit` that are not hvdtrain's: their state and the files that they append to, in checkpoints."""

import io
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import CSVLogger, ProgbarLogger, SwapEMAWeights, TensorBoard

from hvdtrain.core.codec import FUNCTIONS
from hvdtrain.run.attributes import Attributes, ProgramKinds
from hvdtrain.tensorflow import models, private

NO_STATE = {"params", "_params", "_model", "csv_file", "writer"}
"""Attributes that Keras sets itself, and those of CSVLogger's open file."""
OF_TENSORBOARD = {"_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"}
"""The only private attributes of TensorBoard that belong to no process."""
OF_MODEL = {"stop_training", "built", "compiled", "trainable", "run_eagerly", "jit_compile"}
"""Attributes of a model that are Keras's own."""
NUMBERS = bool, int, float, str
STARTED = time.time()
VARIABLES = keras.Variable, tf.Variable
SEEDED = keras.random.SeedGenerator, tf.random.Generator
WITH_VARIABLES = keras.metrics.Metric, keras.Layer, keras.optimizers.Optimizer
OPAQUE: tuple[Any, ...] = keras.Layer, keras.optimizers.Optimizer, keras.losses.Loss, keras.callbacks.CallbackList
OPAQUE += tf.Module, tf.data.Dataset, tf.data.Iterator


class KerasKinds(ProgramKinds):
    """Tensors are made anew; variables, metrics, layers and optimizers stay, and are assigned."""

    functions = FUNCTIONS | {f"keras.ops.{name}": getattr(keras.ops, name) for name in ("less", "greater")}

    def __init__(self, model: keras.Model | None = None) -> None:
        """`model`: the one that is trained, whose weights and optimizers a checkpoint holds."""
        super().__init__()
        self._trained = {id(each): each for each in (models.objects(model) if model else ())}

    def is_opaque(self, each: Any) -> bool:
        return isinstance(each, OPAQUE) or super().is_opaque(each)

    def array_of(self, each: Any) -> tuple[str, np.ndarray] | None:
        is_tensor = tf.is_tensor(each) and hasattr(each, "numpy") and not _is_variable(each)
        return ("tensor", each.numpy()) if is_tensor else None

    def of_array(self, word: str, array: np.ndarray) -> Any:
        return tf.constant(array)

    def state_of(self, each: Any) -> Any:
        if isinstance(each, WITH_VARIABLES) and id(each) not in self._trained:
            return [np.array(variable) for variable in each.variables]
        if isinstance(each, keras.callbacks.Callback):
            held = self.attributes_of(each)
            return {name: value for name, value in held.items() if not _is_left_out(each, name)}
        if isinstance(each, SEEDED):
            return np.array(each.state)
        return np.array(each) if _is_variable(each) else super().state_of(each)

    def set_state(self, each: Any, state: Any, fill: Callable[[Any, Any], Any]) -> None:
        if isinstance(each, WITH_VARIABLES):
            for variable, value in zip(each.variables, state, strict=True):
                variable.assign(value)
        elif _is_variable(each) or isinstance(each, SEEDED):
            getattr(each, "state", each).assign(state)
        else:
            super().set_state(each, state, fill)


def _is_variable(each: Any) -> bool:
    return isinstance(each, VARIABLES)


class Others:
    """The other callbacks, by class and number, such as "EarlyStopping 0". Checkpoints keep their attributes that have
    changed in training, and how long the files were that they append to."""

    def __init__(self, callbacks: list[keras.callbacks.Callback], model: keras.Model | None = None) -> None:
        seen: Counter[str] = Counter()
        self._by_name: dict[str, keras.callbacks.Callback] = {}
        for each in callbacks:
            kind = type(each).__name__
            if not isinstance(each, ProgbarLogger | SwapEMAWeights):  # whose state belongs to a process
                self._by_name[f"{kind} {seen[kind]}"] = each
            seen[kind] += 1
        objects = self._by_name | ({"model": model} if model else {})
        self._attributes = Attributes(objects, KerasKinds(model), _is_left_out)
        self._sizes: dict[str, dict[str, int]] = {}
        """How long the files were at the checkpoint."""
        self._content: np.ndarray | None = None
        """The bytes in the checkpoint that the run continues from."""
        self.keeps_patience = True
        """Whether EarlyStopping counts on after a resume."""
        self.lines, self.begin = self._attributes.lines, self._attributes.begin

    def resume(self, content: np.ndarray, *, is_over: bool) -> str:
        """Before the callbacks begin, in a run that continues from a checkpoint with these bytes: cuts what was
        appended after it, where the run is not over. Returns a line where there are other callbacks now. Raises
        CheckpointError."""
        self._content = content
        _, more = self._attributes.decode(content)
        self._sizes = {} if is_over else more["sizes"]
        for each in () if is_over else self._by_name.values():
            if isinstance(each, CSVLogger):
                each.append = True
        self._cut()
        own = [*self._by_name]
        if own == more["names"]:
            return ""
        return f"the callbacks are {', '.join(own)}, in the checkpoint {', '.join(more['names'])}: state goes by name"

    def give_back(self) -> None:
        """Gives the callbacks their state in the checkpoint."""
        self._cut()  # what the callbacks have written meanwhile
        if self._content is not None:
            saved, _ = self._attributes.decode(self._content)
            kept = {
                name: of for name, of in saved.items() if self.keeps_patience or not name.startswith("EarlyStopping ")
            }
            self._attributes.give_back(kept)

    def _cut(self) -> None:
        for each in self._by_name.values():
            for root, files in _appended(each):
                for path in files if root in self._sizes else ():
                    if not isinstance(each, TensorBoard) or path.stat().st_mtime < STARTED:  # else it writes there
                        _cut(path, self._sizes[root].get(str(path), 0))

    def encode(self) -> np.ndarray:
        """The bytes [n] in which a checkpoint keeps the callbacks' changed attributes, and the lengths of the files
        that they append to. Rank 0 calls it."""
        sizes = {
            root: {str(path): path.stat().st_size for path in files if path.exists()}
            for each in self._by_name.values()
            for root, files in _appended(each)
        }
        return self._attributes.encode({"names": [*self._by_name], "sizes": sizes})

    def stopped_by(self) -> str:
        """The callbacks that have ended the training early, as text."""
        found = (name.partition(" ")[0] for name, each in self._by_name.items() if getattr(each, "stopped_epoch", 0))
        return ", ".join(found) or "model.stop_training was set"


def _is_left_out(callback: keras.callbacks.Callback | keras.Model, name: str) -> bool:
    if isinstance(callback, keras.Model):  # of which callbacks change numbers and texts; the rest is in the weights
        return name[0] == "_" or name in OF_MODEL or not isinstance(getattr(callback, name, None), NUMBERS)
    if isinstance(callback, TensorBoard) and name.startswith("_"):
        return name not in OF_TENSORBOARD
    return name in NO_STATE


def _appended(callback: keras.callbacks.Callback) -> Iterator[tuple[str, list[Path]]]:
    """The files that a callback appends to, by the path that the program gave."""
    if isinstance(callback, TensorBoard):
        for writer in private.writers(callback).values():
            writer.flush()
        yield str(callback.log_dir), sorted(Path(callback.log_dir).glob("*/events.out.tfevents.*"))
    for file in keras.tree.flatten(list(vars(callback).values())) if hasattr(callback, "appends_to") else ():
        if isinstance(file, io.IOBase) and not file.closed and file.writable():
            file.flush()
    given = [callback.filename] if isinstance(callback, CSVLogger) else getattr(callback, "appends_to", ())
    for path in [given] if isinstance(given, str | Path) else given:
        yield str(path), [Path(path)]


def _cut(path: Path, size: int) -> None:
    """Cuts a file of this user's to that many bytes, where it is longer."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # it is gone, or another's
        return
    try:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size > size >= 0:
            os.ftruncate(file, size)
    finally:
        os.close(file)
