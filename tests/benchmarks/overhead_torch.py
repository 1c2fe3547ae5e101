"""hvdtrain's loop and a hand-written Horovod or DDP loop, interleaved step by step, in the same processes.

All train the recipe's network on the CPU, on the same examples with the same loss and optimiser; the hand-written one
does what such a script does and no more: no guard, no log, no metrics, no order kept over ranks, and a data set's own
random numbers as they come. Both have
the one core of Horovod, which does not fuse, as hvdtrain wants it: over MPI that makes the hand-written loop faster.
hvdtrain's logs as a run does, into a temporary folder; checkpoints and validation are in no time. Beside DDP,
Lightning's Trainer trains the network too, where it is installed, by its own DDPStrategy and by hvdtrain's strategy.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import benchmark
import numpy as np
import overhead
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.core.optimizers import settings
from hvdtrain.core.recipe import Recipe
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.torch import models, optimizers
from hvdtrain.torch.data import Examples, Loader
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.objective import Objective
from hvdtrain.torch.trainer import Trainer, open_engine


@dataclass(frozen=True)
class Training:
    """What such a script begins with; the batches are this rank's local ones."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: DataLoader
    objective: Objective

    def loss(self, network: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of `network`, which is the model or what has been put around it."""
        objective, out = self.objective, network(self.objective.inputs(batch))
        if objective._step:
            loss: Any = out[0] if isinstance(out, tuple) and isinstance(out[-1], dict) else out
        else:
            loss = objective._loss(out, batch[1], training=True)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss


class Whole(nn.Module):
    """All that is computed of a batch with gradients, as one module: what DistributedDataParallel can go around."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.compute = model, objective.forward

    def forward(self, inputs: Any) -> Any:
        return self.compute(self.model, inputs)


def training(run: Run) -> Training:
    """The recipe's model, loss, optimiser and data, without anything of hvdtrain's around them."""
    recipe, dataset = run.recipe, run.dataset
    data, collate = _data(run)
    sampler: DistributedSampler = DistributedSampler(data, run.topology.size, run.topology.rank)
    batches = DataLoader(
        data,
        run.plan.local_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=collate,
        num_workers=recipe.workers,
        persistent_workers=recipe.workers > 0,
        multiprocessing_context="forkserver" if recipe.workers else None,
    )
    engine = LocalEngine(torch.device("cpu"))
    model = models.build(recipe, dataset.classes, engine)
    objective = Objective(recipe, engine)
    return Training(Whole(model, objective), _optimizer(recipe, model, run.plan.schedule.peak_lr), batches, objective)


def _data(run: Run) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """The user's data set with its collate; of hvdtrain's all examples, normalised."""
    split = run.dataset.train
    if isinstance(split, Examples):
        return split.dataset, Float32(split.collate)
    every = np.arange(len(split)), None
    x, y = next(Loader(run.recipe, run.dataset, torch.device("cpu")).batches(split, [every]))
    return TensorDataset(x, y), None


@dataclass(frozen=True)
class Float32:
    """A collate whose floating-point numbers are the weights' kind."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return tree_map_only(torch.Tensor, self._of, self.collate(samples))

    @staticmethod
    def _of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor


def _optimizer(recipe: Recipe, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """PyTorch's own where it has the recipe's."""
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if recipe.optimizer not in kinds:
        return optimizers.make(recipe, model, lr, fused=False)
    arguments = settings(recipe).model_dump()
    return kinds[recipe.optimizer](  # type: ignore[no-any-return]
        model.parameters(), lr=lr, **arguments, fused=recipe.fused_optimizer or None
    )


def hand_written(run: Run) -> benchmark.Steps:
    """The bare loop."""
    of_recipe = training(run)
    join = _ddp if run.engine == "ddp" else _horovod
    network, optimizer = join(of_recipe.model, of_recipe.optimizer)
    while True:
        models.training_mode(of_recipe.model, run.recipe)
        for batch in of_recipe.batches:
            optimizer.zero_grad()
            loss = of_recipe.loss(network, batch)
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
    own, beside = None, None
    if run.engine == "ddp" and importlib.util.find_spec("lightning"):
        from overhead_lightning import DDPStrategy, steps

        from hvdtrain.lightning import RankDDPStrategy

        def lightning(strategy: type[DDPStrategy]) -> benchmark.Steps:
            of_recipe = training(run)
            return steps(run, of_recipe.model, of_recipe.optimizer, of_recipe.batches, of_recipe.loss, strategy)

        own, beside = lightning(DDPStrategy), lightning(RankDDPStrategy)
    ours = benchmark.ours(Loop(run, Trainer(run, engine)))
    return overhead.Loops(ours, hand_written(run), engine.sum, engine.close, own, beside)


if __name__ == "__main__":
    overhead.rank("torch", loops, sys.argv[1:])
