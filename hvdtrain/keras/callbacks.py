"""Keras callbacks that make several ranks' `fit` one training."""

import os
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core import sharing
from hvdtrain.errors import KerasError
from hvdtrain.keras import horovod_names, losses
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
    list_of,
    lr_of,
    numbers,
    optimizers,
    shares_steps,
)
from hvdtrain.keras.ranks import broadcast_variables, hvd, sum_arrays
from hvdtrain.launch.topology import discover
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import Values, named, of_process
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.run.loop import Among
from hvdtrain.run.session import check_next
from hvdtrain.tensorflow import models
from hvdtrain.tensorflow.engines import process_settings

Logs = dict[str, Any]
MADE: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()
"""Steps of a model's epoch that were made before the run resumed, by model: Keras counts the others from 0."""


class _Callback(keras.callbacks.Callback):
    """Refuses to begin where the model's optimizer would not average, and makes losses those of all ranks."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if hvd.size() > 1:
            losses.of_all_ranks(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        check_optimizers(self.model)


class BroadcastCallback(_Callback, horovod_names.BroadcastGlobalVariablesCallback):
    """Starts all ranks from the root's weights and optimizer state, and averages BatchNorm's moving statistics.

    The weights of `local_variables` stay each rank's own. A model that its first batch builds is broadcast after that
    batch. Random seeds stay each rank's own. The floating-point statistics of layers in training are averaged at the
    end of an epoch, before its validation. XLA is turned off, with a warning where jit_compile=True asks for it.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        >>> _ = model.fit(np.ones((8, 4)), np.ones(8), callbacks=[hvd.BroadcastCallback()], verbose=0)
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank, device, local_variables)
        self._begin_fit()

    def _begin_fit(self) -> None:
        self._sent: keras.Model | None = None
        """The model that all ranks have as the root has it."""
        self._compared: bool = False
        self._apart = False  # whether batches have made the ranks' statistics differ
        self._epoch, self._steps, self._in_steps = 0, 0, False
        """The steps of this epoch, and whether more may come."""
        self._counted = False  # how many examples each rank has in an epoch
        self._rows: Any = None
        """Inputs whose outputs are compared at the beginning and at the first epoch's end."""
        self._logged: dict[str, float] = {}
        """What the epoch before has logged, on this rank alone where MetricAverageCallback comes later."""
        self._idle = 0
        """The updates that the compiled optimizer had made before."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._begin_fit()
        self._idle = int(self.model.optimizer.iterations)
        fit = {"epochs": self.params["epochs"], "steps an epoch": self.params["steps"]}
        if hvd.size() > 1:
            self._agree(of_process(process_settings(), hvd.rank(), _sum) | named("training", fit))
        self._send()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._steps, self._in_steps = epoch, 0, True

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._send()
        if not self._steps:  # all callbacks have begun the epoch
            self._decide(self._epoch)
        self._apart = True

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps = batch + 1
        if not self._compared:
            self._compared = True
            check_used(self.model, self._idle)
            names = models.unlike_weights(models.own_weights(self.model), (hvd.rank(), hvd.size()), _sum)
            lines = agreement.of_unlike_buffers(names, "weights", "their mean", "average them by hvd.allreduce")
            early = _early_readers(list_of(self).callbacks) if hvd.size() > 1 else []
            batch, of_losses = losses.first_batch(self.model)
            for line in [*early, *lines, *of_losses]:
                self._note(line)
            if self._rows is None and batch is not None:
                self._rows = keras.tree.map_structure(
                    lambda each: each[: models.ROWS], keras.utils.unpack_x_y_sample_weight(batch)[0]
                )

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._end_steps()
        if not self.broadcast_done and not call_of(self.model, "fit"):
            broadcast_variables(self.model.weights, self.root_rank)
            models.refresh(self.model)
        self._unify()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._logged = {name: float(value) for name, value in (logs or {}).items() if not getattr(value, "ndim", 0)}
        self._end_steps()
        check_used(self.model, self._idle)
        self._unify()
        self._check_outputs()
        self._rows = None

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._decide(None)

    def _note(self, line: str) -> None:
        if hvd.rank() == 0:
            print(line, flush=True)

    def _send(self) -> None:
        if self.broadcast_done or not self.model.built:
            return
        optimizer = self.model.optimizer
        if not optimizer.built and not shares_steps(self.model):
            optimizer.build(self.model.trainable_variables)
        variables = State(self.model).tensors
        layout = {f"variable {i}": f"{v.dtype.name} {list(v.shape)}" for i, v in enumerate(variables.values())}
        self._agree(named("model", layout))
        constants = enumerate(models.held_constants(self.model).items())
        self._agree({f"model: constant {i} ({path.rpartition('/')[2]})": mark for i, (path, mark) in constants})
        if self._apart:  # of a model that its first batch has built
            self._average()
        with tf.device(self.device):
            broadcast_variables([v for v in variables.values() if id(v) not in self._local], self.root_rank)
        self._refresh()
        self._sent, self._rows = self.model, self._sample()
        self._check_outputs()

    def _refresh(self) -> None:
        """What layers compute of the weights that they have now, in graphs that are made anew."""
        if models.refresh(self.model):
            self.model.test_function = self.model.predict_function = None
            self.model.make_train_function(force=True)

    def _check_outputs(self) -> None:
        """Raises AgreementError where the ranks compute something else of the same examples."""
        if hvd.size() == 1 or self._rows is None or self._local:
            return
        (rank, size), host, summed = _among()
        ranks: Any = SimpleNamespace(rank=rank, size=size, sum=summed)
        models.check_outputs(lambda x: self.model(x, training=False), self._rows, self.model, ranks, host)

    def _sample(self) -> Any:
        """Inputs of this rank's, where they can be looked up without a change."""
        x = call_of(self.model, "fit").get("x")
        arrays = all(isinstance(each, np.ndarray | tf.Tensor) for each in keras.tree.flatten(x))
        return keras.tree.map_structure(lambda each: each[: models.ROWS], x) if arrays else None

    def _agree(self, values: Values) -> None:
        """Raises AgreementError where ranks have other values, or other numbers of the optimizer's."""
        if hvd.size() > 1:
            values = {**values, **named("training", numbers(self.model.optimizer))}
            agreement.check(values, *_among())

    def _decide(self, epoch: int | None) -> None:
        """Raises AgreementError where callbacks have decided otherwise on other ranks: on the LR, or on the end."""
        if hvd.size() > 1:
            lrs = {f"LR of {name}": lr_of(each) for name, each in optimizers(self.model).items()}
            check_next("decision", epoch, lrs, _among(), self._logged)

    def _end_steps(self) -> None:
        """Waits for those that make more steps in this epoch. Raises AgreementError."""
        if self._in_steps and hvd.size() > 1:
            self._in_steps = False
            _join()
            self._agree({"training: steps of this epoch": self._steps})
            if not self._counted and not MADE.get(self.model):
                self._counted = True
                self._count()

    def _count(self) -> None:
        """A line where ranks had other numbers of examples in as many steps."""
        tracker = getattr(self.model, "_loss_tracker", None)
        examples = float(tracker.count) if tracker else 0.0
        total, squares = _sum(np.array([examples, examples**2]))
        if squares * hvd.size() != total**2:
            self._note(
                "the ranks' batches have unequal numbers of examples, and the mean of each counts alike: give them "
                "equal parts, or GlobalBatches"
            )

    def _unify(self) -> None:
        if self._apart:
            self._send()
            self._average()

    def _average(self) -> None:
        statistics = _statistics(self.model)
        for variable, total in zip(statistics, sum_arrays([v.numpy() for v in statistics]), strict=True):
            variable.assign(total / hvd.size())
        self._apart = False


