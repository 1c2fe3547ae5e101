"""hvdtrain's loop and a hand-written Horovod loop, epoch by epoch in turn, in the same processes.

Both train the same network on the same pictures with the same optimiser and precision; the hand-written one
does what such a script does and no more: no guard, no log, no exact metrics, no order kept over ranks.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain import plan as plans
from hvdtrain import recipe as recipes
from hvdtrain.run import Run, load_dataset
from hvdtrain.topology import discover
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines.horovod import HorovodEngine
from hvdtrain.torch.models import resnet50
from hvdtrain.torch.train import Training


def hand_written(run: Run) -> Callable[[], float]:
    """The bare loop: a function that trains one epoch and returns the seconds of one step."""
    recipe, dataset = run.recipe, run.dataset
    x, y = next(Loader(recipe, dataset, torch.device("cpu")).batches(dataset.train, [(_all(dataset.train), None)]))
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


def ours(run: Run, engine: HorovodEngine) -> Callable[[], float]:
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
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant"})
    dataset = load_dataset(recipe)
    run = Run(recipe, "horovod", topology, dataset, plans.make(recipe, topology, dataset), None)
    engine = HorovodEngine(recipe, None)
    loops = {"hvdtrain": ours(run, engine), "hand-written": hand_written(run)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name, epoch in sorted(loops.items(), reverse=bool(turn % 2)):
            seconds[name].append(float(engine.sum(np.array([epoch()]))[0]) / engine.size)
    engine.close()
    if topology.is_chief:
        tell(run, {name: times[1:] for name, times in seconds.items()})


def tell(run: Run, seconds: dict[str, list[float]]) -> None:
    """Prints a line for each loop and the ratio of their medians, and all of it as JSON."""
    for name, times in seconds.items():
        low, high = 1e3 * min(times), 1e3 * max(times)
        print(f"{name:13}{1e3 * statistics.median(times):9.2f} ms a step ({low:.2f} to {high:.2f})")
    ratio = statistics.median(a / b for a, b in zip(seconds["hvdtrain"], seconds["hand-written"], strict=True))
    print(f"ratio        {ratio:9.4f} (median over {len(seconds['hvdtrain'])} rounds; {run.topology.size} ranks)")
    print(json.dumps({"bench": "overhead", "recipe": run.recipe.name, "ratio": ratio, "step_seconds": seconds}))


def _all(split: object) -> np.ndarray:
    return np.arange(len(split))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
