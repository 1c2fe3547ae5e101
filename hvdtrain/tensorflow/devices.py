"""This rank's device and threads, as TensorFlow has them."""

import contextlib
import os
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import config

from hvdtrain.engines.registry import Setup
from hvdtrain.launch.devices import gpu_index, threads
from hvdtrain.launch.topology import Topology


def take(setup: Setup, *, gpu_operations: bool = True) -> str:
    """The rank's own device, which it is bound to; `gpu_operations`: see `gpu_index`. Raises DeviceError."""
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_index(setup.settings.device, len(gpus), setup.topology, gpu_operations)
    if index is None:
        tf.config.set_visible_devices([], "GPU")
        return "/CPU:0"
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"


def settings() -> dict[str, Any]:
    """How TensorFlow computes in this process, beside what the environment says."""
    return {
        "TensorFloat-32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "op determinism": config.is_op_determinism_enabled(),
        "floatx": keras.config.floatx(),
        "dtype policy": keras.config.dtype_policy().name,
        "image data format": keras.config.image_data_format(),
    }


def take_threads(topology: Topology) -> None:
    """Computes with the rank's share of the host's processors."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, topology, os.environ)
    requested = os.environ.get("OMP_NUM_THREADS", "")  # TensorFlow's own threads do not heed it
    if count or requested.isdecimal():
        with contextlib.suppress(RuntimeError):  # in a notebook TensorFlow may have begun: it keeps its threads then
            tf.config.threading.set_intra_op_parallelism_threads(count or int(requested))
