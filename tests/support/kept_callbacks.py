"""Callbacks as public programs have them, each with another kind of state, all in one training.

`python kept_callbacks.py keras|lightning STEP`: is killed in that step of the run "left". With -1 it continues
that run, trains another, "whole", and writes for both, as NAME.json, what each callback has at the end.
"""

import collections
import dataclasses
import datetime
import enum
import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES, BATCH, EPOCHS = 48, 8, 5


class Kept:
    """What is common: a framework's adapter calls these."""

    def begin_epoch(self, epoch: int) -> None: ...

    def end_batch(self, weights: list[np.ndarray]) -> None: ...

    def end_epoch(self, epoch: int, loss: float, weights: list[np.ndarray]) -> None: ...


class BestPath(Kept):
    lowest, path = float("inf"), None

    def end_epoch(self, epoch, loss, weights):
        if loss < self.lowest:
            self.lowest, self.path = loss, f"best-{epoch}.ckpt"


class Phase(Kept):
    def __init__(self):
        self.phase, self.lines = "head", []

    def end_epoch(self, epoch, loss, weights):
        self.lines.append(self.phase)
        self.phase = "all" if epoch >= 1 else self.phase


class ByEpoch(Kept):
    def __init__(self):
        self.scores = {}

    def end_epoch(self, epoch, loss, weights):
        self.scores[epoch] = loss


class Confusion(Kept):
    def __init__(self):
        self.total = np.zeros((2, 2), int)

    def end_batch(self, weights):
        self.total += (weights[0].ravel()[:4] > 0).astype(int).reshape(2, 2)


class BestWeights(Kept):
    lowest, kept = float("inf"), None

    def end_epoch(self, epoch, loss, weights):
        if loss < self.lowest:
            self.lowest, self.kept = loss, weights


class Large(Kept):
    def __init__(self):
        self.average = np.zeros((300, 300), "float32")

    def end_batch(self, weights):
        self.average = 0.9 * self.average + float(weights[0].ravel()[0])


class Norms(Kept):
    def __init__(self):
        self.norms = self.same = []

    def end_batch(self, weights):
        self.same.append(float(np.abs(weights[0]).sum()))

    def end_epoch(self, epoch, loss, weights):
        self.is_one = self.norms is self.same


class OfEpoch(Kept):
    """A list that each epoch begins anew."""

    def begin_epoch(self, epoch):
        self.of_epoch = []

    def end_batch(self, weights):
        self.of_epoch.append(float(weights[0].ravel()[0]))


class Seen(Kept):
    def __init__(self):
        self.seen = set()

    def end_batch(self, weights):
        self.seen.add((len(self.seen), round(float(weights[0].ravel()[0]), 6)))


class Moving(Kept):
    def __init__(self):
        self.window = collections.deque(maxlen=4)

    def end_batch(self, weights):
        self.window.append(np.float32(weights[0].ravel()[0]))


class ByPhase(Kept):
    def __init__(self):
        self.found = collections.defaultdict(list)

    def end_epoch(self, epoch, loss, weights):
        self.found["early" if epoch < 2 else ("late", epoch)].append(loss)


class Counted(Kept):
    def __init__(self):
        self.signs = collections.Counter()

    def end_batch(self, weights):
        self.signs[bool(weights[0].ravel()[0] > 0)] += 1


class Meter:
    def __init__(self):
        self.total, self.count, self.show = 0.0, 0, lambda value: f"{value:.3f}"

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1


class WithMeters(Kept):
    def __init__(self):
        self.meters = {"loss": Meter(), "norm": Meter()}
        self.current = self.meters["norm"]

    def end_batch(self, weights):
        self.current.update(float(np.abs(weights[0]).sum()))

    def end_epoch(self, epoch, loss, weights):
        self.meters["loss"].update(loss)
        self.shown = [[each.total, each.count] for each in self.meters.values()]


class Stage(enum.Enum):
    WARM, HOT = 1, 2


class Staged(Kept):
    stage = Stage.WARM

    def end_epoch(self, epoch, loss, weights):
        self.stage = Stage.HOT if epoch >= 2 else Stage.WARM
        self.name = self.stage.name


class Drawn(Kept):
    def __init__(self):
        self.draw, self.sum = np.random.default_rng(7), 0.0

    def end_batch(self, weights):
        self.sum += float(self.draw.random())


class DrawnPlain(Kept):
    def __init__(self):
        self.draw, self.sum = random.Random(7), 0.0

    def end_epoch(self, epoch, loss, weights):
        self.sum += self.draw.random()


class Nested(Kept):
    def __init__(self):
        self.tree = {}

    def end_epoch(self, epoch, loss, weights):
        self.tree[epoch, "best"] = {"loss": loss, "parts": (epoch, [loss, {"n": epoch}])}


class Raw(Kept):
    raw = b""

    def end_epoch(self, epoch, loss, weights):
        self.raw += bytes([epoch])
        self.more = bytearray(self.raw)


class Smoothed(Kept):
    value: Any = None

    def end_epoch(self, epoch, loss, weights):
        self.value = np.float64(loss) if self.value is None else 0.5 * self.value + 0.5 * loss


class Names(Kept):
    def __init__(self):
        self.names = np.array(["none"] * EPOCHS, object)

    def end_epoch(self, epoch, loss, weights):
        self.names[epoch] = f"epoch {epoch}"


