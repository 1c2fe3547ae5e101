"""The recipe's optimizer, with the same updates as in hvdtrain.torch, or a Keras optimizer named by an import path;
gradient clipping, and the loss scale of float16.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.core import optimizers
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.recipe.finetuning import Part
from hvdtrain.errors import RecipeError
from hvdtrain.tensorflow import private
from hvdtrain.tensorflow.engines import add, put, subtract

Tensors = list[tf.Tensor]
INSTEAD = {
    "an LR schedule": "lr_schedule",
    "use_ema": "ema_decay",
    "gradient_accumulation_steps": "accumulation_steps",
    "a loss scale": "precision: float16",
}
"""Options of Keras's optimizers that a recipe refuses, and the recipe's keys in their place."""


def make(recipe: Recipe, weights: Sequence[keras.Variable], parts: Sequence[Part] = ()) -> "Optimizer":
    """The recipe's optimizer for these weights, before its first update. `parts`: how each of them learns. Raises
    RecipeError."""
    if odd := [each.path for each in weights if getattr(each, "overwrite_with_gradient", False)]:
        raise RecipeError(
            f"weight {odd[0]} becomes its gradient (float8), of which ranks would have the mean; train without "
            "quantize('float8')."
        )
    if {*parts} <= {Part()}:
        return _made(recipe, weights, Part())
    return Apart(recipe, weights, parts)


def _made(recipe: Recipe, weights: Sequence[keras.Variable], part: Part) -> "Optimizer":
    if recipe.optimizer not in optimizers.NAMED:
        return KerasOptimizer(recipe, weights, part)
    settings = optimizers.settings(recipe)
    settings = settings if part.has_decay else settings.model_copy(update={"weight_decay": 0.0})
    return KINDS[recipe.optimizer](settings, [weight.value for weight in weights])


class SGD:
    """g += weight_decay * w; m = momentum * m + g; w -= lr * (m, or g + momentum * m after Nesterov).

    The LR is no factor of the momentum, as in torch.optim.SGD and unlike keras.optimizers.SGD: a change of the LR
    applies to the whole update.
    """

    def __init__(self, settings: Any, variables: list[tf.Variable]) -> None:
        self._settings, self._variables = settings, variables
        self.momentum = zeros_like(variables) if settings.momentum else []

    @property
    def state(self) -> dict[str, list[tf.Variable] | tf.Variable]:
        return {"momentum_buffer": self.momentum} if self.momentum else {}

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
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


class Moments:
    """Adam's running means of gradients and of their squares, as Kingma and Ba 2015, arXiv:1412.6980, correct them."""

    def __init__(self, settings: optimizers.Adam, variables: list[tf.Variable]) -> None:
        self._settings, self._variables = settings, variables
        self._mean, self._square = zeros_like(variables), zeros_like(variables)
        self._step = tf.Variable(tf.zeros(()), trainable=False)  # TensorFlow keeps int32 off the GPU

    @property
    def state(self) -> dict[str, list[tf.Variable] | tf.Variable]:
        return {"step": self._step, "exp_avg": self._mean, "exp_avg_sq": self._square}

    def _updates(self, gradients: Tensors) -> Tensors:
        """Updates the means; returns each variable's update for an LR of 1."""
        beta1, beta2 = self._settings.betas
        add(self._step, tf.ones(()))
        step = tf.cast(self._step, tf.float64)  # 1 - b^t of a float32 b is wrong in the fifth digit at first
        first, second = (1 - tf.constant(beta, tf.float64) ** step for beta in (beta1, beta2))
        updates = []
        for gradient, mean, square in zip(gradients, self._mean, self._square, strict=True):
            put(mean, mean * beta1 + gradient * (1 - beta1))
            put(square, square * beta2 + tf.square(gradient) * (1 - beta2))
            denominator = tf.sqrt(square / tf.cast(second, square.dtype)) + self._settings.eps
            updates.append(mean / tf.cast(first, mean.dtype) / denominator)
        return updates


class Adam(Moments):
    """torch.optim.Adam, which adds weight decay to the gradient, or torch.optim.AdamW, which adds it to the update."""

    def __init__(self, settings: optimizers.Adam, variables: list[tf.Variable], is_decay_apart: bool) -> None:
        super().__init__(settings, variables)
        self._is_decay_apart = is_decay_apart

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
        decay = self._settings.weight_decay
        if not self._is_decay_apart:
            gradients = [g + decay * v for g, v in zip(gradients, self._variables, strict=True)] if decay else gradients
            decay = 0.0
        for variable, update in zip(self._variables, self._updates(gradients), strict=True):
            subtract(variable, times(lr, update + decay * variable if decay else update))


