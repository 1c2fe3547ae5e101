"""The one training loop: when to train, validate, log, compare replicas, checkpoint and stop, in every framework."""

import contextlib
import time
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress, RunLength, due
from hvdtrain.core.recipe.noise import estimated
from hvdtrain.core.recipe.stopping import best_of, chosen, rule_of
from hvdtrain.core.sharing import Sum
from hvdtrain.ranks import agreement
from hvdtrain.ranks.slow import Clocks
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.progress_line import steps_made
from hvdtrain.record.reporter import Reporter
from hvdtrain.record.schema import as_checkpoint_error
from hvdtrain.record.writer import Checkpointing
from hvdtrain.run.run import BaseRun, Run
from hvdtrain.run.trainer import Replica, Trainer

LENGTH_FIELDS = ("global_batch", "train_examples", "epochs", "max_steps")
"""The fields of a RunLength that decide how many steps an epoch has."""
NORM_BYTES_PER_SECOND = 2e7
"""Bytes of gradients that rank 0 reads each second, at most, to compute their norm. A slow processor reads a hundred
times as many, so the norm slows no run measurably."""


Communicator = tuple[tuple[int, int], str, Sum]
"""What a comparison of the ranks needs: this rank's number and how many ranks there are, its host, and the sum over the
ranks."""


R_co = TypeVar("R_co", bound=Replica, covariant=True)


class Comparison:
    """What must be equal on all ranks, compared while the run trains. Every rank calls the same methods; each method
    raises AgreementError or ReplicaError on every rank where one differs."""

    def __init__(self, run: BaseRun, replica: Replica) -> None:
        self._run, self._replica, engine = run, replica, replica.engine
        self.among: Communicator = (engine.rank, engine.size), run.topology.host, engine.sum
        self._is_alone = engine.size == 1
        self._compared = (0, 0)
        """The step and the epoch of the last comparison of replicas."""
        self._made, self._known = 0, set[Hashable]()
        """The number of updates of this launch, and what learned in any of them."""

    def before_broadcast(self) -> None:
        """Compares code, versions, settings, the model's tensors and the optimizer's numbers."""
        if self._is_alone:
            return
        replica, engine = self._replica, self._replica.engine
        tensors = replica.state.tensors.items()
        layout = {name: f"{getattr(each.dtype, 'name', each.dtype)} {list(each.shape)}" for name, each in tensors}
        process = agreement.of_process(replica.settings(), engine.rank, engine.sum)
        values = process | agreement.named("model", layout) | agreement.named("training", replica.state.numbers())
        agreement.check_values(values | self._run.agreed(), *self.among)

    def length(self, length: RunLength) -> None:
        """Compares how many steps there are, where each rank's own data say so."""
        fields = {name: getattr(length, name) for name in LENGTH_FIELDS}
        agreement.check_values(self._run.agreed() | agreement.named("training", fields), *self.among)

    def after_update(self, progress: Progress, *, is_last: bool) -> bool:
        """Whether the replicas are to be compared now: after updates 1, 2, 4, 8 of a launch and so on, then by the
        recipe's key; after the first update of each set of parameters that learn; and after the last update."""
        learns = self._replica.learns()
        self._made += 1
        is_due = is_last or learns not in self._known or self._is_due(self._made, progress.step)
        self._known.add(learns)
        if not is_due:
            self._watch_next(progress.step)
        return is_due

    def _watch_next(self, step: int) -> None:
        self._replica.watch(self._is_due(self._made + 1, step + 1))

    def _is_due(self, made: int, step: int) -> bool:
        every = self._run.recipe.check_replicas_every_steps
        return (made < every and not made & (made - 1)) or due(step, every)

    def replicas(self, progress: Progress, *, anew: bool = True) -> None:
        """Compares fingerprints of the weights of all devices and ranks, and the numbers that the next update depends
        on. Unless `anew`, only where that was not done after the same step."""
        if not anew and self._compared == (progress.step, progress.epoch):
            return
        marks, step = self._replica.fingerprints(), progress.step
        agreement.check_devices(marks, step, self._run.devices)
        values = {} if self._is_alone else self._agreed(progress)
        agreement.check_replicas(marks[0], values, step, *self.among, self._replica.cause)
        self._compared = step, progress.epoch
        self._watch_next(step)
        self._run.journal.replica_checks += 1

    def _agreed(self, progress: Progress) -> dict[str, Any]:
        position = {"step": progress.step, "epoch": progress.epoch, "example of the epoch": progress.sample}
        return agreement.named("training", {**position, **self._replica.state.numbers()}) | self._run.agreed()


