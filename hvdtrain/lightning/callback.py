"""What a run does around Lightning's steps: tell, check the promises, write checkpoints, stop in order."""

import signal
import time
from typing import Any

import torch
from lightning.pytorch import Callback

from hvdtrain import checkpoint, guard
from hvdtrain.lightning.module import RecipeModule
from hvdtrain.metrics import Reporter, Totals, check_finite
from hvdtrain.progress import Progress, due
from hvdtrain.run import Run
from hvdtrain.torch import models, state
from hvdtrain.torch.engines import Engine


class RunCallback(Callback):
    """The run's log, metrics and checkpoints: those of hvdtrain.torch, word for word and number for number."""

    # Its collectives stand in hooks that every rank comes by: a rank without validation examples skips Lightning's
    # hooks around validation.

    def __init__(self, run: Run, engine: Engine, module: RecipeModule, scaler: torch.amp.GradScaler | None) -> None:
        self.run, self.recipe, self.plan, self.engine = run, run.recipe, run.plan, engine
        self.module, self.scaler = module, scaler
        self.state = state.tensors(module.model, module.optimizer)
        self.module.progress = self._begin()
        self.reporter: Reporter | None = None
        self._told = self.progress.step
        self._began = time.monotonic()
        self._terminate = signal.getsignal(signal.SIGTERM)

    @property
    def progress(self) -> Progress:
        return self.module.progress

    def _begin(self) -> Progress:
        """Rank 0's weights, or its checkpoint's, on every rank."""
        found, facts = self.run.resume.checkpoint, None
        if found:
            state.load(self.state, found)
            facts = dict(found.meta)
        facts = self.engine.broadcast(self.state, facts)
        if facts is None:
            return Progress()
        if self.scaler and facts["scaler"]:  # empty where the checkpoint's run had another precision
            self.scaler.load_state_dict(facts["scaler"])
        return Progress.of(facts)

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own handler would broadcast in the middle of a step; the world has noticed the signal already.
        if callable(self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            signal.siginterrupt(signal.SIGTERM, False)

    def on_train_epoch_start(self, *_: Any) -> None:
        models.training_mode(self.module.model, self.recipe)
        if self.reporter:
            self.reporter.begin_epoch()
        self._began = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        """After a part of a share; only the last part of it makes an update."""
        progress, recipe = self.progress, self.recipe
        if progress.step == self._told:
            return
        self._told = progress.step
        done = progress.is_done(self.plan)
        last = done or progress.is_epoch_done(self.plan)
        stopping = self.run.world.stops_at(progress.step)
        checkpoint_due = stopping or due(progress.step, recipe.checkpoint_every_steps)
        if last or checkpoint_due or due(progress.sample // self.plan.global_batch, recipe.log_every_steps):
            self._tell()
        if progress.step == 1 or done or due(progress.step, recipe.guard_every_steps):
            self._check_replicas()
        if last or checkpoint_due:
            models.average_statistics(self.module.model, self.engine)
        if checkpoint_due and not last:
            self._checkpoint(None)
        if stopping and not last:
            raise self.run.world.stopped(progress.step)

    def on_train_epoch_end(self, *_: Any) -> None:
        """After validation."""
        progress, plan = self.progress, self.plan
        valid = self._over_ranks(self.module.validated.take())
        if self.reporter:
            self.reporter.epoch(progress.step, progress.epoch + 1, progress.train, valid)
        done = progress.is_done(plan)
        if progress.is_epoch_done(plan):
            self.module.progress = progress.next_epoch(plan, valid.mean_loss)
        inside = due(progress.step, self.recipe.checkpoint_every_steps)
        if done or inside or due(self.progress.epoch, self.recipe.checkpoint_every_epochs):
            self._checkpoint(-valid.mean_loss if self.module.classes is None else valid.accuracy)

    def _tell(self) -> None:
        progress = self.progress
        totals = self._over_ranks(self.module.seen.take())
        progress.train += totals
        check_finite(totals, progress.step, self.plan.peak_lr)
        if self.reporter:
            iteration, seconds = progress.sample // self.plan.global_batch, time.monotonic() - self._began
            self.reporter.steps(progress.step, progress.epoch + 1, iteration, totals, self.module.lr, seconds)
        self._began = time.monotonic()

    def _over_ranks(self, totals: Totals) -> Totals:
        return totals.over_ranks(self.engine.sum)

    def _check_replicas(self) -> None:
        mark = models.fingerprint(self.module.model, self.recipe.batch_norm != "local")
        guard.check_replicas(mark, self.progress.step, self.run.topology, self.engine.sum)

    def _checkpoint(self, valid_score: float | None) -> None:
        """Commits the whole state, which hvdtrain.torch reads too."""
        folder = self.run.folder
        if not folder:
            return
        facts = self.run.facts(self.progress, self.scaler.state_dict() if self.scaler else {}, valid_score)
        checkpoint.commit(folder.checkpoints, state.snapshot(self.state, facts), self.recipe.keep_checkpoints)
        folder.write_status("running", step=self.progress.step)
