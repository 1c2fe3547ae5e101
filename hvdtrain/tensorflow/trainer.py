"""TensorFlow's part of a run on one rank: model, updates, data and validation."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.core.totals import Totals
from hvdtrain.datasets import Dataset
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import RecipeError
from hvdtrain.ranks import agreement
from hvdtrain.run.run import Run
from hvdtrain.tensorflow import devices, hidden, models, networks, optimizers, variables
from hvdtrain.tensorflow.data import Loader, evened
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.replication import OneReplica, Replication, graph, replication_of
from hvdtrain.tensorflow.events import EventWriter
from hvdtrain.tensorflow.meter import GradientNorm, Meter, Seen, Trace
from hvdtrain.tensorflow.objective import Objective, examples_in
from hvdtrain.tensorflow.sgd import Scaler, clipped, zeros_like
from hvdtrain.tensorflow.state import Ema, State


class Trainer:
    """Trains a run's model; see `hvdtrain.run.loop.Trainer`."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.recipe, self.plan, self.dataset, self.engine = run.recipe, run.plan, run.dataset, engine
        self.replication = replication_of(engine)
        self.step = Step(run.plan, run.dataset, engine, self.replication)
        self.model, self.weights = self.step.model, self.step.weights
        self.state = State(self.model, self.step.optimizer, self.step.scaler, self.step.ema)
        self.loader = Loader(self.recipe, run.dataset, engine.device)
        # An asynchronous engine's updates have no order that could say what each draws.
        self._seed_states = [] if ENGINES[run.engine].asynchronous else networks.seed_states(self.model)
        self._trace = Trace(run.folder.path if run.folder and self.recipe.profile else None)
        first = engine.rank * self.replication.replicas
        self._local_batches = range(first, first + self.replication.replicas)
        """Which of the plan's local batches this rank's replicas read."""
        self._host = run.topology.host
        self._first_batch: Any = None

    def events(self, folder: Path, first_step: int) -> EventWriter:
        return EventWriter(folder, first_step)

    def batches(self, progress: Progress) -> Iterator[list[Any]]:
        """This rank's micro-batches of each update that is left of the epoch, each one's replicas side by side."""
        hidden.refresh(self.model)  # rank 0's weights, or a checkpoint's, are in place, and no graph is made yet
        of_each = [train_requests(self.plan, progress, index) for index in self._local_batches]
        requests = [request for step in zip(*(own for _, own in of_each), strict=True) for request in step]
        batches = self.loader.batches(self.dataset.train, requests)
        for _ in of_each[0][0]:
            yield [next(batches) for _ in range(self.recipe.accumulation_steps * len(self._local_batches))]

    def update(self, batch: list[Any], lr: float, step: int) -> None:
        if self._first_batch is None:
            outputs = functools.partial(self.step.objective.outputs, self.model)
            hidden.check_outputs(outputs, batch[0], self.model, self.engine, self._host)
            self._first_batch = () if step else batch[0]
        self._seed(step)
        self.step(batch, lr)
        if self.recipe.buffers != "local":
            models.share_weights(self.model, self.engine, self.recipe.buffers)
        self._trace.step()

    def _seed(self, step: int) -> None:
        """Begins the random numbers of Dropout and its like anew, as a function of the step, not of what ran before: a
        resumed run draws what the undisturbed one drew."""
        for index, state in enumerate(self._seed_states):
            for replica, copy in zip(self._local_batches, self.replication.copies(state), strict=True):
                copy.assign([hash((self.recipe.seed, step, replica, index)) % 2**32, 0])

    def validate(self) -> Totals:
        """Totals of this rank's part: every replica reads its own, no example counts twice."""
        requests, counts = evened([valid_requests(self.plan, index) for index in self._local_batches])
        batches = self.loader.batches(self.dataset.valid, requests)
        with self.step.ema.swapped_in() if self.step.ema else contextlib.nullcontext():
            for weights in counts:
                with tf.device(self.engine.device):
                    self.step.evaluate([(next(batches), tf.constant(weight, tf.float64)) for weight in weights])
        return self.totals()

    def totals(self) -> Totals:
        return self.step.meter.take()

    def gradient_norm(self) -> float | None:
        return self.step.gradient_norm()

    def after_first_step(self) -> list[str]:
        own = {path: self.replication.copies(each)[0] for path, each in models.own_weights(self.model).items()}
        names = models.unlike_weights(own, (self.engine.rank, self.engine.size), self.engine.sum)
        batch, self._first_batch = self._first_batch, ()
        notes = self.step.objective.notes(self.model, batch) if self.engine.rank == 0 else []
        return notes + agreement.of_unlike_buffers(names, "weights", "rank 0's", "give buffers: average or rank_0")

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine, self.replication.copies)

    def fingerprints(self) -> list[int]:
        with_statistics = self.recipe.batch_norm != "local"
        watched = [weight.value for weight in self.model.weights] if with_statistics else self.weights
        copies = zip(*map(self.replication.copies, watched), strict=True)
        return [int(models.fingerprint(list(copy)).numpy()) for copy in copies]

    def settings(self) -> dict[str, Any]:
        return devices.settings()

    def profiled(self, note: Callable[[str], None]) -> AbstractContextManager[object]:
        return contextlib.closing(self._trace)


