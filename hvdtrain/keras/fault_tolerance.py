"""Fault tolerance for any model under Keras's `fit`: what a recipe's run has, in one callback."""

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.progress import UserSampling
from hvdtrain.core.recipe import of_program
from hvdtrain.errors import HvdtrainError, KerasError
from hvdtrain.keras.callbacks import BroadcastCallback, Logs, _Callback, refresh, scalars
from hvdtrain.keras.global_batches import MADE, GlobalBatches
from hvdtrain.keras.others import Others
from hvdtrain.keras.program import OTHERS, Program, Replica, State, compare_decisions, list_of, record_config
from hvdtrain.keras.ranks import all_take_part, clock_of, hvd
from hvdtrain.run.session import FitSession, UserHooks, intervals_of
from hvdtrain.tensorflow import private
from hvdtrain.tensorflow.engines.horovod import HorovodEngine
from hvdtrain.terminal import SCREEN

TRAINED: dict[Path, weakref.ref[keras.optimizers.Optimizer]] = {}
"""The optimizer of each run in this process, by the run's folder."""


def _reported(hook: Callable[..., None]) -> Callable[..., None]:
    """The callback's hook, which ends the process with one line for an HvdtrainError."""

    @functools.wraps(hook)
    def call(callback: "FaultTolerance", *args: Any, **kwargs: Any) -> None:
        try:
            hook(callback, *args, **kwargs)
        except HvdtrainError as error:
            if callback._session.is_joined:
                callback._session.failed(error)
            raise

    return call


class FaultTolerance(BroadcastCallback):
    """Resumes `fit` where it was interrupted, also inside an epoch, and stops it in order; also a BroadcastCallback.

    Checkpoints in the folder hold all variables of model and optimizer, and the position; the same program continues
    from the newest. SIGTERM and a warning of the time limit stop all ranks after the same step, with a checkpoint;
    after a warning the job is queued again. Where a rank is lost or hangs, the others end and name it. Replicas are
    compared. Log, metrics.jsonl and TensorBoard events are those of a recipe's run.

    Inside an epoch only `data`, a GlobalBatches, can be resumed. This callback comes first, wherever it stands in the
    list. Other callbacks keep their counts, and a resumed epoch its metrics. The same command does not continue a
    training that has ended, even early. An HvdtrainError ends the process with one line and its exit code.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        >>> data = hvd.GlobalBatches((np.ones((64, 4)), np.ones(64)), batch_size=16)
        >>> run = hvd.FaultTolerance("runs/mean", data, checkpoint_every_steps=100)
        >>> _ = model.fit(data, epochs=2, callbacks=[run], verbose=0)  # doctest: +ELLIPSIS
        INFO - ...
    """

    def __init__(
        self,
        folder: str | Path,
        data: GlobalBatches | None = None,
        *,
        highest: str | None = None,
        lowest: str | None = None,
        log_every_steps: int = 20,
        check_replicas_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        sample_check: Literal["on", "off"] = "on",
        insecure_rendezvous: bool = False,
    ) -> None:
        """The best checkpoint, by the logged metric `highest` or `lowest`, is kept beside the newest. With
        `checkpoint_every_steps` auto the run decides, by what a checkpoint costs and `mtbf_hours`, the mean hours
        between failures of the job. `sample_check` off compares no examples of `data`."""
        super().__init__()
        self.folder, self.data, best = Path(folder), data, (highest, lowest)
        self._session = Session(self.folder, best, intervals_of(locals()), insecure=insecure_rendezvous)

    @_reported
    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._session.join_ranks()
        fit = list_of(self)
        # In any order that the user gives: checkpoints then hold what the others do at an epoch's end.
        torn = keras.callbacks.ProgbarLogger if SCREEN.display == "lines" else ()  # its repaints, by a launcher
        others = (each for each in fit.callbacks if each is not self and not isinstance(each, torn))
        fit.callbacks = [self, *others]
        _check(self, fit.callbacks)
        super().on_train_begin(logs)
        self._session.begin_training(self.model, self.data, fit, self.params)
        refresh(self.model)
        self._check_outputs()

    @_reported
    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        compare_decisions(self.model, epoch, self._logged)
        self._session.begin_epoch(epoch)

    @_reported
    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._session.begin_step()
        if not self._steps:
            self._session.started.run.samples.compare()
        super().on_train_batch_begin(batch, logs)
        self._session.started.trainer.seed(self._session.started.progress.step)

    @_reported
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._session.end_step()

    @_reported
    def on_test_begin(self, logs: Logs | None = None) -> None:
        super().on_test_begin(logs)
        if self._session.hooks:  # None in an evaluate() of the user's, outside of fit
            self._session.hooks.after_step()

    @_reported
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after validation. Later callbacks see the epoch's end before its report and checkpoint are written."""
        super().on_epoch_end(epoch, logs)
        self._session.end_epoch(logs or {})

    @_reported
    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        self._session.end_training()
        private.set_initial_epoch(self.model, None)

    def _note(self, line: str) -> None:
        self._session.started.note(line)

    def _compare_replicas(self) -> None:
        """Nothing: the run's hooks do it."""

    def _sample(self) -> Any:
        return keras.utils.unpack_x_y_sample_weight(self.data[0])[0] if self.data else super()._sample()


