"""Keras 3's optimizers, averaging over the ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import KerasError
from hvdtrain.keras.averaging import Reduction, distribute, distributed
from hvdtrain.tensorflow.engines.clock import Clock
from hvdtrain.tensorflow.engines.horovod import hvd

STOCK = "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls it"


class _Timed(Reduction):
    """A reduction that knows how long this rank waits for the others in it."""

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
    """The same Keras optimizer, which from now on averages the gradients over the ranks before each update; also by its
    name or configuration, as Keras takes them.

    Its state, LR variable and slots stay. Options, as in Horovod: `compression`, `sparse_as_dense`,
    `gradient_predivide_factor`, `op`, `groups`, `process_set`, `local_layers`, `scale_local_gradients`; see
    `Reduction`. `name` changes nothing. An update is of the sum of the gradients of `backward_passes_per_step`
    batches, or of their mean with `average_aggregated_gradients`. With these, and with the optimizer's own
    `gradient_accumulation_steps`, ranks communicate once in so many steps, unless it stands inside a
    LossScaleOptimizer or there are `local_layers` or lists of `groups`: then at every step. A LossScaleOptimizer,
    which Keras adds in mixed_float16, may stand inside or outside. A saved model holds the plain optimizer. Raises
    KerasError.

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
    """Refuses a model's optimizer under which several ranks would train apart. Raises KerasError."""
    if hvd.size() == 1 or distributed(optimizer):
        return
    found = STOCK if _is_stock(optimizer) else f"optimizer {optimizer.name!r} is a plain one"
    raise KerasError(
        f"{found}: {hvd.size()} ranks would train apart; compile the model with hvdtrain.keras's DistributedOptimizer."
    )


def check_called(optimizers: Iterable[Any]) -> None:
    """Refuses a training that has made steps past all of its distributed optimizers. Raises KerasError."""
    if hvd.size() > 1 and not any(each._called for each in map(distributed, optimizers) if each):
        raise KerasError(
            "fit made its steps without the distributed optimizer, in a function older than it; compile the model "
            "again, then fit."
        )


def clock_of(optimizer: Any) -> Clock:
    """How long this rank waits for the others' gradients in the optimizer; stands still where it is a plain one."""
    found = distributed(optimizer)
    return getattr(found._reduction, "clock", None) or Clock() if found else Clock()


def _is_stock(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_allreduce_grads")


PartialDistributedOptimizer = DistributedOptimizer
