"""tf.distribute's strategies with replicas behind the engine's methods: what they share, and those of one process."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.core.settings import EngineSettings
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import DeviceError
from hvdtrain.tensorflow.engines import Change, Inputs, graph
from hvdtrain.tensorflow.engines.local import LocalEngine

MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM


class Distributed(LocalEngine):
    """An engine whose replicas each have a copy of every variable of its strategy; see `Engine` for the methods."""

    def __init__(self, settings: EngineSettings, strategy: tf.distribute.Strategy, replicas: int) -> None:
        super().__init__("/CPU:0")
        self.strategy, self.replicas = strategy, replicas
        self._widened = settings.compression == "fp64"

    @property
    def world(self) -> tuple[int, int]:
        return self.rank, self.strategy.num_replicas_in_sync // self.replicas

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


class MirroredEngine(Distributed):
    """One process with a replica on each device: MirroredStrategy. GPUs add over NCCL, logical CPUs in memory."""

    def __init__(self, settings: EngineSettings, devices: Sequence[str]) -> None:
        super().__init__(settings, tf.distribute.MirroredStrategy(take(devices)), len(devices))

    @classmethod
    def open(cls, setup: Setup) -> "MirroredEngine":
        return cls(setup.settings, setup.devices)


class CentralEngine(Distributed):
    """One process with a replica on each device, all on the same variables, which lie on the CPU or on the only GPU:
    CentralStorageStrategy."""

    def __init__(self, settings: EngineSettings, devices: Sequence[str]) -> None:
        strategy = tf.distribute.experimental.CentralStorageStrategy(take(devices))
        super().__init__(settings, strategy, len(devices))

    @classmethod
    def open(cls, setup: Setup) -> "CentralEngine":
        return cls(setup.settings, setup.devices)

    def update(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self.combine(tensors))

    def keep(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self._reduced(MEAN, tensors) if tensors else [])

    def _once(self, change: Change, tensors: list[tf.Tensor]) -> None:
        # The replicas' parts of the graph are made one after the other, and in that order they use a variable.
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
            change(tensors)


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
