"""TensorFlow's own collectives behind the engine's methods: one engine for each strategy of tf.distribute."""

import collections
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import processors
from hvdtrain.core import sharing
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import DeviceError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.tensorflow.engines import LOST, Change, Clock, Engine, Inputs, graph, take_device

MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM
Implementation = tf.distribute.experimental.CommunicationImplementation
BEHIND = 2
"""How many batches wait for each worker of a parameter server while it computes."""


class Distributed(Engine):
    """An engine in which each replica has a copy of every variable of the strategy; see `Engine` for the methods."""

    def __init__(self, settings: Recipe, strategy: tf.distribute.Strategy, replicas: int) -> None:
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
        if self._widened:  # the sum of float32 numbers is then exact in any order
            tensors = [tf.cast(tensor, tf.float64) for tensor in tensors]
        return [tf.cast(mean, kind) for mean, kind in zip(self._reduced(MEAN, tensors), types, strict=True)]

    def sum_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._reduced(SUM, tensor)

    def _reduced(self, how: tf.distribute.ReduceOp, tensors: Any) -> Any:
        # TensorFlow reduces to the tensor's device, which the graph's argument has not, and its copy has.
        placed = tf.nest.map_structure(tf.identity, tensors)
        return tf.distribute.get_replica_context().all_reduce(how, placed)

    def _per_replica(self, inputs: Sequence[Inputs]) -> Inputs:
        """One tuple of inputs, whose values differ from replica to replica."""
        if self.replicas == 1:
            return inputs[0]
        spread = self.strategy.experimental_distribute_values_from_function
        return tf.nest.map_structure(  # type: ignore[no-any-return]
            lambda *tensors: spread(lambda context: tensors[context.replica_id_in_sync_group]), *inputs
        )


class MirroredEngine(Distributed):
    """One process with a replica on each device: MirroredStrategy. GPUs add over NCCL, logical CPUs in memory."""

    kind = tf.distribute.MirroredStrategy

    @classmethod
    def open(cls, setup: Setup) -> "MirroredEngine":
        return cls(setup.settings, cls.kind(take(setup.devices)), len(setup.devices))


class CentralEngine(MirroredEngine):
    """One process with a replica on each device, all on the same variables, which lie on the CPU or on the only GPU:
    CentralStorageStrategy."""

    kind = tf.distribute.experimental.CentralStorageStrategy

    def update(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self.combine(tensors))

    def keep(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self._reduced(MEAN, tensors) if tensors else [])

    def _once(self, change: Change, tensors: list[tf.Tensor]) -> None:
        # The replicas' parts of the graph are traced one after the other, and use a variable in that order.
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
            change(tensors)


class MultiWorkerEngine(Distributed):
    """Ranks with one replica each, joined by TensorFlow over gRPC on the CPU, over NCCL on GPUs:
    MultiWorkerMirroredStrategy."""

    def __init__(self, settings: Recipe, topology: Topology, endpoints: Sequence[Endpoint], device: str) -> None:
        cluster = rendezvous.workers(endpoints)
        os.environ.update(rendezvous.no_proxy(endpoints, os.environ))
        # The strategy reads TF_CONFIG only from the process environment.
        os.environ["TF_CONFIG"] = rendezvous.tf_config(cluster, "worker", topology.rank) if cluster else "{}"
        implementation = Implementation.NCCL if "GPU" in device else Implementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        super().__init__(settings, strategy, 1)
        self.rank, self.size, self.device = self.strategy.cluster_resolver.task_id or 0, topology.size, device
        self.notes = (f"workers     {', '.join(cluster.get('worker', ['this process alone']))}",)
        self._clock = Clock()
        self._summed = graph(lambda array: strategy.reduce(SUM, strategy.run(tf.identity, (array,)), axis=None))

    @classmethod
    def open(cls, setup: Setup) -> "MultiWorkerEngine":
        device = take_device(setup.settings.device, setup.topology)
        return cls(setup.settings, setup.topology, setup.endpoints, device)

    @property
    def waited(self) -> float | None:
        return self._clock.seconds

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._clock.around(super().combine, tensors)

    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        held = [variable.numpy() for variable in variables.values()]
        own = b"".join(array.tobytes() for array in held) if self.rank == 0 else b""
        received, offset = sharing.bytes_from_rank_0(own, self.sum), 0
        for variable, array in zip(variables.values(), held, strict=True):
            variable.assign(np.frombuffer(received, array.dtype, array.size, offset).reshape(array.shape))
            offset += array.nbytes
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    def sum(self, array: np.ndarray) -> np.ndarray:
        return self._summed(tf.constant(array)).numpy()  # type: ignore[no-any-return]

    def is_lost(self, error: Exception) -> bool:
        lost = isinstance(error, LOST) or "Collective ops is aborted" in str(error)
        return lost and isinstance(error, tf.errors.OpError)


