"""One update of the weights, and the metrics of a batch, as graphs on all replicas of a rank."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.tensorflow import models, optimizers, variables
from hvdtrain.tensorflow.data import Pair
from hvdtrain.tensorflow.ema import Ema
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.replication import Replication, graph
from hvdtrain.tensorflow.meter import Meter, Seen
from hvdtrain.tensorflow.sgd import Scaler, clipped, zeros_like


def mean_loss(out: tf.Tensor, y: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Of outputs [n, classes] and labels [n] the cross-entropy, its targets smoothed as PyTorch's and Keras's are; of
    two [n, 1] the squared error."""
    if y.dtype.is_floating:
        return tf.reduce_mean(tf.square(out - tf.cast(y, out.dtype)))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, out)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * tf.reduce_mean(tf.nn.log_softmax(out), 1)
    return tf.reduce_mean(loss)


def seen(loss: tf.Tensor, out: tf.Tensor, y: tf.Tensor, count: tf.Tensor | int) -> Seen:
    """What is to be reported of a batch: `acc1` where labels are classes."""
    if y.dtype.is_floating:
        return Seen(loss, tf.cast(count, tf.float64), {})
    right = tf.math.count_nonzero(tf.argmax(out, 1) == y)
    return Seen(loss, tf.cast(count, tf.float64), {"acc1": (right, tf.cast(count, tf.float64))})


class Step:
    """A rank's model, optimizer and loss scale, and the way from micro-batches to new weights."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, engine: Engine, replication: Replication, weight: Callable[[int], float]
    ) -> None:
        """`weight` of a micro-batch of so many examples in the mean over all local batches."""
        self.recipe, self._dataset, self._weight = recipe, dataset, weight
        self._engine, self._replication = engine, replication
        self._real = tf.float64 if recipe.precision == "float64" else tf.float32
        with replication.scope():
            self.model = models.build(recipe, dataset.classes, engine, replication.keep)
            self.weights = [weight.value for weight in self.model.trainable_weights]
            self.optimizer = optimizers.make(recipe, self.model.trainable_weights)
            self.ema = Ema(self.weights, recipe.ema_decay, replication) if recipe.ema_decay else None
            self.scaler = Scaler(enabled=recipe.precision == "float16")
            self.meter = Meter(replication.copies)
            self._gathered = zeros_like(self.weights) if recipe.accumulation_steps > 1 else []
        self._gradients = graph(self._differentiate, jit_compile=True) if recipe.xla else self._differentiate
        self._update, self._add = replication.replicate(self._make_update), replication.replicate(self._add_gradients)
        self._update_with_gathered = replication.replicate(self._apply_gathered)
        self.evaluate = replication.replicate(self._measure, relaxed=True)
        """Measures a validation batch (x, y, weight) of each replica."""

    def __call__(self, batch: Sequence[Pair], lr: float) -> None:
        """The update of this rank's micro-batches (x, y), each one's replicas side by side."""
        replicas = self._replication.replicas
        with tf.device(self._engine.device):
            rate = tf.constant(lr, self._real)
            if self.recipe.accumulation_steps == 1:
                self._update(batch, rate)
                return
            for first in range(0, len(batch), replicas):
                self._add(batch[first : first + replicas])
            self._update_with_gathered([()] * replicas, rate)

    def inputs(self, x: tf.Tensor) -> tf.Tensor:
        """Numbers as they are, images normalised."""
        if self._dataset.classes is None:
            return tf.cast(x, self._real)
        mean, std = (tf.constant(of, self._real) for of in (self._dataset.mean, self._dataset.std))
        return (tf.cast(x, self._real) / 255 - mean) / std

    def _make_update(self, x: tf.Tensor, y: tf.Tensor, lr: tf.Tensor) -> None:
        seen, gradients = self._gradients(x, y)
        self.meter.add(seen)
        self._apply(gradients, lr)

    def _add_gradients(self, x: tf.Tensor, y: tf.Tensor) -> None:
        seen, gradients = self._gradients(x, y)
        self.meter.add(seen)
        self._replication.keep(self._collect, gradients)

    def _collect(self, gradients: list[tf.Tensor]) -> None:
        for total, gradient in zip(self._gathered, gradients, strict=True):
            variables.add(total, gradient)

    def _apply_gathered(self, lr: tf.Tensor) -> None:
        self._apply([tf.convert_to_tensor(total) for total in self._gathered], lr)
        self._replication.keep(self._forget, [])

    def _forget(self, _: list[tf.Tensor]) -> None:
        for total in self._gathered:
            variables.put(total, tf.zeros_like(total))

    def _differentiate(self, x: tf.Tensor, y: tf.Tensor) -> tuple[Seen, list[tf.Tensor]]:
        """What is to be reported of one micro-batch, and its part of the scaled gradients."""
        with tf.GradientTape() as tape:
            out = tf.cast(self.model(self.inputs(x), training=True), self._real)
            loss = mean_loss(out, y, self.recipe.label_smoothing)
            weighted = loss * self._weight(y.shape[0])
            scaled = weighted * tf.cast(self.scaler.scale, self._real) / self.recipe.accumulation_steps
        return seen(loss, out, y, y.shape[0]), tape.gradient(scaled, self.weights)

    def _apply(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """The update of all replicas' gradients."""
        if self.recipe.reduction == "adasum":
            self._apply_adasum(gradients, lr)
        else:
            self._replication.update(lambda combined: self._apply_combined(combined, lr), gradients)

    def _apply_combined(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        self._apply_finite(gradients, lr)
        if self.ema:
            self.ema.update()

    def _apply_finite(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """float16 leaves out a step whose gradients overflowed on any replica."""
        if not self.scaler.enabled:
            self._descend(gradients, lr)
            return
        gradients = self.scaler.unscaled(gradients)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        tf.cond(finite, lambda: self._descend(gradients, lr), lambda: None)
        self.scaler.update(finite)

    def _apply_adasum(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """Every rank's own update first; Adasum combines what each has changed."""
        before = [tf.identity(weight) for weight in self.weights]
        self._descend(gradients, lr)
        changes = [weight - old for weight, old in zip(self.weights, before, strict=True)]
        for weight, old, change in zip(self.weights, before, self._engine.combine(changes), strict=True):
            weight.assign(old + change)
        if self.ema:
            self.ema.update()

    def _descend(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        clip = self.recipe.clip_norm
        self.optimizer.descend(clipped(gradients, clip) if clip else gradients, lr)

    def _measure(self, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor) -> None:
        out = tf.cast(self.model(self.inputs(x), training=False), self._real)
        self.meter.add(seen(mean_loss(out, y), out, y, tf.shape(y)[0]), weight)
