"""A ResNet50 split over several devices of one process, the micro-batches in a pipeline: for a model that does not fit
into one."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.engines.registry import Setup
from hvdtrain.errors import DeviceError
from hvdtrain.torch import resnet
from hvdtrain.torch.engines import Forward
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.objective import call


class ModelParallelEngine(LocalEngine):
    """One process whose devices hold consecutive layers; see `Engine` for the methods.

    The micro-batches (accumulation_steps) follow one another through the devices (GPipe: Huang et al. 2019,
    arXiv:1811.06965): while one computes a micro-batch, the device before it computes the next. The first device takes
    the images and the labels.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = [torch.device(device) for device in devices]
        self.notes = (
            f"the layers are split over {', '.join(devices)}; --accumulation-steps N pipelines N micro-batches",
        )
        super().__init__(self._devices[0])

    @classmethod
    def open(cls, setup: Setup) -> "ModelParallelEngine":
        return cls(setup.devices)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple["Stages", torch.optim.Optimizer]:
        return Stages(model, self._devices), optimizer

    def outputs(self, network: "Stages", inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        return iter(network.pipelined(inputs))


class Stages:
    """A model's layers on their devices. Raises DeviceError where there are fewer layers than devices."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        layers = _layers(model)
        if len(layers) < len(devices):
            raise DeviceError(
                f"{type(model).__name__} has {len(layers)} layers to split, fewer than {len(devices)} devices; take "
                "fewer --devices, or a larger model."
            )
        cuts = np.array_split(np.arange(len(layers)), len(devices))
        self._home = devices[0]
        self._stages = [
            (device, nn.Sequential(*(layers[index] for index in cut)).to(device))
            for device, cut in zip(devices, cuts, strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs on the first device."""
        return self.pipelined([x])[0]

    def pipelined(self, micro_batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each micro-batch's outputs. GPUs compute what is queued in one tick at the same time."""
        values = list(micro_batches)
        for tick in range(len(micro_batches) + len(self._stages) - 1):
            for index, (device, stage) in enumerate(self._stages):
                if 0 <= tick - index < len(micro_batches):
                    values[tick - index] = stage(values[tick - index].to(device, non_blocking=True))
        return [value.to(self._home) for value in values]


def _layers(model: Any) -> list[nn.Module]:
    """What may be put on different devices, in the order of computing."""
    if isinstance(model, nn.Linear):
        return [model]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [block for name in resnet.BLOCKS for block in getattr(model, name)]
    return [stem, *blocks, nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)]
