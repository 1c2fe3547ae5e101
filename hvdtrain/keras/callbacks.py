"""Keras callbacks that make the ranks' `fit` one training."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core import sharing
from hvdtrain.errors import KerasError
from hvdtrain.keras import horovod_names, losses, metrics
from hvdtrain.keras.global_batches import MADE
from hvdtrain.keras.horovod_names import (  # noqa: F401 (by Horovod's names)
    BestModelCheckpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdtrain.keras.program import (
    State,
    call_of,
    check_optimizers,
    check_used,
    compare_decisions,
    compare_replicas,
    compare_values,
    list_of,
    shares_steps,
)
from hvdtrain.keras.ranks import all_take_part, among, broadcast_variables, hvd, join_all, sum_array, sum_arrays
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import named, of_process
from hvdtrain.tensorflow import models, private
from hvdtrain.tensorflow.engines import process_settings

Logs = dict[str, Any]
UNEQUAL_PARTS = (
    "the ranks' batches have unequal numbers of examples, and the mean of each counts alike: give them equal parts, or "
    "GlobalBatches"
)


def scalars(logs: Logs | None) -> dict[str, float]:
    """The logged numbers, without what is logged as an array."""
    return {name: float(value) for name, value in (logs or {}).items() if not getattr(value, "ndim", 0)}


class _Callback(keras.callbacks.Callback):
    """Refuses an optimizer that does not average, and makes the model's losses those of all ranks."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        losses.of_all_ranks(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        check_optimizers(self.model)


