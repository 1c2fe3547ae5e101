"""hvdtrain's loop and a hand-written Horovod or DDP loop, interleaved step by step, in the same processes.

All train the same network on the CPU, on the same images with the same optimiser and precision; the hand-written
one does what such a script does and no more: no guard, no log, no exact metrics, no order kept over ranks. Both have
the one core of Horovod, which does not fuse, as hvdtrain wants it: over MPI that makes the hand-written loop faster.
hvdtrain's logs as a run does, into a temporary folder; checkpoints and validation are in no time. Beside DDP,
Lightning's Trainer trains the network too, where it is installed.
"""

import importlib.util
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.tools.bench.workers import overhead
from hvdtrain.torch.data import Loader
from hvdtrain.torch.models import resnet50
from hvdtrain.torch.opening import open_engine
from hvdtrain.torch.trainer import Trainer


def training(run: Run) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """What such a script begins with: network, optimiser, and this rank's local batches of the images."""
    recipe, dataset = run.recipe, run.dataset
    x, y = next(
        Loader(recipe, dataset, torch.device("cpu")).batches(dataset.train, [(np.arange(len(dataset.train)), None)])
    )
    data = TensorDataset(x, y)
    sampler: DistributedSampler = DistributedSampler(data, run.topology.size, run.topology.rank)
    loader = DataLoader(data, run.plan.worker_batch, sampler=sampler, drop_last=True)
    torch.manual_seed(recipe.seed)
    model = resnet50(dataset.classes or 0, recipe.stem)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=run.plan.peak_lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        fused=recipe.fused_optimizer or None,
    )
    return model, optimizer, loader


def hand_written(run: Run) -> overhead.Steps:
    """The bare loop."""
    model, optimizer, loader = training(run)
    network, optimizer = (_ddp if run.engine == "ddp" else _horovod)(model, optimizer)
    loss_of = nn.CrossEntropyLoss()
    while True:
        network.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(network(inputs), labels)
            loss.backward()
            optimizer.step()
            yield


def _horovod(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return model, optimizer


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    return nn.parallel.DistributedDataParallel(model), optimizer


def loops(run: Run) -> overhead.Loops:
    """All loops over one engine."""
    engine = open_engine(run)
    driver = None
    if run.engine == "ddp" and importlib.util.find_spec("lightning"):
        from hvdtrain.tools.bench.workers.lightning_overhead import driver_of

        driver = driver_of(run, training(run))
    return overhead.Loops(
        overhead.ours(Loop(run, Trainer(run, engine))), hand_written(run), engine.sum, engine.close, driver
    )


if __name__ == "__main__":
    overhead.main("torch", loops, sys.argv[1:])
