"""Horovod behind the engine's verbs. The only module that imports horovod.torch."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain import settings
from hvdtrain.errors import EngineUnavailable
from hvdtrain.recipe import Recipe

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
except ImportError as error:
    raise EngineUnavailable(
        f"Horovod for PyTorch cannot be imported ({error}); build it: python -m hvdtrain build --frameworks torch"
    ) from None


class Widened(hvd.Compression.none):
    """Gradients that travel as float64: the sum of float32 numbers is then exact, whatever the order."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "fp64": Widened}


class HorovodEngine:
    """Ranks joined by Horovod; see `Engine` for the verbs."""

    notes: tuple[str, ...] = ()

    def __init__(self, recipe: Recipe, timeline: Path | None) -> None:
        # Horovod's core reads these from the process environment when it starts, and nowhere else.
        os.environ.update(settings.variables(recipe, os.environ))
        hvd.init()
        self.rank, self.size, self.device = hvd.rank(), hvd.size(), torch.device("cpu")
        self._recipe = recipe
        self._adasum = recipe.reduction == "adasum"
        settings.check_reduction(recipe, self.size, hvd.mpi_enabled())
        if timeline:
            hvd.start_timeline(str(timeline))

    @property
    def gpu_operations(self) -> bool:
        """Whether this Horovod averages tensors that lie on a GPU."""
        return bool(hvd.nccl_built() or hvd.cuda_built())

    def broadcast(self, tensors: dict[str, torch.Tensor], facts: Any) -> Any:
        hvd.broadcast_parameters(tensors, root_rank=0)
        return hvd.broadcast_object(facts, root_rank=0, name="hvdtrain.facts")

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        return model, hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            groups=None if self._adasum else settings.groups(self._recipe, os.environ, model.parameters()),
            compression=COMPRESSIONS[self._recipe.compression],
            backward_passes_per_step=self._recipe.accumulation_steps,
            op=hvd.Adasum if self._adasum else hvd.Average,
        )

    def outputs(self, network: Any, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return map(network, parts)  # the optimizer counts the parts by itself

    def finish(self, optimizer: Any) -> None:
        if not self._adasum:  # Adasum combines updates, not gradients, inside step()
            optimizer.synchronize()

    def applying(self, optimizer: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._adasum else optimizer.skip_synchronize()

    def sum(self, array: np.ndarray) -> np.ndarray:
        total = hvd.allreduce(torch.from_numpy(array), op=hvd.Sum, name="hvdtrain.sum")
        return total.numpy()

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return hvd.allgather(row[None], name="hvdtrain.gather")

    def is_lost(self, error: RuntimeError) -> bool:
        return isinstance(error, HorovodInternalError)

    def close(self) -> None:
        hvd.shutdown()
