"""The ranks under Keras 3: initialisation, broadcast and sums."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import KerasError
from hvdtrain.keras import batch_norm
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.topology import discover
from hvdtrain.run.guard import check_world
from hvdtrain.tensorflow.engines.horovod import hvd

SCOPE = "hvdtrain/"
"""Of collectives in a graph, whatever layer they are in: Keras numbers layers as each rank made them."""


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
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_variables(model.weights, root_rank=0)  # every rank calls it
    """
    refuse_xla()
    for index, variable in enumerate(tf.nest.flatten(variables)):
        # A name of our own: Keras numbers layers as each rank made them, and repeats names of variables.
        variable.assign(hvd.broadcast(tf_variable(variable), root_rank, name=f"hvdtrain.broadcast.{index}"))


def sum_over_ranks(tensor: tf.Tensor, **settings: Any) -> tf.Tensor:
    """The tensor added up over the ranks; differentiable. Raises KerasError in an XLA cluster."""
    refuse_xla()
    with tf.name_scope(SCOPE):
        return hvd.allreduce(tensor, op=hvd.Sum, name=None if tf.executing_eagerly() else "sum", **settings)


def sum_arrays(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each array added up over the ranks, in float64; all of them in one allreduce."""
    flat = np.concatenate([np.zeros(0), *(np.ravel(array) for array in arrays)])
    with tf.device("/CPU:0"):  # NCCL takes no part in sums on the host
        total = hvd.allreduce(tf.constant(flat, tf.float64), op=hvd.Sum, name="hvdtrain.sum").numpy()
    ends = np.cumsum([array.size for array in arrays])
    sums = np.split(total, ends[:-1]) if arrays else []
    return [each.reshape(array.shape) for each, array in zip(sums, arrays, strict=True)]


def tf_variable(variable: Any) -> Any:
    """The tf.Variable under Keras's, which is all that Horovod takes."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def refuse_xla() -> None:
    """Raises KerasError while a function is traced that XLA is to compile."""
    if tf.executing_eagerly() or not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return
    raise KerasError(
        "XLA cannot compile Horovod's collectives: compile the model with jit_compile=False, or leave it at 'auto' "
        "and give fit a BroadcastCallback; take jit_compile=True off a tf.function of your own."
    )