BroadcastGlobalVariablesCallback = BroadcastCallback


def _early_readers(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """A line on callbacks that decide by the numbers of one rank."""
    averaged = [index for index, each in enumerate(callbacks) if isinstance(each, MetricAverageCallback)]
    early = callbacks[: averaged[0]] if averaged else callbacks
    reads = [each for each in early if hasattr(each, "monitor") and getattr(each, "save_best_only", True)]
    if not reads:
        return []
    names = ", ".join(type(each).__name__ for each in reads)
    return [f"{names}: decides by one rank's numbers alone; give fit MetricAverageCallback before it"]


def _statistics(model: keras.Model) -> list[keras.Variable]:
    frozen = {id(weight) for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights}
    return [
        weight
        for weight in model.non_trainable_weights
        if keras.backend.is_float_dtype(weight.dtype) and id(weight) not in frozen
    ]


class MetricAverageCallback(_Callback):
    """Puts into an epoch's logs the metrics of all ranks' examples together, the same on every rank.

    The states of Keras's metrics, such as sums and counts, are added over the ranks, so local batches may be of
    unequal size; the metrics themselves stay as they are. A logged value that no metric computes is averaged.
    Callbacks that read the logs come after this one. A metric of your own must have states that may be added.
    `device` changes nothing: the sums are the host's. Raises KerasError where the ranks' logs have different names.

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
        self._train: list[np.ndarray] = []
        self._valid: list[np.ndarray] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._train = self._valid = []

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self._is_of_fit():
            self._train = self._states()  # validation resets the metrics

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._is_of_fit():
            self._valid = self._states()
        elif logs and hvd.size() > 1:
            weights = [weight.value for weight in self.model.trainable_weights]
            marks = {"model: weights": int(models.fingerprint.python_function(weights).numpy())}
            agreement.check(marks, *_among())
            logs.update(self._of_all_ranks(logs, self._states(), []))
            call_of(self.model, "evaluate").get("logs", {}).update(logs)  # what it returns

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs and hvd.size() > 1:
            _join()  # where this rank has left the epoch before others, as TerminateOnNaN does
            logs.update(self._of_all_ranks(logs, self._train or self._states(), self._valid))

    def _is_of_fit(self) -> bool:
        """Whether what is evaluated now is the validation of `fit`."""
        return bool(call_of(self.model, "evaluate").get("use_cached_eval_dataset"))

    def _states(self) -> list[np.ndarray]:
        return [np.array(variable) for variable in self.model.metrics_variables]

    def _of_all_ranks(self, logs: Logs, train: Sequence[np.ndarray], valid: Sequence[np.ndarray]) -> Logs:
        _check_names(sorted(logs))
        values = {name: np.asarray(logs[name], np.float64) for name in sorted(logs)}
        own = self._results(train, valid)
        # A step of the user's may log something else under a metric's name.
        metric = np.array([name in own and np.allclose(own[name], values[name], 1e-6, 0, True) for name in values])
        behind, *sums = sum_arrays([metric, *values.values(), *train, *valid])
        totals, states = sums[: len(values)], sums[len(values) :]
        exact = self._results(states[: len(train)], states[len(train) :])
        means = {
            name: exact[name] if ranks == hvd.size() else total / hvd.size()
            for name, ranks, total in zip(values, behind, totals, strict=True)
        }
        return {name: mean if mean.ndim else float(mean) for name, mean in means.items()}

    def _results(self, train: Sequence[np.ndarray], valid: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The metrics by their names in the logs, if their states were these."""
        found = {}
        for prefix, states in (("", train), ("val_", valid)):
            if states:
                with keras.StatelessScope(list(zip(self.model.metrics_variables, states, strict=True))):
                    results = self.model.get_metrics_result()
                found.update({prefix + name: np.asarray(result, np.float64) for name, result in results.items()})
        return found


def _check_names(names: list[str]) -> None:
    of_ranks = sharing.of_ranks(names, hvd.rank(), hvd.size(), _sum)
    for rank, others in enumerate(of_ranks):
        if others != of_ranks[0]:
            raise KerasError(
                f"rank {rank} logs {', '.join(others)}, but rank 0 {', '.join(of_ranks[0])}: MetricAverageCallback "
                "needs the same metrics of every rank; validate on all ranks or on none."
            )


def _among() -> Among:
    """What a comparison of the ranks needs."""
    return (hvd.rank(), hvd.size()), discover(os.environ).host, _sum


@is_operation
def _sum(array: np.ndarray) -> np.ndarray:
    with tf.device("/CPU:0"):  # NCCL takes no part in sums on the host
        return hvd.allreduce(tf.constant(array), op=hvd.Sum, name="hvdtrain.logs").numpy()  # type: ignore[no-any-return]


def _join() -> None:
    """Waits for all ranks, whose averages go on meanwhile: this one adds zeros to them."""
    tf.compat.v1.wrap_function(hvd.join, [])().numpy()  # TensorFlow takes the second of two eager joins for the first


class WarmupCallback(_Callback):
    """Raises the LR with every batch of the first epochs, from peak_lr / ranks to peak_lr (Goyal et al. 2017,
    arXiv:1706.02677), and prints so on rank 0.

    `steps_per_epoch` is Keras's own where that is known. Raises KerasError where neither is.

    Examples:
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> warmup = hvd.WarmupCallback(peak_lr=0.05 * hvd.size(), warmup_epochs=2)
    """

    def __init__(self, peak_lr: float, warmup_epochs: int = 5, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        self.peak_lr, self.warmup_epochs, self.steps_per_epoch = peak_lr, warmup_epochs, steps_per_epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._epoch, self._rising = 0, False
        self._steps = self.steps_per_epoch or self.params["steps"]
        if not self._steps:
            raise KerasError("WarmupCallback needs steps_per_epoch where Keras does not know an epoch's length.")
        if hvd.rank() == 0:
            print(
                f"LR warm-up: {self.peak_lr / hvd.size():g} to {self.peak_lr:g} ({hvd.size()} ranks) over "
                f"{self.warmup_epochs} epochs of {self._steps} steps",
                flush=True,
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch
        if self._rising and epoch >= self.warmup_epochs:  # with steps_per_execution the last batches had no call
            self.model.optimizer.learning_rate = self.peak_lr
            self._rising = False

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._epoch < self.warmup_epochs:
            done = (self._epoch + (MADE.get(self.model, 0) + batch + 1) / self._steps) / self.warmup_epochs
            self.model.optimizer.learning_rate = self.peak_lr / hvd.size() * (1 + (hvd.size() - 1) * min(1, done))
            self._rising = True