class Step:
    """A rank's model, optimizer and loss scale, and the way from micro-batches to new weights."""

    def __init__(self, plan: Plan, dataset: Dataset, engine: Engine, replication: Replication) -> None:
        self.recipe, self._weight = (recipe := plan.recipe), plan.weight
        self._engine, self._replication = engine, replication
        self._real = tf.float64 if recipe.precision == "float64" else tf.float32
        with replication.scope():
            self.model = models.build(recipe, dataset, engine, replication.keep)
            self.weights = [weight.value for weight in self.model.trainable_weights]
            self.optimizer = optimizers.make(recipe, self.model.trainable_weights)
            self.ema = Ema(self.weights, recipe.ema_decay, replication) if recipe.ema_decay else None
            self.scaler = Scaler(enabled=recipe.precision == "float16")
            self.meter = Meter(replication.copies)
            self.objective = Objective(recipe, dataset, plan.global_batch)
            self._norm = GradientNorm() if type(replication) is OneReplica else None
            counted = tf.zeros((), self._real)
            self._gathered = zeros_like([*self.weights, counted]) if recipe.accumulation_steps > 1 else []
        self._counts = False
        self._unreached: list[int] = []
        """The weights that the loss does not depend on, once a step was traced: no update moves them."""
        self._gradients = graph(self._differentiate, jit_compile=True) if recipe.xla else self._differentiate
        self._update, self._add = replication.replicate(self._make_update), replication.replicate(self._add_gradients)
        self._update_with_gathered = replication.replicate(self._apply_gathered)
        self._evaluate = replication.replicate(self._measure, relaxed=True)

    def __call__(self, micro_batches: Sequence[Any], lr: float) -> None:
        """The update of this rank's micro-batches, each one's replicas side by side."""
        self.objective.check_labels(self.model, micro_batches, training=True)
        batch = [(each,) for each in micro_batches]
        replicas = self._replication.replicas
        with tf.device(self._engine.device):
            rate = tf.constant(lr, self._real)
            if self.recipe.accumulation_steps == 1:
                self._update(batch, rate)
                return
            for first in range(0, len(batch), replicas):
                self._add(batch[first : first + replicas])
            self._update_with_gathered([()] * replicas, rate)

    def evaluate(self, batches: Sequence[tuple[Any, tf.Tensor]]) -> None:
        """Measures a validation batch (batch, weight) of each replica."""
        self.objective.check_labels(self.model, (batch for batch, _ in batches), training=False)
        self._evaluate(batches)

    def _make_update(self, batch: Any, lr: tf.Tensor) -> None:
        seen, gradients = self._gradients(batch)
        self.meter.add(seen)
        self._apply(self._averaged(gradients), lr)

    def _add_gradients(self, batch: Any) -> None:
        seen, gradients = self._gradients(batch)
        self.meter.add(seen)
        self._replication.keep(self._collect, gradients)

    def _collect(self, gradients: list[tf.Tensor]) -> None:
        self._counts = len(gradients) > len(self.weights)
        for total, gradient in zip(self._gathered, gradients, strict=False):
            variables.add(total, gradient)

    def _apply_gathered(self, lr: tf.Tensor) -> None:
        gathered = self._gathered if self._counts else self._gathered[:-1]
        self._apply(self._averaged([tf.convert_to_tensor(total) for total in gathered]), lr)
        self._replication.keep(self._forget, [])

    def _forget(self, _: list[tf.Tensor]) -> None:
        for total in self._gathered:
            variables.put(total, tf.zeros_like(total))

    def _differentiate(self, batch: Any) -> tuple[Seen, list[tf.Tensor]]:
        """What is to be reported of one micro-batch, and its part of the scaled gradients; where the loss is a sum,
        their last is what they are to be divided by."""
        with tf.GradientTape() as tape:
            loss, seen = self.objective.measure(self.model, batch, training=True)
            counted = seen.metrics.get("loss")
            weight, steps = self._weight(1 if counted else examples_in(batch)), self.recipe.accumulation_steps
            scaled = loss * weight * tf.cast(self.scaler.scale, self._real) / steps
        gradients = self._dense(tape.gradient(scaled, self.weights))
        return seen, [*gradients, tf.cast(counted[1] * weight / steps, self._real)] if counted else gradients

    def _averaged(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Of a sum's gradients those whose mean over the replicas is that of all that they count together."""
        if len(gradients) == len(self.weights):
            return gradients
        if self.recipe.reduction == "adasum":
            raise RecipeError("a loss that gives (sum, count) cannot be divided after adasum; drop adasum.")
        counted, replicas = tf.unstack(self._engine.sum_tensor(tf.stack([gradients[-1], tf.ones((), self._real)])))
        factor = tf.math.divide_no_nan(replicas, counted)
        return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients[:-1]]

    def _dense(self, gradients: list[Any]) -> list[tf.Tensor]:
        """The gradients, 0 of weights that the loss does not depend on. Raises RecipeError where it depends on none."""
        if all(gradient is None for gradient in gradients):
            key = "step" if self.recipe.step else "loss"
            raise RecipeError(
                f"{key} {getattr(self.recipe, key)} gives a loss without gradient; compute it of the model's outputs "
                "with TensorFlow's or Keras's functions, without numpy() or stop_gradient()."
            )
        self._unreached = [index for index, gradient in enumerate(gradients) if gradient is None]
        pairs = zip(gradients, self.weights, strict=True)
        return [tf.zeros_like(weight) if one is None else tf.convert_to_tensor(one) for one, weight in pairs]

    def _apply(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        """The update of all replicas' gradients."""
        if self.recipe.reduction == "adasum":
            self._apply_adasum(gradients, lr)
        else:
            self._replication.update(lambda combined: self._apply_combined(combined, lr), gradients)

    def _apply_combined(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        self._apply_finite(gradients, lr)
        if self.ema:
            self.ema.update()

    def _apply_finite(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
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
        for weight, old, change in zip(self.weights, before, self._engine.combine(changes), strict=True):
            weight.assign(old + change)
        self._constrain()
        if self.ema:
            self.ema.update()

    def gradient_norm(self) -> float | None:
        """Of the first update after the call before; None of replicas that tf.distribute keeps."""
        return self._norm.take() if self._norm else None

    def _descend(self, gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        if self._norm:
            self._norm.measure(gradients)
        clip = self.recipe.clip_norm
        before = [(self.weights[index], tf.identity(self.weights[index])) for index in self._unreached]
        self.optimizer.descend(clipped(gradients, clip) if clip else gradients, lr)
        if not isinstance(self.optimizer, optimizers.KerasOptimizer):  # which does it by itself
            self._constrain()
        for weight, old in before:  # which weight decay has moved
            variables.put(weight, old)

    def _constrain(self) -> None:
        """What Keras does behind an update."""
        for weight in self.model.trainable_weights:
            if weight.constraint is not None:
                variables.put(weight.value, weight.constraint(tf.convert_to_tensor(weight.value)))

    def _measure(self, batch: Any, weight: tf.Tensor) -> None:
        self.meter.add(self.objective.measure(self.model, batch, training=False)[1], weight)