class Session(FitSession[Replica]):
    """A run under Keras's `fit`; holds a checkpoint's values beside tensors until Keras can take them."""

    _logs: Logs | None
    """The logs of an epoch whose checkpoint is not written yet; later callbacks may add to them."""
    _lr: float | None
    """The LR of a resumed epoch, which callbacks may have changed a second time when the epoch began."""
    _is_inside: bool
    """Whether this epoch was resumed inside, until its first step begins."""
    _metrics: dict[str, np.ndarray]
    """The states of Keras's metrics in the checkpoint, for a resumed epoch."""

    def join_ranks(self) -> None:
        """Joins the failure detector, and reports to it an error that nobody catches."""
        self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self.join("tensorflow", "horovod")

    def begin_training(
        self,
        model: keras.Model,
        data: GlobalBatches | None,
        fit: keras.callbacks.CallbackList,
        params: dict[str, Any],
    ) -> None:
        """Opens the run and continues it from its folder's last checkpoint. Raises HvdtrainError."""
        self._model, self._data, self._logs, self._lr = model, data, None, None
        self._averages, self._fit = _Averages(model, fit.callbacks), fit
        self._others = Others([each for each in fit.callbacks if not isinstance(each, _Callback)], model)
        self._part_of_epoch = contextlib.ExitStack()
        engine = HorovodEngine(of_program(), None)
        engine.clock = clock_of(model.optimizer)
        engine.device = "/GPU:0" if tf.config.get_visible_devices("GPU") else engine.device
        self.opened(engine)
        self._program = Program(model, data)
        batch = data.batch_size if data else 1
        length = UserSampling(batch, batch * params["steps"], hvd.size(), epochs=params["epochs"])
        replica = Replica(model, engine, data.seed if data else 0, self._others)
        hooks = self.begin(self._program, replica, length)
        hooks.check_step = all_take_part  # type: ignore[method-assign]
        hooks.comparison.length(hooks.length)
        if hooks.run.folder:
            record_config(model, hooks.run.folder.path)
        self._resume(hooks, replica.state)
        if data:
            data.done = 0  # a run's epochs are its own, as it may be resumed alone
            data.samples = hooks.run.samples if data.samples.is_on else data.samples
        else:
            hooks.note(
                "the order of the samples is the data's own: other for another number of ranks, and a resumed epoch "
                "reads from its beginning; GlobalBatches, given to FaultTolerance and fit, keeps both"
            )

    def begin_epoch(self, epoch: int) -> None:
        for swap in self._averages.swaps:  # as Keras does right after: a checkpoint holds the weights of the next step
            swap.on_epoch_begin(epoch)
        self._end_logged_epoch()
        self._begin_others()
        hooks = self.started
        if not hooks.progress.step:
            hooks.progress.epoch = epoch
        hooks.begin_epoch()
        if (sample := hooks.progress.sample) and self._data:
            hooks.trainer.begin_metrics(self._metrics, self._data[0])
            self._part_of_epoch.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")  # Keras expects a whole epoch
            MADE[self._model] = made = sample // hooks.length.global_batch
            self._part_of_epoch.callback(MADE.pop, self._model)
            self._part_of_epoch.enter_context(_counting_from(made, self._fit))
            self._lr = self._program.lr

    def begin_step(self) -> None:
        """Does what is due after the previous step, whose end all callbacks have seen; sets a resumed epoch's LR."""
        self.started.after_step()
        if self._is_inside:  # others may have begun the epoch anew
            self._others.give_back()
        self._is_inside = False
        self._note_others()
        if self.started.progress.is_epoch_done(self.started.length):
            # Keras expects a whole epoch of a resumed one. A step without data would still count as an update.
            raise tf.errors.OutOfRangeError(None, None, "the epoch is read to its end")
        optimizer = self._model.optimizer
        if self._lr is not None and not private.is_scheduled(optimizer):
            optimizer.learning_rate = self._lr
        self._lr = None

    def end_step(self) -> None:
        self.started.step(self._program.lr)

    def end_epoch(self, logs: Logs) -> None:
        self.started.after_step()
        self._part_of_epoch.close()
        self.started.end_steps(self._program.lr)
        self._averages.keep()
        self._logs = logs

    def end_training(self) -> None:
        hooks = self.started
        if self._logs is not None and hooks.progress.epoch + 1 < hooks.length.epochs:
            self._program.ended = hooks.end_early(self._asked, self._others.stopped_by())
        with self._averages.as_trained():
            self._end_logged_epoch()
        if not hooks.is_over:  # no epoch was trained: initial_epoch is after the last
            hooks.length = replace(hooks.length, epochs=hooks.progress.epoch)  # type: ignore[arg-type]
        self._begin_others()
        self._note_others()
        self.left()

    def _resume(self, hooks: UserHooks[Replica], state: State) -> None:
        """Takes the checkpoint's values beside tensors; an ended training stays at its end."""
        self._asked = {"epochs": hooks.length.epochs}
        arrays = state.take_arrays()
        self._metrics = arrays if hooks.progress.sample else {}
        self._has_begun, self._is_inside = False, hooks.progress.sample > 0
        ended = hooks.resumed_from.get("program", {}).get("ended")
        is_over = hooks.has_ended(self._asked)
        if ended and is_over:
            for swap in self._averages.swaps:
                private.swap(swap)  # Keras had done so when it ended early
        elif ended:  # more epochs are requested: patience begins anew
            self._others.keeps_patience = False
        if OTHERS in arrays and (line := self._others.resume(arrays[OTHERS], is_over=is_over)):
            hooks.note(line)
        private.set_initial_epoch(self._model, self._asked["epochs"] if is_over else hooks.progress.epoch or None)

    def _begin_others(self) -> None:
        """Gives the other callbacks, once all have begun, their state in the checkpoint."""
        if not self._has_begun:
            self._has_begun = True
            self._others.begin()
            self._others.give_back()

    def _note_others(self) -> None:
        for line in self._others.lines():
            self.started.note(line)

    def _end_logged_epoch(self) -> None:
        if self._logs is not None:
            self.started.end_logged_epoch(scalars(self._logs))
            self._logs = None

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an error that nobody has caught, such as that of a collective whose other rank is gone."""
        excepthook = self._excepthook
        if self.is_joined:
            self.failed(error)
        excepthook(kind, error, trace)

    def _close(self, error: BaseException | None) -> None:
        sys.excepthook = self._excepthook
        super()._close(error)


@contextlib.contextmanager
def _counting_from(made: int, fit: keras.callbacks.CallbackList) -> Iterator[None]:
    """Lets callbacks see an epoch's batches numbered from `made` on."""
    names = "on_train_batch_begin", "on_train_batch_end"
    for name in names:
        call = getattr(fit, name)
        setattr(fit, name, lambda batch, logs=None, call=call: call(made + batch, logs))
    yield
    for name in names:
        delattr(fit, name)


