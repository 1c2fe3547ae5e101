"""torch.distributed behind the engine's methods: NCCL on GPUs, else Gloo, or MPI where torch has it."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.core import sharing
from hvdtrain.core.settings import EngineSettings
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import EngineUnavailable, StoppedError
from hvdtrain.launch.topology import Topology, launcher
from hvdtrain.ranks.stacks import waits_for_ranks
from hvdtrain.torch.averaging import Averager, AveragingEngine
from hvdtrain.torch.engines import in_bytes, take_device

try:
    import torch.distributed as dist
    import torch.distributed.nn.functional  # by Lightning's DDP too late: a default keeps a group that is there
except ImportError as error:
    raise EngineUnavailable(
        f"this PyTorch was built without torch.distributed ({error}); install one that has it: pip install torch"
    ) from None

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's (Li et al. 2020, arXiv:2006.15704, section 4.2)


class DdpEngine(AveragingEngine):
    """Ranks joined by torch.distributed; see `Engine` for the methods.

    Address and port of rank 0 are read from MASTER_ADDR and MASTER_PORT, which the run has set for itself.
    """

    notes: tuple[str, ...] = ()
    waited: float | None = 0.0

    def __init__(self, settings: EngineSettings, topology: Topology, device: torch.device) -> None:
        self._settings, self.device = settings, device
        self._computed: float | None = None
        """When this rank's last gradient of a backward was computed."""
        if not dist.is_initialized():
            # One process needs no address.
            rendezvous = {"store": dist.HashStore()} if topology.size == 1 else {"init_method": "env://"}
            backend = _backend(topology, device)
            dist.init_process_group(backend, rank=topology.rank, world_size=topology.size, **rendezvous)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Buckets are sent while backward runs: what the loop itself adds up must not get between them.
        self._own = dist.new_group(backend=_backend(topology, device))  # Lightning's has NCCL alone

    @classmethod
    def open(cls, setup: Setup) -> "DdpEngine":
        return cls(setup.settings, setup.topology, take_device(setup))

    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        with in_bytes(tensors) as found:
            for each in found.values():
                dist.broadcast(each, 0, group=self._own)
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        if self.size > 1:
            self._averager = Averager(model, self, self._settings.compression, at_end=False)
        return model, optimizer

    def watch(self, model: nn.Module) -> None:
        """Notes from now on when each backward of Lightning's DDP has computed the model's last gradient."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_computed)

    def finish(self) -> None:
        super().finish()
        if self._computed is not None:  # since then backward has waited for the last bucket
            self._count_waiting(self._computed)
            self._computed = None

    def _count_waiting(self, began: float) -> None:
        # On a GPU the host waits for nothing: NCCL's operations wait in their stream.
        self.waited = None if self.device.type == "cuda" else (self.waited or 0.0) + time.monotonic() - began

    def _note_computed(self, parameter: nn.Parameter) -> None:
        self._computed = time.monotonic()

    def bucket_bytes(self) -> int:
        return BUCKET_BYTES

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        is_half = tensor.dtype == torch.float16  # whose sum could be too large
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

    def sum(self, array: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(array.copy())
        dist.all_reduce(total, group=self._own)
        return total.numpy()

    def allreduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = row.new_empty(self.size * len(row))
        dist.all_gather_into_tensor(rows, row, group=self._own)
        return rows.view(self.size, -1)

    def is_lost(self, error: Exception) -> bool:
        # Gloo's failures have no type of their own, but name the file they come from.
        return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))

    def close(self) -> None:
        dist.destroy_process_group()
        # The last owner of a group waits for Gloo's threads: one that still held the last collective's tensor when the
        # interpreter ends would abort the process (pytorch/pytorch#179291).
        if isinstance(sys.exc_info()[1], StoppedError | None):  # else a collective may wait for a rank that is gone
            del self._own


def _backend(topology: Topology, device: torch.device) -> str:
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    return "mpi" if dist.is_mpi_available() and launcher(topology.launcher).mpi else "gloo"