class StepLog:
    """The lines of the log about steps: loss and metrics over all ranks since the line before."""

    def __init__(self, run: BaseRun, replica: Replica, reporter: Reporter | None) -> None:
        self._run, self._replica, self._reporter = run, replica, reporter
        self.begin()

    def begin(self) -> None:
        """Measures the time of a step from now on."""
        self._since = time.monotonic()

    def tell(self, event: str, text: str) -> None:
        """Writes a line into rank 0's log, and into the run's record."""
        if self._reporter:
            self._reporter.note(text)
        self._run.journal.event(event, text)

    def write(self, progress: Progress, lr: float) -> None:
        """Adds the sums to those of the epoch, and reports them on rank 0. Every rank calls it. Raises DivergedError,
        and OutputError where the run folder is no longer this run's."""
        run, journal = self._run, self._run.journal
        if run.folder:
            run.folder.check_held()
        journal.step = progress.step
        totals = self._replica.totals().over_ranks(self._replica.engine.sum)
        progress.train += totals
        run.check_finite(totals, progress.step)
        sums = self._replica.gradient_noise()
        noise = {} if sums is None else estimated(self._replica.engine.sum(sums))
        if self._reporter and totals.count:
            seconds = time.monotonic() - self._since
            apart = run.identity.checkpoint_bytes / NORM_BYTES_PER_SECOND
            norm = self._replica.gradient_norm() if journal.is_due("gradient_norm", apart) else None
            self._reporter.steps(progress.step, progress.epoch + 1, totals, lr, seconds, norm, noise)
        self.begin()
        journal.mark(progress.step)


