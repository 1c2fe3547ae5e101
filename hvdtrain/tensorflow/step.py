"""An update of the weights on every replica, a step of validation, and the sums that both measure."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.core.metrics import Totals, check_names
from hvdtrain.core.optimizers import NAMED
from hvdtrain.core.plan import Plan
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import RecipeError
from hvdtrain.tensorflow import finetuning, models, networks
from hvdtrain.tensorflow.engines import Engine, add, graph, put
from hvdtrain.tensorflow.objective import Objective, StepOutput, examples_in
from hvdtrain.tensorflow.optimizers import Apart, Scaler, clipped, make, norm_of, zeros_like
from hvdtrain.tensorflow.state import Ema


class Step:
    """A rank's model, optimizer and loss scale, and the graphs that update and evaluate them."""

    def __init__(self, plan: Plan, dataset: Dataset, engine: Engine, begins: bool = False) -> None:
        """`begins`: whether the model gets the weights that the recipe's `init_from` names."""
        self.recipe, self.weight_of, self._engine = (recipe := plan.recipe), plan.weight, engine
        self._real = tf.float64 if recipe.precision == "float64" else tf.float32
        with engine.scope():
            self.model = models.build(recipe, dataset, engine)
            self.begun = [finetuning.start(recipe, self.model)] if begins else []
            self.parts = finetuning.Learning(recipe, self.model)
            self.optimizer = make(recipe, self.parts.all, self.parts.parts)
            every, decay = [weight.value for weight in self.parts.all], recipe.ema_decay
            self.ema = Ema(every, decay, engine) if decay else None
            self.scaler = Scaler(enabled=recipe.precision == "float16")
            self.meter = Meter(engine.copies)
            self.objective = Objective(recipe, dataset, engine, plan.global_batch)
            self.objective.class_weights = plan.class_weights
            self.norm = None if engine.strategy else GradientNorm()
            self.noise = GradientNoise(plan.global_batch) if recipe.gradient_noise else None
        self._make_graphs()

    def begin_epoch(self, epoch: int) -> None:
        """Sets what learns in this epoch."""
        if self.parts.enter(epoch):
            self._make_graphs()

    def _make_graphs(self) -> None:
        """Makes the graphs of an update of the weights that learn now, and of validation."""
        recipe, engine = self.recipe, self._engine
        self.weights = [weight.value for weight in self.parts.learning]
        if isinstance(self.optimizer, Apart):
            self.optimizer.now = self.parts.now
        with engine.scope():
            accumulated = [*self.weights, tf.zeros((), self._real)] if recipe.accumulation_steps > 1 else []
            self._accumulated = Accumulated(accumulated)
        self._unreached: list[int] = []
        """Indices of the weights that the loss does not depend on, known after tracing; no update moves these."""
        self._gradients = graph(self._differentiate, jit_compile=True) if recipe.xla else self._differentiate
        self._update, self._add = engine.replicate(self._make_update), engine.replicate(self._accumulate)
        self._update_with_accumulated = engine.replicate(self._apply_accumulated)
        self._evaluate = engine.replicate(self._measure, relaxed=True)

    def __call__(self, micro_batches: Sequence[Any], lr: float) -> None:
        """Makes an update from this rank's micro-batches: the first one of each replica, then the second ones."""
        self.objective.check_labels(self.model, micro_batches, training=True)
        batch = [(each,) for each in micro_batches]
        replicas = self._engine.replicas
        with tf.device(self._engine.device):
            rate = tf.constant(lr, self._real)
            if self.recipe.accumulation_steps == 1:
                self._update(batch, rate)
                return
            for first in range(0, len(batch), replicas):
                self._add(batch[first : first + replicas])
            self._update_with_accumulated([()] * replicas, rate)

    def evaluate(self, batches: Sequence[tuple[Any, tf.Tensor]]) -> None:
        """Measures a validation batch (batch, weight) of each replica."""
        self.objective.check_labels(self.model, (batch for batch, _ in batches), training=False)
        given = self._evaluate(batches)
        if self.objective.metrics.have_sets:
            self.objective.update_sets(*given)

    def _make_update(self, batch: Any, lr: tf.Tensor) -> None:
        self._apply(self._metered(batch), lr)

    def _accumulate(self, batch: Any) -> None:
        self._engine.keep(self._accumulated.add, self._metered(batch))

    def _apply_accumulated(self, lr: tf.Tensor) -> None:
        self._apply(self._accumulated.sums(), lr)
        self._engine.keep(self._accumulated.reset, [])

    def _metered(self, batch: Any) -> list[tf.Tensor]:
        """The gradients of a micro-batch, whose loss and metrics are added up."""
        seen, gradients = self._gradients(batch)
        self.meter.add(seen)
        if self.noise:
            self.noise.add(self, gradients, examples_in(batch))
        return gradients

    def _differentiate(self, batch: Any) -> tuple[StepOutput, list[tf.Tensor]]:
        """What is reported of one micro-batch, and its part of the scaled gradients; where the loss is (sum, count),
        their last element is the count, by which they will be divided."""
        with tf.GradientTape() as tape:
            loss, seen = self.objective.measure(self.model, batch, training=True)
            counted = seen.metrics.get("loss")
            weight, steps = self.weight_of(1 if counted else examples_in(batch)), self.recipe.accumulation_steps
            scaled = loss * weight * tf.cast(self.scaler.scale, self._real) / steps
        self.unmet = networks.unmet(self.recipe)
        gradients = self._dense(tape.gradient(scaled, self.weights))
        return seen, [*gradients, tf.cast(counted[1] * weight / steps, self._real)] if counted else gradients

    def _dense(self, gradients: list[Any]) -> list[tf.Tensor]:
        """The gradients, with 0 for weights that the loss does not depend on. Raises RecipeError where it depends on
        none."""
        if all(gradient is None for gradient in gradients):
            raise RecipeError(
                f"{self.objective.name} gives a loss without gradient; compute it of the model's outputs "
                "with TensorFlow's or Keras's functions, without numpy() or stop_gradient()."
            )
        self._unreached = [index for index, gradient in enumerate(gradients) if gradient is None]
        pairs = zip(gradients, self.weights, strict=True)
        return [tf.zeros_like(weight) if one is None else tf.convert_to_tensor(one) for one, weight in pairs]

    def _apply(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """Updates the weights by the gradients of all replicas."""
        if len(gradients) > len(self.weights):
            gradients = divided(gradients, self._engine, self.recipe)
        if self.recipe.reduction == "adasum":
            _apply_adasum(self, gradients, lr)
        else:
            self._engine.update(lambda combined: self._apply_combined(combined, lr), gradients)

    def _apply_combined(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """Updates the weights; float16 leaves out a step whose gradients overflowed on any replica."""
        if self.scaler.enabled:
            gradients = self.scaler.unscaled(gradients)
        if self.noise:
            self.noise.averaged(gradients)
        if self.scaler.enabled:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            tf.cond(finite, lambda: self._descend(gradients, lr), lambda: None)
            self.scaler.update(finite)
        else:
            self._descend(gradients, lr)
        if self.ema:
            self.ema.update()

    def _descend(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        if self.norm:
            self.norm.measure(gradients)
        clip = self.recipe.clip_norm
        before = [(self.weights[index], tf.identity(self.weights[index])) for index in self._unreached]
        self.optimizer.descend(clipped(gradients, clip) if clip else gradients, lr)
        if self.recipe.optimizer in NAMED:  # Keras's own apply constraints themselves
            _constrain(self.parts.learning)
        for weight, old in before:  # weight decay has moved it
            put(weight, old)

    def _measure(self, batch: Any, weight: tf.Tensor) -> Any:
        seen = self.objective.measure(self.model, batch, training=False)[1]
        self.meter.add(seen, weight)
        return seen.given


def _apply_adasum(step: Step, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
    """Each rank makes an update by its own gradients; Adasum combines the changes."""
    before = [tf.identity(weight) for weight in step.weights]
    step._descend(gradients, lr)
    changes = [weight - old for weight, old in zip(step.weights, before, strict=True)]
    for weight, old, change in zip(step.weights, before, step._engine.combine(changes), strict=True):
        weight.assign(old + change)
    _constrain(step.parts.learning)
    if step.ema:
        step.ema.update()


def divided(gradients: list[tf.Tensor], engine: Engine, recipe: Recipe) -> list[tf.Tensor]:
    """The gradients, the last of which is a count, divided so that their mean over the replicas is the gradient of the
    mean over all that is counted. Raises RecipeError."""
    if recipe.reduction == "adasum":
        raise RecipeError("a loss that gives (sum, count) cannot be divided after adasum; drop adasum.")
    *gradients, count = gradients
    counted, replicas = tf.unstack(engine.sum_tensor(tf.stack([count, tf.ones((), count.dtype)])))
    factor = tf.math.divide_no_nan(replicas, counted)
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def _constrain(weights: Sequence[keras.Variable]) -> None:
    """Applies the weights' constraints, as Keras does after an update."""
    for weight in weights:
        if weight.constraint is not None:
            put(weight.value, weight.constraint(tf.convert_to_tensor(weight.value)))


class Accumulated:
    """The gradients of an update's micro-batches, added up on each replica. Its methods are called inside a graph."""

    def __init__(self, like: list[Any]) -> None:
        """`like`: the weights, and the count that the gradients of a loss (sum, count) end with."""
        self._totals, self._number = zeros_like(like), 0

    def add(self, gradients: list[tf.Tensor]) -> None:
        """Adds those of a micro-batch."""
        self._number = len(gradients)
        for total, gradient in zip(self._totals, gradients, strict=False):
            add(total, gradient)

    def sums(self) -> list[tf.Tensor]:
        """As many as were added each time."""
        return [tf.convert_to_tensor(total) for total in self._totals[: self._number]]

    def reset(self, _: list[tf.Tensor]) -> None:
        """Sets them to 0."""
        for total in self._totals:
            put(total, tf.zeros_like(total))


class Meter:
    """Adds up loss, examples and metrics on the device, so that no step has to wait."""

    MOST = 30
    """The most metrics: the variable is made before the first graph gives their names."""

    def __init__(self, copies_of: Callable[[tf.Variable], Sequence[tf.Variable]]) -> None:
        self._copies_of = copies_of
        self._names: list[str] | None = None
        self._sums = tf.Variable(tf.zeros(2 + 2 * self.MOST, tf.float64), trainable=False)

    def add(self, seen: StepOutput, weight: tf.Tensor | float = 1.0) -> None:
        """Adds a batch, inside a graph; `weight` 0 leaves it out. Raises RecipeError where it has too many metrics, or
        other ones than another graph."""
        if len(names := sorted(seen.metrics)) > self.MOST:
            raise RecipeError(f"a step may have {self.MOST} metrics at most, got {len(names)}; give fewer.")
        self._names = names if self._names is None else self._names
        check_names(names, self._names)
        numbers = [seen.loss, seen.count, *(number for name in names for number in seen.metrics[name])]
        loss, count, *rest = (tf.cast(number, tf.float64) for number in numbers)
        unused = self._sums.shape[0] - len(numbers)
        add(self._sums, tf.pad(tf.stack([loss * count, count, *rest]) * weight, [[0, unused]]))

    def take(self, *, keeps: bool = False) -> Totals:
        """Returns the sums of this rank's replicas since the previous call, and sets them to 0, or `keeps` them."""
        copies = self._copies_of(self._sums)
        numbers = sum(copy.numpy() for copy in copies).tolist()
        for copy in copies if not keeps else ():
            copy.assign(tf.zeros_like(copy))
        return Totals.from_numbers(self._names or (), numbers)


class GradientNorm:
    """The gradients' common norm in the first update after each `take`."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):  # every step would have to wait for a condition on a GPU
            self._is_wanted = tf.Variable(False, trainable=False)
            self._norm = tf.Variable(float("nan"), trainable=False)

    def measure(self, gradients: list[tf.Tensor]) -> None:
        """Stores the gradients' norm if it is wanted. Called inside a graph."""

        def note() -> None:
            put(self._norm, tf.cast(norm_of(gradients), tf.float32))
            put(self._is_wanted, tf.constant(False))

        tf.cond(self._is_wanted, note, lambda: None)

    def take(self) -> float | None:
        """Returns the norm that was stored last, or None, and requests that of the next update."""
        norm = float(self._norm.numpy())
        self._is_wanted.assign(True)
        return None if math.isnan(norm) else norm


class GradientNoise:
    """Adds up what the noise scale follows from: in each update the squared norms of the gradients of this rank's
    micro-batches, and of the gradient averaged over all. `add` and `averaged` are called inside a graph."""

    def __init__(self, global_batch: int) -> None:
        self._whole = 1 / global_batch
        self._sums = tf.Variable(tf.zeros(5, tf.float64), trainable=False)
        self._parts = tf.Variable(tf.zeros(3, tf.float64), trainable=False)
        """Of this update's micro-batches: the sum of squares, of 1 / examples, and how many there are."""

    def add(self, step: Step, gradients: list[tf.Tensor], examples: Any) -> None:
        """Adds a micro-batch of so many examples, divided by what its mean gradient is multiplied by."""
        number, scale = len(step.weights), tf.cast(step.scaler.scale, tf.float64)
        parts = step.recipe.accumulation_steps
        share = gradients[-1] if len(gradients) > number else step.weight_of(examples) / parts
        square = (tf.cast(norm_of(gradients[:number]), tf.float64) / (tf.cast(share, tf.float64) * scale)) ** 2
        add(self._parts, tf.stack([square, 1 / tf.cast(examples, tf.float64), tf.ones((), tf.float64)]))

    def averaged(self, gradients: list[tf.Tensor]) -> None:
        """Ends an update with its gradients, the mean over the batch. One that is not finite is left out."""
        square, inverse, count = tf.unstack(tf.convert_to_tensor(self._parts))
        whole, one = tf.cast(norm_of(gradients), tf.float64) ** 2, tf.ones((), tf.float64)
        row = tf.stack([square / count, whole, inverse / count, self._whole * one, one])
        add(self._sums, tf.where(tf.reduce_all(tf.math.is_finite(row)), row, tf.zeros_like(row)))
        put(self._parts, tf.zeros_like(self._parts))

    def take(self) -> NDArray[np.float64]:
        """The sums [5] since the last call; see `hvdtrain.core.recipe.noise.estimated`."""
        sums: NDArray[np.float64] = self._sums.numpy()
        self._sums.assign(tf.zeros_like(self._sums))
        return sums