def _check(run: FaultTolerance, callbacks: list[keras.callbacks.Callback]) -> None:
    """Raises KerasError where the training could not be resumed."""
    model = run.model
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise KerasError("BackupAndRestore and FaultTolerance would both resume the training; leave out the first.")
    if TRAINED.setdefault(run.folder.absolute(), weakref.ref(model.optimizer))() is not model.optimizer:
        raise KerasError(
            f"{run.folder} is the folder of another model's run in this program, or of this model's before it was "
            "compiled again; give each fold and each stage a FaultTolerance and a folder of its own."
        )
    if model.steps_per_execution > 1:
        raise KerasError(
            f"FaultTolerance looks after every step, got steps_per_execution={model.steps_per_execution}; compile the "
            "model with 1."
        )
    if not model.built:
        raise KerasError("FaultTolerance needs a model that is built: give it an Input layer, or call it once.")
    if not run.params["steps"]:
        raise KerasError("FaultTolerance needs steps_per_epoch where Keras does not know an epoch's length.")


class _Averages:
    """The optimizer's moving averages of the weights, which may replace them in the model between epochs."""

    def __init__(self, model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> None:
        swaps = (each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights))
        self.swaps = [each for each in swaps if each.swap_on_epoch]
        """The callbacks that swap weights and averages between epochs."""
        self._optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._kept: list[np.ndarray] = []

    def keep(self) -> None:
        """Copies both at the epoch's end, before callbacks swap them, and Keras does before `on_train_end`."""
        self._kept = [np.array(each) for each in self._variables]

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Gives the model, until the block ends, the weights from which training would continue."""
        self._swap()
        if self._kept:
            for each in self.swaps * 2:  # to round as a swap and back does
                private.swap(each)
        yield
        self._swap()

    @property
    def _variables(self) -> list[keras.Variable]:
        """The weights and their averages, or nothing where the optimizer keeps no averages."""
        return private.with_averages(self._optimizer) if self._optimizer.use_ema else []

    def _swap(self) -> None:
        for index, weight in enumerate(self._variables if self._kept else ()):
            self._kept[index], now = np.array(weight), self._kept[index]
            weight.assign(now)
