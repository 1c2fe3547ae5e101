"""The PyTorch training loop: a run from the first broadcast to the last checkpoint."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from hvdtrain import checkpoint, guard
from hvdtrain.devices import gpu_index, threads
from hvdtrain.engines import ENGINES
from hvdtrain.metrics import Events, Totals, check_finite
from hvdtrain.progress import Progress, due, train_requests, valid_requests
from hvdtrain.run import Run
from hvdtrain.torch import models, state
from hvdtrain.torch.data import Loader, Pair, autocast
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.local import LocalEngine


def train(run: Run) -> None:
    """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
    with engine_of(run) as engine:
        Training(run, engine).run_to_end()


@contextlib.contextmanager
def engine_of(run: Run) -> Iterator[Engine]:
    """The run's engine, of the world that the launcher promised, until the end of the block. Raises HvdtrainError, also
    where the block finds another rank gone."""
    engine = open_engine(run)
    try:
        guard.check_world(run.topology, engine.rank, engine.size, ENGINES[run.engine].title)
        run.line.exchange(engine.sum)
        yield engine
    except RuntimeError as error:
        if not engine.is_lost(error):
            raise
        raise run.line.aborted() from None
    finally:
        engine.close()


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, run.topology, os.environ)
    if count:
        torch.set_num_threads(count)
    match run.engine:
        case "local":
            return LocalEngine(_device(run, gpu_operations=True))
        case "ddp":
            from hvdtrain.torch.engines.ddp import DdpEngine

            return DdpEngine(run.recipe, run.topology, _device(run, gpu_operations=True))
        case "dataparallel":
            from hvdtrain.torch.engines.dataparallel import DataParallelEngine

            return DataParallelEngine(run.devices)
        case "modelparallel":
            from hvdtrain.torch.engines.modelparallel import ModelParallelEngine

            return ModelParallelEngine(run.devices)
    return _horovod(run)


def _horovod(run: Run) -> Engine:
    from hvdtrain.torch.engines.horovod import HorovodEngine

    timeline = run.start.folder.path / "timeline.json" if run.start and run.recipe.horovod_timeline else None
    engine = HorovodEngine(run.recipe, timeline)
    engine.device = _device(run, engine.gpu_operations)
    return engine


def _device(run: Run, gpu_operations: bool) -> torch.device:
    index = gpu_index(run.recipe.device, torch.cuda.device_count(), run.topology, gpu_operations)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class Training:
    """The parts of one run on one rank, and the loop over them."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run, self.recipe, self.plan, self.engine = run, run.recipe, run.plan, engine
        torch.backends.cudnn.benchmark = self.recipe.cudnn_benchmark
        self.model = models.build(self.recipe, run.dataset.classes, engine)
        plain = torch.optim.SGD(
            self.model.parameters(),
            lr=self.plan.peak_lr,
            momentum=self.recipe.momentum,
            nesterov=self.recipe.nesterov,
            weight_decay=self.recipe.weight_decay,
            fused=self.recipe.fused_optimizer or None,
        )
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=self.recipe.precision == "float16")
        self.network, self.optimizer = engine.wrap(self.model, plain)
        state.start_momentum(self.optimizer)
        self.state = state.tensors(self.model, self.optimizer)
        self.progress = self._begin()
        self.loader = Loader(self.recipe, run.dataset, engine.device)
        device = ",".join(run.devices) or str(engine.device)
        self.reporter = run.reporter(self.progress.step, device, _events, engine.notes)
        self.profiler = self._profiler()

    def run_to_end(self) -> None:
        """Epoch after epoch: train, validate, tell, checkpoint."""
        with contextlib.closing(self.reporter) if self.reporter else contextlib.nullcontext():
            self._run_to_end()

    def _run_to_end(self) -> None:
        with self.profiler or contextlib.nullcontext():
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
        models.training_mode(self.model, recipe)
        if self.reporter:
            self.reporter.begin_epoch()
        meter, began = _Meter(self.engine.device), time.monotonic()
        for start, parts in self._epoch_batches():
            lr = progress.lr(plan, start)
            self._update(parts, lr, meter)
            progress.step += 1
            progress.sample = start + plan.global_batch
            done = progress.is_done(plan)
            last = done or progress.is_epoch_done(plan)
            stopping = self.run.line.stops_at(progress.step)
            checkpoint_due = stopping or due(progress.step, recipe.checkpoint_every_steps)
            iteration = progress.sample // plan.global_batch
            if last or checkpoint_due or due(iteration, recipe.log_every_steps):
                totals = meter.take().over_ranks(self.engine.sum)
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

    def _update(self, parts: list[Pair], lr: float, meter: "_Meter") -> None:
        """One update from the parts of this rank's share."""
        # A function of the step, not of what ran before: a resumed run draws what the undisturbed one drew.
        torch.manual_seed(hash((self.recipe.seed, self.progress.step, self.engine.rank)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        outputs = self.engine.outputs(self.network, [x for x, _ in parts])
        for _, y in parts:
            with autocast(self.recipe, self.engine.device):
                out = next(outputs)
                loss = self._loss(out, y)
            self.scaler.scale(loss * self.plan.weight(len(y)) / len(parts)).backward()
            meter.add(loss, out, y)
        self.engine.finish(self.optimizer)
        if self.recipe.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        with self.engine.applying(self.optimizer):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.profiler:
            self.profiler.step()

    def _loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y) if self.run.dataset.classes is None else F.cross_entropy(out, y)

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
        meter = _Meter(self.engine.device)
        self.model.eval()
        with torch.inference_mode(), autocast(self.recipe, self.engine.device):
            for x, y in self.loader.batches(self.run.dataset.valid, valid_requests(self.plan, self.engine.rank)):
                out = self.network(x)
                meter.add(self._loss(out, y), out, y)
        return meter.take().over_ranks(self.engine.sum)

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
        mark = models.fingerprint(self.model, shared_statistics)
        guard.check_replicas(mark, self.progress.step, self.run.topology, self.engine.sum)

    def _profiler(self) -> torch.profiler.profile | None:
        """On the chief, where the recipe asks: a trace of ten steps into the run folder."""
        start = self.run.start
        if not (self.recipe.profile and start):
            return None
        trace = str(start.folder.path / "profile.json")
        return torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=3, warmup=2, active=10, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(trace),
        )


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
