"""The loss and metrics of a batch, from the model's outputs or from the user's step."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core import objective, user_code
from hvdtrain.core.metrics import Metrics, Summed
from hvdtrain.core.recipe import Recipe, augmentation
from hvdtrain.core.user_code import is_path
from hvdtrain.datasets import Dataset
from hvdtrain.datasets.base import IGNORED
from hvdtrain.errors import RecipeError
from hvdtrain.run.examples import shape_text
from hvdtrain.tensorflow import private
from hvdtrain.tensorflow.data import Examples
from hvdtrain.tensorflow.networks import InceptionOutputs
from hvdtrain.untrusted import printable

Metric = tuple[tf.Tensor, tf.Tensor]
"""A sum, and how many values were added up."""


class StepOutput(NamedTuple):
    """A batch's mean loss, how many examples it has, and its metrics; in validation, where there are metrics of a set,
    also what these take: outputs, targets, and a mask of the outputs or None."""

    loss: tf.Tensor
    count: tf.Tensor
    metrics: dict[str, Metric]
    given: tuple[Any, ...] | None = None


def cross_entropy(out: tf.Tensor, y: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """The losses [...] of logits [..., classes]; y has labels [...], or each class's probability [..., classes].
    Smoothing is that of PyTorch and Keras."""
    if y.dtype.is_floating:
        loss = tf.nn.softmax_cross_entropy_with_logits(tf.cast(y, out.dtype), out)
    else:
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int64), out)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * tf.reduce_mean(tf.nn.log_softmax(out), -1)
    return loss


def weighed(out: tf.Tensor, y: tf.Tensor, weights: Sequence[float], smoothing: float) -> tuple[tf.Tensor, tf.Tensor]:
    """The cross entropy as (sum, count) with weights of the first classes, by which the sum is divided; those of the
    others are 1."""
    of_class = tf.constant([*weights, *[1.0] * (out.shape[-1] - len(weights))], out.dtype)
    targets = tf.cast(y, out.dtype) if y.dtype.is_floating else tf.one_hot(y, out.shape[-1], dtype=out.dtype)
    smoothed = (1 - smoothing) * targets + smoothing / out.shape[-1]
    kept = 1 if (mask := private.mask_of(out)) is None else tf.cast(mask, out.dtype)
    losses = -tf.reduce_sum(of_class * smoothed * tf.nn.log_softmax(out), -1)
    return tf.reduce_sum(losses * kept), tf.reduce_sum(tf.reduce_sum(of_class * targets, -1) * kept)


NAMED: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "cross_entropy": cross_entropy,
    "mse": lambda out, y: tf.square(out - tf.cast(y, out.dtype)),
    "bce_with_logits": lambda out, y: tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y, out.dtype), out),
    "l1": lambda out, y: tf.abs(out - tf.cast(y, out.dtype)),
}
"""Losses of outputs and targets, by name; their mean is the batch's loss."""


