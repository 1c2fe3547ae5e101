"""SGD as PyTorch defines it, and the loss scale of float16: the same updates in both frameworks."""

import itertools
from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow.variables import put, subtract


class SGD:
    """g += weight_decay * w; m = momentum * m + g; w -= lr * (m, or g + momentum * m after Nesterov).

    The LR stands outside the momentum, as in torch.optim.SGD and unlike in keras.optimizers.SGD: a change of the LR
    acts on the whole update.
    """

    def __init__(self, settings: Any, variables: list[tf.Variable]) -> None:
        self._settings, self._variables = settings, variables
        self.momentum = zeros_like(variables) if settings.momentum else []

    @property
    def state(self) -> dict[str, list[tf.Variable] | tf.Variable]:
        return {"momentum": self.momentum} if self.momentum else {}

    def descend(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """One update of every variable; `lr` is a scalar."""
        decay = self._settings.weight_decay
        for variable, given, momentum in itertools.zip_longest(self._variables, gradients, self.momentum):
            gradient = given + decay * variable if decay else given
            if momentum is None:
                subtract(variable, times(lr, gradient))
                continue
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=momentum.handle,
                lr=tf.cast(lr, gradient.dtype),
                grad=gradient,
                momentum=tf.constant(self._settings.momentum, gradient.dtype),
                use_nesterov=self._settings.nesterov,
            )


def times(lr: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
    """The update, times the LR in its type."""
    return tf.cast(lr, update.dtype) * update


def zeros_like(variables: list[tf.Variable]) -> list[tf.Variable]:
    """A variable of zeros for each."""
    return [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]


def clipped(gradients: list[tf.Tensor], norm: float) -> list[tf.Tensor]:
    """The gradients, scaled down so that their common norm is at most `norm` (torch.nn.utils.clip_grad_norm_)."""
    total = norm_of(gradients)
    factor = tf.minimum(norm / (total + 1e-6), tf.ones((), total.dtype))
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def norm_of(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Their common norm, in the widest of their types."""
    widest = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.size)
    return tf.linalg.global_norm([tf.cast(gradient, widest) for gradient in gradients])


class Scaler:
    """The dynamic loss scale of float16 (torch.amp.GradScaler's rule and numbers); 1 where it is not `enabled`."""

    GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = tf.Variable(2.0**16 if enabled else 1.0, trainable=False)
        self._steps = tf.Variable(tf.zeros((), tf.int64), trainable=False)  # GPUs hold no 32-bit integers

    def unscaled(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients of the loss itself."""
        return [gradient / tf.cast(self.scale, gradient.dtype) for gradient in gradients]

    def update(self, finite: tf.Tensor) -> None:
        """Halves the scale after gradients that were not `finite`, doubles it after a long row of finite ones."""
        grown = finite & (self._steps + 1 >= self.INTERVAL)
        put(self._steps, tf.where(finite & ~grown, self._steps + 1, tf.zeros_like(self._steps)))
        put(self.scale, self.scale * tf.where(finite, tf.where(grown, self.GROWTH, 1.0), self.BACKOFF))

    def state_dict(self) -> dict[str, Any]:
        """With GradScaler's keys; empty where it is not enabled."""
        if not self.enabled:
            return {}
        return {
            "scale": float(self.scale.numpy()),
            "growth_factor": self.GROWTH,
            "backoff_factor": self.BACKOFF,
            "growth_interval": self.INTERVAL,
            "_growth_tracker": int(self._steps.numpy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self.scale.assign(state["scale"])
            self._steps.assign(state["_growth_tracker"])
