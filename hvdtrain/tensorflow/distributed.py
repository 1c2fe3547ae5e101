"""Averaging over the ranks for Keras 3: its optimizers, gradient tapes and variables."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import KerasError
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.topology import discover
from hvdtrain.run.guard import check_world
from hvdtrain.tensorflow.engines.horovod import hvd

STOCK = "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls it"
# Horovod's arguments that have no place under Keras 3, and what to write instead.
REMEDIES = {
    "backward_passes_per_step": "Keras accumulates by itself, give its optimizer gradient_accumulation_steps",
    "average_aggregated_gradients": "gradient_accumulation_steps of Keras's optimizer always averages",
    "num_groups": "write groups",
    "scale_local_gradients": "gradients of local layers are always divided by the number of ranks",
}


def init() -> None:
    """Joins the ranks and gives this one its GPU, whose memory then grows with need; a second call changes nothing.

    Raises WorldError where Horovod sees another world than the launcher promised, TopologyError, DeviceError, and
    KerasError where TensorFlow has taken its GPUs already.

    Examples:
        >>> import hvdtrain.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()  # with one process
        (0, 1)
    """
    hvd.init()
    topology = discover(os.environ)
    check_world(topology, hvd.rank(), hvd.size())
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


def DistributedOptimizer(optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.optimizers.Optimizer:  # noqa: N802
    """The same Keras optimizer, which from now on averages the gradients over the ranks before each update.

    Its state, LR variable and slots stay. Options, as in Horovod: `compression`, `sparse_as_dense`,
    `gradient_predivide_factor`, `op`, `groups`, `process_set`, `local_layers`; see `Reduction`. With the
    optimizer's `gradient_accumulation_steps`, ranks communicate once in so many steps, unless it stands inside a
    LossScaleOptimizer or there are `local_layers` or lists of `groups`: then at every step. In mixed_float16 wrap
    the LossScaleOptimizer. A saved model holds the plain optimizer. Raises KerasError.

    Examples:
        >>> import hvdtrain.tensorflow as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer, loss="mse")
    """
    if isinstance(optimizer, _Distributed):
        raise KerasError("the optimizer is distributed already: wrap it once.")
    if _is_stock(optimizer):
        raise KerasError(f"{STOCK}; give the Keras optimizer itself to hvdtrain.tensorflow's DistributedOptimizer.")
    reduction = Reduction(**options)
    base = type(optimizer)
    loss_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    averaging = type(
        base.__name__,
        (_Distributed, base),
        # Keras stores an optimizer by its __class__: a model loads where there is no hvdtrain.
        {"__module__": base.__module__, "__class__": property(lambda self: base)},
    )
    vars(optimizer).update(
        _reduction=reduction,
        _at_update=bool(optimizer.gradient_accumulation_steps and not loss_scaled and not reduction.by_variable),
        _called=False,
    )
    object.__setattr__(optimizer, "__class__", averaging)
    return optimizer


def check_distributed(optimizer: Any) -> None:
    """Refuses a model's optimizer under which several ranks would train apart. Raises KerasError."""
    if hvd.size() == 1 or isinstance(optimizer, _Distributed):
        return
    found = STOCK if _is_stock(optimizer) else f"optimizer {optimizer.name!r} is a plain one"
    raise KerasError(
        f"{found}: {hvd.size()} ranks would train apart; compile the model with hvdtrain.tensorflow's "
        "DistributedOptimizer."
    )


def check_called(optimizer: Any) -> None:
    """Refuses a training that has made steps past its distributed optimizer. Raises KerasError."""
    if hvd.size() > 1 and not optimizer._called:
        raise KerasError(
            "fit made its steps without the distributed optimizer, in a function older than it; compile the model "
            "again, then fit."
        )


