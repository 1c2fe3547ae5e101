"""What a recipe's run promises, for anybody's model under Keras's `fit`."""

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.progress import UserSampling
from hvdtrain.core.settings import UserEngineSettings
from hvdtrain.errors import HvdtrainError, KerasError
from hvdtrain.keras.callbacks import MADE, BroadcastCallback, Logs, _Callback
from hvdtrain.keras.global_batches import GlobalBatches
from hvdtrain.keras.program import Others, Program, Replica, State, list_of
from hvdtrain.keras.ranks import clock_of, hvd
from hvdtrain.run.session import FitSession, UserHooks, in_programs_words, intervals_of
from hvdtrain.tensorflow.engines.horovod import HorovodEngine

TRAINED: dict[Path, weakref.ref[keras.optimizers.Optimizer]] = {}
"""The optimizer of each run in this process, by its folder."""


class FaultTolerance(BroadcastCallback):
    """Resumes `fit` where it was, also inside an epoch, and ends it in order; a BroadcastCallback too.

    All variables of model and optimizer and the position are in the folder's checkpoints; the same program continues
    from the newest. SIGTERM and a warning of the time limit end all ranks after the same step, with a checkpoint; the
    job is queued again after a warning. A rank that is lost or hangs ends the others, by name. Replicas are compared.
    Log, metrics.jsonl and TensorBoard events are those of a recipe's run.

    The epoch that continues is that of `data`, a GlobalBatches. The callback comes first wherever it stands. What
    other callbacks count is kept, and so are the metrics of a resumed epoch. A training that has ended, early too, is
    not trained further by the same command. An HvdtrainError ends the process with one line and its exit code.

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
        guard_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        insecure_rendezvous: bool = False,
    ) -> None:
        """The best checkpoint, by the logged metric `highest` or `lowest`, is kept beside the newest. With
        `checkpoint_every_steps` auto the run decides, by what a checkpoint costs and `mtbf_hours`, the mean hours
        between failures of the job."""
        super().__init__()
        self.folder, self.data, best = Path(folder), data, (highest, lowest)
        self._session = FitSession[Replica](folder, best, intervals_of(locals()), insecure=insecure_rendezvous)
        self._excepthook = sys.excepthook
        self._resumed = contextlib.ExitStack()
        """Around an epoch of which a part is left."""
        self._lr: float | None = None
        """The LR of a resumed epoch, which callbacks may have changed at its beginning once more."""
        self._logs: Logs | None = None
        """What is logged of an epoch whose checkpoint is not written yet: callbacks that come later may add to it."""
        self._metrics: dict[str, np.ndarray] = {}
        self._others = Others([])
        self._texts: dict[str, Mapping[str, str]] | None = None
        """What a checkpoint has of other callbacks, until they have begun."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self._session.join("tensorflow", "horovod")
        self._lr, self._logs = None, None
        with self._reported():
            self._list = list_of(self)
            # Whatever the order given: the others then have an epoch's end before its checkpoint.
            self._list.callbacks = [self, *(each for each in self._list.callbacks if each is not self)]
            _check(self)
            self._averages = _Averages(self.model, self._list.callbacks)
            super().on_train_begin(logs)
            self._begin()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        with self._reported():
            super().on_epoch_begin(epoch, logs)
            self._decide(epoch)
            for swap in self._averages.swaps:  # as it does itself now: a checkpoint has what the next step begins with
                swap.on_epoch_begin(epoch)
            self._end_epoch()
        self._take_others()
        hooks = self._session.started
        if not hooks.progress.step:
            hooks.progress.epoch = epoch
        hooks.begin_epoch()
        hooks.trainer.begin_epoch()
        if sample := hooks.progress.sample:
            self._resumed.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")  # Keras expects a whole epoch
            MADE[self.model] = sample // hooks.extent.global_batch
            self._resumed.callback(MADE.pop, self.model)
            self._lr = self._program.lr

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._after_update()
        if self._session.started.progress.is_epoch_done(self._session.started.extent):
            # Of a resumed epoch, which Keras takes for a whole one. Were the step to find no data, TensorFlow would
            # count it as one of the optimizer's all the same.
            raise tf.errors.OutOfRangeError(None, None, "the epoch is read to its end")
        if self._lr is not None and isinstance(self.model.optimizer._learning_rate, keras.Variable):
            self.model.optimizer.learning_rate = self._lr
        self._lr = None
        with self._reported():
            super().on_train_batch_begin(batch, logs)
        self._session.started.trainer.seed(self._session.started.progress.step)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        with self._reported():
            super().on_train_batch_end(batch, logs)
        hooks = self._session.started
        if self._metrics:
            hooks.trainer.add_metrics(self._metrics)
        self._metrics = {}
        hooks.step(self._program.lr)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        with self._reported():
            super().on_test_begin(logs)
        self._after_update()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After validation; callbacks that come later have the epoch's end before the report and the checkpoint."""
        with self._reported():
            super().on_epoch_end(epoch, logs)
            self._after_update()
            self._resumed.close()
            self._session.started.end_steps(self._program.lr)
        self._averages.keep()
        self._logs = logs or {}

    def on_train_end(self, logs: Logs | None = None) -> None:
        hooks = self._session.started
        with self._reported():
            super().on_train_end(logs)
            is_early = self._logs is not None and hooks.progress.epoch + 1 < hooks.extent.epochs
            if is_early:
                self._program.ended = hooks.end_early(self._asked, self._others.stopped_by())
            with self._averages.as_trained():
                self._end_epoch()
            if not hooks.is_over:  # of no epoch, with an initial_epoch after the last
                hooks.end_here()
            self._take_others()
            self._release()
            self._session.left()
        self.model._initial_epoch = None

    def _after_update(self) -> None:
        """What is due once all callbacks have had a step's end."""
        if self._session.hooks:
            with self._reported():
                self._session.hooks.after_step()

    def _take_others(self) -> None:
        """The other callbacks count on from the checkpoint, once all have begun."""
        if self._texts is not None:
            self._others.begin(self._texts, self._arrays)
            self._texts = None

    def _note(self, line: str) -> None:
        self._session.started.note(line)

    def _sample(self) -> Any:
        return self.data[0][0] if self.data else super()._sample()

    def _begin(self) -> None:
        """The run, continued from its folder's last checkpoint."""
        self._others = Others([each for each in self._list.callbacks if not isinstance(each, _Callback)])
        engine = HorovodEngine(UserEngineSettings(), None)
        engine.clock = clock_of(self.model.optimizer)
        engine.device = "/GPU:0" if tf.config.get_visible_devices("GPU") else engine.device
        self._session.opened(engine)
        self._program = program = Program(self.model, self.data)
        batch = self.data.batch_size if self.data else 1
        extent = UserSampling(batch, batch * self.params["steps"], hvd.size(), epochs=self.params["epochs"])
        with in_programs_words("FaultTolerance"):
            replica = Replica(self.model, engine, self.data.seed if self.data else 0, self._others)
            hooks = self._session.begin(program, replica, extent)
            hooks.check_extent()
            self._resume(hooks, replica.state)
        for line in self._others.unkept():
            hooks.note(line)
        if self.data:
            self.data.follow(lambda: hooks.progress)
        else:
            hooks.note(
                "the order of the samples is the data's own: other for another number of ranks, and a resumed epoch "
                "reads from its beginning; GlobalBatches, given to FaultTolerance and fit, keeps both"
            )

    def _resume(self, hooks: UserHooks[Replica], state: State) -> None:
        """Takes what a checkpoint holds beside tensors."""
        self._refresh()
        self._check_outputs()
        self._asked = {"epochs": self.params["epochs"]}
        self._texts, self._arrays = dict(state.texts), state.take_arrays()
        self._metrics = self._arrays if hooks.progress.sample else {}
        is_over = hooks.has_ended(self._asked)
        if is_over:
            for swap in self._averages.swaps if hooks.resumed_from["program"].get("ended") else ():
                swap._swap_variables()  # as it had when Keras, ending early, finalized the weights
        elif hooks.resumed_from.get("program", {}).get("ended"):  # more epochs are asked for: patience begins anew
            self._texts = {name: of for name, of in self._texts.items() if not name.startswith("EarlyStopping ")}
        self.model._initial_epoch = self.params["epochs"] if is_over else hooks.progress.epoch or None

    def _end_epoch(self) -> None:
        if self._logs is not None:
            logged = {name: float(value) for name, value in self._logs.items() if not getattr(value, "ndim", 0)}
            self._session.started.end_logged_epoch(logged)
            self._logs = None

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Ends the process for an error that a user can meet."""
        try:
            yield
        except HvdtrainError as error:
            self._fail(error)
            raise

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that nobody has caught, as of a collective whose other rank is gone."""
        self._fail(error)
        self._excepthook(kind, error, trace)

    def _fail(self, error: BaseException) -> None:
        self._release()
        if self._session.is_joined:
            self._session.failed(error)

    def _release(self) -> None:
        sys.excepthook = self._excepthook
        if self.data:
            self.data.follow()


