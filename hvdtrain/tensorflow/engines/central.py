"""tf.distribute's CentralStorageStrategy behind the engine's methods: one process, several devices that compute, and
one copy of every variable, on the CPU or on the only GPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.settings import EngineSettings
from hvdtrain.engines.registry import Setup
from hvdtrain.tensorflow.engines.distribute import MEAN, Distributed, take
from hvdtrain.tensorflow.engines.replication import Change


class CentralEngine(Distributed):
    """A replica on each device, all on the same variables; see `Engine` for the methods."""

    def __init__(self, settings: EngineSettings, devices: Sequence[str]) -> None:
        strategy = tf.distribute.experimental.CentralStorageStrategy(take(devices))
        super().__init__(settings, strategy, len(devices))

    @classmethod
    def open(cls, setup: Setup) -> "CentralEngine":
        return cls(setup.settings, setup.devices)

    @property
    def world(self) -> tuple[int, int]:
        return self.rank, self.strategy.num_replicas_in_sync // self.replicas

    def update(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self.combine(tensors))

    def keep(self, change: Change, tensors: list[tf.Tensor]) -> None:
        self._once(change, self._reduced(MEAN, tensors) if tensors else [])

    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        return metadata

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def _once(self, change: Change, tensors: list[tf.Tensor]) -> None:
        # The replicas' parts of the graph are made one after the other, and in that order they use a variable.
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
            change(tensors)
