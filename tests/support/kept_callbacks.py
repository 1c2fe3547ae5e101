"""Callbacks as public programs have them, each with another kind of state, all in one training.

`python kept_callbacks.py keras|lightning STEP`: is killed in that step of the run "left". With -1 it continues
that run, trains another, "whole", and writes for both, as NAME.json, what each callback has at the end.
"""

import collections
import copy
import importlib.util
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kept_kinds import BATCH, EPOCHS, EXAMPLES, KINDS, OUTER, OUTSIDE, UNKEPT, Kept, OfClass, OfClassByNumber


def plain(value: Any) -> Any:
    """The value as JSON has it, with its type."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        found: Any = [[plain(key), plain(each)] for key, each in value.items()]
    elif isinstance(value, set):
        found = sorted(str(each) for each in value)
    elif isinstance(value, list | tuple | collections.deque | bytes | bytearray):
        found = [plain(each) for each in value]
    else:
        found = value if isinstance(value, float | int | str | None) else type(value).__name__
    return [type(value).__name__, str(found) if isinstance(found, int) else found]


def result(callback: Any, own: set[str]) -> Any:
    return {name: plain(value) for name, value in sorted(vars(callback).items()) if name in own}


def made(kinds: list[type], adapter: type) -> list[Any]:
    """A framework's callbacks of these kinds, for a new training."""
    for each in (OUTSIDE, OUTER, OfClass.rows):
        each.clear()
    OfClassByNumber.steps, OfClassByNumber.names = 0, ()
    return [type(each.__name__, (each, adapter), {"kind": each})() for each in kinds]


def keras_adapter() -> type:
    import keras

    class Adapter(keras.callbacks.Callback):
        kind: Any

        def __init__(self):
            keras.callbacks.Callback.__init__(self)
            if self.kind.__init__ is not object.__init__:
                self.kind.__init__(self)

        def on_epoch_begin(self, epoch, logs=None):
            self.begin_epoch(epoch)

        def on_train_batch_end(self, batch, logs=None):
            self.end_batch(self.model.get_weights())

        def on_epoch_end(self, epoch, logs=None):
            self.end_epoch(epoch, logs["loss"], self.model.get_weights())

    return Adapter


def of_keras(folder: str, kill: int) -> list[Any]:
    import keras

    import hvdtrain.keras as hvd

    hvd.init()

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    class Rows(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.appends_to = Path(f"{folder}.jsonl")

        def on_train_begin(self, logs=None):
            self.file = self.appends_to.open("a")  # which is buffered
            self.file.write("begun\n")

        def on_epoch_begin(self, epoch, logs=None):
            self.file.write(f"{epoch}\n")

        def on_train_batch_end(self, batch, logs=None):
            self.file.write(json.dumps([batch, logs["loss"]]) + "\n")

        def on_train_end(self, logs=None):
            self.file.close()

    class Shadow(Kept, keras.callbacks.Callback):
        """A model beside the one that is trained, and a metric."""

        def on_train_begin(self, logs=None):
            self.shadow, self.mean = keras.models.clone_model(self.model), keras.metrics.Mean()
            self.shadow.set_weights(self.model.get_weights())

        def on_train_batch_end(self, batch, logs=None):
            for mean, now in zip(self.shadow.weights, self.model.weights, strict=True):
                mean.assign(0.9 * mean + 0.1 * now)
            self.mean.update_state(float(np.sum(self.model.weights[0])))
            self.model.temperature *= 0.9
            self.shown = [float(np.sum(self.shadow.weights[0])), float(self.mean.result()), self.model.temperature]

    keras.utils.set_random_seed(1)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(EXAMPLES, 4))
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.temperature = 1.0
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    data = hvd.GlobalBatches((x, x[:, :2] ** 2), BATCH)
    own = made(KINDS, keras_adapter())
    run = hvd.FaultTolerance(folder, data, checkpoint_every_steps=4)
    own += [
        keras.callbacks.CSVLogger(f"{folder}.csv"),
        keras.callbacks.ModelCheckpoint(f"{folder}.keras", "loss", save_best_only=True, save_freq=4),
        Rows(),
        Shadow(),
    ]
    if importlib.util.find_spec("tensorboard"):
        own.append(keras.callbacks.TensorBoard(f"{folder}-board", update_freq=1))
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[run, *own, Kill()])
    return own


def lightning_adapter() -> type:
    from lightning.pytorch import Callback

    class Adapter(Callback):
        kind: Any

        def __init__(self):
            if self.kind.__init__ is not object.__init__:
                self.kind.__init__(self)

        def weights(self, module):
            return [each.detach().numpy().copy() for each in module.parameters()]

        def on_train_epoch_start(self, trainer, module):
            self.begin_epoch(trainer.current_epoch)

        def on_train_batch_end(self, trainer, module, *_):
            self.end_batch(self.weights(module))

        def on_train_epoch_end(self, trainer, module):
            weights = self.weights(module)
            self.end_epoch(trainer.current_epoch, float(sum(np.square(each).sum() for each in weights)), weights)

    return Adapter


def of_lightning(folder: str, kill: int) -> list[Any]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torchmetrics import MeanMetric

    import hvdtrain.lightning as hl

    class Kill(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    class Shadow(Kept, Callback):
        """A module beside the one that is trained, a metric, a scheduler, and the live weights."""

        def on_fit_start(self, trainer, module):
            self.shadow, self.mean, self.live = copy.deepcopy(module), MeanMetric(), module.state_dict()
            self.scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(self.shadow.parameters(), 1.0), 3)
            self.empty, self.best = {"losses": torch.zeros(0)}, torch.tensor(0)

        @torch.no_grad()
        def on_train_batch_end(self, trainer, module, *_):
            self.shadow.weight.lerp_(module.weight, 0.1)
            self.mean.update(module.weight.sum())
            self.scheduler.step()
            self.empty, self.best = {"losses": torch.zeros(0), "seen": 1}, self.best + 0.25
            lr, live = self.scheduler.get_last_lr(), self.live["weight"] is not None
            self.shown = [float(self.shadow.weight.sum()), float(self.mean.compute()), *lr, float(self.best), live]
            self.weight, self.count = float(module.weight.sum()), module.count

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.count = 0
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8).reshape(4, 2).double())

        def training_step(self, batch, index):
            self.count += 1
            return (batch[0] @ self.weight - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(EXAMPLES, 4)))
    data = hl.GlobalBatches(torch.utils.data.TensorDataset(x, x[:, :2] ** 2), batch_size=BATCH)
    own = made(KINDS, lightning_adapter())
    own.append(Shadow())
    run = hl.FaultTolerance(folder, checkpoint_every_steps=4)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[run, *own, Kill()], **off)
    trainer.fit(Module(), data)
    return own


NOT_OURS = {"params", "_params", "_model", "validation_data", "log", "log_dict"}


def drawn(seed: int) -> list[type]:
    """Three kinds that a checkpoint holds whole."""
    return random.Random(seed).sample([each for each in KINDS if each not in UNKEPT], 3)


def results(own: list[Any]) -> dict[str, Any]:
    """What each of these callbacks has."""
    return {type(each).__name__: result(each, set(vars(each)) - NOT_OURS) for each in own}


if __name__ == "__main__":
    train, step = {"keras": of_keras, "lightning": of_lightning}[sys.argv[1]], int(sys.argv[2])
    for folder in ["left"] if step >= 0 else ["left", "whole"]:
        own = [each for each in train(folder, step) if isinstance(each, Kept)]
        Path(f"{folder}.json").write_text(json.dumps(results(own)))
