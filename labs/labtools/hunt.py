"""Lab 10: what a program is given, and what is measured of it on each rank: what it reads, what its network sees, and
the weights that it leaves."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labtools.ranks import Ranks
from labtools.worker import tell

TRAIN, VALID, WIDTH, CLASSES = 64, 21, 6, 3
EPOCHS, BATCH = 4, 16  # of all ranks
LOADED = ("torch._dynamo", "torch.distributed")
"""What the ranks of this lab load once: seconds in each run otherwise."""

Array = NDArray[Any]


class Recorded:
    """Examples by index, and the indices that were read."""

    def __init__(self, x: Array, y: Array, read: list[int]) -> None:
        self._x, self._y, self._read = x, y, read

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        import torch

        self._read.append(int(index))
        return torch.from_numpy(self._x[index]), int(self._y[index])


class Task:
    """What a program is given."""

    def __init__(self, seed: int, epochs: int, folder: str) -> None:
        draw = np.random.default_rng(seed)
        self.epochs, self.batch, self.seed, self.folder = epochs, BATCH, seed, folder
        self.read, self.read_partly, self.read_valid = list[int](), list[int](), list[int]()
        self.seen, self.asked = list[Array](), list[float]()
        self.first: Any = None
        self.used: Any = None
        self._rule = draw.normal(size=(WIDTH, CLASSES))
        x, y = self._draw(draw, TRAIN)
        self.x, self.y = x, y
        self.train = Recorded(x, y, self.read)
        """The training set."""
        self.partly_labelled = Recorded(x, np.where(draw.random(TRAIN) < 0.4, -100, y), self.read_partly)
        """The same, where -100 stands for a label that nobody has given."""
        self.x_valid, self.y_valid = self._draw(draw, VALID)
        self.valid = Recorded(self.x_valid, self.y_valid, self.read_valid)
        """The validation set, of 21 examples."""

    def _draw(self, draw: Any, count: int) -> tuple[Array, Array]:
        x = draw.normal(size=(count, WIDTH)).astype(np.float32)
        return x, (x @ self._rule + draw.normal(size=(count, CLASSES))).argmax(1)

    def network(self, classes: int = CLASSES) -> Any:
        """A network with two layers, `body` and `head`, and random weights."""
        import torch

        task = self

        class Network(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, classes)

            def forward(self, x: Any) -> Any:
                if torch.is_grad_enabled():
                    task.seen.append(x.detach().numpy().copy())
                    task.used = self
                    if task.first is None:
                        task.first = weights_of(self)
                return self.head(self.body(x).tanh())

        return Network()

    def scheduler(self, optimizer: Any) -> Any:
        """Halves the learning rate once the number that it is given has not fallen for four updates."""
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        asked = self.asked

        class Plateau(ReduceLROnPlateau):  # type: ignore[misc]
            def step(self, metrics: Any, epoch: Any = None) -> None:
                asked.append(float(metrics))
                super().step(metrics)

        return Plateau(optimizer, factor=0.5, patience=4)


class Found(NamedTuple):
    """What a rank has after a program, or what the program gave back in place of a network."""

    wrong: str = ""
    first: Any = None
    """The weights [n] with which a network was first used in training."""
    weights: Any = None
    """Those of the network that was given back."""
    used: bool = False
    """Whether that is the network that was used last in training."""
    changed: Sequence[bool] = ()
    """Which of its tensors have changed since."""
    classes: int = 0
    read: Sequence[int] = ()
    """The examples read, in their order."""
    partly: bool = False
    """Whether of the partly labelled set."""
    read_valid: Sequence[int] = ()
    asked: Sequence[float] = ()
    """What the scheduler was given."""
    noise: Sequence[Array] = ()
    """By update, what the network was given less what was read."""
    loss: float = 0.0
    """Over the whole training set."""
    value: Any = None
    """What the program gave back besides."""
    accuracy: float = 0.0
    """That of the network."""


def measured(program: Callable[[Task], Any], seed: int, epochs: int, folder: str, shows: bool = False) -> Found:
    """Runs a program on this rank."""
    import torch

    task = Task(seed, epochs, folder)
    torch.manual_seed(0)
    with contextlib.nullcontext() if shows else contextlib.redirect_stdout(io.StringIO()):
        given = program(task)
    tell(None)
    model, value = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, torch.nn.Module):
        return Found(wrong=f"{model!r:.60}")
    network: Any = getattr(model, "module", model)
    used = task.used is network
    with torch.no_grad():
        logits, valid = network(torch.from_numpy(task.x)), network(torch.from_numpy(task.x_valid))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(task.y)).item()
        accuracy = (valid.argmax(1).numpy() == task.y_valid).mean().item()
    ends = np.cumsum([each.numel() for each in network.state_dict().values()])[:-1]
    first, last = task.first, weights_of(network)
    same = first is not None and first.shape == last.shape
    pairs = zip(np.split(first, ends), np.split(last, ends), strict=True) if same else ()
    changed = [bool((before != after).any()) for before, after in pairs]
    with contextlib.suppress(TypeError, ValueError):
        value = None if value is None else float(value)
    read = task.read or task.read_partly
    parts = np.split(np.array(read, int), np.cumsum([len(each) for each in task.seen]))
    noise = [seen - task.x[part] for seen, part in zip(task.seen, parts, strict=False) if len(seen) == len(part)]
    return Found(
        first=first,
        weights=last,
        used=used,
        changed=changed,
        classes=logits.shape[1],
        read=read,
        partly=bool(task.read_partly),
        read_valid=task.read_valid,
        asked=task.asked,
        noise=noise,
        loss=loss,
        value=value,
        accuracy=accuracy,
    )


def weights_of(model: Any) -> Array:
    """All weights [n]."""
    return np.concatenate([each.numpy().ravel() for each in model.state_dict().values()])


def by_epoch(read: Sequence[int], epochs: int) -> list[list[int]]:
    """The indices that a rank has read, cut into epochs of equal length."""
    return [part.tolist() for part in np.array_split(np.array(read, int), epochs)]


def look(ranks: Ranks, program: Callable[[Task], Any], epochs: int = EPOCHS) -> None:
    """Runs a program on one rank and on two, and prints what each rank read, saw and has then."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        (alone,) = ranks.run(measured, program, 0, epochs, one, ranks=1)
        both = ranks.run(measured, program, 0, epochs, two, True, ranks=2)
    if wrong := next((each.wrong for each in (alone, *both) if each.wrong), ""):
        print(f"The program gave back {wrong}, and no model.")
        return
    each = [alone, *both]
    rows: dict[str, list[Any]] = {
        "": ["1 rank", "rank 0 of 2", "rank 1 of 2"],
        "updates": [len(found.noise) for found in each],
        "examples read in an epoch": [len(found.read) // epochs for found in each],
        **{
            f"the first of epoch {epoch}": [
                " ".join(map(str, by_epoch(found.read, epochs)[epoch][:6])) for found in each
            ]
            for epoch in range(min(2, epochs))
        },
        "added to the first inputs": [" ".join(f"{x:.2f}" for x in np.ravel(found.noise[:1])[:3]) for found in each],
        "loss on the training set": [f"{found.loss:.4f}" for found in each],
        "validated": [len(found.read_valid) for found in each],
        "reported": [f"{'-' if found.value is None else found.value!s:.6}" for found in each],
    }
    for name, values in rows.items():
        print(f"{name:26}" + "".join(f"{value!s:>23}" for value in values))
    print(f"{'weights, ranks 0 and 1':26}{apart(both[0], both[1]):>23}")
    print(f"{'weights, 1 rank and 2':26}{apart(alone, both[0]):>23}")


def resumed(ranks: Ranks, program: Callable[[Task], Any]) -> None:
    """Runs a program on two ranks to its end, and once more with a pause in the middle; prints how they differ."""
    straight, paused = through_and_paused(lambda *given: ranks.run(measured, program, 0, *given, ranks=2))
    print(f"{'weights, with and without a pause':35}{apart(straight[0], paused[0])}")


def through_and_paused(run: Callable[[int, str], Sequence[Found]]) -> tuple[Sequence[Found], Sequence[Found]]:
    """What run(epochs, folder) finds after all epochs, and after all with a second launch for the second half."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        straight = run(EPOCHS, one)
        run(EPOCHS // 2, two)
        return straight, run(EPOCHS, two)


def apart(one: Found, other: Found) -> str:
    """The largest difference of two ranks' weights."""
    if np.shape(one.weights) != np.shape(other.weights):
        return "of different shapes"
    return f"apart by {np.abs(one.weights - other.weights).max():.1g}"