class InMode:
    """The model, whose calls are for training or for validation, as `training` says."""

    def __init__(self, model: keras.Model, training: bool) -> None:
        self._model, self.training = model, training

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self._model(*args, **{"training": self.training, **arguments})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Objective:
    """A recipe's loss and metrics.

    The user's loss is called as loss(out, y), a loss of Keras's as loss(y, out), and a metric as metric(out, y). A step
    is called as step(model, batch), where the model is an `InMode`, and returns a loss, or (loss, metrics). A loss may
    be (sum, count), where masks leave some values out.
    """

    class_weights: Sequence[float] = ()
    """The weight of each class in training."""

    def __init__(self, recipe: Recipe, dataset: Dataset, engine: Any, global_batch: int = 1) -> None:
        """Raises RecipeError where code that the recipe names cannot be imported. `global_batch` is for losses that are
        sums, `engine` has the ranks over which metrics of a set are computed."""
        self._recipe, self._dataset, self._mixes = recipe, dataset, augmentation.mixes(recipe)
        self._as_is = isinstance(dataset.train, Examples)
        self._real = tf.float64 if recipe.precision == "float64" else tf.float32
        self.name = f"step {recipe.step}" if recipe.step else f"loss {recipe.loss or 'of the data set'}"
        """The step or the loss, as messages name it."""
        self._step = user_code.load(recipe.step, "step") if recipe.step else None
        self._own_loss = _own_loss(recipe.loss, global_batch) if recipe.loss and is_path(recipe.loss) else None
        self.metrics = Metrics(recipe, engine, _of_set, "keras.metrics")
        self._is_one_hot = recipe.loss == "bce_with_logits" and not self._as_is
        self._unchecked = {True, False}
        """The values of `training` for which labels are still to be checked."""
        self._outputs = 0

    def check_labels(self, model: keras.Model, batches: Iterable[Any], training: bool) -> None:
        """Raises DataError for labels of the user's data set that the model has no output for, whose loss would be NaN,
        and for targets that are no probabilities: on a CPU in every batch, on a GPU, for which the host would have to
        wait, in the first."""
        loss = self._recipe.loss
        is_due = self._as_is and loss in {"cross_entropy", "bce_with_logits"} and training in self._unchecked
        for batch in batches if is_due else ():
            x, y = objective.pair(self._recipe, batch)
            if not tf.is_tensor(y) or not len(y):
                continue
            if "GPU" in y.device:
                self._unchecked.discard(training)
            if loss == "bce_with_logits":
                objective.check_probabilities(self._recipe, float(y.numpy().min()), float(y.numpy().max()))
            elif y.dtype.is_integer:
                self._outputs = self._outputs or _outputs(model, x)
                objective.check_labels(self._recipe, self._outputs, int(y.numpy().min()), int(y.numpy().max()))

    def measure(self, model: keras.Model, batch: Any, training: bool) -> tuple[tf.Tensor, StepOutput]:
        """The mean loss over the batch's examples, or its sum where the loss is (sum, count); and what is reported.
        Raises RecipeError where the user's code returns something else."""
        count, given = examples_in(batch), None
        if self._step:
            loss, metrics = objective.of_step(self.name, self._step(InMode(model, training), batch), _is_pair)
        else:
            x, y = objective.pair(self._recipe, batch)
            out = keras.tree.map_structure(self._wide, model(self.inputs(x), training=training))
            loss, metrics = self._loss(out, y, training), self._measured(out, y, count)
            given = (out, y, private.mask_of(out)) if self.metrics.have_sets and not training else None
        loss, counted = _checked(self.name, loss, self._real)
        loss = mean = loss if self._step else _regularized(loss, model, counted)
        if counted is not None:
            metrics, mean = {**metrics, "loss": (loss, counted)}, loss / tf.cast(count, loss.dtype)
        sums = {name: _summed(name, of, count) for name, of in metrics.items()}
        return loss, StepOutput(mean, tf.cast(count, tf.float64), sums, given)

    def try_metrics(self, model: keras.Model, batch: Any) -> None:
        """Tries the metrics of a set with a training batch. Every rank calls it. Raises RecipeError, ProgramError."""
        if self.metrics.have_sets:
            x, y = objective.pair(self._recipe, batch)
            self.metrics.try_once(keras.tree.map_structure(self._wide, model(self.inputs(x), training=False)), y)

    def update_sets(self, out: Any, y: Any, mask: Any) -> None:
        """Adds a validation batch, whose outputs have lost their mask in a graph, to the metrics of a set."""
        self.metrics.update(_masked(out, mask), y)

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        """The model's outputs for a batch in inference; with a step its loss."""
        if self._step:
            return self.measure(model, batch, training=False)[0]
        return model(self.inputs(objective.pair(self._recipe, batch)[0]), training=False)

    def inputs(self, x: Any) -> Any:
        """The model's inputs: images of hvdtrain's data sets normalised, tokens and all others as they are."""
        if self._as_is or self._dataset.text:
            return x
        if self._dataset.classes is None:
            return tf.cast(x, self._real)
        mean, std = (tf.constant(of, self._real) for of in (self._dataset.mean, self._dataset.std))
        return (tf.cast(x, self._real) / 255 - mean) / std

    def _wide(self, out: Any) -> Any:
        return _masked(tf.cast(out, self._real) if out.dtype.is_floating else out, private.mask_of(out))

    def _loss(self, out: Any, y: Any, training: bool) -> Any:
        if self._own_loss:
            return self._own_loss(out, y)
        is_regression = y.dtype.is_floating and not self._mixes
        name = self._recipe.loss or ("mse" if is_regression else "cross_entropy")
        if isinstance(out, InceptionOutputs):
            loss, auxiliary = (self._named(name, one, y, training) for one in out)
            weight = objective.AUXILIARY["InceptionOutputs"]
            return (loss[0] + weight * auxiliary[0], loss[1]) if _is_pair(loss) else loss + weight * auxiliary
        return self._named(name, out, y, training)

    def _named(self, name: str, out: Any, y: Any, training: bool) -> Any:
        if not tf.is_tensor(out) or not tf.is_tensor(y):
            raise RecipeError(
                f"loss {name} needs one tensor from the model and one as y, got {shape_text(out)} and {shape_text(y)}; "
                "give a loss of your own, or a step."
            )
        if self._is_one_hot and y.shape.rank == 1 and not y.dtype.is_floating:
            y = tf.one_hot(y, out.shape[-1], dtype=out.dtype)
        wanted = out.shape[:-1] if name == "cross_entropy" and not y.dtype.is_floating else out.shape
        if not wanted.is_compatible_with(y.shape):
            raise objective.misfit(name, out.shape.as_list(), y.shape.as_list(), y.dtype.name)
        if self._dataset.text:
            out, y = _masked(out, y != IGNORED), tf.maximum(y, 0)
        if name == "cross_entropy":
            if (classes := self._dataset.classes) and self._recipe.model not in user_code.MODELS:
                objective.check_labels(self._recipe, out.shape[-1], 0, classes - 1, f"{classes} classes")
            smoothing = self._recipe.label_smoothing if training else 0.0
            if self.class_weights:
                return weighed(out, y, self.class_weights if training else (), smoothing)
            losses = cross_entropy(out, y, smoothing)
        else:
            losses = NAMED[name](out, y)
        if (mask := private.mask_of(out)) is None:
            return tf.reduce_mean(losses)
        losses = tf.reduce_mean(losses, range(mask.shape.rank, losses.shape.rank))
        return tf.reduce_sum(tf.where(mask, losses, 0)), tf.math.count_nonzero(mask)

    def _measured(self, out: Any, y: Any, count: Any) -> dict[str, Any]:
        metrics = self.metrics.of_batch(out, y)
        is_of_classes = self._is_one_hot or self._recipe.loss in {None, "cross_entropy"}
        if is_of_classes and (right := _right(y, self._mixes)) is not None:
            metrics["acc1"] = tf.math.count_nonzero(tf.argmax(getattr(out, "logits", out), 1) == right), count
        return metrics


