"""Lightning's DDP for ranks that any launcher started."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy

from hvdtrain.lightning.environment import OneDevice, RankEnvironment


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
        super().__init__(**{"cluster_environment": RankEnvironment(), **settings})

    def on_train_start(self) -> None:
        self.agree_to_train(self._sum)

    def _sum(self, array: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(array.copy()).to(self.root_device)
        torch.distributed.all_reduce(total)
        return total.cpu().numpy()

    def on_validation_start(self) -> None:
        """Each rank has BatchNorm's statistics of its own examples: rank 0's, which a checkpoint holds, are taken."""
        _sync_module_states(self.lightning_module)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.precision_plugin.val_step_context():
            return module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.precision_plugin.test_step_context():
            return module.test_step(*args, **kwargs)