class BroadcastCallback(_Callback, horovod_names.BroadcastGlobalVariablesCallback):
    """Starts all ranks with the root's weights and optimizer state, and averages BatchNorm's moving statistics.

    `local_variables` and random seeds stay different on each rank. A model that its first batch builds is broadcast
    after that batch. Floating-point statistics of trainable layers are averaged at the end of an epoch, before its
    validation. XLA is turned off, with a warning where jit_compile=True requests it.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        >>> _ = model.fit(np.ones((8, 4)), np.ones(8), callbacks=[hvd.BroadcastCallback()], verbose=0)
    """

    _rows: Any
    """Inputs whose outputs the ranks compare when training begins and when the first epoch ends."""
    _logged: dict[str, float]
    """The logs of the previous epoch, only of this rank where MetricAverageCallback comes later."""

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank, device, local_variables)
        self._begin_fit()

    def _begin_fit(self) -> None:
        self._sent, self._rows, self._logged = None, None, {}
        self._is_first_epoch = True
        self._has_own_statistics = False  # whether batches have made BatchNorm's statistics differ between ranks
        self._epoch, self._steps, self._seen, self._may_step = 0, 0, 0, False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._begin_fit()
        self._updates_before = int(self.model.optimizer.iterations)
        fit = {"epochs": self.params["epochs"], "steps an epoch": self.params["steps"]}
        if hvd.size() > 1:
            compare_values(self.model, of_process(process_settings(), hvd.rank(), sum_array) | named("training", fit))
        self._send()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._steps, self._may_step = epoch, 0, True

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._send()
        if not self._steps:  # all callbacks have begun the epoch
            compare_decisions(self.model, self._epoch, self._logged)
        self._has_own_statistics = True

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps = batch + 1
        if not self._seen:
            self._look_at_first_step()
        self._seen += 1
        if self._is_first_epoch and not self._seen & (self._seen - 1):
            self._compare_replicas()

    def _look_at_first_step(self) -> None:
        check_used(self.model, self._updates_before)
        own, mark = models.own_weights(self.model), models.fingerprint.python_function  # tracing would take seconds
        among, remedy = (hvd.rank(), hvd.size(), sum_array), "average them by hvd.allreduce"
        lines = agreement.of_unlike_buffers(own, mark, among, "weights", "their mean", remedy)
        early = _early_readers(list_of(self).callbacks) if hvd.size() > 1 else []
        batch, of_losses = losses.first_batch(self.model)
        for line in [*early, *lines, *of_losses]:
            self._note(line)
        if self._rows is None and batch is not None:
            self._rows = _first_rows(keras.utils.unpack_x_y_sample_weight(batch)[0])

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._end_steps()
        if not self.broadcast_done and not call_of(self.model, "fit"):
            broadcast_variables(self.model.weights, self.root_rank)
            models.refresh(self.model)
        self._unify_statistics()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._logged = scalars(logs)
        self._end_steps()
        check_used(self.model, self._updates_before)
        self._unify_statistics()
        self._check_outputs()
        self._compare_replicas()
        self._rows = None

    def on_train_end(self, logs: Logs | None = None) -> None:
        compare_decisions(self.model, None, self._logged)

    def _note(self, line: str) -> None:
        if hvd.rank() == 0:
            print(line, flush=True)

    def _send(self) -> None:
        model = self.model
        # A model of built layers may not be built itself, and have weights all the same.
        if self.broadcast_done or not (model.built or model.weights):
            return
        # A model may say that it is built before its layers are; some layers never are.
        is_whole = self._seen > 0 or (model.built and all(each.built for each in private.layers(model)))
        optimizer = model.optimizer
        if is_whole and not optimizer.built and not shares_steps(model):
            optimizer.build(model.trainable_variables)
        variables = State(self.model).tensors
        layout = {f"variable {i}": f"{v.dtype.name} {list(v.shape)}" for i, v in enumerate(variables.values())}
        compare_values(model, named("model", layout))
        constants = enumerate(models.held_constants(self.model).items())
        marks = {f"model: constant {i} ({path.rpartition('/')[2]})": mark for i, (path, mark) in constants}
        compare_values(model, marks)
        if is_whole and self._has_own_statistics:  # the first batch has built the model
            _average_statistics(self.model)
            self._has_own_statistics = False
        with tf.device(self.device):
            broadcast_variables([v for v in variables.values() if id(v) not in self._local], self.root_rank)
        refresh(self.model)
        if is_whole:
            self._sent, self._rows = model, self._sample()
            self._check_outputs()

    def _check_outputs(self) -> None:
        """Raises AgreementError where the ranks' models give different outputs for the same examples."""
        if hvd.size() > 1 and self._rows is not None and not self._local:
            models.check_outputs(lambda x: self.model(x, training=False), self._rows, self.model, *among())

    def _compare_replicas(self) -> None:
        if hvd.size() > 1 and self.broadcast_done and not self._local and all_take_part():
            compare_replicas(self.model, self._seen)

    def _sample(self) -> Any:
        """Some of this rank's inputs; None where reading them would change what `fit` reads."""
        x = call_of(self.model, "fit").get("x")
        arrays = all(isinstance(each, np.ndarray | tf.Tensor) for each in keras.tree.flatten(x))
        return _first_rows(x) if arrays else None

    def _end_steps(self) -> None:
        """Waits for the ranks that make more steps in this epoch. Raises AgreementError."""
        if self._may_step and hvd.size() > 1:
            self._may_step = False
            join_all()
            compare_values(self.model, {"training: steps of this epoch": self._steps})
            if self._is_first_epoch and not MADE.get(self.model):
                self._is_first_epoch = False
                if _have_unequal_parts(self.model):
                    self._note(UNEQUAL_PARTS)

    def _unify_statistics(self) -> None:
        if self._has_own_statistics:
            self._send()
            _average_statistics(self.model)
            self._has_own_statistics = False


BroadcastGlobalVariablesCallback = BroadcastCallback


def _first_rows(x: Any) -> Any:
    return keras.tree.map_structure(lambda each: each[: models.ROWS], x)


def _have_unequal_parts(model: keras.Model) -> bool:
    """Whether the ranks had different numbers of examples in the same number of steps. Every rank calls it."""
    tracker = private.loss_tracker(model)
    examples = float(tracker.count) if tracker else 0.0
    total, squares = sum_array(np.array([examples, examples**2]))
    return bool(squares * hvd.size() != total**2)


