"""Programs of tensorflow_keras_programs.py that read a GlobalBatches in each role, and note which rows."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest
from keras import layers

import hvdtrain.keras as ours
from hvdtrain.errors import DataError
from hvdtrain.keras import fault_tolerance
from hvdtrain.tensorflow.data import split

ROWS, BATCH, EPOCHS = 26, 4, 3
X = np.arange(ROWS, dtype="float32")[:, None]
Y = X * 2 + (X > 20) * 100  # the last rows weigh much
TEXTS = np.array(["a", "bc", "def ghi"] * ROWS, object)[:ROWS]


class Recorder(keras.Model):
    """Notes the first input of each row that a step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.seen = layers.Dense(1, kernel_initializer="ones", name="last"), list[list[Any]]()
        self.last.build((None, 1))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.last(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.seen.append(np.ravel(next(iter(x.values())) if isinstance(x, dict) else x).tolist())
        return super().train_step((x["x"] if isinstance(x, dict) else x, y))


class Changing(keras.utils.PyDataset):
    """Items whose rows are 10 times the epoch and the number of an item, which are shuffled between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.order, self.calls = 0, np.arange(6), list[str]()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        number = 10.0 * self.level + self.order[index]
        return np.full((BATCH, 1), number), np.zeros((BATCH, 1))

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.level += 1
        np.random.shuffle(self.order)


class Disturbed(keras.callbacks.Callback):
    """Makes rank 0 late at an epoch's end; stops all ranks after `left` updates."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        time.sleep(0.1 * (ours.rank() == 0))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.left and self.model.optimizer.iterations == self.left:
            os.kill(os.getpid(), signal.SIGTERM)


def made() -> Recorder:
    model = Recorder()
    optimizer = ours.DistributedOptimizer(keras.optimizers.SGD(0.0, name="sgd"))
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    return model


def trained(folder: Path | None, data: Any, left: int = 0, model: Any = None, **more: Any) -> list[list[Any]]:
    """The rows of each step of one fit; with a folder under FaultTolerance."""
    fault_tolerance.TRAINED.clear()  # as if it were another process
    np.random.seed()
    model = model or made()
    model.seen.clear()
    run = ours.FaultTolerance(folder, data, checkpoint_every_steps=100) if folder else ours.BroadcastCallback()
    with contextlib.suppress(SystemExit) if left else contextlib.nullcontext():
        model.fit(data, verbose=0, callbacks=[run, Disturbed(left)], **{"epochs": EPOCHS, **more})
    return [*model.seen]


def arrays(**more: Any) -> Any:
    return ours.GlobalBatches((X, Y), BATCH, **more)


FITS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "few steps": (arrays, {"steps_per_epoch": 4}),
    "many steps": (arrays, {"steps_per_epoch": 8, "epochs": 2}),
    "in order": (lambda: arrays(shuffle=False), {"epochs": 2}),
    "changing": (lambda: ours.GlobalBatches(Changing(), BATCH), {"steps_per_epoch": 8}),
    "texts": (
        lambda: ours.GlobalBatches(({"text": TEXTS, "x": X, "wide": np.ones((ROWS, 2, 3))}, Y), BATCH),
        {"epochs": 1, "shuffle": False},
    ),
}
"""By name, the data and what fit is given."""
LEFT = 9
"""After how many updates what is stopped is stopped."""


def reads(folder: str, left: Sequence[str] = ()) -> dict[str, Any]:
    """By fit, the rows of each step; and those of the fits that were `left` and resumed."""
    horovod.tensorflow.shutdown = lambda: None  # by what is stopped: a process cannot begin it a second time
    found = {name: trained(None, data(), **more) for name, (data, more) in FITS.items()}
    for name in left:
        data, more = FITS[name]
        parts = [trained(Path(folder, name), data(), stopped, **more) for stopped in (LEFT, 0)]
        found[f"{name}, left"] = [step for part in parts for step in part]
    return json.loads(json.dumps(found, default=bytes.decode))


def roles() -> dict[str, Any]:
    """What other roles read."""
    data, model, average = arrays(), made(), ours.MetricAverageCallback()
    first = trained(None, data, model=model, epochs=1)
    model.evaluate(data, verbose=0)
    second = trained(None, data, model=model, epochs=1)
    third = trained(None, data, model=model, epochs=3, initial_epoch=2)
    fit = {"callbacks": [ours.BroadcastCallback(), average], "verbose": 0}
    valid = ours.GlobalBatches((X[:25], Y[:25]), BATCH)  # its last batch has one row
    changing = Changing()
    hooked = ours.GlobalBatches(changing, BATCH)
    trained(None, hooked, epochs=2)
    changed = split(Changing(), "the set")
    changed.enter(1, ended=True)
    with pytest.raises(DataError) as refused:
        changed.enter(1)
    return {
        "refused": str(refused.value),
        "several fits": [*first, *second, *third],
        "validated": model.fit(data, validation_data=valid, **fit).history["val_mae"],
        "validated, 2 steps": model.fit(data, validation_data=valid, validation_steps=2, **fit).history["val_mae"],
        "evaluated": model.evaluate(valid, verbose=0, callbacks=[average]),
        "evaluated, 2 steps": model.evaluate(valid, steps=2, verbose=0, callbacks=[average]),
        "predicted": np.ravel(model.predict(valid, verbose=0)).tolist(),
        "predicted, 2 steps": np.ravel(model.predict(valid, verbose=0, steps=2)).tolist(),
        "hooks": changing.calls,
    }
