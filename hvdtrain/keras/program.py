"""The model that `fit` trains, as a run's hooks need it."""

import contextlib
import json
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import files
from hvdtrain.core.metrics import Totals
from hvdtrain.core.network import curve_line
from hvdtrain.core.progress import Progress
from hvdtrain.errors import KerasError
from hvdtrain.keras import metrics
from hvdtrain.keras.averaging import distributed
from hvdtrain.keras.batch_norm import SyncBatchNormalization
from hvdtrain.keras.global_batches import GlobalBatches
from hvdtrain.keras.others import Others
from hvdtrain.keras.ranks import among, check_called, check_distributed, hvd, sum_arrays
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import Values
from hvdtrain.record.checkpoint import Layout
from hvdtrain.record.folder import MODEL
from hvdtrain.run import trainer
from hvdtrain.run.session import check_next, take_data
from hvdtrain.tensorflow import models, networks, private
from hvdtrain.tensorflow.engines import process_settings
from hvdtrain.tensorflow.engines.horovod import HorovodEngine
from hvdtrain.tensorflow.optimizers import Scaler
from hvdtrain.tensorflow.state import State as OfVariables
from hvdtrain.tensorflow.state import of_model

PREFIX = "callbacks."
OTHERS, METRICS = f"{PREFIX}others", f"{PREFIX}metrics."
"""The names in a checkpoint of the other callbacks' state, and of those of Keras's metrics."""
COMPILED = "optimizer"
AUTOMATIC = re.compile(r"\bvariable(_\d+)?$")
"""A name that Keras numbers by the variables which this process has made."""


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


class State(OfVariables):
    """All variables of a model and its optimizers, and the state of other callbacks.

    Names are `model.PATH`, `optimizer.PATH`, and `ATTRIBUTE.NUMBER` for further optimizers.
    """

    def __init__(self, model: keras.Model, others: Others | None = None) -> None:
        super().__init__(model, {}, Scaler(enabled=False))  # whose loss scale is a variable of Keras's optimizer
        self._model, self._others = model, others or Others([])
        self.tensors = self._found()
        self.metrics: Mapping[str, np.ndarray] = {}
        """The states of Keras's metrics over the ranks; see `Merging.kept`."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        super().start(layout, values)
        pool, found = self._pool(), optimizers(self._model)
        for name, indices in json.loads(values["built"]).items():
            if name in found and not found[name].built:
                found[name].build([pool[index] for index in indices])
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
        merged = {f"{METRICS}{name}": each for name, each in self.metrics.items()}
        return super().snapshot() | merged | {OTHERS: self._others.encode()}

    def values(self) -> dict[str, Any]:
        place = {id(each): index for index, each in enumerate(self._pool())}
        built = {
            name: [place[id(each)] for each in private.trained(optimizer) if id(each) in place]
            for name, optimizer in optimizers(self._model).items()
            if optimizer.built
        }
        return {**super().values(), "built": json.dumps(built)}

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
    for layer in private.layers(model):
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
        self._seen = model.train_step.totals.numpy()

    def seed(self, step: int) -> None:
        models.seed(self._seed_states, self._seed, step, self.engine)

    def totals(self) -> Totals:
        """The totals of the loss that Keras logs; 0 where the model's own train_step logs none."""
        now = self.model.train_step.totals.numpy()
        (loss, count, _), self._seen = now - self._seen, now
        return Totals(float(loss), float(count))

    def settings(self) -> dict[str, Any]:
        return process_settings()

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine)
        built = [each for each in optimizers(self.model).values() if each.built]
        gathered = [each for one in built for each in private.accumulated(one)]  # on each rank those of its examples
        for variable, total in zip(gathered, sum_arrays([np.array(each) for each in gathered]), strict=True):
            variable.assign(total / self.engine.size)
        self.state.metrics = metrics.merging_of(self.model).kept()

    def begin_metrics(self, before: Mapping[str, np.ndarray], batch: Any) -> None:
        """Gives Keras's metrics, which a batch makes, their states in a checkpoint's arrays."""
        with contextlib.suppress(Exception), keras.StatelessScope():  # a train_step of its own has made its metrics
            self.model.test_step(batch)
        for index, variable in enumerate(self.model.metrics_variables):
            of_rank_0 = before.get(f"{METRICS}{index}") if self.engine.rank == 0 else None
            if (state := before.get(f"{METRICS}{index}.each", of_rank_0)) is not None:
                variable.assign(tf.cast(state, variable.dtype))

    def fingerprints(self) -> list[int]:
        return [int(models.fingerprint(trained_variables(self.model)).numpy())]


def trained_variables(model: keras.Model) -> list[Any]:
    """The variables that learn."""
    found = [*model.trainable_weights]
    found += [each for one in optimizers(model).values() for each in private.trained(one)]
    return list({id(each): getattr(each, "value", each) for each in found}.values())


def compare_values(model: keras.Model, values: Values) -> None:
    """Raises AgreementError where these values or the optimizer's settings differ between the ranks. Every rank calls
    it."""
    if hvd.size() > 1:
        agreement.check_values({**values, **agreement.named("training", numbers(model.optimizer))}, *among())


def compare_decisions(model: keras.Model, epoch: int | None, logged: Mapping[str, float]) -> None:
    """Raises AgreementError where callbacks have decided differently on the ranks: on the LR of the next `epoch`, or on
    the end, None. `logged`: what they may decide by. Compares examples too. Every rank calls it."""
    if hvd.size() > 1:
        lrs = {f"LR of {name}": lr_of(each) for name, each in optimizers(model).items()}
        check_next("decision", epoch, lrs, among(), logged)
        data = getattr(call_of(model, "fit").get("x"), "data", None)
        if isinstance(data, GlobalBatches):
            data.samples.compare(among())


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

    @property
    def lr_groups(self) -> int:
        return len(getattr(self.model.optimizer, "optimizers", (None,)))

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
        data, names = self.data, ("batch_size", "seed", "shuffle")
        return {**{name: getattr(data, name) for name in names}, **data.examples.contents()} if data else {}
