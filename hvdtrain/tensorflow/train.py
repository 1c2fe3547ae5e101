"""The TensorFlow training loop: a run from the first broadcast to the last checkpoint."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import tensorflow as tf

from hvdtrain import checkpoint, guard
from hvdtrain.metrics import Totals, check_finite
from hvdtrain.progress import Progress, due, train_requests, valid_requests
from hvdtrain.run import Run
from hvdtrain.tensorflow import models, state, variables
from hvdtrain.tensorflow.data import Loader, Pair, evened
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.one_replica import graph
from hvdtrain.tensorflow.events import EventWriter
from hvdtrain.tensorflow.meter import Meter, Trace
from hvdtrain.tensorflow.opening import engine_of
from hvdtrain.tensorflow.sgd import SGD, Scaler, clipped, zeros_like


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    with engine_of(run) as engine:
        if engine.serves:
            run.world.serve_rank_0()
        else:
            Training(run, engine).run_to_end()


class Training:
    """The parts of one run on one rank, and the loop over them."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run, self.recipe, self.plan, self.engine = run, run.recipe, run.plan, engine
        self._real = tf.float64 if self.recipe.precision == "float64" else tf.float32
        with engine.scope():
            self.model = models.build(self.recipe, run.dataset.classes, engine)
            self.weights = [weight.value for weight in self.model.trainable_weights]
            self.optimizer = SGD(self.recipe, self.weights)
            self.scaler = Scaler(enabled=self.recipe.precision == "float16")
            self._meter = Meter()
            self._part_gradients = zeros_like(self.weights) if self._in_parts else []
        self.state = state.variables(self.model, self.optimizer)
        self._gradients = graph(self._differentiate, jit_compile=True) if self.recipe.xla else self._differentiate
        self._step, self._add_part = engine.replicate(self._make_step), engine.replicate(self._differentiate_part)
        self._step_with_parts = engine.replicate(self._apply_parts)
        self._evaluate = engine.replicate(self._measure, relaxed=True)
        self.progress = self._begin()
        self.loader = Loader(self.recipe, run.dataset, engine.device)
        device = ",".join(run.devices) or engine.device.strip("/").lower()
        self.reporter = run.reporter(self.progress.step, device, EventWriter, engine.notes)
        self._trace = Trace(run.folder.path if run.folder and self.recipe.profile else None)

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
        found, facts = self.run.resume.checkpoint, None
        if found:
            state.load(self.state, found)
            facts = dict(found.meta)
        facts = self.engine.broadcast(self.state, facts)
        if facts is None:
            return Progress()
        if facts["scaler"]:  # empty where the checkpoint's run had another precision
            self.scaler.load_state_dict(facts["scaler"])
        return Progress.of(facts)

    def train_epoch(self) -> None:
        """The rest of the current epoch, from where a checkpoint may have left it."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """Trains the rest of the current epoch, and gives way after every step."""
        progress, plan, recipe = self.progress, self.plan, self.recipe
        if self.reporter:
            self.reporter.begin_epoch()
        began = time.monotonic()
        for start, parts in self.batches():
            lr = progress.lr(plan, start)
            self.update(parts, lr)
            progress.step += 1
            progress.sample = start + plan.global_batch
            done = progress.is_done(plan)
            last = done or progress.is_epoch_done(plan)
            stopping = self.run.world.stops_at(progress.step)
            checkpoint_due = stopping or due(progress.step, recipe.checkpoint_every_steps)
            iteration = progress.sample // plan.global_batch
            if last or checkpoint_due or due(iteration, recipe.log_every_steps):
                totals = self._meter.take(self.engine).over_ranks(self.engine.sum)
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
            if stopping and not last:
                raise self.run.world.stopped(progress.step)
            yield
            if done:
                break

    def batches(self) -> Iterator[tuple[int, list[Pair]]]:
        """For each update of the epoch: where its batch begins in the order, and this rank's parts of it, each part's
        replicas side by side."""
        of_each = [train_requests(self.plan, self.progress, share) for share in self._shares]
        requests = [request for part in zip(*(own for _, own in of_each), strict=True) for request in part]
        pairs = self.loader.batches(self.run.dataset.train, requests)
        for start in of_each[0][0]:
            yield start, [next(pairs) for _ in range(self.recipe.accumulation_steps * self.engine.replicas)]

    @property
    def _shares(self) -> range:
        """Which of the plan's shares this rank's replicas read."""
        first = self.engine.rank * self.engine.replicas
        return range(first, first + self.engine.replicas)

    def update(self, parts: list[Pair], lr: float) -> None:
        """One update from the parts of this rank's shares."""
        replicas = self.engine.replicas
        with tf.device(self.engine.device):
            rate = tf.constant(lr, self._real)
            if self._in_parts:
                for first in range(0, len(parts), replicas):
                    self._add_part(parts[first : first + replicas])
                self._step_with_parts([()] * replicas, rate)
            else:
                self._step(parts, rate)
        self._trace.step()

    def _make_step(self, x: tf.Tensor, y: tf.Tensor, lr: tf.Tensor) -> None:
        loss, correct, gradients = self._gradients(x, y)
        self._meter.add(loss, correct, y.shape[0])
        self._apply(gradients, lr)

    def _differentiate_part(self, x: tf.Tensor, y: tf.Tensor) -> None:
        loss, correct, gradients = self._gradients(x, y)
        self._meter.add(loss, correct, y.shape[0])
        self.engine.keep(self._collect, gradients)

    def _collect(self, gradients: list[tf.Tensor]) -> None:
        for total, gradient in zip(self._part_gradients, gradients, strict=True):
            variables.add(total, gradient)

    def _apply_parts(self, lr: tf.Tensor) -> None:
        self._apply([tf.convert_to_tensor(total) for total in self._part_gradients], lr)
        self.engine.keep(self._forget, [])

    def _forget(self, _: list[tf.Tensor]) -> None:
        for total in self._part_gradients:
            variables.put(total, tf.zeros_like(total))

    def _differentiate(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Mean loss and number of right answers of one part, and its share of the scaled gradients."""
        with tf.GradientTape() as tape:
            out = tf.cast(self.model(self._inputs(x), training=True), self._real)
            loss = self._loss(out, y, self.recipe.label_smoothing)
            weighted = loss * self.plan.weight(y.shape[0])
            scaled = weighted * tf.cast(self.scaler.scale, self._real) / self.recipe.accumulation_steps
        return loss, self._correct(out, y), tape.gradient(scaled, self.weights)

    def _apply(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """The update of all replicas' gradients."""
        if self.recipe.reduction == "adasum":
            self._apply_adasum(gradients, lr)
        else:
            self.engine.update(lambda combined: self._apply_combined(combined, lr), gradients)

    def _apply_combined(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
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

    def _loss(self, out: tf.Tensor, y: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Mean squared error, or cross-entropy, whose targets are smoothed as PyTorch's and Keras's are."""
        if self.run.dataset.classes is None:
            return tf.reduce_mean(tf.square(out - tf.cast(y, self._real)))
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, out)
        if smoothing:
            loss = (1 - smoothing) * loss - smoothing * tf.reduce_mean(tf.nn.log_softmax(out), 1)
        return tf.reduce_mean(loss)

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
        """Totals over the whole validation set: every replica reads its part, no example counts twice."""
        requests, counts = evened([valid_requests(self.plan, share) for share in self._shares])
        pairs = self.loader.batches(self.run.dataset.valid, requests)
        for weights in counts:
            with tf.device(self.engine.device):
                self._evaluate([(*next(pairs), tf.constant(weight, tf.float64)) for weight in weights])
        return self._meter.take(self.engine).over_ranks(self.engine.sum)

    def _measure(self, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor) -> None:
        out = tf.cast(self.model(self._inputs(x), training=False), self._real)
        self._meter.add(self._loss(out, y), self._correct(out, y), tf.shape(y)[0], weight)

    def _checkpoint(self, valid_score: float | None) -> None:
        """Commits the whole state. BatchNorm's statistics are averaged first, as every rank then holds them."""
        if valid_score is None:
            models.average_statistics(self.model, self.engine)
        folder = self.run.folder
        if not folder:
            return
        facts = self.run.facts(self.progress, self.scaler.state_dict(), valid_score)
        checkpoint.commit(folder.checkpoints, state.snapshot(self.state, facts), self.recipe.keep_checkpoints)
        folder.write_status("running", step=self.progress.step)

    def _check_replicas(self) -> None:
        shared_statistics = self.recipe.batch_norm != "local"
        watched = [weight.value for weight in self.model.weights] if shared_statistics else self.weights
        copies = zip(*map(self.engine.copies, watched), strict=True)
        marks = [int(models.fingerprint(list(copy)).numpy()) for copy in copies]
        guard.check_devices(marks, self.progress.step, self.run.devices)
        rank, size = self.engine.rank, self.engine.size
        world = dataclasses.replace(self.run.topology, rank=rank, size=size)
        guard.check_replicas(marks[0], self.progress.step, world, self.engine.sum)
