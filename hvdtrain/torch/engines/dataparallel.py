"""torch.nn.DataParallel over the GPUs of one process."""

from collections.abc import Sequence

import torch
from torch import nn

from hvdtrain.engines.registry import Setup
from hvdtrain.torch.engines.local import LocalEngine

ADVICE = (
    "PyTorch's documentation recommends DistributedDataParallel instead of DataParallel, even on a single node: "
    "one process drives all GPUs, and copies the model to them in every step; --engine ddp is faster"
)


class DataParallelEngine(LocalEngine):
    """One process that hands each GPU a part of the batch; see `Engine` for the methods.

    BatchNorm takes the statistics of each GPU's part, and keeps those of the first GPU.
    """

    notes: tuple[str, ...] = (ADVICE,)

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = [torch.device(device) for device in devices]
        super().__init__(self._devices[0])

    @classmethod
    def open(cls, setup: Setup) -> "DataParallelEngine":
        return cls(setup.devices)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.DataParallel, torch.optim.Optimizer]:
        return nn.DataParallel(model, self._devices), optimizer