def _check(run: FaultTolerance) -> None:
    """Raises KerasError where the training could not be resumed."""
    model = run.model
    assert model
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in run._list.callbacks):
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
    """Averages that the optimizer keeps of the weights, which may take their place in the model between epochs."""

    def __init__(self, model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> None:
        swaps = (each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights))
        self.swaps = [each for each in swaps if each.swap_on_epoch]
        """The callbacks that swap the two for the time between epochs."""
        self._optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._kept: list[np.ndarray] = []

    def keep(self) -> None:
        """The epoch's last step is made, and nothing is swapped: callbacks do it now, Keras before `on_train_end`."""
        self._kept = [np.array(each) for each in self._variables]

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Within it the model has the weights that training would continue from, for the last checkpoint."""
        self._swap()
        if self._kept:
            for each in self.swaps * 2:  # it rounds
                each._swap_variables()
        yield
        self._swap()

    @property
    def _variables(self) -> list[keras.Variable]:
        """The weights, and their averages; none where there are no averages."""
        optimizer = self._optimizer
        if not optimizer.use_ema:
            return []
        return [*optimizer._trainable_variables, *optimizer._model_variables_moving_average]

    def _swap(self) -> None:
        for index, weight in enumerate(self._variables if self._kept else ()):
            self._kept[index], now = np.array(weight), self._kept[index]
            weight.assign(now)
