"""Engines: one collective library each, behind the same few methods."""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import keras
import tensorflow as tf
from tensorflow.python.framework import config

from hvdtrain import engines
from hvdtrain.engines.registry import Setup
from hvdtrain.launch.devices import gpu_index, threads
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.stacks import mark_operations

mark_operations(__name__, "broadcast", "sum")
# AutoGraph would only cost time: where something depends on a tensor, the code calls tf.cond.
graph = functools.partial(tf.function, autograph=False)

Inputs = tuple[Any, ...]
"""The arguments of one replica's step: a micro-batch; in validation its weight too."""
Change = Callable[[list[tf.Tensor]], None]
LOST = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip
"""The errors that tf.distribute raises when another task is lost."""


class Engine(engines.Engine):
    """A collective library, and the way a step runs on the replicas of a rank; see `hvdtrain.engines.Engine` for
    the other methods.

    Every replica calls `combine`, `sum_tensor`, `update` and `keep` inside a graph that `replicate` made. By default a
    rank has one replica, whose variables are plain ones.
    """

    replicas: int = 1
    """How many replicas this rank has; each reads a local batch of the plan's."""
    serves: bool = False
    """Whether this rank only computes what rank 0 requests, and has no loop of its own."""
    strategy: Any = None
    """The strategy of tf.distribute that keeps the variables; None where they are plain ones."""

    def __init__(self, device: str) -> None:
        self.device = device
        """Where this rank's batches are put."""

    @classmethod
    def open(cls, setup: Setup) -> "Engine":
        return cls(take_device(setup.settings.device, setup.topology))

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The replicas' tensors, averaged or combined by Adasum: a list of the same shapes and dtypes. Each tensor is
        communicated as soon as it is ready."""
        return tensors

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' tensors, of their common shape and dtype."""
        return tensor

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which all variables are made."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()  # type: ignore[no-any-return]

    def replicate(self, step: Callable[..., Any], relaxed: bool = False) -> Callable[..., Any]:
        """`on_all(inputs, *same)`: a graph of step(*inputs[i], *same) on every replica i of this rank.
        `relaxed`: the sizes of batches vary. The engine of one replica returns the step's results."""
        compiled = graph(step, reduce_retracing=relaxed)

        def on_all(inputs: Sequence[Inputs], *same: tf.Tensor) -> Any:
            return compiled(*inputs[0], *same)

        return on_all

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        """Each replica's copy of a variable, after all requested steps; a single one where the replicas share it."""
        return (variable,)

    def update(self, change: Change, tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the combined tensors, once for every copy of the variables that it changes. `tensors`: a
        gradient or a value of each variable, of its shape."""
        change(self.combine(tensors))

    def keep(self, change: Change, tensors: list[tf.Tensor]) -> None:
        """Calls `change` with the replica's own tensors; where replicas share variables, once with the mean."""
        change(tensors)


class Clock:
    """Adds up the seconds from when this rank has computed its tensors until the combined ones have arrived.

    Only the clock waits for the last tensor: each is communicated as soon as it is ready, during the backward pass.
    A process with a GPU has no such clock: an operation counts as done once the GPU has it in its queue.
    """

    def __init__(self) -> None:
        self._is_on_gpu = bool(tf.config.get_visible_devices("GPU"))
        with tf.init_scope(), tf.device("/CPU:0"):
            self._seconds = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    @property
    def seconds(self) -> float | None:
        """The seconds of all requested steps; waits until these are computed. None with a GPU."""
        if self._is_on_gpu:
            return None
        # Variable.numpy() takes four times as long.
        handle = self._seconds.handle
        return float(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy())

    def around(self, combine: Callable[[Any], list[Any]], tensors: Sequence[Any]) -> list[Any]:
        """Returns `combine(tensors)` and measures its time, inside a graph or eagerly. The tensors have any shapes, and
        may be None."""
        if self._is_on_gpu:
            return combine(tensors)
        began = _time_after(tensors)
        combined = combine(tensors)
        # This is the system's clock, which somebody may set back.
        self._seconds.assign_add(tf.maximum(_time_after(combined) - began, 0.0))
        return combined


def _time_after(tensors: Sequence[Any]) -> tf.Tensor:
    with tf.device("/CPU:0"), tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.timestamp()


# These change the calling replica's copy alone, inside a graph: under tf.distribute, `assign` of a variable would
# require an aggregation first.


def put(variable: tf.Variable, value: tf.Tensor) -> None:
    """Sets the replica's copy of the variable to the value."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def add(variable: tf.Variable, value: tf.Tensor) -> None:
    """Adds the value to the replica's copy of the variable."""
    tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def subtract(variable: tf.Variable, value: tf.Tensor) -> None:
    """Subtracts the value from the replica's copy of the variable."""
    tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=value)


def take_device(wanted: Literal["auto", "cpu", "cuda"], topology: Topology, gpu_operations: bool = True) -> str:
    """Binds this rank to its device, whose name it returns; `gpu_operations`: see `gpu_index`. Raises DeviceError."""
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_index(wanted, len(gpus), topology, gpu_operations)
    if index is None:
        tf.config.set_visible_devices([], "GPU")
        return "/CPU:0"
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"


def process_settings() -> dict[str, Any]:
    """The settings of this process by which TensorFlow computes, without environment variables."""
    return {
        "TensorFloat-32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "op determinism": config.is_op_determinism_enabled(),
        "floatx": keras.config.floatx(),
        "dtype policy": keras.config.dtype_policy().name,
        "image data format": keras.config.image_data_format(),
    }


def take_threads(topology: Topology) -> None:
    """Limits TensorFlow's threads to this rank's share of the host's processors."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, topology, os.environ)
    requested = os.environ.get("OMP_NUM_THREADS", "")  # TensorFlow's own threads do not heed it
    if count or requested.isdecimal():
        with contextlib.suppress(RuntimeError):  # in a notebook TensorFlow may have begun: it keeps its threads then
            tf.config.threading.set_intra_op_parallelism_threads(count or int(requested))