class LAMB(Moments):
    """You et al. 2020, arXiv:1904.00962, algorithm 2; see `hvdtrain.torch.optimizers.LAMB`."""

    _settings: optimizers.Lamb

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
        for variable, update in zip(self._variables, self._updates(gradients), strict=True):
            subtract(variable, times(lr, self._scaled(variable, update)))

    def _scaled(self, variable: tf.Variable, update: tf.Tensor) -> tf.Tensor:
        if not _is_adapted(self._settings, variable):
            return update
        whole = update + self._settings.weight_decay * variable
        of_variable, of_whole = tf.norm(variable), tf.norm(whole)
        return whole * _ratio(of_variable, of_whole, (of_variable == 0) | (of_whole == 0))


class LARS(SGD):
    """You et al. 2017, arXiv:1708.03888, algorithm 1; see `hvdtrain.torch.optimizers.LARS`."""

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
        for variable, gradient, momentum in itertools.zip_longest(self._variables, gradients, self.momentum):
            update = times(lr, self._locally_scaled(variable, gradient))
            if momentum is not None:
                put(momentum, self._settings.momentum * momentum + update)
                update = tf.convert_to_tensor(momentum)
            subtract(variable, update)

    def _locally_scaled(self, variable: tf.Variable, gradient: tf.Tensor) -> tf.Tensor:
        s = self._settings
        if not _is_adapted(s, variable):
            return gradient
        of_variable, of_gradient = tf.norm(variable), tf.norm(gradient)
        below = of_gradient + s.weight_decay * of_variable + s.eps
        is_at_0 = (of_variable == 0) | (of_gradient == 0)
        return _ratio(s.trust_coefficient * of_variable, below, is_at_0) * (gradient + s.weight_decay * variable)


KINDS: dict[str, Callable[[Any, list[tf.Variable]], "Optimizer"]] = {
    "sgd": SGD,
    "adam": functools.partial(Adam, is_decay_apart=False),
    "adamw": functools.partial(Adam, is_decay_apart=True),
    "lamb": LAMB,
    "lars": LARS,
}
"""The optimizers' classes, by their names in `hvdtrain.core.optimizers.NAMED`."""


class KerasOptimizer:
    """A Keras optimizer that the recipe names by an import path."""

    def __init__(self, recipe: Recipe, weights: Sequence[keras.Variable], part: Part) -> None:
        def made(kind: Callable[..., Any]) -> Any:
            return kind(learning_rate=recipe.base_lr, **recipe.optimizer_args)

        base = keras.optimizers.Optimizer
        self._weights = list(weights)
        self._optimizer = own = optimizers.imported(recipe, made, base, "keras.optimizers.Optimizer")
        scales = own.loss_scale_factor or isinstance(own, keras.optimizers.LossScaleOptimizer)
        has = (private.is_scheduled(own), own.use_ema, own.gradient_accumulation_steps, scales)
        for (argument, key), is_there in zip(INSTEAD.items(), has, strict=True):
            if is_there:
                its = f"optimizer {recipe.optimizer} has {argument} of its own"
                raise RecipeError(f"{its}, which no recipe runs; drop it, and give {key}.")
        if not part.has_decay:
            own.exclude_from_weight_decay(self._weights)
        own.build(self._weights)

    @property
    def state(self) -> dict[str, list[tf.Variable] | tf.Variable]:
        rate, own = self._optimizer.learning_rate, self._optimizer.variables
        return {self._named(index, kept): kept.value for index, kept in enumerate(own) if kept is not rate}

    def _named(self, index: int, kept: keras.Variable) -> str:
        """SLOT.LAYER.NAME for a slot of a weight, by Keras's path; optimizer.INDEX for all others."""
        name = kept.path.rpartition("/")[2]
        owners = [weight for weight in self._weights if name.startswith(f"{_joined(weight)}_")]
        if not owners:
            return f"optimizer.{index}"
        owner = max(owners, key=lambda weight: len(weight.path))
        return f"{name.removeprefix(_joined(owner))[1:]}.{owner.path.replace('/', '.')}"

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
        self._optimizer.learning_rate.assign(tf.cast(lr, self._optimizer.learning_rate.dtype))
        self._optimizer.apply(gradients, self._weights)


