"""The engine horovod."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.core import compatibility, sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import Setup, fusion_bytes, horovod_variables
from hvdtrain.launch import mpi
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import waits_for_ranks
from hvdtrain.torch.averaging import AveragingEngine
from hvdtrain.torch.engines import Engine, in_bytes, take_device

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
except ImportError as error:
    raise mpi.unavailable("torch", "PyTorch", error) from None


class Widened(hvd.Compression.none):
    """Communicates gradients as float64: a sum of float32 numbers is then exact in any order."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "fp64": Widened}

POLL_SECONDS = 0.0005


class _Waited:
    """The time that this process has spent in `wait`: there is one Horovod in a process."""

    seconds = 0.0


@waits_for_ranks
def wait(handle: int, where: str = "cpu", what: str = "") -> torch.Tensor:
    """The result of the operation with that handle, once it is there. `where` is the type of its device; `what`
    describes this rank's tensor for a message. Raises HorovodInternalError.

    hvd.synchronize polls without a pause: good beside a GPU, bad on a processor that other ranks compute with. Over
    MPI it stays, as Horovod's own thread polls there in the same way: a pause gained nothing, and where many ranks
    shared few cores Linux 6.18 did not wake pausing ranks for a minute beside those that yield.
    """
    began = time.monotonic()
    while where == "cpu" and not hvd.mpi_enabled() and not hvd.poll(handle):
        time.sleep(POLL_SECONDS)
    try:
        result = hvd.synchronize(handle)
    except HorovodInternalError as error:
        raise HorovodInternalError(f"{error} ({what})" if what else error) from None
    _Waited.seconds += time.monotonic() - began
    return result


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables in the process's environment until the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class HorovodEngine(AveragingEngine, Engine):
    """Joins the ranks by Horovod; see `Engine` for the methods."""

    def __init__(self, settings: Recipe, timeline: Path | None) -> None:
        self._together = fusion_bytes(settings, os.environ)
        variables = horovod_variables(settings, os.environ)
        if self._together is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = "0"  # else Horovod copies small tensors together
        with environment(variables):  # Horovod's core reads them only when it starts
            hvd.init()
        self.rank, self.size, self.device = hvd.rank(), hvd.size(), torch.device("cpu")
        self._settings = settings
        self._adasum = settings.reduction == "adasum"
        compatibility.check_adasum(settings, self.size, hvd.mpi_enabled())
        if timeline:
            hvd.start_timeline(str(timeline))

    @classmethod
    def open(cls, setup: Setup) -> "HorovodEngine":
        engine = cls(setup.settings, setup.timeline)
        engine.device = take_device(setup, gpu_operations=engine.gpu_operations)
        if engine.device.type == "cuda" and hvd.nccl_built():
            agreement.check_gpus(setup.topology, os.environ, (engine.rank, engine.size), engine.sum)
        return engine

    @property
    def gpu_operations(self) -> bool:
        """Whether this Horovod averages tensors on a GPU."""
        return bool(hvd.nccl_built() or hvd.cuda_built())

    @property
    def waited(self) -> float | None:
        # Horovod's own optimizer waits for Adasum. A GPU must first compute what is to be averaged.
        return None if self._adasum or self.device.type == "cuda" else _Waited.seconds

    def broadcast(self, tensors: dict[str, torch.Tensor], metadata: Any) -> Any:
        with in_bytes(tensors) as found:
            hvd.broadcast_parameters(found, root_rank=0)
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        if self._adasum:  # which combines updates, not gradients, inside step()
            return model, hvd.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                compression=COMPRESSIONS[self._settings.compression],
                backward_passes_per_step=self._settings.accumulation_steps,
                op=hvd.Adasum,
            )
        return super().wrap(model, optimizer)

    def bucket_bytes(self) -> int:
        # Rank 0 decides: with different sizes, as by hosts' environments, the ranks would wait for ever.
        return sharing.from_rank_0(self._together, self.rank, self.sum) or 0

    def average(self, tensor: torch.Tensor, name: str) -> Callable[[], object]:
        operation = hvd.Average  # which divides the sum
        if tensor.dtype == torch.float16:  # in which a sum could overflow
            operation = hvd.Sum
            tensor.div_(self.size)
        handle = hvd.allreduce_async_(tensor, op=operation, name=name)
        return partial(wait, handle, tensor.device.type, f"{name}, {tensor.dtype} {list(tensor.shape)}")

    def sum(self, array: np.ndarray) -> np.ndarray:
        handle = hvd.allreduce_async(torch.from_numpy(array), op=hvd.Sum, name="hvdtrain.sum")
        return wait(handle, what=f"a sum of {array.dtype} {list(array.shape)}").numpy()

    def allreduce(self, tensor: torch.Tensor) -> None:
        hvd.allreduce_(tensor, op=hvd.Sum, name="hvdtrain.allreduce")

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return wait(hvd.allgather_async(row[None], name="hvdtrain.gather"), row.device.type)

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, HorovodInternalError)

    def close(self) -> None:
        hvd.shutdown()
