"""A user's program with Keras and FaultTolerance: `python tensorflow_fault_tolerance.py FOLDER JSON`.

Each entry of the JSON list is one `fit`: `folder`, and what happens: `signal` to the last rank after `at` steps. A
program that ends well writes its weights' digest to `FOLDER/rank-N.json`, by folder.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from small import hold

import hvdtrain.keras as hvd
from hvdtrain.ranks import timeouts

EXAMPLES, EPOCHS = 50, 3
SIZE = 8


class Cells:
    """Images with a mask, turned at random."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image = np.random.default_rng(index).random((SIZE, SIZE, 1))
        turned = np.rot90(image, random.randrange(4))
        return turned, (turned > 0.5).astype(float)


class Extremes(keras.metrics.Metric):
    """The extremes of the outputs, in variables that are no sums."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.low, self.high = (self.add_weight((), "zeros", name=name) for name in ("low", "high"))

    def reset_state(self) -> None:
        self.low.assign(np.inf)
        self.high.assign(-np.inf)

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        self.low.assign(keras.ops.minimum(self.low, keras.ops.min(out)))
        self.high.assign(keras.ops.maximum(self.high, keras.ops.max(out)))

    def result(self) -> dict[str, Any]:
        return {"lowest": self.low + 0, "highest": self.high + 0}


class Disturbed(keras.callbacks.Callback):
    """Sends the signal before its step."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given, self.steps = given, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == hvd.size() - 1 and self.given.get("at") == self.steps:
            disturb(self.given)
        self.steps += 1


def disturb(given: dict[str, Any]) -> None:
    """Sends this process the signal, once the checkpoint before is complete."""
    while not Path(given["folder"], "checkpoints", f"step-{given['at'] // 4 * 4:08}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), given["signal"])


def fit(given: dict[str, Any]) -> str:
    """Trains, and returns the digest of the weights."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.Input((SIZE, SIZE, 1)),
            keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
            keras.layers.Dropout(given.get("dropout", 0.0)),
            keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    adam = keras.optimizers.Adam(0.02, use_ema="others" in given, ema_momentum=0.9)
    model.compile(hvd.DistributedOptimizer(adam), "binary_crossentropy", metrics=["accuracy", Extremes()])
    data = hvd.GlobalBatches(Cells(), batch_size=8, seed=5)
    run = hvd.FaultTolerance(given["folder"], data, highest="accuracy", log_every_steps=1, checkpoint_every_steps=4)
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.7 if epoch else lr)
    changing = hvd.WarmupCallback(0.04, warmup_epochs=2) if given.get("warm") else slower
    mine = f"{given['folder']}-{hvd.rank()}"
    others = {
        "": [],
        "swapped": [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1.0),
            keras.callbacks.CSVLogger(f"{mine}.csv", append=True),
            keras.callbacks.TerminateOnNaN(),
        ],
        "restored": [
            keras.callbacks.EarlyStopping("loss", 1.0, patience=9, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(f"{mine}.keras", "loss", save_best_only=True),
        ],
    }[given.get("others", "")]
    callbacks = [*others[:1], hvd.MetricAverageCallback(), run, changing, *others[1:], Disturbed(given)]
    x = np.random.default_rng(7).random((EXAMPLES, SIZE, SIZE, 1))[hvd.rank() :: hvd.size()]
    model.fit(data, validation_data=(x, (x > 0.5).astype(float)), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.weights)
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    if f'"signal": {signal.SIGSTOP:d}' in sys.argv[2]:
        timeouts.SILENCE = 3.0
    hold()
    keras.backend.set_floatx("float64")
    hvd.init()
    found = {each["folder"]: fit(each) for each in json.loads(sys.argv[2])}
    (Path(sys.argv[1]) / f"rank-{hvd.rank()}.json").write_text(json.dumps(found))
