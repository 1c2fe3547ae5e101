"""The run of a program with its own loop: its epochs, batches, steps and reports."""

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import Request, UserSampling, each_once, train_requests
from hvdtrain.core.samples import Samples
from hvdtrain.core.sharing import gather, of_all
from hvdtrain.core.wording import counted
from hvdtrain.errors import AgreementError, LoopError
from hvdtrain.ranks import agreement
from hvdtrain.run.session import LONGEST_REASON, Best, UserHooks, UserRun, in_programs_words, take_data
from hvdtrain.torch.averaging import divisor, mean_count
from hvdtrain.torch.data import Loader, loader_of
from hvdtrain.torch.engines import Engine, seed
from hvdtrain.torch.examples import Collate, Examples
from hvdtrain.torch.objective import Seen, before_backward, no_means
from hvdtrain.torch.trainer import Replica
from hvdtrain.torch.user_loop.averager import LEAVE, SKIP, LoopAverager
from hvdtrain.torch.user_loop.program import ENDS, UNEQUAL, Batches, Order, Program, check_source, number, score
from hvdtrain.untrusted import printable

MOST_KEPT = 8
"""The largest number of data sets whose readers wait for the next epoch."""
REMEDY = "call run.loss(total, count)"


class LoopHooks(UserHooks[Replica]):
    """What is due after each step and epoch of a program's loop."""

    extent: UserSampling

    def __init__(self, run: UserRun, replica: Replica, program: Program, best: Best, compression: str) -> None:
        engine, model = replica.engine, replica.model
        super().__init__(run, replica, UserSampling(0, 0, engine.size, program.seed, draws=DRAWS), best)
        self.program = program
        self.averager: LoopAverager | None = None
        if engine.size > 1:
            self.averager = LoopAverager(model, engine, compression, program.optimizers, run.topology.host)
        replica.averager = self.averager
        self.count: torch.Tensor | None = None
        """The mean count by which the program has divided its loss in this update; None where it has not."""
        self._lines: list[str] = []
        """Lines of the log on the losses of the first step."""
        self._unwatch = before_backward(self._look) if self.averager else lambda: None
        self._is_left_early = False
        """Whether the program has left the batches of any epoch before their end."""
        self._is_scored = bool(self.resumed_from)
        """Whether an epoch, maybe before this start, has reported what decides on the best checkpoint."""

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left, or the run was stopped."""
        return self.program.stopped is not None or super().is_over

    def set_end(self, epochs: int, max_steps: int | None) -> None:
        """Sets after how many epochs and steps the run ends. Raises LoopError."""
        if epochs < 1 or (max_steps is not None and max_steps < 1):
            raise LoopError(f"epochs and max_steps must be at least 1, got {epochs} and {max_steps}.")
        self.extent = replace(self.extent, epochs=epochs, max_steps=max_steps)
        if self.resumed_from and self.is_over:
            stopped, progress = self.program.stopped, self.progress
            why = f"was stopped ({stopped})" if stopped else "has no epoch left"
            self.note(
                f"this folder's run {why}: it is finished at epoch {progress.epoch}, step {progress.step}, and nothing "
                "is trained; another training, as of the next fold, needs a folder of its own"
            )

    def _look(self, loss: Any) -> None:
        """Called before each backward of this start's first step, on several ranks."""
        if self.extent.global_batch and self.count is None:
            self._lines += no_means(loss, self.extent.global_batch // self.extent.size, "the loss", REMEDY)

    def user_step(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Counts an update with this loss and these metrics, and does what is due after it. A loss of None is that of
        a batch that was left out."""
        if self.averager:
            self.averager.updated()
        if not self._made_steps:
            self._unwatch()
            self.trainer.check_step()
            for line in dict.fromkeys(itertools.chain(*of_all(self._lines, self.engine))):
                self.note(line)
        self.trainer.share_buffers()
        if loss is not None:
            if self.count is not None:
                metrics["loss"] = number(loss) * self.count, self.count
            self.trainer.meter.add(seen(loss, metrics, self.extent.global_batch // self.extent.size))
        if self.averager and self.averager.unreached and not self._made_steps:
            never = ", ".join(self.averager.unreached)
            self.note(f"backward reached none of {never}: the optimizer leaves them as they are")
        self.step(self.program.lr)
        self.after_step()

    def settle(self) -> None:
        """Does what is due after an epoch's last step, where the program has left the epoch's batches early."""
        if self.is_settled:
            return
        if self.averager:
            self.averager.take_part(LEAVE)
        self.end_steps(self.program.lr)
        if not self._is_left_early:
            self._is_left_early = True
            progress, extent = self.progress, self.extent
            steps = f"{progress.updates(extent)} of {counted(extent.train_examples // extent.global_batch, 'step')}"
            self.note(
                f"epoch {progress.epoch} was left after {steps}; a run that resumes inside such an epoch continues "
                "with the next batch, and cannot know where you would leave: decide by run.global_step, or give "
                "run.epochs(..., max_steps=)"
            )

    def end_user_epoch(self, reported: dict[str, float], why: str | None, *, leaves: bool) -> None:
        """Ends an epoch in which the program has `reported` these numbers; `leaves`: by a break. Where any rank gives a
        reason `why` to stop, the epoch is the last one on all ranks. Every rank calls it. Raises AgreementError where
        the ranks differ, LoopError where the epoch had no step, or none has reported what the best checkpoint needs."""
        self.settle()
        progress, engine = self.progress, self.engine
        among = (engine.rank, engine.size), self.run.topology.host, engine.sum
        compared: dict[str, Any] = {f"what follows epoch {progress.epoch}": ENDS[leaves]}
        stops = gather(np.array([int(why is not None)]), *among[0], engine.sum)
        if (stops & ~1).any():  # no flag: another rank begins the epoch's batches, and compares what it reads
            raise AgreementError(agreement.differences(agreement.named("report", compared), *among))
        if stops.any():
            self.program.stopped = why or "another rank called run.stop()"
            self.extent = replace(self.extent, epochs=progress.epoch + 1)
            self.note(f"stopped after epoch {progress.epoch}: {self.program.stopped}")
        if not progress.sample:
            raise LoopError(f"epoch {progress.epoch} ended without a step; train on run.batches() and call run.step().")
        if progress.is_done(self.extent):
            compared.clear()
        compared[f"steps of epoch {progress.epoch}"] = progress.updates(self.extent)
        compared |= {name: value + 0.0 for name, value in reported.items()}  # without the sign of a zero
        agreement.check(agreement.named("report", compared), *among)
        trained = progress.train.count > 0  # else each batch was left out
        train = {"loss": progress.train.mean_loss, **progress.train.means} if trained else {}
        values = {f"train_{name}": mean for name, mean in train.items()} | reported
        self.report(values)
        best = score(values, self.best)
        self.end_epoch(progress.after_steps(self.extent), best)
        self._is_scored = self._is_scored or best is not None or not any(self.best)
        if not self._is_scored and (reported or self.is_over):
            decides = f"{self.best[0] or self.best[1]} decides on the best checkpoint"
            self.note(text := f"{decides}, but run.report() got {', '.join(values)}; report it.")
            if self.is_over:
                raise LoopError(text)

    def write_checkpoint(self, valid_score: float | None) -> None:
        super().write_checkpoint(valid_score)
        for line in self.program.looks.look():
            self.note(line)

    def close(self, error: type[BaseException] | None) -> None:
        self._unwatch()
        if self.averager:
            self.averager.close()
        super().close(error)


class Run:
    """The training of a model, made by `world.run`: gives the epochs and batches that are left, and does what is due
    after each step. Every rank calls the same methods in the same order.

    Examples:
        >>> import torch
        >>> import hvdtrain.torch as ht
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> with ht.join(device="cpu") as world:
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     run = world.run("runs/line", model, optimizer)
        ...     for epoch in run.epochs(2):
        ...         for inputs, targets in run.batches((x, 2 * x), batch_size=16):
        ...             loss = (model(inputs) - targets).square().mean()
        ...             loss.backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             run.step(loss)
        ...         run.report(slope=model.weight.item())  # doctest: +ELLIPSIS
        INFO - ...
    """

    def __init__(self, hooks: LoopHooks) -> None:
        self._hooks, self._program, self._averager = hooks, hooks.program, hooks.averager
        self._engine = hooks.trainer.engine
        self._order, self._begun = Order(hooks.program), False
        self._reading = _Reading(self._engine, hooks.run.samples, hooks.program.seed)
        self._generator, self._seeded = torch.Generator(self._engine.device), -1
        self._why: str | None = None
        self.is_left = False
        """Whether the program has left its epochs by `break`."""

    @property
    def global_step(self) -> int:
        """The number of updates since the training began, also before the last start."""
        return self._hooks.progress.step

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left, or the run was stopped."""
        return self._hooks.is_over

    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[int]:
        """The numbers, from 0, of those of the `count` epochs that are left. With `max_steps` the run ends after so
        many updates. A checkpoint is written when an epoch's body has ended. After a `break` the next start continues
        with the epochs that are left; `stop` ends them for good. Raises LoopError."""
        hooks = self._hooks
        hooks.set_end(count, max_steps)
        self._begun = True
        self._program.looks.look()
        while not hooks.is_over:
            self._order.begin_epoch()
            hooks.begin_epoch()
            try:
                yield hooks.progress.epoch
            except GeneratorExit:
                self.is_left = True
                raise
            self._end_epoch()

    def stop(self, why: str) -> None:
        """Ends the run after this epoch, on all ranks, if any rank calls it: for early stopping. The run is finished
        then, and a later start trains no further. Raises LoopError outside of an epoch."""
        if not self._order.in_epoch:
            raise LoopError(f"run.stop({why!r}) was called outside of run.epochs(); call it in the run's last epoch.")
        self._why = printable(str(why), LONGEST_REASON)

    def batches(
        self, dataset: Any, batch_size: int, *, collate: Collate = default_collate, workers: int = 0, **others: Any
    ) -> Batches:
        """This rank's part of each global batch that is left of the epoch, on the rank's device; `len` counts them.

        `dataset` is map-style, or a tuple of tensors [n, ...]. `batch_size` counts the examples of all ranks together.
        The global batches are the same for every number of ranks. Each epoch leaves out other examples: those that
        fill no batch. `workers` is the number of processes that read; with 0 the rank reads between its steps.

        Of two at once, as in zip(run.batches(a, 8), run.batches(b, 16)), the first counts the epoch's steps; the other
        gives one batch for each of them, in the order of a run with `seed` + 1. Raises LoopError and DataError.
        """
        check_source(dataset, others)
        given = dataset, collate, workers
        return Batches(self._batches(batch_size, given), lambda: self._reading.left(self._hooks, batch_size, given))

    def _batches(self, batch_size: int, given: tuple[Any, Collate, int]) -> Iterator[Any]:
        order, hooks, number = self._order, self._hooks, self._order.read()
        examples, loader = self._reading.of(*given, number)
        requests = self._reading.requests(hooks, examples, batch_size, number)
        batches = loader.batches(examples, requests)
        if number:
            for update, batch in enumerate(batches, hooks.progress.updates(hooks.extent)):
                order.beside(update == hooks.progress.updates(hooks.extent))
                yield batch.data
            order.is_short = True
            return
        try:
            for batch in hooks.run.samples.read(hooks.clocks.read(batches)):
                seed(self._program.seed, hooks.progress.step, self._engine.rank, self._engine.device)
                if self._averager:
                    self._averager.refusal = ""
                    self._averager.begin_batch()
                order.begin_batch()
                hooks.is_settled = False
                yield batch.data
                order.end_batch(hooks.is_settled)
                if hooks.progress.is_done(hooks.extent):
                    break
        finally:
            order.is_reading = False

    def each_once(
        self, dataset: Any, batch_size: int, *, collate: Collate = default_collate, workers: int = 0, **others: Any
    ) -> Iterator[Any]:
        """This rank's part of a validation set, in batches on the rank's device. Each example is on one rank, in order
        and without padding. `batch_size` counts the examples of all ranks together. Ranks may differ by a batch, so
        call `world.sum` and `world.mean` after the loop, not inside. Raises LoopError and DataError."""
        check_source(dataset, others)
        self._hooks.settle()
        size, (examples, loader) = self._engine.size, self._reading.of(dataset, collate, workers)
        requests = each_once(len(examples), max(1, batch_size // size), self._engine.rank, size)
        averager = self._averager if len(examples) % size and not self._order.has_batch else None
        if averager:
            averager.refusal = UNEQUAL
        try:
            for batch in loader.batches(examples, requests):
                yield batch.data
        finally:
            if averager:
                averager.refusal = ""

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The block for backward() of each micro-batch of an update but the last. Within it gradients add up on this
        rank without communication; with `enabled` False the block changes nothing."""
        return self._averager.pause(enabled) if self._averager else contextlib.nullcontext()

    def loss(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss for backward() of a mean over tokens, pixels or weights, not examples: the sum of all ranks' totals
        divided by the sum of their counts. Every rank calls it before each backward().

        `total` is this rank's sum over the micro-batch, a scalar tensor; `count` is this rank's count in all
        micro-batches of the update. Raises LoopError.
        """
        if self._averager:
            self._averager.begin_loss()
        self._hooks.count = mean_count(number(count), self._engine)
        return (total / divisor(self._hooks.count)).to(total.dtype)

    def step(self, loss: Any, **metrics: Any) -> None:
        """Counts an update, and does what is due after it: log, comparison of the replicas, checkpoint, stop. To be
        called after each optimizer.step().

        `loss` is the mean over this rank's batch, or the result of `loss`. A metric is such a mean, too, or a pair
        (sum, count). Raises StoppedError, DivergedError, ReplicaError and LoopError.
        """
        self._order.step()
        self._hooks.user_step(number(loss), metrics)

    def skip(self) -> None:
        """Leaves this batch out, on all ranks: it counts as a step without an update. Every rank calls it in the same
        step, by a number that all have, as of world.sum, and in place of optimizer.step() and run.step(). Raises
        LoopError."""
        self._order.skip()
        if self._averager:
            self._averager.take_part(SKIP)
        self._hooks.user_step(None, {})

    def average(self, gradients: Any) -> Any:
        """The means over the ranks of gradients that the program computes without backward(), as by
        torch.autograd.grad or torch.func: a tensor, or a list, tuple or dictionary of tensors. Every rank calls it, and
        before gradients are combined. Raises LoopError."""
        return self._averager.average(gradients) if self._averager else gradients

    @property
    def generator(self) -> torch.Generator:
        """A generator of random numbers on the rank's device, which are the same on all ranks in each step: for noise
        on gradients or weights. Its seed follows from that of the run and from the step."""
        step = self._hooks.progress.step
        if self._seeded != step:
            self._seeded = step
            self._generator.manual_seed(hash((self._program.seed, step)))
        return self._generator

    def report(self, **metrics: Any) -> None:
        """Reports numbers of this epoch, which are the same on all ranks, to the log, metrics.jsonl, TensorBoard and
        for the choice of the best checkpoint. Raises LoopError outside of an epoch."""
        self._order.report(metrics)

    def finish(self) -> None:
        """Ends the run, and the epoch in which the program has left its loop."""
        if self._order.in_epoch:
            self._end_epoch(leaves=True)
        if self._begun:
            self._begun = False
            self._hooks.finish()

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes the run's files, with the error that has ended the run, if any, and removes all hooks."""
        self._order.close()
        self._hooks.close(error)

    def _end_epoch(self, *, leaves: bool = False) -> None:
        self._order.end_epoch()
        self._hooks.end_user_epoch(self._order.reported, self._why, leaves=leaves)


class _Reading:
    """A rank's readers of a program's data sets, kept from epoch to epoch."""

    def __init__(self, engine: Engine, samples: Samples, seed: int) -> None:
        self._size, self._device, self._samples, self._seed = engine.size, engine.device, samples, seed
        self._kept: dict[tuple[int, ...], tuple[Any, Examples, Loader]] = {}
        """The data set and its reader by the identities of their arguments, the one that was used last at the end."""

    def of(self, dataset: Any, collate: Collate, workers: int, number: int = 0) -> tuple[Examples, Loader]:
        """The data set as a split, and its reader, another one for each set beside others. Raises DataError."""
        # A program may give new tuples of the same tensors each time.
        key = (*map(id, dataset if isinstance(dataset, tuple) else (dataset,)), id(collate), workers, number)
        if not (found := self._kept.pop(key, None)):
            examples = Examples(dataset, "the data set", collate)
            found = (dataset, collate), examples, loader_of(examples, workers, self._device, self._samples, self._seed)
        self._kept = dict([*self._kept.items(), (key, found)][-MOST_KEPT:])
        return found[1:]

    def left(self, hooks: LoopHooks, batch_size: int, given: tuple[Any, Collate, int]) -> int:
        """How many batches of these examples are left of the epoch."""
        made = hooks.progress.sample // (hooks.extent.global_batch or batch_size)
        count, most = len(self.of(*given)[0]) // max(1, batch_size) - made, hooks.extent.max_steps
        return max(0, count if most is None else min(count, most - hooks.progress.step))

    def requests(self, hooks: LoopHooks, examples: Examples, batch_size: int, number: int) -> list[Request]:
        """This rank's local batches of what is left of the epoch, of examples read beside `number` sets. Where they are
        others than the checkpoint's, an epoch that was begun begins anew. Raises LoopError and CheckpointError."""
        if batch_size < 1 or batch_size % self._size:
            rule = f"it must be a multiple of the {self._size} ranks" if self._size > 1 else "it must be at least 1"
            raise LoopError(f"batch_size counts the examples of all ranks: {rule}, got {batch_size}.")
        if batch_size > len(examples):
            raise LoopError(f"batch_size must be at most the {len(examples)} training examples, got {batch_size}.")
        now: dict[str, Any] = {"batch_size": batch_size, **examples.contents()}
        now = {**hooks.program.data, **({f"set {number + 1}": list(now.values())} if number else now)}
        # The program draws its sets: the epoch before had another one.
        is_drawn = not hooks.progress.sample and (hooks.extent.global_batch > 0 or self._samples.is_drawn)
        with in_programs_words("world.run"):
            news = take_data(hooks.program.data, now, hooks.progress)
        hooks.program.data = now
        if news and not is_drawn:
            hooks.note(news)
        extent = replace(hooks.extent, global_batch=batch_size, train_examples=len(examples))
        if number:
            begins = replace(hooks.progress, sample=hooks.progress.updates(hooks.extent) * batch_size)
            return train_requests(replace(extent, seed=extent.seed + number), begins, hooks.engine.rank)[1]
        hooks.extent = extent
        hooks.comparison.extent(extent)
        return train_requests(extent, hooks.progress, hooks.engine.rank)[1]


def seen(loss: Any, metrics: dict[str, Any], count: int) -> Seen:
    """The loss and metrics of `count` examples, given as means or, of metrics, as pairs (sum, count)."""
    pairs = {name: of if isinstance(of, tuple) else (number(of) * count, count) for name, of in metrics.items()}
    return Seen(number(loss), count, {name: (number(total), number(many)) for name, (total, many) in pairs.items()})
