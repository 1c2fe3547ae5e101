"""hvdtrain's loop and a hand-written Horovod loop, epoch by epoch in turn, in the same processes.

Both train the same network on the CPU, on the same pictures with the same optimiser and precision; the hand-written
one does what such a script does and no more: no guard, no log, no exact metrics, no order kept over ranks. hvdtrain's
logs as a run does, into a temporary folder; checkpoints and validation are in neither time.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain import output
from hvdtrain import plan as plans
from hvdtrain import recipe as recipes
from hvdtrain.run import Run, load_dataset
from hvdtrain.topology import discover
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.models import resnet50
from hvdtrain.torch.train import Training, open_engine


def hand_written(run: Run) -> Callable[[], float]:
    """The bare loop: a function that trains one epoch and returns the seconds of one step."""
    recipe, dataset = run.recipe, run.dataset
    x, y = next(
        Loader(recipe, dataset, torch.device("cpu")).batches(dataset.train, [(np.arange(len(dataset.train)), None)])
    )
    data = TensorDataset(x, y)
    sampler: DistributedSampler = DistributedSampler(data, hvd.size(), hvd.rank())
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
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss_of = nn.CrossEntropyLoss()

    def epoch() -> float:
        model.train()
        began = time.perf_counter()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - began) / len(loader)

    return epoch


def ours(run: Run, engine: Engine) -> Callable[[], float]:
    """hvdtrain's loop, with its log, metrics and guard: the same."""
    training = Training(run, engine)

    def epoch() -> float:
        training.progress.sample = 0
        before, began = training.progress.step, time.perf_counter()
        training.train_epoch()
        return (time.perf_counter() - began) / (training.progress.step - before)

    return epoch


def main(recipe_name: str, rounds: int) -> None:
    topology = discover(os.environ)
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant", "device": "cpu"})
    dataset = load_dataset(recipe)
    plan = plans.make(recipe, topology, dataset)
    with tempfile.TemporaryDirectory() as folder:
        start = output.start(plan, topology, "torch", Path(folder, "run"), "never") if topology.is_chief else None
        run = Run("torch", recipe, "horovod", topology, dataset, plan, start)
        with Path(folder, "log").open("w") as log, contextlib.redirect_stdout(log):
            seconds = measure(run, rounds)
    if topology.is_chief:
        tell(run, {name: times[1:] for name, times in seconds.items()})


def measure(run: Run, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, averaged over the ranks, in each round of each loop."""
    engine = open_engine(run)
    loops = {"hvdtrain": ours(run, engine), "hand-written": hand_written(run)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name, epoch in sorted(loops.items(), reverse=bool(turn % 2)):
            seconds[name].append(float(engine.sum(np.array([epoch()]))[0]) / engine.size)
    engine.close()
    return seconds


def tell(run: Run, seconds: dict[str, list[float]]) -> None:
    """Prints a line for each loop and the ratio of their medians, and all of it as JSON."""
    for name, times in seconds.items():
        low, high = 1e3 * min(times), 1e3 * max(times)
        print(f"{name:13}{1e3 * statistics.median(times):9.2f} ms a step ({low:.2f} to {high:.2f})")
    ratios = [a / b for a, b in zip(seconds["hvdtrain"], seconds["hand-written"], strict=True)]
    ratio, spread = statistics.median(ratios), f"{min(ratios):.4f} to {max(ratios):.4f}"
    print(f"ratio        {ratio:9.4f} ({spread} over {len(ratios)} rounds; {run.topology.size} ranks)")
    print(json.dumps({"bench": "overhead", "recipe": run.recipe.name, "ratio": ratio, "step_seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
