"""This rank's device and threads, as PyTorch has them."""

import os
from typing import Any

import torch

from hvdtrain.engines.registry import Setup
from hvdtrain.launch.devices import gpu_index, threads
from hvdtrain.launch.topology import Topology


def take(setup: Setup, *, gpu_operations: bool = True) -> torch.device:
    """The rank's own device, which it is bound to; `gpu_operations`: see `gpu_index`. Raises DeviceError."""
    index = gpu_index(setup.settings.device, torch.cuda.device_count(), setup.topology, gpu_operations)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def seed(number: int, step: int, rank: int, device: torch.device) -> None:
    """Seeds PyTorch for the update after `step` others: a function of the step, not of what ran before, so that a
    resumed run draws what the undisturbed one drew."""
    # torch.manual_seed formats a stack trace for GPUs that are not in use: 0.4 ms.
    generate = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
    generate(hash((number, step, rank)))


def settings() -> dict[str, Any]:
    """How PyTorch computes in this process, beside what the environment says."""
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
    }


def take_threads(topology: Topology) -> None:
    """Computes with the rank's share of the host's processors."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, topology, os.environ)
    if count:
        torch.set_num_threads(count)