class ParameterServerEngine(Engine):
    """Every rank is a worker, the first of a host also a parameter server, rank 0 also the chief:
    ParameterServerStrategy.

    The chief gives each worker one batch after the other. Each worker changes the variables on the parameter servers
    without waiting for the others, so an update is of one worker's batch; the loop on rank 0 sees a world of one.
    """

    def __init__(self, topology: Topology, endpoints: Sequence[Endpoint], device: str) -> None:
        super().__init__(device)
        self.topology, self.serves = topology, not topology.is_rank_0
        self.notes = tuple(rendezvous.placement(endpoints))
        cluster = rendezvous.with_servers(endpoints)
        os.environ.update(rendezvous.no_proxy(endpoints, os.environ))
        self._servers = [self._server(cluster, "worker", topology.rank)]
        if topology.rank in rendezvous.servers(endpoints):
            self._servers.append(self._server(cluster, "ps", rendezvous.servers(endpoints).index(topology.rank)))
        if topology.is_rank_0:
            self._lead(cluster)

    @classmethod
    def open(cls, setup: Setup) -> "ParameterServerEngine":
        return cls(setup.topology, setup.endpoints, take_device(setup.settings.device, setup.topology))

    def _server(self, cluster: rendezvous.Cluster, job: str, index: int) -> tf.distribute.Server:
        # A step that waits for another task occupies a thread: with too few threads the tasks would wait forever.
        options = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=max(processors.count(), self.topology.size + 1),
            intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        )
        return tf.distribute.Server(cluster, job_name=job, task_index=index, config=options, protocol="grpc")

    def _lead(self, cluster: rendezvous.Cluster) -> None:
        # The resolver reads TF_CONFIG only from the process environment.
        os.environ["TF_CONFIG"] = rendezvous.tf_config(cluster, "chief", 0)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._scheduled: collections.deque[Any] = collections.deque()

    @property
    def world(self) -> tuple[int, int]:
        """Rank and number of ranks; on rank 0 the number of workers that it has reached."""
        if self.serves:
            return self.topology.rank, self.topology.size
        return 0, sum("/job:worker/" in device.name for device in tf.config.list_logical_devices("CPU"))

    def replicate(self, step: Callable[..., None], relaxed: bool = False) -> Callable[..., None]:
        compiled = graph(step, reduce_retracing=relaxed)

        def on_a_worker(inputs: Sequence[Inputs], *same: tf.Tensor) -> None:
            self._scheduled.append(self._coordinator.schedule(compiled, args=(*inputs[0], *same)))
            if len(self._scheduled) > self.topology.size * (1 + BEHIND):
                self._scheduled.popleft().fetch()

        return on_a_worker

    def copies(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        self._coordinator.join()
        self._scheduled.clear()
        return (variable,)

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, LOST)


def take(devices: Sequence[str]) -> list[str]:
    """Binds this process to the devices and returns TensorFlow's names of them; each cpu is a logical device.

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
