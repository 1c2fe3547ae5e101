"""What `fit` trains, as a run's hooks need it: variables by name, totals, fingerprints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.core.progress import Progress
from hvdtrain.core.totals import Totals
from hvdtrain.keras.global_batches import GlobalBatches
from hvdtrain.run.own import take_data
from hvdtrain.tensorflow import devices, models, networks
from hvdtrain.tensorflow.copies import Copies
from hvdtrain.tensorflow.engines.horovod import HorovodEngine
from hvdtrain.tensorflow.events import EventWriter
from hvdtrain.tensorflow.state import State as OfVariables


class NoScaler:
    """A loss scale is a variable of Keras's optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class State(OfVariables):
    """All variables of a model and its optimizer, `model.PATH` and `optimizer.PATH`; see `hvdtrain.run.loop.State`."""

    def __init__(self, model: keras.Model) -> None:
        self.tensors, self.scaler = {}, NoScaler()
        self._copies, self._optimizer = Copies(), model.optimizer
        named = [("model", each) for each in model.weights]
        named += [("optimizer", each) for each in model.optimizer.variables]
        for owner, variable in named:
            name = f"{owner}.{variable.path.replace('/', '.')}"
            while name in self.tensors:  # Keras may repeat the names of nested layers
                name += "_"
            self.tensors[name] = variable.value

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), **numbers(self._optimizer)}


def numbers(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The settings of a Keras optimizer: its LR now, momentum, betas."""
    config = optimizer.get_config() | {"learning_rate": float(optimizer.learning_rate)}
    return {name: value for name, value in config.items() if isinstance(value, bool | int | float | None)}


class Replica:
    """A rank's model under `fit`; see `hvdtrain.run.loop.Replica`."""

    def __init__(self, model: keras.Model, engine: HorovodEngine, seed: int) -> None:
        self.model, self.engine, self.state, self._seed = model, engine, State(model), seed
        self._seed_states = networks.seed_states(model)
        self._seen = np.zeros(2)

    def seed(self, step: int) -> None:
        """Begins the random numbers of Dropout and its like anew, as a function of the step: a resumed run draws what
        the undisturbed one drew."""
        for index, state in enumerate(self._seed_states):
            state.assign([hash((self._seed, step, self.engine.rank, index)) % 2**32, 0])

    def begin_epoch(self) -> None:
        """Keras's metrics are 0 again."""
        self._seen = np.zeros(2)

    def events(self, folder: Path, first_step: int) -> EventWriter:
        return EventWriter(folder, first_step)

    def totals(self) -> Totals:
        """Of the loss that Keras shows; none where the model has a train_step that shows none."""
        means = (metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "total"))
        metric = next(means, None)
        now = np.array([float(metric.total), float(metric.count)]) if metric else self._seen
        (loss, count), self._seen = now - self._seen, now
        return Totals(float(loss), float(count))

    def gradient_norm(self) -> None:
        """Keras's own train_step keeps no gradients."""

    def after_first_step(self) -> tuple[str, ...]:
        return ()

    def settings(self) -> dict[str, Any]:
        return devices.settings()

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine)  # type: ignore[arg-type]

    def fingerprints(self) -> list[int]:
        return [int(models.fingerprint([weight.value for weight in self.model.trainable_weights]).numpy())]


class Program:
    """The rest of what `fit` trains; see `hvdtrain.run.own.Program`."""

    def __init__(self, model: keras.Model, data: GlobalBatches | None) -> None:
        self.model, self.data = model, data

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
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def metadata(self) -> dict[str, Any]:
        return {"data": self._order}

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """See `take_data`."""
        return take_data(meta.get("data", {}), self._order, progress)

    @property
    def _order(self) -> dict[str, Any]:
        """What the order of the samples follows from."""
        data = self.data
        return {"batch_size": data.batch_size, "seed": data.seed, **data.examples.contents()} if data else {}
