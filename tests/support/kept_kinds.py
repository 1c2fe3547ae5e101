"""Callbacks as public programs have them, each with another kind of state, without a framework."""

import collections
import dataclasses
import datetime
import enum
import random
import time
from pathlib import Path
from typing import Any, ClassVar

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


class OfClass(Kept):
    """A list that its class holds."""

    rows: ClassVar[list[float]] = []

    def end_batch(self, weights):
        self.rows.append(float(weights[0].ravel()[0]))

    def end_epoch(self, epoch, loss, weights):
        self.length = len(self.rows)


class OfClassByNumber(Kept):
    """Numbers that its class holds, and one that hides the class's."""

    steps, names, epochs = 0, (), 0

    def end_batch(self, weights):
        OfClassByNumber.steps += 1

    def end_epoch(self, epoch, loss, weights):
        OfClassByNumber.names += (f"epoch {epoch}",)
        self.epochs += 1
        self.shown = [self.steps, list(self.names), self.epochs]


class Slotted(Kept):
    __slots__ = ("best", "meter")

    def __init__(self):
        self.best, self.meter = [], SlottedMeter()

    def end_epoch(self, epoch, loss, weights):
        self.best = [*self.best, loss]
        self.meter.count += 1
        self.shown = [self.best, self.meter.count]


class SlottedMeter:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Closed(Kept):
    """Functions that fill what is outside of them."""

    def __init__(self):
        inner = []
        self.note = lambda value: inner.append(value) or OUTER.append(value) or len(inner)

    def end_batch(self, weights):
        self.lengths = [self.note(1), len(OUTER)]


class Lazy(Kept):
    def __init__(self):
        self.counts = collections.defaultdict(lambda: 1)

    def end_epoch(self, epoch, loss, weights):
        self.counts[epoch % 2] += 1


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
OUTER: list[int] = []


KINDS = Kept.__subclasses__()
UNKEPT = {Timed, Made}
