"""What the checks of the exercise run on each rank: it calls the learner's function."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain import datasets
from hvdtrain.core.progress import Epoch
from labtools.worker import tell

BASE_LR, BASE_BATCH = 0.1, 50
_MOMENTUM = 0.5
_RESUMED_STEPS = 3

Array = NDArray[Any]


class World(NamedTuple):
    """What a rank knows after the learner's init(): whether Horovod runs, its rank and size; whether init() gave back
    a function in place of calling it; whether torch.distributed runs."""

    running: bool
    rank: int | None
    size: int | None
    uncalled: bool
    distributed: bool = False


class Trained(NamedTuple):
    """A rank's weights, slope and intercept: before the broadcast [2], from then on after every step [steps + 1, 2]."""

    before: Array
    path: Array


def world(init: Callable[[], Any]) -> World:
    import horovod.torch as hvd
    from torch import distributed

    result = init()
    tell(None)
    running = bool(hvd.is_initialized())
    rank, size = (hvd.rank(), hvd.size()) if running else (None, None)
    return World(running, rank, size, callable(result), distributed.is_available() and distributed.is_initialized())


def local_batches(shard: Callable[[Array], Any], batches: Sequence[Array]) -> list[Array | None]:
    """This rank's local batch of each batch, where Horovod sees two ranks on each machine."""
    _init_on_machines_of_two()
    returned = [shard(batch.copy()) for batch in batches]
    return [None if local is None else np.atleast_1d(np.asarray(local)).ravel() for local in returned]


def gradient(shard: Callable[[Array], Any], batch: Array) -> float:
    """The gradient for the slope, at slope and intercept 0, over this rank's local batch."""
    import torch

    _init_on_machines_of_two()
    x, y = map(torch.from_numpy, _points())
    slope = torch.zeros(1, requires_grad=True)
    local_batch = np.asarray(shard(batch))
    torch.nn.functional.mse_loss(slope * x[local_batch], y[local_batch]).backward()
    assert slope.grad is not None
    return float(slope.grad)


def rates(scale: Callable[[float, int, int], Any], cases: Sequence[tuple[float, int, int]]) -> list[float | None]:
    """The LR of each case (base_lr, base_batch, local_batch_size), where Horovod sees two ranks on each machine."""
    _init_on_machines_of_two()
    given = [scale(*case) for case in cases]
    return [None if rate is None else float(rate) for rate in given]


def train(
    wrap: Callable[[Any, Any], Any],
    broadcast: Callable[[Any, Any], Any],
    lr: float | Array,
    resumed: bool = False,
    local_batch_size: int = 50,
    epochs: int = 1,
) -> Trained | None:
    """The line fitted from random weights, different on each rank. None where `wrap` returns nothing.

    `lr` may be an array [rank]. `resumed`: rank 0 has made a few steps before, as though it had read a checkpoint.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    rate = float(np.broadcast_to(lr, hvd.size())[hvd.rank()])
    plain = torch.optim.SGD(model.parameters(), lr=rate, momentum=_MOMENTUM)
    x, y = map(torch.from_numpy, _points())
    if resumed and hvd.rank() == 0:
        for _ in range(_RESUMED_STEPS):
            _step(model, plain, x, y)
    before = _weights(model)
    momentum = plain.state_dict()
    optimizer = wrap(plain, model)
    if optimizer is None:
        return None
    if resumed and hvd.rank() == 0:
        optimizer.load_state_dict(momentum)  # a DistributedOptimizer begins without the state of the one it wraps
    broadcast(model, optimizer)
    tell(None)
    path = [_weights(model)]
    global_batch = local_batch_size * hvd.size()
    for epoch in range(epochs):
        order = Epoch.shuffled(len(x), 0, epoch, 0)
        for start in range(0, len(x), global_batch):
            local_batch = order.local_batch(start, global_batch, hvd.rank(), hvd.size())
            _step(model, optimizer, x[local_batch], y[local_batch])
            path.append(_weights(model))
    return Trained(before, np.array(path))


def average(optimizer: Any, model: Any) -> Any:
    """Gap 4, filled right."""
    import horovod.torch as hvd

    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def broadcast_state(model: Any, optimizer: Any) -> None:
    """Gap 5, filled right."""
    import horovod.torch as hvd

    broadcast_weights(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def broadcast_weights(model: Any, optimizer: Any) -> None:
    """Gap 5, half filled: enough where no rank has momentum yet."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def _init_on_machines_of_two() -> None:
    """Initialises Horovod as though every two ranks were on a machine of their own: the local rank is not the rank."""
    import horovod.torch as hvd

    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    variables = {"HOSTNAME": f"machine-{rank // 2}", "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    variables |= {"CROSS_RANK": rank // 2, "CROSS_SIZE": size // 2}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
    hvd.init()


def _points() -> tuple[Array, Array]:
    # Not labtools.line.points: matplotlib would be loaded anew on each rank in every run.
    train = datasets.load("linear").train
    return train.read(np.arange(len(train)), None)


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    import torch

    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def _weights(model: Any) -> Array:
    return np.array([model.weight.item(), model.bias.item()])
