"""Engines: one collective library each, behind the same few methods."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.engines.registry import Setup
from hvdtrain.launch.devices import gpu_index, threads
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.slow import Waiting
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.torch.objective import call

Forward = Callable[[Any, Any], Any]


class Engine(Waiting, Protocol):
    """What the training loop needs of a collective library. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    device: torch.device
    notes: tuple[str, ...]
    """What the run reports of this engine at its start."""

    @classmethod
    def open(cls, setup: Setup) -> "Engine":
        """The engine, joined with the other ranks and bound to its devices. Raises HvdtrainError."""

    @is_operation
    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's `metadata`, which JSON can hold."""

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """The network to call and the optimizer to step: gradients are averaged over the ranks while backward runs."""

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        """`forward(network, x)` for the inputs x of each of this rank's micro-batches, one by one; backward through one
        comes before the next is requested. Gradients are averaged with the last one's."""

    def pause(self) -> AbstractContextManager[None]:
        """Around the backward of all micro-batches but the last, where `outputs` is not called."""

    def finish(self) -> None:
        """Waits until every gradient is the averaged one; only then may they be clipped."""

    def bucket_bytes(self) -> int:
        """The most bytes of gradients that are best communicated as one message. Every rank calls it."""

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        """Begins to average the tensor [n] over the ranks, in place; the name is the same on all of them. What is
        returned waits for the average."""

    @is_operation
    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    @is_operation
    def allreduce(self, tensor: torch.Tensor) -> None:
        """Adds the tensor over the ranks, in place, as one message: what a benchmark times."""

    @is_operation
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """The ranks' rows [n] as [size, n], on every rank; no gradient flows through."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is lost."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""


def take_device(setup: Setup, *, gpu_operations: bool = True) -> torch.device:
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


def process_settings() -> dict[str, Any]:
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


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as [n], whatever the order of the dimensions is: Horovod takes contiguous tensors only.

    Raises RuntimeError where the tensor has gaps.
    """
    as_they_lie = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(as_they_lie).view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, without gaps, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def distinct(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions that `like`, of the same shape, has: its expanded dimensions have length 1."""
    for dimension, (stride, size) in enumerate(zip(like.stride(), like.shape, strict=True)):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


@contextlib.contextmanager
def in_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The bytes [n] of each tensor that has any, to be overwritten within the block: of its own memory, or where it has
    gaps or dimensions that are expanded, of a copy that is copied back."""
    found, copies = {}, []
    for name, tensor in tensors.items():
        lying = own = distinct(tensor.detach(), tensor)
        if own.is_conj() or own.is_neg() or not is_dense(own):
            lying = own.resolve_conj().resolve_neg().contiguous()
            copies.append((own, lying))
        if own.numel():
            found[name] = flat(lying).view(torch.uint8)
    yield found
    with torch.no_grad():
        for own, lying in copies:
            own.copy_(lying)
