"""Makes Keras's losses under `fit` those of the global batch: weights and unmasked values are counted on all ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path
from keras.src.losses import loss as keras_losses
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from hvdtrain.core.objective import of_halves
from hvdtrain.errors import KerasError
from hvdtrain.keras import metrics
from hvdtrain.keras.averaging import distributed, sum_over_ranks
from hvdtrain.keras.program import optimizers
from hvdtrain.keras.ranks import hvd
from hvdtrain.tensorflow import private
from hvdtrain.tensorflow.networks import SEED
from hvdtrain.untrusted import printable

Part = tuple[float, Callable[[tf.Tensor], tf.Tensor]]
"""How many times as large the whole batch is as the part that losses see, and a function that turns the part's [sum,
count] into the whole batch's."""
PLAIN = keras_losses.reduce_weighted_values
_part: Part | None = None
"""The part that losses see now; None where it is a batch of its own."""


def of_all_ranks(model: keras.Model) -> None:
    """Makes the losses in the model's train_step those of all ranks' batches together, and its metrics ready to merge.
    Raises KerasError for a model of tf.distribute."""
    strategy = private.strategy(model)
    if hvd.size() > 1 and not isinstance(strategy, tf.distribute.OneDeviceStrategy | None):
        raise KerasError(
            f"the model was made under tf.distribute's {type(strategy).__name__}, whose replicas are not Horovod's "
            "ranks; make and compile it outside of the strategy's scope, and start one process for each GPU."
        )
    if not isinstance(model.train_step, TrainStep):
        model.train_step = TrainStep(model)
        model.train_function = None
    model.train_step.begin()
    metrics.merging_of(model)


def first_batch(model: keras.Model) -> tuple[Any, list[str]]:
    """After the first step since a compile, once: its batch or None, and lines that name losses which may be no mean
    over the examples."""
    return model.train_step.first_batch() if isinstance(model.train_step, TrainStep) else (None, [])


class TrainStep:
    """A model's train_step with the losses of the global batch; plain means over examples need no collective."""

    def __init__(self, model: keras.Model) -> None:
        self._model, self._own = model, model.train_step
        self._awaited = tf.Variable(0, trainable=False)
        self.totals = tf.Variable(tf.zeros(3, tf.float64), trainable=False)
        """The sum and the count behind the loss that Keras logs, over all steps, and the number of these."""
        self._compiled: Any = self
        """The losses of the last compile whose first batch was awaited."""
        self._first: tuple[Any, list[tf.Tensor]] = None, []
        """The structure and the values of the first batch."""

    def begin(self) -> None:
        """Awaits the first batch, where the model was compiled since the last one."""
        before, self._compiled = self._compiled, private.compiled_loss(self._model)
        if self._compiled is not before:
            self._awaited.assign(1)

    def __call__(self, data: Any) -> Any:
        averaging = [each._reduction for each in map(distributed, optimizers(self._model).values()) if each]
        if not averaging or averaging[0].alone:
            return self._counted(data)
        ranks = averaging[0].process_set
        metrics.keep(data, self._awaited, self._take)
        with _seeing((ranks.size(), lambda sums: sum_over_ranks(sums, process_set=ranks))):
            logs = self._counted(data)
        metrics.merging_of(self._model).keep(data)
        return logs

    def _take(self, like: Any, values: list[tf.Tensor]) -> None:
        self._first = like, values

    def _counted(self, data: Any) -> Any:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return self._own(data)
        before = self._logged()
        logs = self._own(data)
        self.totals.assign_add(tf.concat([self._logged() - before, [1]], 0))
        return logs

    def _logged(self) -> tf.Tensor:
        metric = next((each for each in self._model.metrics if each.name == "loss" and hasattr(each, "total")), None)
        numbers = (metric.total.value, metric.count.value) if metric else (0, 0)
        return tf.stack([tf.cast(each, tf.float64) for each in numbers])

    def first_batch(self) -> tuple[Any, list[str]]:
        (like, values), self._first = self._first, (None, [])
        return (tf.nest.pack_sequence_as(like, values), self._notes(like, values)) if values else (None, [])

    def _notes(self, like: Any, values: list[tf.Tensor]) -> list[str]:
        if type(self._model).train_step is not keras.Model.train_step:
            name = printable(type(self._model).__name__, 200)
            return [
                f"{name} has a train_step of its own: ranks are averaged, so its losses must be means over examples"
            ]
        examples = len(values[0])
        runs = itertools.count()
        counted: list[list[tf.Tensor]] = []
        """For each half, the [sum, count] of each of its losses."""

        def noted(sums: tf.Tensor) -> tf.Tensor:
            counted[-1].append(sums)
            return sums

        def loss(rows: slice, total: Callable[[tf.Tensor], tf.Tensor], drawn: int = 0) -> float:
            batch = tf.nest.pack_sequence_as(like, [value[rows] for value in values])
            return self._loss(batch, (examples / (rows.stop - rows.start), total), drawn)

        def measured(rows: slice) -> float:
            if (run := next(runs)) < 2:
                return loss(rows, lambda sums: sums, run)
            if run == 2:  # as ranks do, both halves count before either has its loss
                for half in (slice(0, examples // 2), slice(examples // 2, examples)):
                    counted.append([])
                    loss(half, noted)
            known = map(sum, zip(*counted, strict=True))
            return loss(rows, lambda _: next(known))

        name = " and ".join(private.loss_names(self._model))
        return of_halves(name, measured, examples, "let it return a value for each example, of that alone")

    def _loss(self, batch: Any, part: Part, drawn: int) -> float:
        """The loss of a batch in inference, after `drawn` draws of random numbers; changes nothing."""
        model = self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        common = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)  # making it would draw from `random`
        seeds = [*([common.state] if common else []), *(each for each in model.variables if each.name == SEED)]
        states = [(seed, seed.value + tf.constant([0, drawn], seed.dtype)) for seed in seeds]
        with keras.StatelessScope(states, collect_losses=True), _seeing(part):
            return float(tf.reduce_mean(private.loss_of(model, x, y, weights)))


@contextlib.contextmanager
def _seeing(part: Part) -> Iterator[None]:
    global _part
    before, _part = _part, part
    try:
        yield
    finally:
        _part = before


def _reduced(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> tf.Tensor:
    """Keras's reduction of a loss's values, replaced so that the mean over the parts is the whole batch's loss; where
    weights or masks are counted, each part has the value of the whole one."""
    loss = PLAIN(values, sample_weight, mask, reduction, dtype)
    if _part is None:
        return loss
    parts, total = _part
    if reduction in ("sum", "none", None):
        # Where a step of the user's calls the loss, the user divides the sum.
        compiled = "compile_loss" in current_path().split("/") and tf.convert_to_tensor(values).shape.rank
        whole = loss * parts if compiled else loss
        return whole if reduction == "sum" else whole + tf.stop_gradient(loss - whole)
    weights = sample_weight if reduction == "mean_with_sample_weight" else None
    if mask is None and weights is None:
        return loss
    kept = keras_losses.apply_mask(weights, mask, "float64", "sum")
    count = tf.reduce_sum(tf.cast(kept, tf.float64))
    sums = tf.stop_gradient(tf.stack([tf.cast(loss, tf.float64) * count, count]))
    whole_sum, whole_count = tf.unstack(total(sums))
    share = loss * tf.cast(tf.math.divide_no_nan(count * parts, whole_count), loss.dtype)
    return share + tf.stop_gradient(tf.cast(tf.math.divide_no_nan(whole_sum, whole_count), loss.dtype) - share)


keras_losses.reduce_weighted_values = _reduced
