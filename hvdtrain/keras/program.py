"""The model that `fit` trains, as a run's hooks need it, and the other callbacks, whose state checkpoints keep."""

import contextlib
import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import CSVLogger, ProgbarLogger, SwapEMAWeights, TensorBoard

from hvdtrain import files
from hvdtrain.core.network import curve_line
from hvdtrain.core.progress import Progress
from hvdtrain.core.sharing import Totals
from hvdtrain.errors import KerasError
from hvdtrain.keras.averaging import distributed
from hvdtrain.keras.batch_norm import SyncBatchNormalization
from hvdtrain.keras.global_batches import GlobalBatches
from hvdtrain.keras.ranks import among, check_called, check_distributed, hvd, sum_arrays
from hvdtrain.ranks import agreement
from hvdtrain.record.checkpoint import Layout
from hvdtrain.record.folder import MODEL
from hvdtrain.run import trainer
from hvdtrain.run.session import take_data
from hvdtrain.tensorflow import models, networks
from hvdtrain.tensorflow.engines import process_settings
from hvdtrain.tensorflow.engines.horovod import HorovodEngine
from hvdtrain.tensorflow.optimizers import Scaler
from hvdtrain.tensorflow.state import State as OfVariables
from hvdtrain.tensorflow.state import of_model

PREFIX, WEIGHTS = "callbacks.", "best_weights"
"""The prefix of callbacks' arrays in a checkpoint, and the only attribute that is kept as arrays."""
NOT_KEPT = {"params", "_params", "min_delta", "_model", WEIGHTS}
"""Attributes that Keras sets itself; it changes the sign of min_delta once in each process."""
LONGEST = 1 << 16
"""The most characters of an attribute's JSON in a checkpoint."""
COMPILED = "optimizer"
AUTOMATIC = re.compile(r"\bvariable(_\d+)?$")
"""A name that Keras numbers by the variables which this process has made."""
METRICS = f"{PREFIX}metrics."


def call_of(model: keras.Model, name: str) -> Mapping[str, Any]:
    """The local variables of the model's method of that name, if it is running now."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == name)
    return next((frame.f_locals for frame in frames if frame.f_locals.get("self") is model), {})


def list_of(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList:
    """The list that calls this callback; a new one with it alone where that is not Keras's."""
    holders = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    lists = (each for each in holders if isinstance(each, keras.callbacks.CallbackList))
    return next((each for each in lists if callback in each.callbacks), keras.callbacks.CallbackList([callback]))


def record_config(model: keras.Model, folder: Path) -> None:
    """Writes the model's layers into the run folder, for `export`, where Keras can describe them."""
    with contextlib.suppress(Exception):  # of layers of the user's too
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)  # with a class of Horovod's, and no part of the model
        made = {"weights": list(of_model(model)), "model": config, "assets": models.assets(model)}
        files.write(folder / MODEL, json.dumps({**made, "own": models.own_objects(model, json.dumps(config))}))


