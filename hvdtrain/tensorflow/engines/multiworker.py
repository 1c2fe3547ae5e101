"""tf.distribute.MultiWorkerMirroredStrategy behind the engine's methods: one replica a rank, joined by TensorFlow's own
collectives."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core import sharing
from hvdtrain.core.settings import EngineSettings
from hvdtrain.engines.registry import Setup
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.tensorflow.engines import LOST, Clock, graph, take_device
from hvdtrain.tensorflow.engines.distribute import SUM, Distributed

Implementation = tf.distribute.experimental.CommunicationImplementation


class MultiWorkerEngine(Distributed):
    """Ranks joined by TensorFlow: over gRPC on the CPU, over NCCL on GPUs; see `Engine` for the methods."""

    def __init__(
        self, settings: EngineSettings, topology: Topology, endpoints: Sequence[Endpoint], device: str
    ) -> None:
        cluster = rendezvous.workers(endpoints)
        os.environ.update(rendezvous.no_proxy(endpoints, os.environ))
        # The strategy reads it from the process environment, and nowhere else.
        os.environ["TF_CONFIG"] = rendezvous.of(cluster, "worker", topology.rank) if cluster else "{}"
        implementation = Implementation.NCCL if "GPU" in device else Implementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        super().__init__(settings, tf.distribute.MultiWorkerMirroredStrategy(communication_options=options), 1)
        self.rank, self.size, self.device = self.strategy.cluster_resolver.task_id or 0, topology.size, device
        self.notes = (f"workers     {', '.join(cluster.get('worker', ['this process alone']))}",)
        self._clock = Clock()
        self._summed = graph(self._sum_of_ranks)

    @classmethod
    def open(cls, setup: Setup) -> "MultiWorkerEngine":
        return cls(setup.settings, setup.topology, setup.endpoints, take_device(setup))

    @property
    def waited(self) -> float:
        return self._clock.seconds

    def combine(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._clock.around(super().combine, tensors)

    @is_operation
    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        held = [variable.numpy() for variable in variables.values()]
        own = b"".join(array.tobytes() for array in held) if self.rank == 0 else b""
        received, offset = sharing.bytes_from_rank_0(own, self.sum), 0
        for variable, array in zip(variables.values(), held, strict=True):
            variable.assign(np.frombuffer(received, array.dtype, array.size, offset).reshape(array.shape))
            offset += array.nbytes
        return sharing.from_rank_0(metadata, self.rank, self.sum)

    @is_operation
    def sum(self, array: np.ndarray) -> np.ndarray:
        return self._summed(tf.constant(array)).numpy()  # type: ignore[no-any-return]

    def is_lost(self, error: Exception) -> bool:
        lost = isinstance(error, LOST) or "Collective ops is aborted" in str(error)
        return lost and isinstance(error, tf.errors.OpError)

    def _sum_of_ranks(self, array: tf.Tensor) -> tf.Tensor:
        return self.strategy.reduce(SUM, self.strategy.run(tf.identity, (array,)), axis=None)
