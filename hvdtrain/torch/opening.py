"""Which engine a run has, joined with the other ranks and bound to its device."""

from contextlib import AbstractContextManager

import torch

from hvdtrain.core.optimizers import FUSED
from hvdtrain.core.own_code import MODELS, is_path
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines import registry
from hvdtrain.engines.registry import Setup
from hvdtrain.run import engine as engines
from hvdtrain.run.run import Run
from hvdtrain.torch import devices
from hvdtrain.torch.engines import Engine


def engine_of(run: Run) -> AbstractContextManager[Engine]:
    """The run's engine, of the world that the launcher promised, until the block ends. Raises HvdtrainError, also where
    another rank is lost within the block."""
    engine = open_engine(run)
    return engines.joined(run.world, run.engine, engine, engine.rank, engine.size, run.given())


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    return opened(run.engine, engines.setup_of(run))


def opened(name: str, setup: Setup) -> Engine:
    """The engine of that name, joined with the other ranks and bound to its device."""
    devices.take_threads(setup.topology)
    engine: Engine = registry.load(name, "torch").open(setup)
    return engine


def is_one_graph(recipe: Recipe, engine: str, device: torch.device) -> bool:
    """Whether the whole update is one CUDA graph: not with a loss scale, phases to be measured apart, or
    an optimizer whose kernels no graph is known to hold."""
    whole = engine == "local" and device.type == "cuda" and recipe.compile and recipe.optimizer in FUSED
    ours = recipe.model in MODELS and not is_path(recipe.dataset)  # the user's code may do what no capture can hold
    return whole and ours and recipe.precision != "float16" and not recipe.profile