@dataclasses.dataclass
class Record:
    best: float = float("inf")
    epoch: int = -1
    waited: int = 0


class WithRecord(Kept):
    def __init__(self):
        self.record = Record()

    def end_epoch(self, epoch, loss, weights):
        is_better = loss < self.record.best
        self.record.waited += not is_better
        self.record.best, self.record.epoch = (loss, epoch) if is_better else (self.record.best, self.record.epoch)
        self.shown = dataclasses.astuple(self.record)


class Stamped(Kept):
    def __init__(self):
        self.rows = []

    def end_epoch(self, epoch, loss, weights):
        self.rows.append({"epoch": epoch, "loss": loss, "at": datetime.datetime.now()})
        self.shown = [[each["epoch"], each["loss"], type(each["at"]).__name__] for each in self.rows]


class BestFile(Kept):
    file = Path("none")

    def end_epoch(self, epoch, loss, weights):
        self.file = Path("runs") / f"{epoch}.npz"


class Chosen(Kept):
    """Compares by a function that it chooses later."""

    better, best = None, 0.0

    def end_epoch(self, epoch, loss, weights):
        if self.better is None:
            self.better = np.less
        self.best = loss if self.better(loss, self.best or np.inf) else self.best


class Outside(Kept):
    """Fills what the program holds."""

    def __init__(self):
        self.rows = OUTSIDE

    def end_epoch(self, epoch, loss, weights):
        self.rows.append(loss)
        self.length = len(OUTSIDE)


class Stopper(Kept):
    best, wait, is_over = float("inf"), 0, False

    def end_epoch(self, epoch, loss, weights):
        self.wait = 0 if loss < self.best - 0.01 else self.wait + 1
        self.best, self.is_over = min(loss, self.best), self.wait > 2


class Plateau(Kept):
    best, cooldown, factor = None, 0, 1.0

    def end_epoch(self, epoch, loss, weights):
        if self.best is None or loss < self.best:
            self.best = loss
        self.cooldown += 1
        self.factor *= 0.5 if self.cooldown % 2 else 1.0


class Hashed(Kept):
    number = 1

    def end_batch(self, weights):
        self.number = self.number * 1_000_003 ^ int(abs(float(weights[0].ravel()[0])) * 1e12)


class Ranks(Kept):
    """A number for each batch of all epochs, as a rank's loss curve."""

    def __init__(self):
        self.curve = np.full(EPOCHS * EXAMPLES // BATCH, np.nan)
        self.at = 0

    def end_batch(self, weights):
        self.curve[self.at] = float(weights[0].ravel()[0])
        self.at += 1


class Timed(Kept):
    """What no checkpoint holds."""

    def begin_epoch(self, epoch):
        self.started = time.time()


class Made(Kept):
    judge: Any = None

    def end_epoch(self, epoch, loss, weights):
        self.judge = lambda value: value < loss


OUTSIDE: list[float] = []


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
    """A framework's callbacks of these kinds."""
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

        def on_train_batch_end(self, batch, logs=None):
            with self.appends_to.open("a") as file:
                file.write(json.dumps([batch, logs["loss"]]) + "\n")

    keras.utils.set_random_seed(1)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(EXAMPLES, 4))
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    data = hvd.GlobalBatches((x, x[:, :2] ** 2), BATCH)
    own = made(Kept.__subclasses__(), keras_adapter())
    run = hvd.FaultTolerance(folder, data, checkpoint_every_steps=4)
    own += [
        keras.callbacks.CSVLogger(f"{folder}.csv"),
        keras.callbacks.ModelCheckpoint(f"{folder}.keras", "loss", save_best_only=True, save_freq=4),
        Rows(),
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

    import hvdtrain.lightning as hl

    class Kill(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8).reshape(4, 2).double())

        def training_step(self, batch, index):
            return (batch[0] @ self.weight - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(EXAMPLES, 4)))
    data = hl.GlobalBatches(torch.utils.data.TensorDataset(x, x[:, :2] ** 2), batch_size=BATCH)
    own = made(Kept.__subclasses__(), lightning_adapter())
    run = hl.FaultTolerance(folder, checkpoint_every_steps=4)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[run, *own, Kill()], **off)
    trainer.fit(Module(), data)
    return own


NOT_OURS = {"params", "_params", "_model", "validation_data", "log", "log_dict"}
UNKEPT = {Timed, Made}


def drawn(seed: int) -> list[type]:
    """Three kinds that a checkpoint holds whole."""
    OUTSIDE.clear()
    return random.Random(seed).sample([each for each in Kept.__subclasses__() if each not in UNKEPT], 3)


def results(own: list[Any]) -> dict[str, Any]:
    """What each of these callbacks has."""
    return {type(each).__name__: result(each, set(vars(each)) - NOT_OURS) for each in own}


if __name__ == "__main__":
    train, step = {"keras": of_keras, "lightning": of_lightning}[sys.argv[1]], int(sys.argv[2])
    for folder in ["left"] if step >= 0 else ["left", "whole"]:
        OUTSIDE.clear()
        own = [each for each in train(folder, step) if isinstance(each, Kept)]
        Path(f"{folder}.json").write_text(json.dumps(results(own)))
