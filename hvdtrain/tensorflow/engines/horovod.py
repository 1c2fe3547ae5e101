"""Horovod behind the engine's methods."""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core import compatibility, sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import Setup, horovod_variables
from hvdtrain.launch import mpi
from hvdtrain.ranks import agreement
from hvdtrain.tensorflow.engines import Clock, Engine, take_device

try:
    import horovod.tensorflow as hvd
except (ImportError, tf.errors.NotFoundError) as error:
    raise mpi.unavailable("tensorflow", "TensorFlow", error) from None

# Horovod's errors have no type of their own: their text holds its name, or the names of our operations.
FAILURE = re.compile(r"Horovod|hvdtrain\.(gradient|sum)")


class Widened(hvd.Compression.none):
    """Communicates gradients as float64: the sum of float32 numbers is then exact in any order."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return tf.cast(tensor, tf.float64), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, ctx)


COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "fp64": Widened}


class HorovodEngine(Engine):
    """Ranks joined by Horovod; see `Engine` for the methods."""

    def __init__(self, settings: Recipe, timeline: Path | None) -> None:
        # Horovod's core reads its settings only from the process environment, when it starts.
        os.environ.update(horovod_variables(settings, os.environ))
        hvd.init()
        self.rank, self.size, self.device = hvd.rank(), hvd.size(), "/CPU:0"
        compatibility.check_adasum(settings, self.size, hvd.mpi_enabled())
        self._op = hvd.Adasum if settings.reduction == "adasum" else hvd.Average
        self._compression = COMPRESSIONS[settings.compression]
        if timeline:
            hvd.start_timeline(str(timeline))

    @classmethod
    def open(cls, setup: Setup) -> "HorovodEngine":
        engine = cls(setup.settings, setup.timeline)
        on_gpus = bool(hvd.nccl_built() or hvd.cuda_built())  # whether this Horovod averages tensors that lie there
        engine.device = take_device(setup.settings.device, setup.topology, on_gpus)
        if "GPU" in engine.device and hvd.nccl_built():
            agreement.check_gpus(setup.topology, os.environ, (engine.rank, engine.size), engine.sum)
        return engine

    @cached_property
    def clock(self) -> Clock:
        """Made at first use, since TensorFlow takes its devices for the first variable; Keras's runs set their own."""
        return Clock()

    @property
    def waited(self) -> float | None:
        return self.clock.seconds

    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        if variables:
            hvd.broadcast_variables(list(variables.values()), root_rank=0)
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self.clock.around(self._combine, tensors)

    def sum(self, array: np.ndarray) -> np.ndarray:
        # On the host: NCCL would gain nothing for a handful of numbers.
        with tf.device("/CPU:0"):
            return hvd.allreduce(tf.constant(array), op=hvd.Sum, name="hvdtrain.sum").numpy()

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(tensor, op=hvd.Sum)

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, tf.errors.OpError) and bool(FAILURE.search(str(error)))

    def _combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [self._reduced(tensor, f"hvdtrain.gradient.{index}") for index, tensor in enumerate(tensors)]

    def _reduced(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        op, factor, compression = self._op, 1.0, self._compression
        is_half = tensor.dtype == tf.float16 or compression is hvd.Compression.fp16
        if is_half and op == hvd.Average:  # which divides the sum, and that could overflow
            op, factor = hvd.Sum, 1 / self.size
        return hvd.allreduce(tensor, op=op, prescale_factor=factor, compression=compression, name=name)

    def close(self) -> None:
        hvd.shutdown()