def _early_readers(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """A line that names callbacks which decide by the numbers of only one rank."""
    early = itertools.takewhile(lambda each: not isinstance(each, MetricAverageCallback), callbacks)
    reads = (each for each in early if hasattr(each, "monitor") and getattr(each, "save_best_only", True))
    names = ", ".join(type(each).__name__ for each in reads)
    return [f"{names}: decides by one rank's numbers alone; give fit MetricAverageCallback before it"] if names else []


def refresh(model: keras.Model) -> None:
    """Computes again what layers derive from their weights, and discards the graphs that hold the old values."""
    if models.refresh(model):
        model.test_function = model.predict_function = None
        model.make_train_function(force=True)


def _average_statistics(model: keras.Model) -> None:
    """Averages over the ranks the floating-point weights that training changes without gradients."""
    frozen = {id(weight) for layer in private.layers(model) if not layer.trainable for weight in layer.weights}
    rest = (weight for weight in model.non_trainable_weights if id(weight) not in frozen)
    statistics = [weight for weight in rest if keras.backend.is_float_dtype(weight.dtype)]
    for variable, total in zip(statistics, sum_arrays([each.numpy() for each in statistics]), strict=True):
        variable.assign(total / hvd.size())


class MetricAverageCallback(_Callback):
    """Replaces an epoch's logged metrics by those of all ranks' examples together, the same on every rank.

    The states of Keras's metrics, such as sums and counts, are added over the ranks, so local batches may have unequal
    sizes; the metrics themselves are not changed. A logged value that no metric computes is averaged. Callbacks that
    read the logs must come after this one. Variables of your own metrics may be sums, maxima or minima; a metric of
    another kind is averaged, and a line names it. `device` has no effect, as the host adds. Raises KerasError where the
    ranks' logs have different names.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", metrics=["mae"])
        >>> callbacks = [hvd.BroadcastCallback(), hvd.MetricAverageCallback()]
        >>> history = model.fit(np.ones((8, 4)), np.ones(8), callbacks=callbacks, verbose=0)
        >>> sorted(history.history)
        ['loss', 'mae']
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._valid: metrics.Present | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._valid = None

    def on_test_end(self, logs: Logs | None = None) -> None:
        merging, call = metrics.merging_of(self.model), call_of(self.model, "evaluate")
        if call.get("use_cached_eval_dataset"):  # the validation of `fit`
            self._valid = merging.present()
        elif logs and hvd.size() > 1:
            weights = [weight.value for weight in self.model.trainable_weights]
            marks = {"model: weights": int(models.fingerprint.python_function(weights).numpy())}
            agreement.check_values(marks, *among())
            _check_names(sorted(logs))
            logs.update(merging.of_all_ranks(logs, {"": merging.present()}))
            call.get("logs", {}).update(logs)  # what it returns

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs and hvd.size() > 1:
            join_all()  # where this rank has left the epoch before others, as TerminateOnNaN does
            _check_names(sorted(logs))
            merging = metrics.merging_of(self.model)
            valid = {"val_": self._valid} if self._valid else {}
            logs.update(merging.of_all_ranks(logs, {"": merging.trained(), **valid}))


def _check_names(names: list[str]) -> None:
    of_ranks = sharing.of_ranks(names, hvd.rank(), hvd.size(), sum_array)
    for rank, others in enumerate(of_ranks):
        if others != of_ranks[0]:
            raise KerasError(
                f"rank {rank} logs {', '.join(others)}, but rank 0 {', '.join(of_ranks[0])}: MetricAverageCallback "
                "needs the same metrics of every rank; validate on all ranks or on none."
            )


class WarmupCallback(_Callback, LearningRateWarmupCallback):
    """Raises the LR with every batch of the first epochs, from peak_lr / ranks to peak_lr (Goyal et al. 2017,
    arXiv:1706.02677); rank 0 prints it.

    By default `steps_per_epoch` is the number that Keras knows. Raises KerasError where Keras knows none.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> warmup = hvd.WarmupCallback(peak_lr=0.05 * hvd.size(), warmup_epochs=2)
    """

    def __init__(self, peak_lr: float, warmup_epochs: int = 5, steps_per_epoch: int | None = None) -> None:
        super().__init__(peak_lr, warmup_epochs, momentum_correction=False)
        self.peak_lr, self._given_steps = peak_lr, steps_per_epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self.steps_per_epoch, self._is_rising = self._given_steps, False
        LearningRateWarmupCallback.on_train_begin(self, logs)
        if hvd.rank() == 0:
            print(
                f"LR warm-up: {self.peak_lr / hvd.size():g} to {self.peak_lr:g} ({hvd.size()} ranks) over "
                f"{self.warmup_epochs} epochs of {self.steps_per_epoch} steps",
                flush=True,
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self._is_rising and epoch >= self.warmup_epochs:  # with steps_per_execution the last batches had no call
            self.model.optimizer.learning_rate = self.peak_lr
            self._is_rising = False

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        self._is_rising = self.current_epoch < self.warmup_epochs

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Leaves Keras's logs as they are."""

    def _of_ranks(self, epoch: float) -> float:
        return min(1.0, super()._of_ranks(epoch))