class Hooks(Generic[R_co]):
    """What a run does after every update and every epoch, in a recipe's own loop, in Lightning's or Keras's, or in a
    loop of the user's."""

    def __init__(self, run: BaseRun, trainer: R_co, length: RunLength) -> None:
        self.run, self.length = run, length
        self.trainer, self.engine, self.journal = trainer, trainer.engine, run.journal
        self.comparison = Comparison(run, trainer)
        self.comparison.before_broadcast()
        self.resumed_from = restored(trainer, run.resume.checkpoint)
        """The metadata of the checkpoint that the run continues from; empty where there is none."""
        self.progress = Progress.from_metadata(self.resumed_from) if self.resumed_from else Progress()
        self.journal.step, self._made_steps = self.progress.step, False
        self.journal.is_finished, self.journal.made = False, lambda: steps_made(self.progress, self.length)
        if run.folder:
            self.journal.record("world", hosts=run.world.hosts())
        self.checkpointing = Checkpointing(run.folder, run.recipe, self.progress.step, self.engine.sum)
        self.reporter = run.reporter(self.progress.step, self.engine.device, (*self.engine.notes, *trainer.begun))
        self.step_log = StepLog(run, trainer, self.reporter)
        for line in trainer.begun:  # which the log has already
            self.journal.event("init", line)
        self.clocks = Clocks(self.engine, run.world.slow)
        run.samples.begin(self.resumed_from, self.note, self.comparison.among)
        if changed := _changed(run.code, self.resumed_from.get("code", {})):
            self.note(f"the code of {changed} has changed since the checkpoint of step {self.progress.step}")

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left."""
        return self.progress.is_over(self.length)

    def begin_epoch(self) -> None:
        """What is due before the first step of an epoch, or before the next one of a resumed epoch."""
        self.checkpointing.pause()
        self.journal.epochs(self.length.epochs)
        self.journal.enter("training" if self._made_steps else "first_step")
        self.run.world.expect_steps(True)
        self.run.samples.began = self.run.samples.passed = self.progress.step
        self.clocks.begin_step()
        if self.reporter:
            self.reporter.begin_epoch(self.progress, self.length)
        self.step_log.begin()

    def after_update(self, lr: float) -> None:
        """What is due after an update, once `progress` has counted it: log, comparison, checkpoint. Raises StoppedError
        where the ranks agree to stop, DivergedError and ReplicaError."""
        progress, length, intervals = self.progress, self.length, self.run.recipe
        self.checkpointing.stepped()
        if not self._made_steps:
            self._made_steps = True
            self.journal.enter("training")
        if self.reporter:
            self.reporter.stepped(progress, length)
        done = progress.is_done(length)
        last = done or progress.is_epoch_done(length)
        self.clocks.end_step()
        stopping = self.run.world.stops_after_step()
        checkpoint_due = stopping or self.checkpointing.due(progress.step)
        compares = self.comparison.after_update(progress, is_last=done)
        logs = last or checkpoint_due or due(progress.sample // length.global_batch, intervals.log_every_steps)
        if logs or compares:
            compares &= self.check_step()
        if logs:
            self.step_log.write(progress, lr)
        if compares:
            self.comparison.replicas(progress)
        if progress.step == 1:
            for line in self.trainer.after_first_step():
                self.step_log.tell("note", line)
        if last or checkpoint_due:  # validation and checkpoints take the same model from every rank
            self.trainer.average_statistics()
        if checkpoint_due and not last:
            self.write_checkpoint(None)
        if last:
            self.run.world.expect_steps(False)
            self.journal.enter("validation")
        if stopping and not last:  # else at the epoch's end: programs do not resume between its last step and that
            self._stop()
        self.clocks.begin_step()

    def check_step(self) -> bool:
        """Called after an update before the ranks communicate: whether all are there to be compared. A user's loop
        raises LoopError on all ranks where they are in different steps."""
        return True

    def end_epoch(self, after: Progress, valid_score: float | None) -> None:
        """Ends an epoch that was reported: compares the samples, commits a checkpoint where one is due, and continues
        at `after`. Raises StoppedError where a signal has requested that, unless the run has come to its end."""
        self.run.samples.compare(keeps=False)
        self.progress = after
        if after.ended:
            self.note(after.ending)
        done, every = self.is_over, self.run.recipe.checkpoint_every_epochs
        stopping = not done and self.run.world.stops_here(self.engine.rank, self.engine.size, self.engine.sum)
        is_best = after.patience.epoch == after.epoch  # by the metric that decides on an early stop
        if done or stopping or is_best or self.checkpointing.due(after.step) or due(after.epoch, every):
            self.write_checkpoint(valid_score)
        if stopping:
            self._stop()

    def _stop(self) -> None:
        with self.journal.within("checkpoint"):
            self.checkpointing.wait()
        raise self.run.world.stopped(self.progress.step)

    @takes_long
    def write_checkpoint(self, valid_score: float | None) -> None:
        """Copies the whole state, on rank 0, and begins to write it while training continues. It waits for the
        checkpoint before, and raises OutputError where that one could not be written."""
        state, step = self.trainer.state, self.progress.step
        self.comparison.replicas(self.progress, anew=False)  # a checkpoint holds what all ranks have
        self.journal.mark(step, always=True)
        self.journal.event("checkpoint", f"checkpoint of step {step}", step=step)
        with self.journal.within("checkpoint"):
            news = self.checkpointing.write(step, state, lambda: self.run.metadata(self.progress, state, valid_score))
        if news:
            self.note(news)

    def note(self, text: str) -> None:
        """Writes a line into rank 0's log."""
        if self.reporter:
            self.reporter.note(text)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """A context around all epochs, which reports the run's end and closes its files."""
        with self.reporter or contextlib.nullcontext():
            try:
                yield
                self.finish()
            except BaseException:
                self.checkpointing.leave()
                raise

    def finish(self) -> None:
        """Waits for the last checkpoint, and reports the run's end. Raises OutputError."""
        self.journal.enter("checkpoint")
        self.checkpointing.wait()
        self.journal.enter("end")
        self.journal.is_finished = self.is_over
        early = self.progress.ended if self.progress.epoch < self.length.epochs else ""
        self.run.finish(self.reporter, self.progress.step, is_over=self.is_over, early=early)

    def close(self, error: type[BaseException] | None) -> None:
        """Closes the log and the checkpoints of a user's loop, which `error` has ended; None: it ended well. May be
        called twice."""
        self.checkpointing.leave()
        if self.reporter:
            self.reporter.__exit__(error)
            self.reporter = None