class Others:
    """The callbacks of a `fit` that are not hvdtrain's, by class and number, such as "EarlyStopping 0". Checkpoints
    keep the attributes that JSON can hold and that have changed in training, and EarlyStopping's best weights."""

    def __init__(self, callbacks: list[keras.callbacks.Callback]) -> None:
        seen: Counter[str] = Counter()
        self.by_name: dict[str, keras.callbacks.Callback] = {}
        for each in callbacks:
            kind = type(each).__name__
            if not isinstance(each, ProgbarLogger | SwapEMAWeights | TensorBoard):  # their state belongs to a process
                self.by_name[f"{kind} {seen[kind]}"] = each
            seen[kind] += 1
        self._first: dict[str, dict[str, str]] = {}

    def begin(self, texts: Mapping[str, Mapping[str, str]], arrays: Mapping[str, np.ndarray]) -> None:
        """Gives the callbacks, which have all begun to train, their state in a checkpoint."""
        self._first = {name: _texts(each) for name, each in self.by_name.items()}
        for name in self.by_name.keys() & texts.keys():
            own, each = self._first[name], self.by_name[name]
            for attribute in (key for key in texts[name] if key in own or not hasattr(each, key)):
                setattr(each, attribute, json.loads(texts[name][attribute]))
            if paths := sorted(path for path in arrays if path.startswith(f"{PREFIX}{name}.")):
                setattr(each, WEIGHTS, [arrays[path] for path in paths])

    def texts(self) -> dict[str, dict[str, str]]:
        """The attributes that have changed, as JSON, by callback and name."""
        return {
            name: {key: text for key, text in _texts(each).items() if self._first.get(name, {}).get(key) != text}
            for name, each in self.by_name.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights, by their names in a checkpoint."""
        found = {name: getattr(each, WEIGHTS, None) or [] for name, each in self.by_name.items()}
        return {f"{PREFIX}{name}.{i:06}": np.array(each) for name, of in found.items() for i, each in enumerate(of)}

    def stopped_by(self) -> str:
        """The callbacks that have ended the training early, as text."""
        found = (name.partition(" ")[0] for name, each in self.by_name.items() if getattr(each, "stopped_epoch", 0))
        return ", ".join(found) or "model.stop_training was set"

    def unkept(self) -> list[str]:
        """Lines on state of callbacks that no checkpoint holds."""
        lines = []
        for name, each in self.by_name.items():
            own = {} if type(each).__module__.startswith("keras.") else vars(each)
            known = {*_texts(each), *NOT_KEPT}
            if more := [k for k, value in own.items() if not (k in known or callable(value) or _is_path(value))]:
                lines.append(f"no checkpoint holds {', '.join(more)} of {name.partition(' ')[0]}: it begins anew")
            if isinstance(each, CSVLogger) and not each.append:
                lines.append("CSVLogger begins its file anew after a resume; CSVLogger(..., append=True) continues it")
        return lines


def _texts(callback: keras.callbacks.Callback) -> dict[str, str]:
    """The callback's attributes that JSON can hold, as JSON, without paths."""
    found = {}
    for name, value in vars(callback).items():
        try:
            text = "" if name in NOT_KEPT or _is_path(value) else json.dumps(value, default=_number)
        except (TypeError, ValueError):
            continue
        if 0 < len(text) < LONGEST:
            found[name] = text
    return found


def _number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


class State(OfVariables):
    """All variables of a model and its optimizers, and the state of other callbacks.

    Names are `model.PATH`, `optimizer.PATH`, and `ATTRIBUTE.NUMBER` for further optimizers.
    """

    def __init__(self, model: keras.Model, others: Others | None = None) -> None:
        super().__init__(model, {}, Scaler(enabled=False))  # whose loss scale is a variable of Keras's optimizer
        self._model, self._others = model, others or Others([])
        self.tensors = self._found()
        self.texts: Mapping[str, Any] = {}
        """The state of callbacks in the checkpoint; see `Others`."""
        self.metrics: list[np.ndarray] = []
        """The states of Keras's metrics, added over the ranks."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        super().start(layout, values)
        pool, found = self._pool(), optimizers(self._model)
        for name, indices in json.loads(values["built"]).items():
            if name in found and not found[name].built:
                found[name].build([pool[index] for index in indices])
        self.texts = json.loads(values["callbacks"])
        of_callbacks = {name: kind for name, kind in layout.items() if name.startswith(PREFIX)}
        self.tensors = self._found() | {
            name: tf.Variable(tf.zeros(shape, dtype)) for name, (dtype, shape) in of_callbacks.items()
        }

    def take_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of callbacks in the checkpoint, and forgets them."""
        found = {name: each.numpy() for name, each in self.tensors.items() if name.startswith(PREFIX)}
        self.tensors = self._found()
        return found

    def snapshot(self) -> dict[str, np.ndarray]:
        self.tensors = self._found()  # some optimizers make variables at their first update
        metrics = {f"{METRICS}{index}": each for index, each in enumerate(self.metrics)}
        return super().snapshot() | self._others.arrays() | metrics

    def values(self) -> dict[str, Any]:
        place = {id(each): index for index, each in enumerate(self._pool())}
        built = {
            name: [place[id(each)] for each in optimizer._trainable_variables if id(each) in place]
            for name, optimizer in optimizers(self._model).items()
            if optimizer.built
        }
        return {**super().values(), "built": json.dumps(built), "callbacks": json.dumps(self._others.texts())}

    def numbers(self) -> dict[str, Any]:
        self.tensors = self._found()  # as in `snapshot`, which only rank 0 calls
        return {**super().numbers(), **numbers(self._model.optimizer)}

    def _pool(self) -> list[Any]:
        return [*self._model.variables, *models.held_variables(self._model).values()]

    def _found(self) -> dict[str, tf.Variable]:
        found, named = of_model(self._model), list[tuple[str, tf.Variable]]()
        for owner, optimizer in optimizers(self._model).items():
            for index, each in enumerate(optimizer.variables):
                has_name = owner == COMPILED and not AUTOMATIC.search(each.path)
                named.append((f"{owner}.{each.path if has_name else index}", each.value))
        for path, variable in named:
            name = path.replace("/", ".")
            while name in found:  # Keras may repeat the names of nested layers
                name += "_"
            found[name] = variable
        return found


def optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """The compiled optimizer, and those in attributes of the model and its layers, by the attribute's path."""
    found = {COMPILED: model.optimizer}
    for layer in model._flatten_layers():
        for name, held in vars(layer).items():
            for index, each in enumerate(models.flat(held)):
                known = any(each is one for one in found.values())
                if isinstance(each, keras.optimizers.Optimizer) and not known:
                    path = name if layer is model else f"{layer.path or layer.name}/{name}"
                    found[f"{path}{f'/{index}' if index else ''}"] = each
    return found


def shares_steps(model: keras.Model) -> bool:
    """Whether the model has a train_step of its own with several optimizers, which decides what each of them trains."""
    return type(model).train_step is not keras.Model.train_step and len(optimizers(model)) > 1


def is_idle(model: keras.Model) -> bool:
    """Whether the compiled optimizer may be one that compile() chose and no step uses."""
    return shares_steps(model) and not distributed(model.optimizer)


def check_optimizers(model: keras.Model) -> None:
    """Refuses a model with an optimizer that does not average gradients. Raises KerasError."""
    float8 = (each.path for each in model.trainable_variables if getattr(each, "overwrite_with_gradient", False))
    if (path := next(float8, None)) and hvd.size() > 1:
        raise KerasError(
            f"{path} becomes its gradient (float8), of which ranks would have the mean where one process has the "
            "maximum; train without quantize('float8')."
        )
    for name, optimizer in optimizers(model).items():
        if name != COMPILED or not is_idle(model):
            check_distributed(optimizer)


def check_used(model: keras.Model, before: int) -> None:
    """Refuses steps that did not call the distributed optimizers; `before`: how many updates the compiled one had made.
    Raises KerasError."""
    if is_idle(model) and int(model.optimizer.iterations) != before:
        check_distributed(model.optimizer)
    check_called(optimizers(model).values())


def lr_of(optimizer: keras.optimizers.Optimizer) -> float:
    """The present LR; for a MultiOptimizer that of its first optimizer."""
    first = next(iter(getattr(optimizer, "optimizers", ())), optimizer)
    return float(keras.ops.convert_to_numpy(first.learning_rate))


def numbers(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The settings of a Keras optimizer, such as its present LR, momentum and betas."""
    config = optimizer.get_config() | {"learning_rate": lr_of(optimizer)}
    return {name: value for name, value in config.items() if isinstance(value, bool | int | float | None)}


class Replica(trainer.Replica):
    """A rank's model under `fit`, whose train_step keeps no gradients."""

    engine: HorovodEngine
    state: State

    def __init__(self, model: keras.Model, engine: HorovodEngine, seed: int, others: Others) -> None:
        self.model, self.engine, self.state, self._seed = model, engine, State(model, others), seed
        self._seed_states = networks.seed_states(model)
        self._seen = np.zeros(2)

    def seed(self, step: int) -> None:
        models.seed(self._seed_states, self._seed, step, self.engine)

    def begin_epoch(self) -> None:
        """Notes that Keras has set its metrics to 0."""
        self._seen = np.zeros(2)

    def totals(self) -> Totals:
        """The totals of the loss that Keras logs; 0 where the model's own train_step logs none."""
        now = self._shown()
        (loss, count), self._seen = now - self._seen, now
        return Totals(float(loss), float(count))

    def _shown(self) -> np.ndarray:
        means = (metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "total"))
        metric = next(means, None)
        return np.array([float(metric.total), float(metric.count)]) if metric else self._seen

    def settings(self) -> dict[str, Any]:
        return process_settings()

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine)
        own = [getattr(each, "_accumulated_gradients", ()) for each in optimizers(self.model).values() if each.built]
        gathered = [each for of_one in own for each in of_one]  # on each rank those of its examples
        for variable, total in zip(gathered, sum_arrays([np.array(each) for each in gathered]), strict=True):
            variable.assign(total / self.engine.size)
        self.state.metrics = sum_arrays([np.array(each) for each in self.model.metrics_variables])

    def add_metrics(self, before: Mapping[str, np.ndarray]) -> None:
        """Adds the metrics in a checkpoint's arrays on rank 0, after the first step of a resumed epoch, which makes all
        metrics."""
        shown, own = self._shown(), self.model.metrics_variables if self.engine.rank == 0 else []
        for index, variable in enumerate(own):
            variable.assign(variable + tf.cast(before.get(f"{METRICS}{index}", 0), variable.dtype))
        self._seen = self._seen + self._shown() - shown

    def fingerprints(self) -> list[int]:
        return [int(models.fingerprint(trained_variables(self.model)).numpy())]


