"""What a recipe's run promises, for anybody's model under Keras's `fit`."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.progress import OwnSampling, Progress
from hvdtrain.core.settings import OwnEngineSettings, OwnIntervals
from hvdtrain.errors import HvdtrainError, KerasError
from hvdtrain.keras.callbacks import MADE, BroadcastCallback, Logs
from hvdtrain.keras.global_batches import GlobalBatches
from hvdtrain.keras.optimizer import clock_of
from hvdtrain.keras.program import Program, Replica
from hvdtrain.keras.ranks import hvd
from hvdtrain.run.loop import Hooks
from hvdtrain.run.own import Ranks, in_own_words, open_own, report_logged
from hvdtrain.tensorflow.engines.horovod import HorovodEngine


class FaultTolerance(BroadcastCallback):
    """Resumes `fit` where it was, also inside an epoch, and ends it in order; a BroadcastCallback too.

    All variables of model and optimizer and the position are in the folder's checkpoints; the same program continues
    from the newest. SIGTERM and a warning of the time limit end all ranks after the same step, with a checkpoint; the
    job is queued again after a warning. A rank that is lost or hangs ends the others, by name. Replicas are compared.
    Log, metrics.jsonl and TensorBoard events are those of a recipe's run.

    The epoch that continues is that of `data`, a GlobalBatches. Give the callback first. What other callbacks count
    begins anew, and so do the metrics of a resumed epoch. An HvdtrainError ends the process with one line and its exit
    code.

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
        self.folder, self.data = Path(folder), data
        self._best, self._insecure = (highest, lowest), insecure_rendezvous
        self._intervals = OwnIntervals(
            log_every_steps,
            guard_every_steps,
            checkpoint_every_epochs,
            checkpoint_every_steps,
            keep_checkpoints,
            mtbf_hours,
        )
        self._ranks: Ranks | None = None
        self._hooks: Hooks[Replica] | None = None
        self._excepthook = sys.excepthook
        self._settled = True
        self._resumed = contextlib.ExitStack()
        """Around an epoch of which a part is left."""
        self._trained: list[np.ndarray] = []
        self._lr: float | None = None
        """That of a resumed epoch, which callbacks may have changed at its beginning once more."""
        self._logs: Logs | None = None
        """What is logged of an epoch whose checkpoint is not written yet: callbacks that come later may add to it."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self._ranks = Ranks("tensorflow", "horovod", insecure=self._insecure)
        with self._reported():
            super().on_train_begin(logs)
            self._begin(self._ranks)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        with self._reported():
            self._end_epoch()
        self._started.begin_epoch()
        self._started.trainer.begin_epoch()
        if sample := self._started.progress.sample:
            self._resumed.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")  # Keras expects a whole epoch
            MADE[self.model] = sample // self._started.extent.global_batch
            self._resumed.callback(MADE.pop, self.model)
            self._lr = self._program.lr

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._started.progress.is_epoch_done(self._started.extent):
            # Of a resumed epoch, which Keras takes for a whole one. Were the step to find no data, TensorFlow would
            # count it as one of the optimizer's all the same.
            raise tf.errors.OutOfRangeError(None, None, "the epoch is read to its end")
        super().on_train_batch_begin(batch, logs)
        if self._lr is not None and isinstance(self.model.optimizer._learning_rate, keras.Variable):
            self.model.optimizer.learning_rate = self._lr
        self._lr = None
        self._started.trainer.seed(self._started.progress.step)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        hooks = self._started
        hooks.progress.advance(hooks.extent)
        self._settled = hooks.progress.is_done(hooks.extent) or hooks.progress.is_epoch_done(hooks.extent)
        with self._reported():
            hooks.after_update(self._program.lr)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After validation; callbacks that come later have the epoch's end before the report and the checkpoint."""
        super().on_epoch_end(epoch, logs)
        self._resumed.close()
        if not self._settled:
            self._settled = True
            self._started.settle(self._program.lr)
        self._logs, optimizer = logs or {}, self.model.optimizer
        # Its averages take the weights' place before `on_train_end`.
        if getattr(optimizer, "inner_optimizer", optimizer).use_ema:
            self._trained = [np.array(weight) for weight in self.model.trainable_weights]

    def on_train_end(self, logs: Logs | None = None) -> None:
        with self._reported(), self._as_trained():
            self._end_epoch()
            self._started.finish()
        self._release(None)
        self.model._initial_epoch = None
        if self._ranks:
            self._ranks.left()
            self._ranks = None

    @contextlib.contextmanager
    def _as_trained(self) -> Iterator[None]:
        """With the weights that training would continue from, as the last checkpoint is to have them."""
        self._swap()
        yield
        self._swap()

    def _swap(self) -> None:
        for index, weight in enumerate(self.model.trainable_weights if self._trained else ()):
            self._trained[index], own = np.array(weight), self._trained[index]
            weight.assign(own)

    def _note(self, line: str) -> None:
        self._started.note(line)

    @property
    def _started(self) -> Hooks[Replica]:
        assert self._hooks
        return self._hooks

    def _begin(self, ranks: Ranks) -> None:
        """The run, continued from its folder's last checkpoint."""
        if self.model.steps_per_execution > 1:
            raise KerasError(
                f"FaultTolerance looks after every step, got steps_per_execution={self.model.steps_per_execution}; "
                "compile the model with 1."
            )
        if not self.model.built:
            raise KerasError("FaultTolerance needs a model that is built: give it an Input layer, or call it once.")
        if not self.params["steps"]:
            raise KerasError("FaultTolerance needs steps_per_epoch where Keras does not know an epoch's length.")
        engine = HorovodEngine(OwnEngineSettings(), None)
        engine.clock = clock_of(self.model.optimizer)
        engine.device = "/GPU:0" if tf.config.get_visible_devices("GPU") else engine.device
        ranks.opened(engine, engine.rank, engine.size)
        self._program = program = Program(self.model, self.data)
        batch = self.data.batch_size if self.data else 1
        extent = OwnSampling(batch, batch * self.params["steps"], hvd.size(), epochs=self.params["epochs"])
        with in_own_words("FaultTolerance"):
            run = open_own(self.folder, program, "tensorflow", ranks.name, self._intervals, ranks.ending)
            replica = Replica(self.model, engine, self.data.seed if self.data else 0)
            self._hooks = hooks = Hooks(run, replica, extent)
            if news := program.restore(hooks.resumed_from.get("program", {}), hooks.progress):
                hooks.note(news)
            hooks.check_extent()
        self.model._initial_epoch = hooks.progress.epoch
        if self.data:
            self.data.position = lambda: hooks.progress
        else:
            hooks.note(
                "the order of the samples is the data's own: other for another number of ranks, and a resumed epoch "
                "reads from its beginning; GlobalBatches, given to FaultTolerance and fit, keeps both"
            )

    def _end_epoch(self) -> None:
        if self._logs is None:
            return
        hooks, progress = self._started, self._started.progress
        logged = {name: float(value) for name, value in self._logs.items() if not getattr(value, "ndim", 0)}
        score = report_logged(hooks, logged, self._best)
        hooks.end_epoch(Progress(progress.step, progress.epoch + 1), score)
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
        self._release(error)
        if self._ranks:
            ranks, self._ranks = self._ranks, None
            ranks.failed(error)

    def _release(self, error: BaseException | None) -> None:
        sys.excepthook = self._excepthook
        if self._hooks:
            self._hooks.close(type(error) if error else None)
