"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [flags]`.

Importing it brings `Trainer(strategy="horovod")` back for any module, with data that validates each example once.
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
    "FaultTolerance",
    "GlobalBatches",
    "HorovodStrategy",
    "RankDDPStrategy",
    "RankEnvironment",
    "RecipeDataModule",
    "RecipeModule",
    "mean_loss",
]

if TYPE_CHECKING:
    from hvdtrain.lightning.data import GlobalBatches
    from hvdtrain.lightning.environment import RankDDPStrategy, RankEnvironment, mean_loss
    from hvdtrain.lightning.fault_tolerance import FaultTolerance
    from hvdtrain.lightning.recipe import RecipeDataModule, RecipeModule
    from hvdtrain.lightning.strategy import HorovodStrategy


MODULES = {
    "GlobalBatches": "data",
    **dict.fromkeys(("RankDDPStrategy", "RankEnvironment", "mean_loss"), "environment"),
    "FaultTolerance": "fault_tolerance",
    **dict.fromkeys(("RecipeDataModule", "RecipeModule"), "recipe"),
    "HorovodStrategy": "strategy",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Imports a public class at its first use."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


def _horovod(**settings: Any) -> Any:
    """Imports Horovod only when a Trainer takes this strategy: with ddp none need be installed."""
    return __getattr__("HorovodStrategy")(**settings)


# As soon as Lightning is imported: `python -m hvdtrain.lightning` checks recipe and data before that.
@wrapt.when_imported("lightning.pytorch.strategies")
def _register(strategies: Any) -> None:
    if "horovod" not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register("horovod", _horovod, description="ranks joined by Horovod")


@wrapt.when_imported("lightning.fabric.plugins.environments.mpi")
def _start_no_mpi(mpi: Any) -> None:
    """Lightning starts MPI to see whether a launcher did; a rank of another launcher that is killed would then leave
    MPI's shared memory."""
    with contextlib.suppress(HvdtrainError):
        if (rank := discover(os.environ)).size > 1 and not rank.row.mpi:
            mpi.MPIEnvironment.detect = staticmethod(lambda: False)


@wrapt.when_imported("lightning_utilities.core.rank_zero")
def _know_rank(rank_zero: Any) -> None:
    """Tells loggers and prepare(), which may come before the Trainer, the rank under horovodrun or mpirun."""
    with contextlib.suppress(HvdtrainError):  # the Trainer raises it
        rank_zero.rank_zero_only.rank = discover(os.environ).rank
