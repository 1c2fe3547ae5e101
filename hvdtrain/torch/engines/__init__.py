"""Engines: each one is a collective library behind the same methods."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain import engines
from hvdtrain.engines.registry import Setup
from hvdtrain.launch.devices import gpu_index, threads
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.stacks import mark_operations
from hvdtrain.torch.objective import call

Forward = Callable[[Any, Any], Any]
mark_operations(__name__, "broadcast", "sum", "allreduce", "gather_rows")


class Engine(engines.Engine):
    """A collective library with PyTorch's verbs; see `hvdtrain.engines.Engine` for the others."""

    device: torch.device

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """The network to call and the optimizer to step: gradients are averaged over the ranks while backward runs."""
        return model, optimizer

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        """`forward(network, x)` for the inputs x of each of this rank's micro-batches. The caller runs backward through
        one output before it requests the next. Gradients are averaged in the last backward."""
        return (forward(network, x) for x in inputs)

    def finish(self) -> None:
        """Waits until every gradient is averaged; only then may gradients be clipped."""

    def bucket_bytes(self) -> int:
        """The largest size in bytes of a message of several gradients. Every rank calls it."""
        return 0

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        """Begins to average the tensor [n] over the ranks, in place. All ranks give the same name. Returns a function
        that waits for the average."""
        return lambda: None

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Adds up the ranks' tensors in place, as one message, for a benchmark."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """The ranks' rows [n] as [size, n], on every rank; no gradient flows through."""
        return row[None]


def take_device(setup: Setup, *, gpu_operations: bool = True) -> torch.device:
    """Binds the process to this rank's device. `gpu_operations`: see `gpu_index`. Raises DeviceError."""
    index = gpu_index(setup.settings.device, torch.cuda.device_count(), setup.topology, gpu_operations)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


EVERY_RANK = -1
"""In place of a rank: for random numbers that are the same on all of them."""


def seed(number: int, step: int, rank: int, device: torch.device) -> None:
    """Seeds PyTorch, random and NumPy for the update after `step` others. The seed depends on the step and not on what
    ran before, so that a resumed run draws the same random numbers."""
    # torch.manual_seed takes 0.4 ms: it formats a stack trace even where no GPU is in use.
    generate = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
    mixed = hash((number, step, rank))
    generate(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def process_settings() -> dict[str, Any]:
    """The settings of PyTorch in this process that change numbers and are not in the environment."""
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
    }


def take_threads(topology: Topology) -> None:
    """Lets PyTorch compute with this rank's part of the host's processors."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, topology, os.environ)
    if count:
        torch.set_num_threads(count)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view [n] of the tensor's memory, for any order of its dimensions: Horovod takes contiguous tensors only.

    Raises RuntimeError where the tensor has gaps.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    in_memory_order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(in_memory_order).view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, each once and without gaps, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def distinct(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, but of length 1 in the dimensions in which `like`, of the same shape, is expanded."""
    for dimension, (stride, size) in enumerate(zip(like.stride(), like.shape, strict=True)):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


@contextlib.contextmanager
def in_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The bytes [n] of each tensor that is not empty, which the block may overwrite. For a tensor with gaps they are
    those of a copy, which is copied back after the block."""
    found, copies = {}, []
    for name, tensor in tensors.items():
        dense = live = distinct(tensor.detach(), tensor)
        if live.is_conj() or live.is_neg() or not is_dense(live):
            dense = live.resolve_conj().resolve_neg().contiguous()
            copies.append((live, dense))
        if live.numel():
            found[name] = flat(dense).view(torch.uint8)
    yield found
    with torch.no_grad():
        for live, dense in copies:
            live.copy_(dense)
