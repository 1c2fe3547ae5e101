"""The engines of one process: with one device, with several that divide each batch, or that divide the layers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.core.wording import counted
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import DeviceError
from hvdtrain.torch import resnet
from hvdtrain.torch.engines import Engine, Forward, take_device
from hvdtrain.torch.objective import call


class LocalEngine(Engine):
    """One rank alone, as `Engine` itself is."""

    def __init__(self, *devices: torch.device) -> None:
        self.device, self._devices = devices[0], devices

    @classmethod
    def open(cls, setup: Setup) -> "LocalEngine":
        return cls(*(map(torch.device, setup.devices) if setup.devices else [take_device(setup)]))


ADVICE = (
    "PyTorch's documentation recommends DistributedDataParallel instead of DataParallel, even on a single node: "
    "one process drives all GPUs, and copies the model to them in every step; --engine ddp is faster"
)


class DataParallelEngine(LocalEngine):
    """One process that gives each GPU a part of the batch; see `Engine` for the methods.

    BatchNorm normalises by the statistics of each GPU's part, and keeps those of the first GPU.
    """

    notes = (ADVICE,)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.DataParallel, torch.optim.Optimizer]:
        return nn.DataParallel(model, self._devices), optimizer


class ModelParallelEngine(LocalEngine):
    """One process whose devices hold consecutive layers; see `Engine` for the methods.

    The devices form a pipeline for the micro-batches (accumulation_steps): while one device computes a micro-batch,
    the device before it computes the next (GPipe: Huang et al. 2019, arXiv:1811.06965). Images and labels are on the
    first device.
    """

    def __init__(self, *devices: torch.device) -> None:
        super().__init__(*devices)
        where = ", ".join(map(str, devices))
        self.notes = (f"the layers are split over {where}; --accumulation-steps N pipelines N micro-batches",)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple["Stages", torch.optim.Optimizer]:
        stages = Stages(model, self._devices)
        optimizer.load_state_dict(optimizer.state_dict())  # its state follows the parameters to their devices
        return stages, optimizer

    def outputs(self, network: "Stages", inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        return iter(network.pipelined(inputs))


class Stages:
    """A model's layers on their devices. Raises DeviceError where there are fewer layers than devices."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        layers = _layers(model)
        if len(layers) < len(devices):
            raise DeviceError(
                f"{type(model).__name__} has {counted(len(layers), 'layer')} to split, fewer than {len(devices)} "
                "devices; take fewer --devices, or a larger model."
            )
        cuts = np.array_split(np.arange(len(layers)), len(devices))
        self._home = devices[0]
        self._stages = [
            (device, nn.Sequential(*(layers[index] for index in cut)).to(device))
            for device, cut in zip(devices, cuts, strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.pipelined([x])[0]

    def pipelined(self, micro_batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each micro-batch's outputs, on the first device. In each tick all GPUs compute at the same time."""
        values = list(micro_batches)
        for tick in range(len(micro_batches) + len(self._stages) - 1):
            for index, (device, stage) in enumerate(self._stages):
                if 0 <= tick - index < len(micro_batches):
                    # A GPU waits for the copies issued before its kernels; a CPU would read one that is under way.
                    value = values[tick - index].to(device, non_blocking=device.type != "cpu")
                    with self._autocast(device):
                        values[tick - index] = stage(value)
        return [value.to(self._home) for value in values]

    def _autocast(self, device: torch.device) -> torch.autocast:
        """The first device's mixed precision, for a stage on this device, which may be one of another type."""
        home = self._home.type
        return torch.autocast(device.type, torch.get_autocast_dtype(home), enabled=torch.is_autocast_enabled(home))


def _layers(model: Any) -> list[nn.Module]:
    """The layers that different devices may hold, in the order in which they compute."""
    if isinstance(model, nn.Linear):
        return [model]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [block for name in resnet.BLOCKS for block in getattr(model, name)]
    return [stem, *blocks, nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)]
