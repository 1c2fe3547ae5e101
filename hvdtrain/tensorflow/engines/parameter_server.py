"""tf.distribute's ParameterServerStrategy behind the engine's methods: the chief hands each worker one batch after the
other, and every worker changes the variables on the parameter servers without waiting for the others."""

import collections
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain import processors
from hvdtrain.engines.registry import Setup
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.tensorflow.engines import LOST, Inputs, graph, take_device
from hvdtrain.tensorflow.engines.local import LocalEngine

BEHIND = 2
"""Batches that wait for each worker while it computes."""


class ParameterServerEngine(LocalEngine):
    """Every rank is a worker, the first of a host also a parameter server, rank 0 also the chief.

    See `Engine` for the methods. An update is one worker's; the loop on rank 0 sees a world of one.
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
        return cls(setup.topology, setup.endpoints, take_device(setup))

    def _server(self, cluster: rendezvous.Cluster, job: str, index: int) -> tf.distribute.Server:
        # A step that waits for another task holds a thread: with too few of them they would wait for each other.
        options = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=max(processors.count(), self.topology.size + 1),
            intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        )
        return tf.distribute.Server(cluster, job_name=job, task_index=index, config=options, protocol="grpc")

    def _lead(self, cluster: rendezvous.Cluster) -> None:
        # The resolver reads it from the process environment, and nowhere else.
        os.environ["TF_CONFIG"] = rendezvous.of(cluster, "chief", 0)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._scheduled: collections.deque[Any] = collections.deque()

    @property
    def world(self) -> tuple[int, int]:
        """On rank 0, the number of workers that it has reached."""
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