def _is_stock(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_allreduce_grads")


class _Distributed(keras.optimizers.Optimizer):
    """Put before the class of an optimizer: the gradients are averaged on their way into an update."""

    _reduction: "Reduction"
    _at_update: bool
    _called: bool

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._called = True
        given = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self._at_update:
            grads = self._reduction(grads, given)
        super().apply(grads, None if trainable_variables is None else given)

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        # Keras clips once in a real update, in the branch that every rank takes at the same count of iterations.
        if self._at_update:
            grads = self._reduction(grads, [None] * len(grads))
        return super()._clip_gradients(grads)

    def __setattr__(self, name: str, value: Any) -> None:
        # Only a LossScaleOptimizer takes the factor away, from what it wraps; compile() adds one in mixed_float16.
        if name == "loss_scale_factor" and value is None:
            raise KerasError(
                "a LossScaleOptimizer around a distributed optimizer would let each rank skip steps by itself; in "
                "mixed_float16 compile with DistributedOptimizer(LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)


def DistributedGradientTape(tape: tf.GradientTape, **options: Any) -> tf.GradientTape:  # noqa: N802
    """The same tape, whose `gradient` from now on gives averages over the ranks; options as for the optimizer.

    Sources may be Keras's variables or TensorFlow's, nested or single. Eagerly every gradient is averaged on its
    own, which is slow: write the loop in a `tf.function`.

    Examples:
        >>> import hvdtrain.tensorflow as hvd
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


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Gives every rank the root's values. `variables`: Keras's or TensorFlow's, nested or single; also within a
    `tf.function`. Raises KerasError.

    Examples:
        >>> import hvdtrain.tensorflow as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_variables(model.weights, root_rank=0)  # every rank calls it
    """
    refuse_xla()
    for index, variable in enumerate(tf.nest.flatten(variables)):
        # A name of our own: Keras numbers layers as each rank made them, and repeats names of variables.
        variable.assign(hvd.broadcast(tf_variable(variable), root_rank, name=f"hvdtrain.broadcast.{index}"))


class Reduction:
    """Averages gradients over the ranks.

    `op`: Average, Sum or Adasum. `groups`: how many allreduces, or lists of variables that travel together.
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
        self._sparse_as_dense, self._groups, self._process_set = sparse_as_dense, groups, process_set
        self._local = {id(tf_variable(v)) for layer in local_layers for v in layer.trainable_weights}
        self._settings = {
            "op": op,
            "compression": compression,
            "prescale_factor": 1 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": process_set,
        }

    @property
    def by_variable(self) -> bool:
        """Whether it matters which variable a gradient is of."""
        return bool(self._local) or isinstance(self._groups, Sequence)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients averaged, in their order; None stays None. Raises KerasError in an XLA cluster."""
        averaged = [self._dense(gradient) for gradient in gradients]
        if self._process_set.size() == 1 or not self._process_set.included():
            return averaged
        refuse_xla()
        places = {place for place, gradient in enumerate(averaged) if gradient is not None}
        local = {place for place in places if self._local and id(tf_variable(variables[place])) in self._local}
        for place in local:
            averaged[place] = tf.math.scalar_mul(1 / self._process_set.size(), averaged[place])
        # Horovod 0.28.1 takes a sparse gradient's shape from another in its group.
        sparse = {place for place in places - local if isinstance(averaged[place], tf.IndexedSlices)}
        parts = self._parts(sorted(places - local - sparse), variables) + [[place] for place in sorted(sparse)]
        for part in parts:
            for place, gradient in zip(part, self._reduced([averaged[place] for place in part], part[0]), strict=True):
                averaged[place] = gradient
        return averaged

    def _reduced(self, gradients: list[Any], place: int) -> list[Any]:
        # A name of our own: Keras numbers layers in the order in which this rank made them.
        settings = {**self._settings, "name": f"hvdtrain.{place}"}
        if len(gradients) == 1:
            return [hvd.allreduce(gradients[0], **settings)]
        return hvd.grouped_allreduce(gradients, **settings)

    def _dense(self, gradient: Any) -> Any:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self._sparse_as_dense else gradient

    def _parts(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The places of gradients that travel together."""
        if self._groups is None:
            return [[place] for place in places]
        if isinstance(self._groups, int):
            return [part.tolist() for part in np.array_split(places, self._groups) if part.size]
        group_of = {id(tf_variable(v)): number for number, group in enumerate(self._groups) for v in group}
        parts: dict[int, list[int]] = {}
        for place in places:
            parts.setdefault(group_of.get(id(tf_variable(variables[place])), -1 - place), []).append(place)
        return list(parts.values())


def sum_over_ranks(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor added up over the ranks; differentiable. Raises KerasError in an XLA cluster."""
    refuse_xla()
    return hvd.allreduce(tensor, op=hvd.Sum)


def sum_arrays(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each array added up over the ranks, in float64; all of them in one allreduce."""
    flat = np.concatenate([np.zeros(0), *(np.ravel(array) for array in arrays)])
    with tf.device("/CPU:0"):  # NCCL has nothing to do with what lies on the host
        total = hvd.allreduce(tf.constant(flat, tf.float64), op=hvd.Sum, name="hvdtrain.sum").numpy()
    ends = np.cumsum([array.size for array in arrays])
    parts = np.split(total, ends[:-1]) if arrays else []
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


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
