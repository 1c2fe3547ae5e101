"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [flags]`.

Importing it brings `Trainer(strategy="horovod")` back for anybody's module, with classes for exact validation.
"""

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

import wrapt

from hvdtrain import installed
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import discover

installed.refuse("numpy", "torch", "lightning", "horovod", "mpi4py")

__all__ = [
    "ExactAccuracy",
    "FaultTolerance",
    "GlobalBatches",
    "HorovodStrategy",
    "ImageNetDataModule",
    "RankDDPStrategy",
    "RankEnvironment",
    "RecipeDataModule",
    "RecipeModule",
    "UnpaddedSampler",
    "mean_loss",
]

if TYPE_CHECKING:
    from hvdtrain.lightning.data import ExactAccuracy, GlobalBatches, ImageNetDataModule, UnpaddedSampler
    from hvdtrain.lightning.environment import RankDDPStrategy, RankEnvironment, mean_loss
    from hvdtrain.lightning.fault_tolerance import FaultTolerance
    from hvdtrain.lightning.recipe import RecipeDataModule, RecipeModule
    from hvdtrain.lightning.strategy import HorovodStrategy


MODULES = {
    "ExactAccuracy": "data",
    "FaultTolerance": "fault_tolerance",
    "GlobalBatches": "data",
    "HorovodStrategy": "strategy",
    "ImageNetDataModule": "data",
    "RankDDPStrategy": "environment",
    "RankEnvironment": "environment",
    "RecipeDataModule": "recipe",
    "RecipeModule": "recipe",
    "UnpaddedSampler": "data",
    "mean_loss": "environment",
}


def __getattr__(name: str) -> Any:
    """The classes, each loaded at its first use."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


def _horovod(**settings: Any) -> Any:
    """Loaded when a Trainer takes it: whoever trains with ddp needs no Horovod."""
    return __getattr__("HorovodStrategy")(**settings)


# Whenever Lightning is imported, now or later: `python -m hvdtrain.lightning` checks recipe and data before that.
@wrapt.when_imported("lightning.pytorch.strategies")
def _register(strategies: Any) -> None:
    if "horovod" not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register("horovod", _horovod, description="ranks joined by Horovod")


@wrapt.when_imported("lightning_utilities.core.rank_zero")
def _know_rank(rank_zero: Any) -> None:
    """Loggers and prepare() come before the Trainer, which alone would know the rank under horovodrun or mpirun."""
    with contextlib.suppress(HvdtrainError):  # which the Trainer raises
        rank_zero.rank_zero_only.rank = discover(os.environ).rank
