"""Averages over the ranks under Keras 3, for hvdtrain.keras and for the Horovod that `hvdtrain build` makes.

The build puts a copy of this module into Horovod, as horovod/_keras/averaging.py: see tools/build/patching.py.
"""

import copy
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import KerasError
from hvdtrain.tensorflow.engines.horovod import hvd

SCOPE = "hvdtrain/"
"""Of collectives in a graph, whatever layer they are in: Keras numbers layers as each rank made them."""


class Reduction:
    """Averages gradients over the ranks.

    `op`: Average, Sum or Adasum. `groups`: how many allreduces, or lists of variables that are communicated together.
    `local_layers`: layers whose weights each rank trains for itself, by the gradient of the ranks' mean loss (its
    own gradient divided by the number of ranks), or, without `scale_local_gradients`, by its own gradient. Raises
    KerasError for an option that is none.
    """

    def __init__(
        self,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = hvd.Compression.none,
        sparse_as_dense: bool = False,
        op: Any = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = hvd.global_process_set,
        local_layers: Any = (),
        scale_local_gradients: bool = True,
        **others: Any,
    ) -> None:
        for name in others:
            raise KerasError(f"{name} is no option of Horovod's: leave it out.")
        if groups is None and num_groups:
            groups = num_groups
        if gradient_predivide_factor != 1.0 and op != hvd.Average:
            raise KerasError(f"gradient_predivide_factor={gradient_predivide_factor} goes with op=Average alone.")
        if isinstance(groups, int) and groups < 1:
            raise KerasError(f"groups must be at least 1, got {groups}.")
        if groups is not None and op == hvd.Adasum:
            raise KerasError("Adasum combines each gradient by itself: leave groups out.")
        self._sparse_as_dense, self._groups, self.process_set = sparse_as_dense, groups, process_set
        layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or ()
        self._local = {id(tf_variable(v)) for layer in layers for v in layer.trainable_weights}
        self._scale_local = scale_local_gradients
        self._settings = {
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "op": op,
            "compression": compression,
            "prescale_factor": 1 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": process_set,
        }

    @property
    def alone(self) -> bool:
        """Whether this rank averages with no other; ranks may join an elastic training at any time."""
        return not self.process_set.included() or (self.process_set.size() == 1 and not elastic())

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
        local = {index for index in given if self._local and self.is_local(variables[index])}
        for index in local if self._scale_local else ():
            averaged[index] = tf.math.scalar_mul(self._part(averaged[index].dtype), averaged[index])
        # Horovod 0.28.1 takes a sparse gradient's shape from another in its group.
        sparse = {index for index in given - local if isinstance(averaged[index], tf.IndexedSlices)}
        groups = self._grouped(sorted(given - local - sparse), variables) + [[index] for index in sorted(sparse)]
        for group in groups:
            means = self._reduced([averaged[index] for index in group], group[0])
            for index, gradient in zip(group, means, strict=True):
                averaged[index] = gradient
        return averaged

    def is_local(self, variable: Any) -> bool:
        """Whether each rank trains this variable for itself."""
        return id(tf_variable(variable)) in self._local

    def register_local_var(self, variable: Any) -> None:
        """From now on each rank trains this variable for itself."""
        self._local.add(id(tf_variable(variable)))

    def all(self, finite: Any) -> Any:
        """True if `finite` is true on all ranks."""
        if self.alone:
            return finite
        refuse_xla()
        with tf.name_scope(SCOPE):
            least = hvd.allreduce(tf.cast(finite, tf.int32), op=hvd.Min, name="finite", process_set=self.process_set)
        return tf.cast(least, tf.bool)

    def _part(self, dtype: tf.DType) -> tf.Tensor:
        """One rank's part of the whole."""
        size = hvd.size_op(self.process_set.process_set_id) if elastic() else self.process_set.size()
        return 1 / tf.cast(size, dtype)

    def _reduced(self, gradients: list[Any], number: int) -> list[Any]:
        settings = {**self._settings, **self._predivision(gradients), "name": f"hvdtrain.{number}"}
        with tf.name_scope(SCOPE):
            if len(gradients) == 1:
                return [hvd.allreduce(gradients[0], **settings)]
            return hvd.grouped_allreduce(gradients, **settings)

    def _predivision(self, gradients: list[Any]) -> dict[str, float]:
        """Divides float16 numbers before the sum, which could overflow, and not after it."""
        half = self._settings["compression"] is hvd.Compression.fp16 or any(g.dtype == tf.float16 for g in gradients)
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        if self._settings["op"] != hvd.Average or not half or sparse or elastic():
            return {}
        size = float(self.process_set.size())
        return {"prescale_factor": 1 / size, "postscale_factor": size}

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


def distribute(
    optimizer: keras.optimizers.Optimizer,
    reduction: Reduction,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> keras.optimizers.Optimizer:
    """The same optimizer, which from now on reduces its gradients so before each update.

    `backward_passes_per_step`: gradients that are added up before the ranks communicate, or averaged with
    `average_aggregated_gradients`. Raises KerasError.
    """
    if distributed(optimizer):
        raise KerasError("the optimizer is distributed already: wrap it once.")
    accumulating = getattr(optimizer, "inner_optimizer", optimizer)
    if backward_passes_per_step < 1:
        raise KerasError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}.")
    if backward_passes_per_step > 1:
        _accumulate(accumulating, backward_passes_per_step)
    return _averaging(optimizer, reduction, 1 if average_aggregated_gradients else backward_passes_per_step)


