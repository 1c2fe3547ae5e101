"""The engine ddp, on torch.distributed: NCCL on GPUs, else Gloo, or MPI where PyTorch was built with it."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.core import sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import EngineUnavailable, StoppedError
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import waits_for_ranks, waits_on_gpu
from hvdtrain.torch.averaging import AveragingEngine
from hvdtrain.torch.engines import Engine, in_bytes, take_device

try:
    import torch.distributed as dist
    import torch.distributed.nn.functional  # before there is a group: its defaults would keep it alive
except ImportError as error:
    raise EngineUnavailable(
        f"this PyTorch was built without torch.distributed ({error}); install one that has it: pip install torch"
    ) from None

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's (Li et al. 2020, arXiv:2006.15704, section 4.2)


class DdpEngine(AveragingEngine, Engine):
    """Joins the ranks by torch.distributed; see `Engine` for the methods.

    Reads the address and port of rank 0 from MASTER_ADDR and MASTER_PORT, which the run has set.
    """

    waited: float | None = 0.0

    def __init__(self, settings: Recipe, topology: Topology, device: torch.device) -> None:
        self._settings, self.device = settings, device
        self._computed: float | None = None
        """The time at which backward had computed this rank's last gradient."""
        backend = _backend(topology, device)
        if not dist.is_initialized():
            # One process needs no address.
            rendezvous = {"store": dist.HashStore()} if topology.size == 1 else {"init_method": "env://"}
            dist.init_process_group(backend, rank=topology.rank, world_size=topology.size, **rendezvous)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # For sums on the host. It has Gloo, which Lightning's group may not have.
        self._group = dist.new_group(backend=backend)
        if "nccl" in backend:
            agreement.check_gpus(topology, os.environ, (self.rank, self.size), self.sum)
        self._event: torch.cuda.Event | None = None
        """Recorded on the GPU behind the last collective that it waits for."""
        if device.type == "cuda":
            self._event = event = torch.cuda.Event()
            waits_on_gpu(lambda: not event.query())

    @classmethod
    def open(cls, setup: Setup) -> "DdpEngine":
        return cls(setup.settings, setup.topology, take_device(setup))

    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        with in_bytes(tensors) as found:
            for each in found.values():
                dist.broadcast(each, 0, group=self._group_of(each))
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    def watch(self, model: nn.Module) -> None:
        """From now on measures how long each backward of Lightning's DDP waits for other ranks."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_computed)

    def finish(self) -> None:
        super().finish()
        if self._computed is not None:  # backward has waited for the last bucket since
            self._count_waiting(self._computed)
            self._computed = None

    def _count_waiting(self, began: float) -> None:
        if self._event:  # with a GPU the host does not wait: NCCL's operations wait in their stream
            self._event.record()
        self.waited = None if self._event else (self.waited or 0.0) + time.monotonic() - began

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """The group that communicates the tensor. On GPUs it is always that of the gradients: operations of two of
        NCCL's communicators may wait for each other for ever. On CPUs it is another one than theirs, as ranks whose
        backward reaches different parameters send gradients before or after the rows of a layer.
        """
        return None if tensor.is_cuda else self._group

    def _note_computed(self, parameter: nn.Parameter) -> None:
        self._computed = time.monotonic()

    def bucket_bytes(self) -> int:
        return BUCKET_BYTES

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        is_half = tensor.dtype == torch.float16  # in which a sum could overflow
        if is_half:
            tensor.div_(self.size)
        work = dist.all_reduce(tensor, async_op=True)

        @waits_for_ranks
        def averaged() -> None:
            began = time.monotonic()
            work.wait()
            self._count_waiting(began)
            if not is_half:
                tensor.div_(self.size)

        return averaged

    @waits_for_ranks
    def sum(self, array: np.ndarray, seconds: float = 0) -> np.ndarray:
        """Raises RuntimeError where the ranks have not come within so many `seconds`; 0: they may take any time."""
        total = torch.from_numpy(array.copy())
        dist.all_reduce(total, group=self._group, async_op=True).wait(timedelta(seconds=seconds))
        return total.numpy()

    def allreduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = row.new_empty(self.size * len(row))
        dist.all_gather_into_tensor(rows, row, group=self._group_of(row))
        if self._event:
            self._event.record()
        return rows.view(self.size, -1)

    def is_lost(self, error: Exception) -> bool:
        # Gloo's errors have no type of their own, but their messages name Gloo's source file.
        return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))

    def close(self) -> None:
        dist.destroy_process_group()
        # To delete a group waits for Gloo's threads: a thread that holds a tensor when the interpreter ends aborts the
        # process (pytorch/pytorch#179291). After an error a collective may wait for a lost rank for ever.
        if isinstance(sys.exc_info()[1], StoppedError | None):
            del self._group


def _backend(topology: Topology, device: torch.device) -> str:
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    return "mpi" if dist.is_mpi_available() and topology.row.mpi else "gloo"
