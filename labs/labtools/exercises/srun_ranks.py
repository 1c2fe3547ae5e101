"""What the checks of lab 6 run on each rank: it calls the learner's function."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.untrusted import mapping
from labtools.worker import tell

TRAIN, VALID, BATCH = 96, 21, 32  # examples; 21 are unequal parts on any number of ranks
EPOCHS = 2
KILLED_AT = 28  # the step in which the ranks of `begun` are killed, of the 30 of its one epoch

Array = NDArray[Any]


class Prepared(NamedTuple):
    """Whether Horovod runs, and an optimizer came back; a rank's weights [n] before, then, and after three steps."""

    running: bool
    returned: bool
    before: Array
    start: Array
    after: Array


class Trained(NamedTuple):
    """A rank's weights after two epochs, what it read of each set, what was reported; else why it stopped."""

    error: str = ""
    weights: Any = None
    read: Sequence[int] = ()
    validated: Sequence[int] = ()
    reported: Any = None
    steps: int = 0


class Begun(NamedTuple):
    """A launch: whether begin() gave back a run, and the step that it began at; else why it stopped."""

    error: str = ""
    returned: bool = True
    began_at: int = 0


def prepared(prepare: Callable[[Any, Any], Any]) -> Prepared:
    import horovod.torch as hvd
    import torch

    rank = int(os.environ["HOROVOD_RANK"])
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    before = _weights(model)
    optimizer = prepare(model, plain)
    tell(None)
    running, start = bool(hvd.is_initialized()), _weights(model)
    if running and optimizer is not None:
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 3)  # other examples on each rank
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return Prepared(running, optimizer is not None, before, start, _weights(model))


def ratios(accuracy: Callable[[int, int], Any], parts: Sequence[Sequence[tuple[int, int]]]) -> list[float | None]:
    """What accuracy(right, count) gives back on this rank, for each part [case][rank] of a validation set."""
    import horovod.torch as hvd

    hvd.init()
    given = [accuracy(*part[hvd.rank()]) for part in parts]
    tell(None)
    return [None if value is None else float(value) for value in given]


def trained(one_epoch: Callable[..., Any], folder: str) -> Trained:
    """Two epochs of the learner's loop in a run of its own."""
    import torch

    import hvdtrain.torch as ht

    class Recorded(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self, first: int, count: int) -> None:
            self.first, self.count, self.read = first, count, list[int]()

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> Any:
            self.read.append(int(index))
            draw = torch.Generator().manual_seed(self.first + int(index))
            x = torch.randn(4, generator=draw)
            return x, (x.sum() > 0).long()

    train, valid = Recorded(0, TRAIN), Recorded(TRAIN, VALID)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    steps = 0

    def body() -> None:
        nonlocal steps
        with ht.join() as world:
            run = world.run(folder, model, optimizer)
            train.read.clear()
            for _ in run.epochs(EPOCHS):
                one_epoch(world, run, model, optimizer, train, valid, BATCH)
            tell(None)
            steps = run.global_step

    error = refusal(body)
    if error:
        return Trained(error)
    return Trained("", _weights(model), train.read, valid.read, _reported(Path(folder)), steps)


def begun(begin: Callable[..., Any], folder: str, kill: bool) -> Begun:
    """A run of one epoch of 30 steps, killed in step 28 if `kill`, else left at its first step."""
    import torch

    import hvdtrain.torch as ht

    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    found = Begun(returned=False)

    def body() -> None:
        nonlocal found
        with ht.join() as world:
            run = begin(world, folder, model, optimizer)
            if run is None:
                return
            found = Begun(began_at=run.global_step)
            if kill:
                _until_killed(run, Path(folder), model, optimizer, data)

    error = refusal(body)
    return Begun(error) if error else found


def _until_killed(run: Any, folder: Path, model: Any, optimizer: Any, data: Any) -> None:
    import torch

    seen: set[int] = set()
    for _ in run.epochs(1):
        for x, y in run.batches(data, batch_size=4):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
            seen |= _checkpoints(folder)
            if run.global_step == KILLED_AT:
                tell(sorted(seen))
                time.sleep(0.5)  # until the message has been read
                os.kill(os.getpid(), signal.SIGKILL)


def _checkpoints(folder: Path) -> set[int]:
    """The steps of the checkpoints, once none of them is being written any more."""
    while any(each.name.endswith(".tmp") for each in (folder / "checkpoints").glob(".*")):
        time.sleep(0.02)
    return {int(each.name.removeprefix("step-")) for each in (folder / "checkpoints").glob("step-*")}


def refusal(body: Callable[[], None]) -> str:
    """The line that hvdtrain printed before it ended this rank; empty where it did not."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            body()
    except SystemExit:
        lines = [line for line in printed.getvalue().splitlines() if line.strip()]
        return lines[-1] if lines else "it ended"
    return ""


def _reported(folder: Path) -> list[dict[str, float]]:
    """The numbers of run.report by epoch."""
    usual = {"kind", "step", "epoch", "seconds", "time", "train_loss"}
    lines = files.read(folder / "metrics.jsonl").splitlines()
    records = [mapping(files.parse_json(line)) for line in lines]
    return [{k: v for k, v in each.items() if k not in usual} for each in records if each.get("kind") == "epoch"]


def _network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _weights(model: Any) -> Array:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])
