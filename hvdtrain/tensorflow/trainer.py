"""TensorFlow's part of a run on one rank: its engine, model, updates, data and validation."""

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain import processors
from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Lazy, Progress, train_requests, valid_requests
from hvdtrain.core.recipe import augmentation
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import OutOfMemoryError, RecipeError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.run import engine as engines
from hvdtrain.run import trainer
from hvdtrain.run.run import Run
from hvdtrain.tensorflow import models, networks
from hvdtrain.tensorflow.data import Loader, evened
from hvdtrain.tensorflow.engines import Engine, process_settings, take_threads
from hvdtrain.tensorflow.flops import kept_by_layer
from hvdtrain.tensorflow.objective import notes_of
from hvdtrain.tensorflow.state import State, variables
from hvdtrain.tensorflow.step import Step


class Trainer(trainer.Trainer):
    """Trains a run's model."""

    engine: Engine

    def __init__(self, run: Run, engine: Engine) -> None:
        self.recipe, self.plan, self.dataset, self.engine = run.recipe, run.plan, run.dataset, engine
        is_new = run.resume.checkpoint is None and engine.rank == 0  # which broadcasts its weights
        self.step = step = Step(run.plan, run.dataset, engine, is_new and bool(self.recipe.init_from))
        self.begun, self._first = step.begun, Totals(0.0, 0.0)
        self.model, self.weights = step.model, [weight.value for weight in step.parts.all]
        self.state = State(self.model, variables(self.model, step.optimizer, step.ema, step.parts.all), step.scaler)
        self.loader = Loader(self.recipe, engine.device, augmentation.augmenter(self.recipe, self.dataset))
        self.loader.samples = run.samples
        # An asynchronous engine's updates have no order on which random numbers could depend.
        self._seed_states = [] if ENGINES[run.engine].asynchronous else networks.seed_states(self.model)
        self._trace = Trace(run.folder.path if run.folder and self.recipe.profile else None)
        first = engine.rank * engine.replicas
        self._local_batches = range(first, first + engine.replicas)
        """The numbers of the plan's local batches that this rank's replicas read."""
        self._host = run.topology.host
        self._first_batch: Any = None

    def batches(self, progress: Progress) -> Iterator[list[Any]]:
        """Yields this rank's micro-batches for each update that is left of the epoch: the first one of each replica,
        then the second ones."""
        self.step.begin_epoch(progress.epoch)
        models.refresh(self.model)  # after rank 0's or a checkpoint's weights are loaded, before a graph is traced
        (starts, first), *others = (train_requests(self.plan, progress, index) for index in self._local_batches)
        own = first, *(requests for _, requests in others)
        requests = Lazy(lambda k: own[k % len(own)][k // len(own)], range(len(own) * len(first)))
        enter = getattr(self.dataset.train, "enter", lambda epoch, **ended: None)
        enter(progress.epoch)
        batches = self.loader.batches(self.dataset.train, requests)
        for start in starts:
            batch = [next(batches) for _ in range(self.recipe.accumulation_steps * len(self._local_batches))]
            if start == starts[-1]:
                enter(progress.epoch, ended=True)
            yield batch

    def update(self, batch: list[Any], lr: float, step: int) -> None:
        if self._first_batch is None:
            outputs = functools.partial(self.step.objective.outputs, self.model)
            ranks = self.engine.rank, self.engine.size
            models.check_outputs(outputs, batch[0], self.model, ranks, self._host, self.engine.sum)
            self.step.objective.try_metrics(self.model, batch[0])
            self._first_batch = () if step else batch[0]
        models.seed(self._seed_states, self.recipe.seed, step, self.engine)
        try:
            self.step(batch, lr)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise self._out_of_memory(error, step) from None
        if self.recipe.init_from and step == 0:
            self._first = self.step.meter.take(keeps=True)
        if self.recipe.buffers != "local":
            models.share_weights(self.model, self.engine, self.recipe.buffers)
        self._trace.step()

    def _out_of_memory(self, error: Exception, step: int) -> OutOfMemoryError:
        device, shape = self.engine.device, re.search(r"tensor with shape\s*(\S+)", str(error))
        asked = f"a tensor of shape {shape[1]} could not be had" if shape else "memory could not be had"
        is_gpu = "GPU" in device
        peak = tf.config.experimental.get_memory_info(device)["peak"] if is_gpu else processors.peak_memory()
        keys = ["precision: bfloat16"] * (self.recipe.precision == "float32") or ["a smaller batch_size"]
        where = trainer.Place(self.plan, self.dataset, self.engine.rank, step)
        return trainer.out_of_memory(where, asked, peak, kept_by_layer, keys)

    @takes_long
    def validate(self) -> Totals:
        """The totals of this rank's part of the validation set, of which no example counts twice."""
        models.refresh(self.model)
        requests, counts = evened([valid_requests(self.plan, index) for index in self._local_batches])
        batches = self.loader.batches(self.dataset.valid, requests)
        with self.step.ema.swapped_in() if self.step.ema else contextlib.nullcontext():
            for weights in counts:
                with tf.device(self.engine.device):
                    self.step.evaluate([(next(batches), tf.constant(weight, tf.float64)) for weight in weights])
        return self.step.objective.metrics.added_to(self.totals())

    def totals(self) -> Totals:
        return self.step.meter.take()

    def gradient_norm(self) -> float | None:
        return self.step.norm.take() if self.step.norm else None

    def gradient_noise(self) -> NDArray[np.float64] | None:
        return self.step.noise.take() if self.step.noise else None

    def after_first_step(self) -> list[str]:
        own = {path: self.engine.copies(each)[0] for path, each in models.own_weights(self.model).items()}
        mark, among = models.fingerprint.python_function, (self.engine.rank, self.engine.size, self.engine.sum)
        unlike = agreement.of_unlike_buffers(own, mark, among, "weights", "rank 0's", "give buffers: average or rank_0")
        batch, self._first_batch = self._first_batch, ()
        notes = notes_of(self.step.objective, self.model, batch) if self.engine.rank == 0 else []
        notes += ["xla has no effect: functions run eagerly"] * (self.recipe.xla and tf.config.functions_run_eagerly())
        first = trainer.first_loss(self.recipe, Totals(self._first.loss, self._first.count), self.engine.sum)
        return [*first, *self.step.unmet, *notes, *unlike]

    def learns(self) -> Hashable:
        return len(self.step.weights)

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine)

    def fingerprints(self) -> list[int]:
        with_statistics = self.recipe.batch_norm != "local"
        watched = [weight.value for weight in self.model.weights] if with_statistics else self.weights
        copies = zip(*map(self.engine.copies, watched), strict=True)
        return [int(models.fingerprint(list(copy)).numpy()) for copy in copies]

    settings = staticmethod(process_settings)

    def profiled(self, note: Callable[[str], None]) -> AbstractContextManager[object]:
        return contextlib.closing(self._trace)


class Trace:
    """Runs TensorFlow's profiler for ten steps after the first ones; `folder` None profiles nothing."""

    FIRST, STEPS = 5, 10

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._steps, self._running = folder, 0, False

    def step(self) -> None:
        self._steps += 1
        if self._folder and self._steps == self.FIRST:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True
        elif self._steps == self.FIRST + self.STEPS:
            self.close()

    def close(self) -> None:
        if self._running:
            tf.profiler.experimental.stop()
        self._running = False


def engine_of(run: Run) -> AbstractContextManager[Engine]:
    """See `hvdtrain.run.engine.of_run`."""
    return engines.of_run(run, open_engine)


def open_engine(run: Run) -> Engine:
    """The run's engine, which has joined the other ranks and is bound to its device. Raises HvdtrainError."""
    take_threads(run.topology)
    try:
        engine: Engine = registry.load(run.engine, "tensorflow").open(engines.setup_of(run))
    except RuntimeError as error:
        if "after being initialized" not in str(error):
            raise
        raise RecipeError(
            f"TensorFlow computed before it was given its devices ({error}); make no tensors in the data set's or the "
            "model's module and callable, take NumPy there."
        ) from error
    return engine
