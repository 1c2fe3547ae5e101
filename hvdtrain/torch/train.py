"""The PyTorch training loop: a run from the first broadcast to the last checkpoint."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hvdtrain import checkpoint, guard
from hvdtrain.metrics import Events, Totals, check_finite
from hvdtrain.progress import Progress, due, train_requests, valid_requests
from hvdtrain.run import Run
from hvdtrain.torch import models, state
from hvdtrain.torch.compiling import record_cuda_graph
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.opening import engine_of, is_one_graph
from hvdtrain.torch.profiling import Profiler
from hvdtrain.torch.step import Pair, Step, autocast, mean_loss, unwatched


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    with engine_of(run) as engine:
        Training(run, engine).run_to_end()


class Training:
    """The parts of one run on one rank, and the loop over them."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run, self.recipe, self.plan, self.engine = run, run.recipe, run.plan, engine
        torch.backends.cudnn.benchmark = self.recipe.cudnn_benchmark
        self.model = models.build(self.recipe, run.dataset.classes, engine)
        self.profiler = Profiler(run.folder.path, engine.device) if run.folder and self.recipe.profile else None
        self.step = Step(
            self.recipe,
            engine,
            self.model,
            self.plan.peak_lr,
            self.plan.weight,
            self.profiler.phase if self.profiler else unwatched,
            in_one=run.engine == "local",
            record=record_cuda_graph if is_one_graph(self.recipe, run.engine, engine.device) else None,
        )
        self.network, self.optimizer, self.scaler = self.step.network, self.step.optimizer, self.step.scaler
        self.state = state.tensors(self.model, self.optimizer)
        self.progress = self._begin()
        self.loader = Loader(self.recipe, run.dataset, engine.device)
        self._meter = _Meter(engine.device)
        device = ",".join(run.devices) or str(engine.device)
        self.reporter = run.reporter(self.progress.step, device, _events, engine.notes)

    def run_to_end(self) -> None:
        """Epoch after epoch: train, validate, tell, checkpoint."""
        with contextlib.closing(self.reporter) if self.reporter else contextlib.nullcontext():
            self._run_to_end()

    def _run_to_end(self) -> None:
        with self.profiler or contextlib.nullcontext():
            while self.progress.epoch < self.recipe.epochs and not self.progress.is_stopped(self.plan):
                self.train_epoch()
                self._finish_epoch()
        if self.profiler:
            self._tell(self.profiler.lacking())
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
        models.training_mode(self.model, recipe)
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
            if stopping and not last:
                raise self.run.world.stopped(progress.step)
            yield
            if done:
                break

    def batches(self) -> Iterator[tuple[int, list[Pair]]]:
        """For each update of the epoch: where its batch begins in the order, and this rank's parts of it."""
        starts, requests = train_requests(self.plan, self.progress, self.engine.rank)
        pairs = self.loader.batches(self.run.dataset.train, requests)
        phase = self.profiler.phase if self.profiler else unwatched
        for start in starts:
            with phase("data"):
                parts = [next(pairs) for _ in range(self.recipe.accumulation_steps)]
            yield start, parts

    def update(self, parts: list[Pair], lr: float) -> None:
        """One update from the parts of this rank's share."""
        # A function of the step, not of what ran before: a resumed run draws what the undisturbed one drew.
        seed = hash((self.recipe.seed, self.progress.step, self.engine.rank))
        # torch.manual_seed formats a stack trace for GPUs that are not in use: 0.4 ms.
        (torch.manual_seed if self.engine.device.type == "cuda" else torch.default_generator.manual_seed)(seed)
        for seen in self.step(parts, lr):
            self._meter.add(*seen)
        if self.profiler:
            self._tell(self.profiler.step())

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            assert self.reporter  # whoever has a profiler is the chief
            self.reporter.note(line)

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
        self.model.eval()
        with torch.inference_mode(), autocast(self.recipe, self.engine.device):
            for x, y in self.loader.batches(self.run.dataset.valid, valid_requests(self.plan, self.engine.rank)):
                out = self.network(x)
                self._meter.add(mean_loss(out, y), out, y)
        return self._meter.take().over_ranks(self.engine.sum)

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
        mark = models.fingerprint(self.model, shared_statistics)
        guard.check_replicas(mark, self.progress.step, self.run.topology, self.engine.sum)


class _Meter:
    """Sums of loss, right answers and examples, kept on the device so that a step waits for nothing."""

    def __init__(self, where: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=where)

    def add(self, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
        """A batch: mean loss, outputs [n, classes] and labels [n] (or both [n, 1]: no right or wrong)."""
        count = len(y)
        self._sums[0] += loss.detach() * count
        if y.dim() == 1:
            self._sums[1] += (out.detach().argmax(1) == y).sum()
        self._sums[2] += count

    def take(self) -> Totals:
        """The sums so far; they start again at 0."""
        totals = Totals(*self._sums.tolist())
        self._sums.zero_()
        return totals


def _events(folder: Path, first_step: int) -> Events:
    from tensorboardX import SummaryWriter  # a second of imports, and the chief's alone

    return SummaryWriter(str(folder), purge_step=first_step, write_to_disk=True)
