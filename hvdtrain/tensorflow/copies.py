"""Copies of variables on the host, whose memory is taken once."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf


class Copies:
    """Memory for copies of variables, which each call fills anew; see `hvdtrain.torch.state`."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def of(self, variables: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
        """The variables as they are now, by name, until the next call."""
        self._held = {name: self._copied(name, variable) for name, variable in variables.items()}
        return dict(self._held)

    def _copied(self, name: str, variable: tf.Variable) -> np.ndarray:
        # numpy() would be a copy by itself; what this views is the variable's own memory, on the CPU.
        now = np.asarray(memoryview(variable.read_value()))
        held = self._held.get(name)
        if held is None or held.dtype != now.dtype or held.shape != now.shape:
            held = np.empty_like(now)
        np.copyto(held, now)
        return held
