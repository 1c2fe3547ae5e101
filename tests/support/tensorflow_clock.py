"""Prints as JSON what the clock inside a graph measures, and what waits for it."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow_programs import horovod

from hvdtrain.core.metrics import Totals
from hvdtrain.tensorflow.engines import Clock
from hvdtrain.tensorflow.objective import Seen
from hvdtrain.tensorflow.step import GradientNorm, Meter

NOW = np.zeros(())
"""The time of the system's clock."""


def slept(seconds: float, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, after that time."""

    def sleep(value: Any) -> Any:
        NOW[...] += seconds
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [tensor], tensor.dtype), tensor.shape)


def timestamp() -> tf.Tensor:
    return tf.ensure_shape(tf.numpy_function(NOW.copy, [], tf.float64), ())


def measured(around: Callable[[Any], Any]) -> list[Any]:
    """The results of two steps that compute for 500 ms and combine for 200 ms, each with the clock after it."""
    clock, found = Clock(), []

    def step(x: tf.Tensor) -> tf.Tensor:
        gradients = [slept(0.5, x), None, x + 1]
        first, _, last = clock.around(lambda own: [slept(0.2, own[0]), None, own[2]], gradients)
        return first + last

    step = around(step)
    with mock.patch.object(tf, "timestamp", timestamp):
        for _ in range(2):
            found.append([float(step(tf.constant(1.0))), clock.seconds])
    return found


def ancestors(op: Any) -> set[Any]:
    """The operation and all that must run before it."""
    found, left = set(), [op]
    while left:
        if (op := left.pop()) not in found:
            found.add(op)
            left += [*(each.op for each in op.inputs), *op.control_inputs]
    return found


def waited_for() -> dict[str, list[str]]:
    """The operations for which each average and clock waits where Horovod's engine averages two gradients."""
    engine, made = horovod(), []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        made[:] = engine.combine([tf.identity(x, name="early"), tf.identity(x, name="late")])
        return [*made]

    graph = step.get_concrete_function(tf.TensorSpec((2,), tf.float32)).graph
    began, ended = (op for op in graph.get_operations() if op.type == "Timestamp")
    averages = {"average of early": made[0].op, "average of late": made[1].op}
    watched = {**averages, "began": began, "ended": ended}
    watched |= {name: graph.get_operation_by_name(name) for name in ("early", "late")}
    return {
        name: sorted(other for other, op in watched.items() if op in ancestors(watched[name]) and other != name)
        for name in (*averages, "began", "ended")
    }


def set_back() -> float:
    """The seconds of the clock after the system's was set back by a minute."""
    clock, times = Clock(), iter([100.0, 40.0])
    tf.timestamp = lambda: tf.constant(next(times), tf.float64)
    clock.around(list, [tf.constant(1.0)])
    return clock.seconds


def on_gpu() -> list[Any]:
    """The seconds of a clock in a process with a GPU, and the operations that it adds to a graph."""
    with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [kind]):
        clock = Clock()

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return clock.around(lambda own: [own[0] + 1], [x])

    graph = step.get_concrete_function(tf.TensorSpec((), tf.float32)).graph
    return [clock.seconds, [op.type for op in graph.get_operations() if op.type == "Timestamp"]]


def norms() -> list[float | None]:
    """The norms that three requests return, after the first, third and fifth of five updates."""
    norm, found = GradientNorm(), []

    @tf.function(autograph=False)
    def update(x: tf.Tensor) -> None:
        norm.measure([3 * x, 4 * x])

    for number in range(1, 6):
        update(tf.constant([float(number)]))
        found += [norm.take()] if number in {1, 3, 5} else []
    return found


def totals() -> Totals:
    """The sums of a batch that counts and of one that does not."""
    meter = Meter(lambda sums: [sums])
    for weight in (1.0, 0.0):
        meter.add(Seen(tf.constant(0.5), tf.constant(4), {"right": (tf.constant(3), tf.constant(4))}), weight)
    return meter.take()


if __name__ == "__main__":
    found = {
        "in a graph": measured(lambda step: tf.function(step, autograph=False)),
        "eagerly": measured(lambda step: step),
        "waited for": waited_for(),
        "on a GPU": on_gpu(),
        "set back": set_back(),
        "norms": norms(),
        "totals": dataclasses.astuple(totals()),
    }
    print(json.dumps(found))
