"""How gradients are averaged over the ranks: for Keras's optimizers and for TensorFlow's tapes."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import KerasError
from hvdtrain.keras.ranks import SCOPE, refuse_xla, tf_variable
from hvdtrain.tensorflow.engines.horovod import hvd

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
