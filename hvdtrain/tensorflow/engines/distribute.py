"""What the engines over a tf.distribute strategy with replicas share: variables of the strategy, steps on all
replicas, and their all-reduce."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.core.settings import EngineSettings
from hvdtrain.errors import DeviceError
from hvdtrain.tensorflow.engines.replication import Inputs, Replication, graph

MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM


class Distributed(Replication):
    """See `Engine` and `Replication` for the methods. Every replica has its own copy of each variable."""

    rank = 0
    size = 1
    device = "/CPU:0"
    notes: tuple[str, ...] = ()

    def __init__(self, settings: EngineSettings, strategy: tf.distribute.Strategy, replicas: int) -> None:
        self.strategy, self.replicas = strategy, replicas
        self._widened = settings.compression == "fp64"

    @property
    def waited(self) -> float | None:
        return None

    def scope(self) -> AbstractContextManager[Any]:
        return self.strategy.scope()  # type: ignore[no-any-return]

    def replicate(self, step: Callable[..., None], relaxed: bool = False) -> Callable[..., None]:
        @graph
        def on_replicas(inputs: Inputs, *same: tf.Tensor) -> None:
            self.strategy.run(step, (*inputs, *same))

        def on_all(inputs: Sequence[Inputs], *same: tf.Tensor) -> None:
            on_replicas(self._per_replica(inputs), *same)

        return on_all

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        return self.strategy.experimental_local_results(variable)  # type: ignore[no-any-return]

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        types = [tensor.dtype for tensor in tensors]
        if self._widened:  # the sum of float32 numbers is then exact, whatever the order
            tensors = [tf.cast(tensor, tf.float64) for tensor in tensors]
        return [tf.cast(mean, kind) for mean, kind in zip(self._reduced(MEAN, tensors), types, strict=True)]

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._reduced(SUM, tensor)

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        pass

    def _reduced(self, how: tf.distribute.ReduceOp, tensors: Any) -> Any:
        # TensorFlow reduces to where a tensor lies, which an argument of a graph does not say: its copy does.
        placed = tf.nest.map_structure(tf.identity, tensors)
        return tf.distribute.get_replica_context().all_reduce(how, placed)

    def _per_replica(self, inputs: Sequence[Inputs]) -> Inputs:
        """The replicas' inputs as one tuple, whose values differ from replica to replica."""
        if self.replicas == 1:
            return inputs[0]
        return tf.nest.map_structure(lambda *tensors: self._of_each(tensors), *inputs)  # type: ignore[no-any-return]

    def _of_each(self, tensors: Sequence[tf.Tensor]) -> Any:
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensors[context.replica_id_in_sync_group]
        )


def take(devices: Sequence[str]) -> list[str]:
    """TensorFlow's names of this process's devices, which it is bound to: each cpu is a logical device of the CPU.

    Raises DeviceError.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if "cpu" in devices:
        tf.config.set_visible_devices([], "GPU")
        (cpu,) = tf.config.list_physical_devices("CPU")
        if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) != len(devices):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(devices))
        return [f"/CPU:{index}" for index in range(len(devices))]
    indices = [int(device.partition(":")[2] or 0) for device in devices]
    if missing := [index for index in indices if index >= len(gpus)]:
        raise DeviceError(f"--devices names cuda:{missing[0]}, TensorFlow sees {len(gpus)} GPUs; name others.")
    tf.config.set_visible_devices([gpus[index] for index in indices], "GPU")
    for index in indices:
        tf.config.experimental.set_memory_growth(gpus[index], True)
    return [f"/GPU:{index}" for index in range(len(indices))]
