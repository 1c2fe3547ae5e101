"""Keras 3's optimizers, averaging over the ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import KerasError
from hvdtrain.keras.ranks import SCOPE, refuse_xla, tf_variable
from hvdtrain.tensorflow.engines.clock import Clock
from hvdtrain.tensorflow.engines.horovod import hvd

STOCK = "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls it"


# Horovod's arguments that do not exist under Keras 3, and what to write instead.
REMEDIES = {
    "backward_passes_per_step": "Keras accumulates by itself, give its optimizer gradient_accumulation_steps",
    "average_aggregated_gradients": "gradient_accumulation_steps of Keras's optimizer always averages",
    "num_groups": "write groups",
    "scale_local_gradients": "gradients of local layers are always divided by the number of ranks",
}


class Reduction:
    """Averages gradients over the ranks.

    `op`: Average, Sum or Adasum. `groups`: how many allreduces, or lists of variables that are communicated together.
    `local_layers`: layers whose weights each rank trains for itself, by the gradient of the ranks' mean loss (its
    own gradient divided by the number of ranks). Raises KerasError for an option that is none.
    """

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: Any = hvd.Average,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = hvd.global_process_set,
        local_layers: Sequence[keras.layers.Layer] = (),
        **others: Any,
    ) -> None:
        for name in others:
            raise KerasError(f"{name} is no option under Keras 3: {REMEDIES.get(name, 'leave it out')}.")
        if gradient_predivide_factor != 1.0 and op != hvd.Average:
            raise KerasError(f"gradient_predivide_factor={gradient_predivide_factor} goes with op=Average alone.")
        if isinstance(groups, int) and groups < 1:
            raise KerasError(f"groups must be at least 1, got {groups}.")
        if groups is not None and op == hvd.Adasum:
            raise KerasError("Adasum combines each gradient by itself: leave groups out.")
        self._sparse_as_dense, self._groups, self.process_set = sparse_as_dense, groups, process_set
        self._local = {id(tf_variable(v)) for layer in local_layers for v in layer.trainable_weights}
        self._settings = {
            "op": op,
            "compression": compression,
            "prescale_factor": 1 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": process_set,
        }

    @property
    def alone(self) -> bool:
        """Whether this rank averages with no other."""
        return self.process_set.size() == 1 or not self.process_set.included()

    @property
    def by_variable(self) -> bool:
        """Whether it matters which variable a gradient is of."""
        return bool(self._local) or isinstance(self._groups, Sequence)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients averaged, in their order; None stays None. Raises KerasError in an XLA cluster."""
        averaged = [self._dense(gradient) for gradient in gradients]
        if self.alone:
            return averaged
        refuse_xla()
        given = {index for index, gradient in enumerate(averaged) if gradient is not None}
        local = {index for index in given if self._local and id(tf_variable(variables[index])) in self._local}
        for index in local:
            averaged[index] = tf.math.scalar_mul(1 / self.process_set.size(), averaged[index])
        # Horovod 0.28.1 takes a sparse gradient's shape from another in its group.
        sparse = {index for index in given - local if isinstance(averaged[index], tf.IndexedSlices)}
        groups = self._grouped(sorted(given - local - sparse), variables) + [[index] for index in sorted(sparse)]
        for group in groups:
            means = self._reduced([averaged[index] for index in group], group[0])
            for index, gradient in zip(group, means, strict=True):
                averaged[index] = gradient
        return averaged

    def all(self, finite: Any) -> Any:
        """Whether it is so on all ranks."""
        if self.alone:
            return finite
        refuse_xla()
        with tf.name_scope(SCOPE):
            least = hvd.allreduce(tf.cast(finite, tf.int32), op=hvd.Min, name="finite", process_set=self.process_set)
        return tf.cast(least, tf.bool)

    def _reduced(self, gradients: list[Any], number: int) -> list[Any]:
        settings = {**self._settings, "name": f"hvdtrain.{number}"}
        with tf.name_scope(SCOPE):
            if len(gradients) == 1:
                return [hvd.allreduce(gradients[0], **settings)]
            return hvd.grouped_allreduce(gradients, **settings)

    def _dense(self, gradient: Any) -> Any:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self._sparse_as_dense else gradient

    def _grouped(self, indices: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The indices of gradients that are communicated together."""
        if self._groups is None:
            return [[index] for index in indices]
        if isinstance(self._groups, int):
            return [group.tolist() for group in np.array_split(indices, self._groups) if group.size]
        group_of = {id(tf_variable(v)): number for number, group in enumerate(self._groups) for v in group}
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(group_of.get(id(tf_variable(variables[index])), -1 - index), []).append(index)
        return list(groups.values())


def DistributedOptimizer(  # noqa: N802
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any], **options: Any
) -> keras.optimizers.Optimizer:
    """The same Keras optimizer, which from now on averages the gradients over the ranks before each update; also by its
    name or configuration, as Keras takes them.

    Its state, LR variable and slots stay. Options, as in Horovod: `compression`, `sparse_as_dense`,
    `gradient_predivide_factor`, `op`, `groups`, `process_set`, `local_layers`; see `Reduction`. With the
    optimizer's `gradient_accumulation_steps`, ranks communicate once in so many steps, unless it stands inside a
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
    if distributed(optimizer):
        raise KerasError("the optimizer is distributed already: wrap it once.")
    if _is_stock(optimizer):
        raise KerasError(f"{STOCK}; give the Keras optimizer itself to hvdtrain.keras's DistributedOptimizer.")
    reduction = Reduction(**options)
    base = type(optimizer)
    loss_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    averaging = type(
        base.__name__,
        (_Distributed, base),
        # Keras stores an optimizer by its __class__: a model loads where there is no hvdtrain.
        {"__module__": base.__module__, "__class__": property(lambda self: base), "from_config": base.from_config},
    )
    vars(optimizer).update(
        _reduction=reduction,
        _clock=Clock(),
        _at_update=bool(optimizer.gradient_accumulation_steps and not loss_scaled and not reduction.by_variable),
        _called=False,
    )
    object.__setattr__(optimizer, "__class__", averaging)
    return optimizer


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
    return found._clock if found else Clock()


def distributed(optimizer: Any) -> "_Distributed | None":
    """The distributed optimizer that this is, or that a LossScaleOptimizer holds."""
    found = getattr(optimizer, "inner_optimizer", optimizer)
    return next((each for each in (optimizer, found) if isinstance(each, _Distributed)), None)


def _is_stock(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_allreduce_grads")


class _Distributed(keras.optimizers.Optimizer):
    """Put before the class of an optimizer: the gradients are averaged on their way into an update."""

    _reduction: "Reduction"
    _clock: Clock
    _at_update: bool
    _called: bool

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._called = True
        given = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self._at_update:
            grads = self._averaged(grads, given)
        super().apply(grads, None if trainable_variables is None else given)

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        # Keras clips once in a real update, in the branch that every rank takes at the same count of iterations.
        if self._at_update:
            grads = self._averaged(grads, [None] * len(grads))
        return super()._clip_gradients(grads)

    def _averaged(self, grads: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        return self._clock.around(lambda own: self._reduction(own, variables), grads)


_finite = keras.optimizers.LossScaleOptimizer.check_finite


def _finite_everywhere(optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any]) -> Any:
    """Whether this rank's gradients are finite, and those of all ranks where they are averaged inside."""
    finite, inner = _finite(optimizer, grads), optimizer.inner_optimizer
    return inner._reduction.all(finite) if isinstance(inner, _Distributed) else finite


keras.optimizers.LossScaleOptimizer.check_finite = _finite_everywhere


def DistributedGradientTape(tape: tf.GradientTape, **options: Any) -> tf.GradientTape:  # noqa: N802
    """The same tape, whose `gradient` from now on gives averages over the ranks; options as for the optimizer.

    Sources may be Keras's variables or TensorFlow's, nested or single. Eagerly every gradient is averaged on its
    own, which is slow: write the loop in a `tf.function`.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight**2
        >>> float(hvd.DistributedGradientTape(tape).gradient(loss, weight))
        6.0
    """
    reduction, plain = Reduction(**options), tape.gradient

    def gradient(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = plain(target, sources, *args, **kwargs)
        averaged = reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, averaged)

    tape.gradient = gradient
    return tape
