"""The ranks under Keras 3: initialisation, broadcast and sums."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import KerasError
from hvdtrain.keras import batch_norm
from hvdtrain.keras.averaging import refuse_xla, tf_variable
from hvdtrain.keras.horovod_names import advise_at_failure
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.agreement import check_world
from hvdtrain.tensorflow.engines.horovod import hvd


def init() -> None:
    """Joins the ranks and gives this one its GPU, whose memory then grows with need; a second call changes nothing.

    Raises WorldError where Horovod sees another world than the launcher promised, TopologyError, DeviceError, and
    KerasError where TensorFlow has taken its GPUs already.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()  # with one process
        (0, 1)
    """
    advise_at_failure()
    hvd.init()
    topology = discover(os.environ)
    check_world(topology, hvd.rank(), hvd.size())
    if hvd.size() > 1:
        batch_norm.synchronize()
    gpus = tf.config.list_physical_devices("GPU")
    averages_there = hvd.size() == 1 or bool(hvd.nccl_built() or hvd.cuda_built())
    index = gpu_index("auto", len(gpus), topology, averages_there)
    if index is None:
        return
    try:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    except RuntimeError:
        raise KerasError(
            "TensorFlow has taken its GPUs already: call init() before the first tensor or model."
        ) from None


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Gives every rank the root's values. `variables`: Keras's or TensorFlow's, nested or single; also within a
    `tf.function`. Raises KerasError.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> import keras
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_variables(model.weights, root_rank=0)  # every rank calls it
    """
    refuse_xla()
    for index, variable in enumerate(tf.nest.flatten(variables)):
        # A name of our own: Keras numbers layers as each rank made them, and repeats names of variables.
        variable.assign(hvd.broadcast(tf_variable(variable), root_rank, name=f"hvdtrain.broadcast.{index}"))


def _of_values(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's collective, which then takes numbers and arrays too."""

    @functools.wraps(collective)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        return collective(
            value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value), *args, **kwargs
        )

    return call


allreduce, allgather, broadcast, reducescatter = map(
    _of_values, (hvd.allreduce, hvd.allgather, hvd.broadcast, hvd.reducescatter)
)


def sum_arrays(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each array added up over the ranks, in float64; all of them in one allreduce."""
    flat = np.concatenate([np.zeros(0), *(np.ravel(array) for array in arrays)])
    with tf.device("/CPU:0"):  # NCCL takes no part in sums on the host
        total = hvd.allreduce(tf.constant(flat, tf.float64), op=hvd.Sum, name="hvdtrain.sum").numpy()
    ends = np.cumsum([array.size for array in arrays])
    sums = np.split(total, ends[:-1]) if arrays else []
    return [each.reshape(array.shape) for each, array in zip(sums, arrays, strict=True)]