class Apart:
    """An optimizer for each part of a model's weights, which has an LR or weight decay of its own, or is frozen."""

    def __init__(self, recipe: Recipe, weights: Sequence[keras.Variable], parts: Sequence[Part]) -> None:
        self._count, self.now = len(weights), list(range(len(weights)))
        """The indices of the weights whose gradients `descend` is given."""
        indices = {part: [n for n, each in enumerate(parts) if each == part] for part in parts}
        made = {part: _made(recipe, [weights[n] for n in own], part) for part, own in indices.items()}
        self._made = [(made[part], part.lr_scale, own) for part, own in indices.items()]

    @property
    def state(self) -> dict[str, list[tf.Variable] | tf.Variable]:
        found: dict[str, Any] = {}
        for index, (optimizer, _, own) in enumerate(self._made):
            for slot, kept in optimizer.state.items():
                if isinstance(kept, list):
                    of_all = found.setdefault(slot, [None] * self._count)
                    for n, each in zip(own, kept, strict=True):
                        of_all[n] = each
                else:
                    found[f"{slot}@{index}" if slot in found else slot] = kept
        return found

    def descend(self, gradients: Tensors, lr: tf.Tensor) -> None:
        given = dict(zip(self.now, gradients, strict=True))
        for optimizer, scale, own in self._made:
            if own[0] in given:  # a part is frozen as a whole
                optimizer.descend([given[n] for n in own], lr * scale)


Optimizer = SGD | Adam | LAMB | KerasOptimizer | Apart
"""An optimizer updates its variables: `descend` takes gradients and the LR, a scalar, inside a graph. `state` has its
live variables by name: a list with one for each weight, or a single one."""


def _joined(weight: keras.Variable) -> str:
    return weight.path.replace("/", "_")


def _is_adapted(settings: optimizers.Lamb | optimizers.Lars, variable: tf.Variable) -> bool:
    """Whether weight decay and trust ratio apply to this variable."""
    return len(variable.shape) > 1 or not settings.exclude_1d


def _ratio(above: tf.Tensor, below: tf.Tensor, is_one: tf.Tensor) -> tf.Tensor:
    return tf.where(is_one, tf.ones_like(above), above / below)


def times(lr: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
    """The update times the LR, in the update's type."""
    return tf.cast(lr, update.dtype) * update


def zeros_like(variables: list[tf.Variable]) -> list[tf.Variable]:
    """For each variable one of zeros, with the same shape and type."""
    return [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]


def clipped(gradients: Tensors, norm: float) -> Tensors:
    """The gradients, scaled down to a common norm of at most `norm` (torch.nn.utils.clip_grad_norm_)."""
    total = norm_of(gradients)
    factor = tf.minimum(norm / (total + 1e-6), tf.ones((), total.dtype))
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def norm_of(gradients: Tensors) -> tf.Tensor:
    """The gradients' common norm, in the widest of their types."""
    widest = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.size)
    return tf.linalg.global_norm([tf.cast(gradient, widest) for gradient in gradients])


class Scaler:
    """The dynamic loss scale of float16, with torch.amp.GradScaler's rule and numbers; 1 where it is not `enabled`."""

    GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = tf.Variable(2.0**16 if enabled else 1.0, trainable=False)
        self._steps = tf.Variable(tf.zeros((), tf.int64), trainable=False)  # TensorFlow keeps int32 off the GPU

    def unscaled(self, gradients: Tensors) -> Tensors:
        """The gradients of the loss itself."""
        return [gradient / tf.cast(self.scale, gradient.dtype) for gradient in gradients]

    def update(self, finite: tf.Tensor) -> None:
        """Halves the scale after gradients that were not `finite`, doubles it after 2000 steps with finite ones."""
        grown = finite & (self._steps + 1 >= self.INTERVAL)
        put(self._steps, tf.where(finite & ~grown, self._steps + 1, tf.zeros_like(self._steps)))
        put(self.scale, self.scale * tf.where(finite, tf.where(grown, self.GROWTH, 1.0), self.BACKOFF))

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state with GradScaler's keys; empty where it is not enabled."""
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