def notes_of(of: Objective, model: keras.Model, batch: Any) -> list[str]:
    """Lines that name a loss of the user's that is no mean over examples, as the halves of a training batch show,
    and a model whose outputs are not what a named loss takes. The model's state is as before."""
    if of._step or not of._as_is:
        return []
    x, y = objective.pair(of._recipe, batch)
    out = keras.tree.map_structure(of._wide, model(of.inputs(x), training=False))
    if not of._own_loss:
        named = str(of._recipe.loss), [-1] * (of._recipe.loss == "cross_entropy")
        return objective.of_first_batch(of._recipe, *named, out.numpy(), y.shape) if tf.is_tensor(out) else []

    def measured(part: slice) -> Any:
        of_out, of_y = keras.tree.map_structure(lambda one: one[part], (out, y))
        return of._loss(of_out, of_y, training=True)

    remedy = objective.of_one_more_axis(*([*getattr(each, "shape", ())] for each in (out, y)))
    takes = inspect.signature(user_code.load(str(of._recipe.loss), "loss")).parameters.get("from_logits")
    lines = []
    if takes and takes.default is False and tf.is_tensor(out) and not 0 <= np.min(out) <= np.max(out) <= 1:
        instead = "let a loss of your own have from_logits=True, or give loss: cross_entropy or bce_with_logits"
        lines.append(objective.no_inputs(of._recipe, "probabilities", instead))
    lines += objective.of_halves(str(of._recipe.loss), measured, examples_in(batch), *[remedy] * bool(remedy))
    if private.adds_losses(model) and _is_pair(of._loss(out, y, training=True)):
        lines.append(
            f"loss {printable(str(of._recipe.loss), 200)} gives (sum, count), and layers add losses of "
            "their own, which are weighted by each rank's count: let a step add them to the sum, times the count"
        )
    return lines


def _regularized(loss: tf.Tensor, model: keras.Model, counted: tf.Tensor | None) -> tf.Tensor:
    """The loss with the losses that layers add, times the count of a sum."""
    if not model.losses:
        return loss
    added = tf.add_n([tf.cast(one, loss.dtype) for one in model.losses])
    return loss + (added if counted is None else added * counted)


def _right(y: Any, mixes: bool) -> tf.Tensor | None:
    """The classes [n] that top-1 accuracy counts: the labels, or of mixed ones that of the largest share; else None."""
    if not y.dtype.is_floating:
        return tf.cast(y, tf.int64) if y.shape.rank == 1 else None
    return tf.argmax(y, 1) if mixes and y.shape.rank == 2 else None


def _checked(name: str, loss: Any, real: tf.DType) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The loss and None, or its sum and count. Raises RecipeError."""
    total, counted = loss if _is_pair(loss) else (loss, None)
    if not tf.is_tensor(total) or total.shape.rank != 0 or not total.dtype.is_floating:
        raise objective.no_number(name, shape_text(loss))
    return tf.cast(total, real), None if counted is None else tf.cast(counted, real)


def _summed(name: str, of: Any, count: Any) -> Metric:
    """The metric's sum and count for a batch of `count` examples. Raises RecipeError."""
    if isinstance(of, tuple | list) and len(of) == 2:
        return tf.cast(of[0], tf.float64), tf.cast(of[1], tf.float64)
    if tf.is_tensor(of) and of.shape.is_compatible_with([count if isinstance(count, int) else None]):
        return tf.reduce_sum(tf.cast(of, tf.float64)), tf.cast(count, tf.float64)
    raise user_code.no_metric(name, shape_text(of), "keras.metrics")


