"""tf.distribute.MirroredStrategy behind the engine's methods: one process, several devices, one step for all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.settings import EngineSettings
from hvdtrain.engines.registry import Setup
from hvdtrain.tensorflow.engines.distribute import Distributed, take


class MirroredEngine(Distributed):
    """A replica on each device; see `Engine` for the methods. GPUs add over NCCL, logical CPUs in memory."""

    def __init__(self, settings: EngineSettings, devices: Sequence[str]) -> None:
        super().__init__(settings, tf.distribute.MirroredStrategy(take(devices)), len(devices))

    @classmethod
    def open(cls, setup: Setup) -> "MirroredEngine":
        return cls(setup.settings, setup.devices)

    @property
    def world(self) -> tuple[int, int]:
        return self.rank, self.strategy.num_replicas_in_sync // self.replicas

    def broadcast(self, variables: dict[str, tf.Variable], metadata: Any) -> Any:
        return metadata

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array
