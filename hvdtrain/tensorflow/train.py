"""The TensorFlow training loop: a run from the first broadcast to the last checkpoint."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from hvdtrain import checkpoint, guard
from hvdtrain.devices import gpu_index, threads
from hvdtrain.metrics import Totals, check_finite
from hvdtrain.progress import Progress, due, train_requests, valid_requests
from hvdtrain.run import Run
from hvdtrain.tensorflow import models, state
from hvdtrain.tensorflow.data import Loader, Pair
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.local import LocalEngine
from hvdtrain.tensorflow.events import EventWriter
from hvdtrain.tensorflow.sgd import SGD, Scaler, clipped, zeros_like

# AutoGraph would only cost time: what depends on a tensor says so with tf.cond.
graph = functools.partial(tf.function, autograph=False)

# Horovod's failures have no type of their own: its words, or the names that we gave its operations.
OF_HOROVOD = re.compile(r"Horovod|hvdtrain\.(gradient|sum|facts)")


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    engine = open_engine(run)
    try:
        guard.check_world(run.topology, engine.rank, engine.size)
        run.line.exchange(engine.sum)
        Training(run, engine).run_to_end()
    except tf.errors.OpError as error:
        if not OF_HOROVOD.search(str(error)):
            raise
        raise run.line.aborted() from None
    finally:
        engine.close()


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    _take_threads(run)
    if run.engine == "local":
        return LocalEngine(_device(run, gpu_operations=True))
    from hvdtrain.tensorflow.engines.horovod import HorovodEngine

    timeline = run.start.folder.path / "timeline.json" if run.start and run.recipe.horovod_timeline else None
    engine = HorovodEngine(run.recipe, timeline)
    engine.device = _device(run, engine.gpu_operations)
    return engine


def _take_threads(run: Run) -> None:
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, run.topology, os.environ)
    said = os.environ.get("OMP_NUM_THREADS", "")  # TensorFlow's own threads do not heed it
    if count or said.isdecimal():
        with contextlib.suppress(RuntimeError):  # in a notebook TensorFlow may have begun: it keeps its threads then
            tf.config.threading.set_intra_op_parallelism_threads(count or int(said))


def _device(run: Run, gpu_operations: bool) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_index(run.recipe.device, len(gpus), run.topology, gpu_operations)
    if index is None:
        tf.config.set_visible_devices([], "GPU")
        return "/CPU:0"
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"


class Training:
    """The parts of one run on one rank, and the loop over them."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run, self.recipe, self.plan, self.engine = run, run.recipe, run.plan, engine
        self._real = tf.float64 if self.recipe.precision == "float64" else tf.float32
        self.model = models.build(self.recipe, run.dataset.classes, engine)
        self.weights = [weight.value for weight in self.model.trainable_weights]
        self.optimizer = SGD(self.recipe, self.weights)
        self.scaler = Scaler(enabled=self.recipe.precision == "float16")
        self.state = state.variables(self.model, self.optimizer)
        self._meter = _Meter()
        self._part_gradients = zeros_like(self.weights) if self._in_parts else []
        compiled = self.recipe.xla
        self._gradients = graph(self._differentiate, jit_compile=True) if compiled else self._differentiate
        self.progress = self._begin()
        self.loader = Loader(self.recipe, run.dataset, engine.device)
        self.reporter = run.reporter(self.progress.step, engine.device.strip("/").lower(), EventWriter)
        self._trace = _Trace(run.start.folder.path if run.start and self.recipe.profile else None)

    @property
    def _in_parts(self) -> bool:
        return self.recipe.accumulation_steps > 1

    def run_to_end(self) -> None:
        """Epoch after epoch: train, validate, tell, checkpoint."""
        with contextlib.closing(self.reporter) if self.reporter else contextlib.nullcontext():
            with contextlib.closing(self._trace):
                while self.progress.epoch < self.recipe.epochs and not self.progress.is_stopped(self.plan):
                    self.train_epoch()
                    self._finish_epoch()
            self.run.finish(self.reporter, self.progress.step, models.fitted_line(self.model))

    def _begin(self) -> Progress:
        """Rank 0's weights, or its checkpoint's, on every rank."""
        start = self.run.start
        facts = None
        if start and start.checkpoint:
            state.load(self.state, start.checkpoint)
            facts = dict(start.checkpoint.meta)
        facts = self.engine.broadcast(self.state, facts)
        if facts is None:
            return Progress()
        if facts["scaler"]:  # empty where the checkpoint's run had another precision
            self.scaler.load_state_dict(facts["scaler"])
        return Progress.of(facts)

    def train_epoch(self) -> None:
        """The rest of the current epoch, from where a checkpoint may have left it."""
        progress, plan, recipe = self.progress, self.plan, self.recipe
        if self.reporter:
            self.reporter.begin_epoch()
        began = time.monotonic()
        for start, parts in self._epoch_batches():
            lr = progress.lr(plan, start)
            self._update(parts, lr)
            progress.step += 1
            progress.sample = start + plan.global_batch
            done = progress.is_done(plan)
            last = done or progress.is_epoch_done(plan)
            stopping = self.run.line.stops_at(progress.step)
            checkpoint_due = stopping or due(progress.step, recipe.checkpoint_every_steps)
            iteration = progress.sample // plan.global_batch
            if last or checkpoint_due or due(iteration, recipe.log_every_steps):
                totals = self._meter.take().over_ranks(self.engine.sum)
                progress.train += totals
                check_finite(totals, progress.step, plan.peak_lr)
                if self.reporter:
                    seconds = time.monotonic() - began
                    self.reporter.steps(progress.step, progress.epoch + 1, iteration, totals, lr, seconds)
                began = time.monotonic()
            if progress.step == 1 or done or due(progress.step, recipe.guard_every_steps):
                self._check_replicas()
            if checkpoint_due and not last:
                self._checkpoint(None)
            if done:
                break
            if stopping and not last:
                raise self.run.line.stopped(progress.step)

    def _epoch_batches(self) -> Iterator[tuple[int, list[Pair]]]:
        """For each update of the epoch: where its batch begins in the order, and this rank's parts of it."""
        starts, requests = train_requests(self.plan, self.progress, self.engine.rank)
        pairs = self.loader.batches(self.run.dataset.train, requests)
        for start in starts:
            yield start, [next(pairs) for _ in range(self.recipe.accumulation_steps)]

    def _update(self, parts: list[Pair], lr: float) -> None:
        """One update from the parts of this rank's share."""
        with tf.device(self.engine.device):
            rate = tf.constant(lr, self._real)
            if self._in_parts:
                for x, y in parts:
                    self._add_part(x, y)
                self._step_with_parts(rate)
            else:
                self._step(*parts[0], rate)
        self._trace.step()

    @graph
    def _step(self, x: tf.Tensor, y: tf.Tensor, lr: tf.Tensor) -> None:
        loss, correct, gradients = self._gradients(x, y)
        self._meter.add(loss, correct, y.shape[0])
        self._apply(gradients, lr)

    @graph
    def _add_part(self, x: tf.Tensor, y: tf.Tensor) -> None:
        loss, correct, gradients = self._gradients(x, y)
        self._meter.add(loss, correct, y.shape[0])
        for total, gradient in zip(self._part_gradients, gradients, strict=True):
            total.assign_add(gradient)

    @graph
    def _step_with_parts(self, lr: tf.Tensor) -> None:
        self._apply([total.value() for total in self._part_gradients], lr)
        for total in self._part_gradients:
            total.assign(tf.zeros_like(total))

    def _differentiate(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Mean loss and number of right answers of one part, and its share of the scaled gradients."""
        with tf.GradientTape() as tape:
            out = tf.cast(self.model(self._inputs(x), training=True), self._real)
            loss = self._loss(out, y)
            weighted = loss * self.plan.weight(y.shape[0])
            scaled = weighted * tf.cast(self.scaler.scale, self._real) / self.recipe.accumulation_steps
        return loss, self._correct(out, y), tape.gradient(scaled, self.weights)

    def _apply(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """The update of all ranks' gradients; float16 leaves out a step whose gradients overflowed on any rank."""
        if self.recipe.reduction == "adasum":
            self._apply_adasum(gradients, lr)
            return
        gradients = self.engine.combine(gradients)
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
        for weight, old, change in zip(self.weights, before, self.engine.combine(changes), strict=True):
            weight.assign(old + change)

    def _descend(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        clip = self.recipe.clip_norm
        self.optimizer.descend(clipped(gradients, clip) if clip else gradients, lr)

    def _inputs(self, x: tf.Tensor) -> tf.Tensor:
        """Numbers as they are, pictures normalised."""
        if self.run.dataset.classes is None:
            return tf.cast(x, self._real)
        mean, std = (tf.constant(of, self._real) for of in (self.run.dataset.mean, self.run.dataset.std))
        return (tf.cast(x, self._real) / 255 - mean) / std

    def _loss(self, out: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if self.run.dataset.classes is None:
            return tf.reduce_mean(tf.square(out - tf.cast(y, self._real)))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, out))

    def _correct(self, out: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """How many answers are right; 0 of a regression."""
        if self.run.dataset.classes is None:
            return tf.zeros((), tf.int64)
        return tf.math.count_nonzero(tf.argmax(out, 1) == y)

    def _finish_epoch(self) -> None:
        models.average_statistics(self.model, self.engine)
        valid = self._validate()
        progress, plan = self.progress, self.plan
        if self.reporter:
            self.reporter.epoch(progress.step, progress.epoch + 1, progress.train, valid)
        done = progress.is_done(plan)
        if progress.is_epoch_done(plan):
            self.progress = progress.next_epoch(plan, valid.mean_loss)
        inside = due(progress.step, self.recipe.checkpoint_every_steps)
        if done or inside or due(self.progress.epoch, self.recipe.checkpoint_every_epochs):
            self._checkpoint(-valid.mean_loss if self.run.dataset.classes is None else valid.accuracy)

    def _validate(self) -> Totals:
        """Totals over the whole validation set: every rank reads its part, no example twice or padded."""
        for x, y in self.loader.batches(self.run.dataset.valid, valid_requests(self.plan, self.engine.rank)):
            with tf.device(self.engine.device):
                self._evaluate(x, y)
        return self._meter.take().over_ranks(self.engine.sum)

    @graph(reduce_retracing=True)
    def _evaluate(self, x: tf.Tensor, y: tf.Tensor) -> None:
        out = tf.cast(self.model(self._inputs(x), training=False), self._real)
        self._meter.add(self._loss(out, y), self._correct(out, y), tf.shape(y)[0])

    def _checkpoint(self, valid_score: float | None) -> None:
        """Commits the whole state. BatchNorm's statistics are averaged first, as every rank then holds them."""
        if valid_score is None:
            models.average_statistics(self.model, self.engine)
        start = self.run.start
        if not start:
            return
        facts = self.run.facts(self.progress, self.scaler.state_dict(), valid_score)
        checkpoint.commit(start.folder.checkpoints, state.snapshot(self.state, facts), self.recipe.keep_checkpoints)
        start.folder.write_status("running", step=self.progress.step)

    def _check_replicas(self) -> None:
        shared_statistics = self.recipe.batch_norm != "local"
        watched = [weight.value for weight in self.model.weights] if shared_statistics else self.weights
        mark = int(models.fingerprint(watched).numpy())
        guard.check_replicas(mark, self.progress.step, self.run.topology, self.engine.sum)


class _Meter:
    """Sums of loss, right answers and examples, kept on the device so that a step waits for nothing."""

    def __init__(self) -> None:
        self._sums = tf.Variable(tf.zeros(3, tf.float64), trainable=False)

    def add(self, loss: tf.Tensor, correct: tf.Tensor, count: tf.Tensor | int) -> None:
        """A batch: mean loss, right answers, examples. Within a graph."""
        count = tf.cast(count, tf.float64)
        self._sums.assign_add(tf.stack([tf.cast(loss, tf.float64) * count, tf.cast(correct, tf.float64), count]))

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        totals = Totals(*self._sums.numpy().tolist())
        self._sums.assign(tf.zeros_like(self._sums))
        return totals


class _Trace:
    """TensorFlow's profiler over ten steps, once the first five have warmed up; `folder` None traces nothing."""

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