def trained_variables(model: keras.Model) -> list[Any]:
    """The variables that learn."""
    found = [*model.trainable_weights]
    found += [each for one in optimizers(model).values() for each in one._trainable_variables]
    return list({id(each): getattr(each, "value", each) for each in found}.values())


def compare_replicas(model: keras.Model, step: int) -> None:
    """Raises ReplicaError where the ranks' weights differ after that step of a `fit`. Every rank calls it."""
    reductions = [each._reduction for each in map(distributed, optimizers(model).values()) if each]
    if not any(each._local or each.process_set.process_set_id for each in reductions):  # else they may differ
        mark = int(models.fingerprint.python_function(trained_variables(model)).numpy())  # tracing would take seconds
        agreement.check_replicas(mark, {}, step, *among(), "steps")


class Program:
    """What a `fit` reports to its run of its model and data; see `hvdtrain.run.session.Program`."""

    def __init__(self, model: keras.Model, data: GlobalBatches | None) -> None:
        self.model, self.data = model, data
        self.ended: dict[str, Any] = {}
        """See `hvdtrain.run.session.UserHooks.end_early`."""

    @property
    def identity(self) -> str:
        # The wrapped optimizer's class is the one that Keras knows.
        model, optimizer = self.model, self.model.optimizer.__class__
        return f"{type(model).__name__}, {model.count_params():,} parameters, {optimizer.__name__}"

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for array in State(self.model).arrays().values())

    @property
    def lr(self) -> float:
        return lr_of(self.model.optimizer)

    def curve_line(self, size: int) -> str:
        found = [each for each in networks.batch_norms(self.model) if each.trainable and not each.synchronized]
        norms = [each.name for each in found if not isinstance(each, SyncBatchNormalization)]
        return curve_line(size, norms, "synchronized=True", networks.has_dropout(self.model))

    def metadata(self) -> dict[str, Any]:
        return {"data": self._order, "ended": self.ended}

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """See `take_data`."""
        return take_data(meta["data"], self._order, progress)

    @property
    def _order(self) -> dict[str, Any]:
        """What determines the order of the samples."""
        data = self.data
        return {"batch_size": data.batch_size, "seed": data.seed, **data.examples.contents()} if data else {}