def _averaging(optimizer: Any, reduction: Reduction, factor: int) -> Any:
    """The same optimizer, of a class that averages; its copies average too."""
    base = type(optimizer)
    own = {
        "__module__": base.__module__,
        # Keras stores an optimizer by its __class__: a model loads where there is no Horovod.
        "__class__": property(lambda self: base),
        "from_config": staticmethod(lambda *args, **kw: _averaging(base.from_config(*args, **kw), reduction, factor)),
    }
    vars(optimizer).update(_reduction=reduction, _factor=factor, _called=False)
    object.__setattr__(optimizer, "__class__", type(base.__name__, (_Distributed, base), own))
    return optimizer


def _accumulate(optimizer: keras.optimizers.Optimizer, steps: int) -> None:
    if optimizer.gradient_accumulation_steps:
        raise KerasError(
            f"the optimizer has gradient_accumulation_steps={optimizer.gradient_accumulation_steps} already: "
            "leave that or backward_passes_per_step out."
        )
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(each, name="gradient_accumulator")
            for each in optimizer._trainable_variables
        ]


def distributed(optimizer: Any) -> Any:
    """The distributed optimizer that this is, or that a LossScaleOptimizer holds; None where it is a plain one."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return next((each for each in (optimizer, inner) if hasattr(each, "_reduction")), None)


class _Distributed(keras.optimizers.Optimizer):
    """Put before the class of an optimizer: the gradients are averaged on their way into an update."""

    _reduction: Reduction
    _factor: int
    """That a mean of accumulated gradients is multiplied by."""
    _called: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, arguments = super().__reduce__()  # Keras's copy is made by its name, and so a plain one
        return _averaging(make(*arguments), self._reduction, self._factor)

    @property
    def _at_update(self) -> bool:
        """Whether ranks communicate once for all gradients that are accumulated."""
        loss_scaled = isinstance(self, keras.optimizers.LossScaleOptimizer)
        return bool(self.gradient_accumulation_steps and not loss_scaled and not self._reduction.by_variable)

    def register_local_var(self, variable: Any) -> None:
        self._reduction.register_local_var(variable)

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
        if all(getattr(each, "_horovod_combined", False) for each in grads if each is not None):
            return grads  # by a distributed tape or an allreduce of the program's, which with op=Sum counts once
        averaged = self._reduction(grads, variables)
        return [g if g is None or self._factor == 1 else tf.math.scalar_mul(self._factor, g) for g in averaged]


_finite = keras.optimizers.LossScaleOptimizer.check_finite


def _finite_everywhere(optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any]) -> Any:
    """Whether this rank's gradients are finite, and those of all ranks where they are averaged inside."""
    finite, inner = _finite(optimizer, grads), optimizer.inner_optimizer
    return inner._reduction.all(finite) if hasattr(inner, "_reduction") else finite


keras.optimizers.LossScaleOptimizer.check_finite = _finite_everywhere


class _CallableList(list):  # type: ignore[type-arg]
    """What an optimizer's `variables` is, also where it is called, as by programs written for Keras 2."""

    def __call__(self) -> list[Any]:
        return self


_variables = keras.optimizers.Optimizer.variables
keras.optimizers.Optimizer.variables = property(lambda optimizer: _CallableList(_variables.fget(optimizer)))


def DistributedGradientTape(gradtape: tf.GradientTape, *args: Any, **options: Any) -> tf.GradientTape:  # noqa: N802
    """The same tape, but that its `gradient` gives averages over the ranks; options as for the optimizer.

    Sources may be Keras's variables or TensorFlow's, nested or single. Eagerly every gradient is averaged on its
    own, which is slow: write the loop in a `tf.function`. `use_generic_names` of `gradient` changes nothing.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight**2
        >>> float(hvd.DistributedGradientTape(tape).gradient(loss, weight))
        6.0
    """
    reduction, tape = Reduction(*args, **options), copy.copy(gradtape)
    tape._recording = False  # that of the program's records, if any does
    plain = tape.gradient

    def gradient(target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any) -> Any:
        gradients = plain(target, sources, *args, **kwargs)
        averaged = reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, averaged)

    def get_local_and_global_gradients(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(zip(map(tf_variable, sources), gradient(target, sources, *args, **kwargs), strict=True))
        return [[pair for pair in pairs if reduction.is_local(pair[0]) is local] for local in (True, False)]

    vars(tape).update(
        gradient=gradient,
        get_local_and_global_gradients=get_local_and_global_gradients,
        register_local_source=reduction.register_local_var,
    )
    return tape


PartialDistributedGradientTape = DistributedGradientTape


def sum_over_ranks(tensor: tf.Tensor, **settings: Any) -> tf.Tensor:
    """The tensor added up over the ranks; differentiable. Raises KerasError in an XLA cluster."""
    refuse_xla()
    with tf.name_scope(SCOPE):
        return hvd.allreduce(tensor, op=hvd.Sum, name=None if tf.executing_eagerly() else "sum", **settings)


def tf_variable(variable: Any) -> Any:
    """The tf.Variable under Keras's, which is all that Horovod takes."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def elastic() -> bool:
    """Whether ranks may join this training."""
    return os.environ.get("HOROVOD_ELASTIC", "0") != "0"


def refuse_xla() -> None:
    """Raises KerasError while a function is traced that XLA is to compile."""
    if tf.executing_eagerly() or not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return
    raise KerasError(
        "XLA cannot compile Horovod's collectives: compile the model with jit_compile=False, or give fit the callback "
        "that broadcasts, which turns it off; take jit_compile=True off a tf.function of your own."
    )