def _of_set(metric: Any, name: str, engine: Any) -> Summed | None:
    """The metric of a whole set: one of Keras's, or a pair (update, compute). None for others. Raises RecipeError."""
    is_of_keras = isinstance(metric, keras.metrics.Metric)
    if is_of_keras and not type(metric).update_state.__module__.startswith("keras."):
        raise RecipeError(
            f"metric {name}: {type(metric).__name__} updates variables by code of its own, which need not add up over "
            "the ranks; take a metric of keras.metrics, or give a pair (update, compute)."
        )
    pair = _of_metric(metric) if is_of_keras else user_code.pair_of(metric)
    if pair and engine.strategy:
        raise RecipeError(f"metric {name} of a whole set goes with engines local and horovod; take one of these.")
    return Summed(name, pair, engine, lambda one: np.asarray(one, np.float64), tf.convert_to_tensor) if pair else None


def _of_metric(metric: keras.metrics.Metric) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions (update, compute) of one of Keras's metrics, all of whose variables are sums over examples."""

    compiled = tf.function(metric.update_state, autograph=False, reduce_retracing=True)

    def update(out: Any, y: Any) -> tuple[np.ndarray, ...]:
        metric.reset_state()
        (compiled if metric.variables else metric.update_state)(y, out)  # some make their variables in the first batch
        return tuple(variable.numpy() for variable in metric.variables)

    def compute(*sums: Any) -> Any:
        for variable, total in zip(metric.variables, sums, strict=False):  # none on a rank without examples
            variable.assign(tf.cast(total, variable.dtype))
        return metric.result() if metric.variables else 0.0

    return update, compute


def examples_in(batch: Any) -> Any:
    """The number of examples in a batch, as a tensor where its shape leaves it open."""
    first = keras.tree.flatten(batch)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def _outputs(model: keras.Model, x: Any) -> int:
    """The size of the last axis of the model's outputs, found without computing them; more than any label where that
    fails."""
    with contextlib.suppress(Exception):
        specs = keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype.name), x)
        return int(model(specs, training=False).shape[-1])
    return sys.maxsize


def _own_loss(path: str, global_batch: int) -> Callable[[Any, Any], Any]:
    """The user's or Keras's loss, to be called as loss(out, y); raises RecipeError for its errors."""
    loss = _by_position(path, global_batch)

    def explained(out: Any, y: Any) -> Any:
        try:
            return loss(out, y)
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"loss {path} of outputs {shape_text(out)} and targets {shape_text(y)}: {user_code.reason(error)} "
                "It is called as loss(out, y), and as loss(y_true, y_pred) where its arguments have Keras's names."
            ) from error

    return explained


def _by_position(path: str, global_batch: int) -> Callable[[Any, Any], Any]:
    found: Any = user_code.load(path, "loss")
    if inspect.isclass(found) and issubclass(found, keras.losses.Loss):
        user_code.check_arguments(found, path, "loss")
        found = found()
    if isinstance(found, keras.losses.Loss):
        return functools.partial(_of_keras, found, global_batch)
    if list(inspect.signature(found).parameters)[:1] == ["y_true"]:
        return lambda out, y: found(y, out)
    return found  # type: ignore[no-any-return]


def _of_keras(loss: keras.losses.Loss, global_batch: int, out: Any, y: Any) -> Any:
    """Keras's loss: (sum, count) where masks leave some values out; a sum is scaled to the global batch."""
    found = loss(y, out)
    if loss.reduction in {"sum", "none", None}:
        return found * (global_batch / tf.cast(examples_in(y), found.dtype)) if loss.reduction == "sum" else found
    found *= tf.distribute.get_strategy().num_replicas_in_sync  # Keras has divided it by this number
    masks = [private.mask_of(out)]
    if getattr(loss, "ignore_class", None) is not None:
        masks.append(private.mask_of(loss.call(y, out)))
    kept = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    if not kept:
        return found
    count = tf.cast(tf.math.count_nonzero(functools.reduce(tf.logical_and, kept)), found.dtype)
    return found * count, count


def _masked(out: Any, mask: Any) -> Any:
    if mask is not None:
        private.set_mask(out, mask)
    return out


def _is_pair(loss: Any) -> bool:
    """Whether the loss is (sum, count)."""
    if not isinstance(loss, tuple) or len(loss) != 2:
        return False
    return isinstance(loss[1], int | float) or (tf.is_tensor(loss[1]) and loss[1].shape.rank == 0)
