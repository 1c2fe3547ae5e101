"""Lightning's strategy over a run's engine, one function an engine: its ranks and its device."""

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from hvdtrain.lightning.ddp import RankDDPStrategy
from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.run.run import Run
from hvdtrain.torch.engines import Engine


def local(run: Run, engine: Engine) -> Strategy:
    """One process and its device."""
    return SingleDeviceStrategy(device=engine.device)


def ddp(run: Run, engine: Engine) -> Strategy:
    """The ranks that torch.distributed has joined."""
    return _RunDDP(engine, **_ranks(run, engine))


def horovod(run: Run, engine: Engine) -> Strategy:
    """The ranks that Horovod has joined."""
    from hvdtrain.lightning.strategy import HorovodStrategy  # which imports Horovod

    class RunHorovod(HorovodStrategy):
        """Without a collective around validation, which a rank without validation examples would not reach."""

        def on_validation_start(self) -> None:
            """The callback has averaged BatchNorm's statistics."""

    return RunHorovod(compression=run.recipe.compression, **_ranks(run, engine))


def _ranks(run: Run, engine: Engine) -> dict[str, Any]:
    return {"parallel_devices": [engine.device], "cluster_environment": RankEnvironment(run.topology)}


class _RunDDP(RankDDPStrategy):
    """The DistributedDataParallel of the engine, with its compression; and no collective around validation."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        super().__init__(**settings)
        self._engine = engine

    def _setup_model(self, model: torch.nn.Module) -> Any:
        network, _ = self._engine.wrap(model, torch.optim.SGD(model.parameters()))
        return network

    def on_validation_start(self) -> None:
        """The callback has averaged BatchNorm's statistics."""