def _changed(now: dict[str, str], before: dict[str, str]) -> str:
    return ", ".join(name for name, digest in now.items() if before.get(name, digest) != digest)


def restored(replica: Replica, found: Checkpoint | None) -> dict[str, Any]:
    """Gives every rank rank 0's training state: that of the checkpoint, which only rank 0 has, or else its new weights.
    Returns the checkpoint's metadata, or {} without a checkpoint."""
    state, engine = replica.state, replica.engine
    meta: dict[str, Any] = engine.broadcast({}, {**found.meta, "layout": found.layout} if found else {})
    if meta:  # before the tensors are broadcast: all ranks then have the same ones
        with as_checkpoint_error(meta["step"]):
            state.start(meta["layout"], meta["optimizer"])
    if found:
        state.load(found)
    engine.broadcast(state.tensors, None)
    state.share(engine)
    if meta and meta["scaler"]:  # empty where the checkpoint's run had another precision
        state.scaler.load_state_dict(meta["scaler"])
    return meta


class Loop(Hooks[R_co]):
    """A recipe's run on one rank. Lightning has a loop of its own and calls the hooks alone."""

    run: Run

    def __init__(self, run: Run, trainer: R_co) -> None:
        self.recipe, self.plan = run.recipe, run.plan
        super().__init__(run, trainer, run.plan)
        self.progress.judge_again(rule_of(run.recipe))
        if self.progress.patience.is_over and not run.evaluates:
            more = f"a stop_patience above {self.progress.patience.waited} trains on, another --output begins anew"
            self.note(f"this run was {self.progress.ending}; nothing is trained: {more}")

    def train(self: "Loop[Trainer]") -> None:
        """Trains the run to its end. Every rank calls it. Raises HvdtrainError."""
        with self.reported(), self.trainer.profiled(self.note):
            while not self.is_over:
                for _ in self.epoch():
                    pass
                self.finish_epoch(self.trainer.validate())

    def epoch(self: "Loop[Trainer]") -> Iterator[None]:
        """Trains what is left of the epoch; yields after every update."""
        self.begin_epoch()
        self.trainer.parts = self.progress.parts
        for batch in self.run.samples.read(self.clocks.read(self.trainer.batches(self.progress))):
            lr = self.progress.lr(self.plan)
            self.trainer.update(batch, lr, self.progress.step)
            self.progress.advance(self.plan)
            self._note_parts()
            self.after_update(lr)
            yield
            if self.progress.is_done(self.plan):
                break

    def _note_parts(self: "Loop[Trainer]") -> None:
        """Says where a micro-batch did not fit into memory."""
        if (parts := self.trainer.parts) != self.progress.parts:
            self.progress.parts = parts
            same = "the same samples make the same update"
            if self.plan.has_batch_norm and self.recipe.batch_norm == "local":
                same = "the same samples make an update, in which BatchNorm sees fewer of them together"
            whole = f"a micro-batch of {self.plan.micro_batch} examples did not fit into the memory of a rank"
            self.step_log.tell(
                "note", f"step {self.progress.step}: {whole}; each is divided into {parts} from now on: {same}"
            )

    def finish_epoch(self, own: Totals) -> None:
        """What is due after validation; `own`: the sums over this rank's examples."""
        progress, valid = self.progress, own.over_ranks(self.engine.sum)
        if self.reporter:
            self.reporter.epoch(progress.step, progress.epoch + 1, progress.train, valid)
        after, values = progress, valid.of_validation
        if progress.is_epoch_done(self.plan):
            after = progress.next_epoch(self.plan, values)
            if self.recipe.stop_patience:
                decision = {"early stop": after.ended, "best value": after.patience.best}
                agreement.check_values(agreement.named("training", decision), *self.comparison.among)
        self.end_epoch(after, chosen(values, best_of(self.recipe), "best").score(values))

    def fitted_line(self) -> tuple[float, float] | None:
        """Slope and intercept of the linear model; None of another."""
        if self.recipe.model != "linear":
            return None
        arrays = self.trainer.state.arrays().items()
        slope, intercept = (array.item() for name, array in arrays if name.startswith("model."))
        return slope, intercept

    def finish(self) -> None:
        if self.reporter and (line := self.fitted_line()):
            self.note(f"fitted line: y = {line[0]:.4f} x + {line[1]:.4f}")
        super().finish()
