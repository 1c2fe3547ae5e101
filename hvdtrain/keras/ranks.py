"""Initialisation, broadcasts and sums of ranks under Keras 3, and their distributed optimizer."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import KerasError
from hvdtrain.keras import batch_norm
from hvdtrain.keras.averaging import Reduction, distribute, distributed, refuse_xla, tf_variable
from hvdtrain.keras.horovod_names import advise_at_failure
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.agreement import check_world
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.run.loop import Communicator
from hvdtrain.tensorflow.engines import Clock, take_device
from hvdtrain.tensorflow.engines.horovod import hvd


def init() -> None:
    """Joins the ranks and binds this one to its GPU, whose memory use then grows as needed. A second call changes
    nothing.

    Raises WorldError where Horovod's ranks are not those of the launcher, TopologyError, DeviceError, and KerasError
    where TensorFlow has taken its GPUs already.

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
    try:
        take_device("auto", topology, hvd.size() == 1 or bool(hvd.nccl_built() or hvd.cuda_built()))
    except RuntimeError:
        raise KerasError(
            "TensorFlow has taken its GPUs already: call init() before the first tensor or model."
        ) from None


@is_operation
def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Gives every rank the root's values of Keras's or TensorFlow's variables, nested or single; also in a
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
        # Not the variable's name: Keras numbers layers in the order in which each rank made them, and repeats names.
        variable.assign(hvd.broadcast(tf_variable(variable), root_rank, name=f"hvdtrain.broadcast.{index}"))


def _of_values(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's collective, made to take numbers and arrays too."""

    @functools.wraps(collective)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        return collective(
            value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value), *args, **kwargs
        )

    return call


allreduce, allgather, broadcast, reducescatter = map(
    _of_values, (hvd.allreduce, hvd.allgather, hvd.broadcast, hvd.reducescatter)
)


@is_operation
def sum_array(array: np.ndarray, op: Any = hvd.Sum) -> np.ndarray:
    """The sum of the ranks' arrays, of the same type; or what another of Horovod's operations makes of them."""
    with tf.device("/CPU:0"):  # the array is in the host's memory, where NCCL adds nothing
        return hvd.allreduce(tf.constant(array), op=op, name="hvdtrain.sum").numpy()  # type: ignore[no-any-return]


def sum_arrays(arrays: Sequence[np.ndarray], op: Any = hvd.Sum) -> list[np.ndarray]:
    """Each array added up over the ranks, in float64; all of them in one allreduce. `op`: see `sum_array`."""
    total = sum_array(np.concatenate([np.zeros(0), *(np.ravel(array) for array in arrays)]), op)
    ends = np.cumsum([array.size for array in arrays])
    sums = np.split(total, ends[:-1]) if arrays else []
    return [each.reshape(array.shape) for each, array in zip(sums, arrays, strict=True)]


def among() -> Communicator:
    """What a comparison of the ranks needs; see `hvdtrain.ranks.agreement.check_values`."""
    return (hvd.rank(), hvd.size()), discover(os.environ).host, sum_array


def all_take_part() -> bool:
    """Whether no rank has left the epoch before the others, which is reported where they leave it, too. Every rank
    calls it."""
    return bool(sum_array(np.ones(1)) == hvd.size())


def join_all() -> None:
    """Waits for all ranks; to their averages until then, this rank contributes zeros."""
    tf.compat.v1.wrap_function(hvd.join, [])().numpy()  # TensorFlow takes the second of two eager joins for the first


STOCK = "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls it"


class _Timed(Reduction):
    """A reduction that measures how long this rank waits for the others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = Clock()

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self.clock.around(lambda own: super(_Timed, self).__call__(own, variables), gradients)


def DistributedOptimizer(  # noqa: N802
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
    name: str | None = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer average the gradients over the ranks before each update, and returns it. It may be given
    by name or configuration, as in Keras.

    Its state, LR variable and slots stay as they are. Options, as in Horovod: `compression`, `sparse_as_dense`,
    `gradient_predivide_factor`, `op`, `groups`, `process_set`, `local_layers`, `scale_local_gradients`; see
    `Reduction`. `name` has no effect. An update uses the sum of the gradients of `backward_passes_per_step` batches, or
    their mean with `average_aggregated_gradients`. With this option, or the optimizer's `gradient_accumulation_steps`,
    ranks communicate only at an update; inside a LossScaleOptimizer, and with `local_layers` or lists of `groups`, at
    every step. A LossScaleOptimizer, which Keras adds in mixed_float16, may be inside or outside. A saved model holds
    the plain optimizer. Raises KerasError.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer, loss="mse")
    """
    optimizer = keras.optimizers.get(optimizer)
    if optimizer is None:
        raise KerasError("DistributedOptimizer needs an optimizer, its name or its configuration, got None.")
    if _is_stock(optimizer):
        raise KerasError(f"{STOCK}; give the Keras optimizer itself to hvdtrain.keras's DistributedOptimizer.")
    return distribute(optimizer, _Timed(**options), backward_passes_per_step, average_aggregated_gradients)


def check_distributed(optimizer: Any) -> None:
    """Refuses an optimizer that does not average over several ranks. Raises KerasError."""
    if hvd.size() == 1 or distributed(optimizer):
        return
    found = STOCK if _is_stock(optimizer) else f"optimizer {optimizer.name!r} is a plain one"
    raise KerasError(
        f"{found}: {hvd.size()} ranks would train apart; compile the model with hvdtrain.keras's DistributedOptimizer."
    )


def check_called(optimizers: Iterable[Any]) -> None:
    """Refuses a training whose steps have called none of its distributed optimizers. Raises KerasError."""
    if hvd.size() > 1 and not any(each._called for each in map(distributed, optimizers) if each):
        raise KerasError(
            "fit made its steps without the distributed optimizer, in a function older than it; compile the model "
            "again, then fit."
        )


def clock_of(optimizer: Any) -> Clock:
    """The clock of this rank's waiting for gradients in the optimizer; one that stays at 0 for a plain optimizer."""
    found = distributed(optimizer)
    return getattr(found._reduction, "clock", None) or Clock() if found else Clock()


def _is_stock(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_allreduce_grads")


PartialDistributedOptimizer = DistributedOptimizer
