"""Lightning's DDP for ranks that any launcher started."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy

from hvdtrain.core.settings import OwnEngineSettings
from hvdtrain.lightning.environment import OneDevice, RankEnvironment
from hvdtrain.torch.engines.ddp import DdpEngine


class RankDDPStrategy(OneDevice, DDPStrategy):
    """DDP over the ranks of the launcher, also where hosts have unequal numbers of them.

    Validation goes past DistributedDataParallel, which would exchange buffers in every batch: ranks may then have
    unequal numbers of batches, and no example has to be read twice.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=hl.RankDDPStrategy(), accelerator="cpu", logger=False)
    """

    strategy_name = "rank_ddp"
    engine = "ddp"

    def __init__(self, **settings: Any) -> None:
        """Settings as DDPStrategy's."""
        self.environment = settings.setdefault("cluster_environment", RankEnvironment())
        super().__init__(**settings)

    def on_train_start(self) -> None:
        self.agree_to_train()

    def sum(self, array: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(array.copy()).to(self.root_device)
        torch.distributed.all_reduce(total)
        return total.cpu().numpy()

    def library(self) -> DdpEngine:
        return DdpEngine(OwnEngineSettings(), self.environment.topology, self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's; a mean of whole numbers, as those of examples, is a float64, and not cut off."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in {"mean", "avg"}:
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def on_validation_start(self) -> None:
        """Each rank has BatchNorm's statistics of its own examples: rank 0's, which a checkpoint holds, are taken."""
        _sync_module_states(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.precision_plugin.val_step_context():
            return module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.precision_plugin.test_step_context():
            return module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.precision_plugin.predict_step_context():
            return module.predict_step(*args, **kwargs)
