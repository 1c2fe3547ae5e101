"""A run of a program that keeps its own loop: its epochs, batches, steps and reports."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import Extent, Progress, UserSampling, each_once, train_requests
from hvdtrain.core.settings import UserReadSettings
from hvdtrain.datasets import Dataset
from hvdtrain.errors import LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import named
from hvdtrain.run.session import LONGEST_REASON, Best, UserHooks, in_programs_words, take_data
from hvdtrain.torch.averaging import LoopAverager, divisor, mean_count
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine, seed
from hvdtrain.torch.examples import Examples
from hvdtrain.torch.objective import Seen
from hvdtrain.torch.trainer import Replica
from hvdtrain.torch.user_loop.program import Order, Program, number
from hvdtrain.untrusted import printable

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""
MOST_KEPT = 8
"""Data sets whose readers wait for the next epoch."""


class Run:
    """What `world.run` gives: epochs and batches that continue where the run was, and what is due after each step.
    Every rank calls the same methods in the same order.

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

    def __init__(self, hooks: UserHooks[Replica], program: Program, averager: LoopAverager | None) -> None:
        self._hooks, self._program, self._averager = hooks, program, averager
        self._engine: Engine = hooks.trainer.engine  # type: ignore[assignment]
        self._reading, self._order, self._begun = _Reading(self._engine), Order(program), False
        self._is_left_early = False
        """Whether the batches of any epoch were left before their end."""
        self._why: str | None = None
        self._count: torch.Tensor | None = None
        """What `loss` has divided by in this update."""
        self.is_left = False
        """Whether the program has left its epochs by `break`."""

    @property
    def global_step(self) -> int:
        """How many updates were made."""
        return self._hooks.progress.step

    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[int]:
        """The epochs that are left of so many, each by its number from 0; with `max_steps` the run ends after so many
        updates. A checkpoint is written when an epoch's body has ended. Leaving them by `break` leaves the rest for the
        next start; `stop` ends them for good."""
        if count < 1 or (max_steps is not None and max_steps < 1):
            raise LoopError(f"epochs and max_steps must be at least 1, got {count} and {max_steps}.")
        hooks, self._begun = self._hooks, True
        hooks.extent = replace(self._extent, epochs=count, max_steps=max_steps)
        if hooks.resumed_from and self.is_over:
            hooks.note(_of_nothing_to_do(hooks.progress, self._program.stopped))
        while not self.is_over:
            self._order.begin_epoch()
            hooks.begin_epoch()
            try:
                yield hooks.progress.epoch
            except GeneratorExit:
                self.is_left = True
                raise
            self._end_epoch()

    def stop(self, why: str) -> None:
        """Ends the run after this epoch, on all ranks if any of them calls it: as early stopping does. The run counts
        as finished then, and a later start trains no further. Raises LoopError outside of an epoch."""
        if not self._order.in_epoch:
            raise LoopError(f"run.stop({why!r}) was called outside of run.epochs(); call it in the run's last epoch.")
        self._why = printable(str(why), LONGEST_REASON)

    def batches(
        self, dataset: Any, batch_size: int, *, collate: Collate = default_collate, workers: int = 0
    ) -> Iterator[Any]:
        """This rank's part of each global batch that is left of the epoch, on its device.

        `dataset` is map-style, or a tuple of tensors; `batch_size` counts the examples of all ranks. The global batches
        are the same for every number of ranks, and what is left over of an epoch are other examples each time.
        `workers`: processes that read; 0 reads between steps. Raises LoopError and DataError.
        """
        self._order.read()
        hooks, (examples, loader) = self._hooks, self._reading.of(dataset, collate, workers)
        with in_programs_words("world.run"):
            given = self._extent, hooks.progress, self._program, examples, batch_size
            hooks.extent, news = self._reading.training(*given)
        if news:
            hooks.note(news)
        hooks.check_extent()
        _, requests = train_requests(self._extent, hooks.progress, self._engine.rank)
        for batch in hooks.clocks.read(loader.batches(examples, requests)):
            seed(self._program.seed, hooks.progress.step, self._engine.rank, self._engine.device)
            if self._averager:
                self._averager.begin_batch()
            self._order.begin_batch()
            hooks.is_settled = False
            yield batch.data
            self._order.end_batch(hooks.is_settled)
            if hooks.progress.is_done(self._extent):
                break

    def each_once(
        self, dataset: Any, batch_size: int, *, collate: Collate = default_collate, workers: int = 0
    ) -> Iterator[Any]:
        """For validation, on this rank's device: its part of the examples in order, each of them on one rank, none
        padded. `batch_size` counts the examples of all ranks; ranks may differ by a batch, so a sum over the ranks
        belongs behind the loop."""
        self._settle()
        size, (examples, loader) = self._engine.size, self._reading.of(dataset, collate, workers)
        requests = each_once(len(examples), max(1, batch_size // size), self._engine.rank, size)
        for batch in loader.batches(examples, requests):
            yield batch.data

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Around the backward() of all micro-batches of an update but the last: their gradients add up on this rank,
        without communication."""
        return self._averager.pause(enabled) if self._averager else contextlib.nullcontext()

    def loss(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """A loss whose gradients are those of the ranks' totals, added, divided by their counts, added: of a mean over
        tokens, pixels or weights rather than examples. Every rank calls it before each backward().

        `total` is the sum over this rank's micro-batch, and `count` that of all its micro-batches of the update.
        """
        if self._averager:
            self._averager.begin_loss()
        self._count = mean_count(number(count), self._engine)
        return (total / divisor(self._count)).to(total.dtype)

    def step(self, loss: Any, **metrics: Any) -> None:
        """To be called after each optimizer.step(): counts the update, and does what is due: log, comparison of the
        replicas, checkpoint, stop.

        `loss` is the mean over this rank's batch, or what `loss` has made of it; a metric is such a mean too, or a pair
        (sum, count). Raises StoppedError, DivergedError, ReplicaError and LoopError.
        """
        self._order.step()
        hooks, extent = self._hooks, self._extent
        hooks.trainer.share_buffers()
        if self._count is not None:
            metrics["loss"] = number(loss) * self._count, self._count
        hooks.trainer.meter.add(seen(loss, metrics, extent.global_batch // extent.size))
        if self._averager and (never := self._averager.take_unreached()):
            hooks.note(f"backward reached none of {', '.join(never)}: the optimizer leaves them as they are")
        hooks.step(self._program.lr)
        hooks.after_step()

    def report(self, **metrics: Any) -> None:
        """Numbers of this epoch, the same on all ranks, for log, metrics.jsonl, TensorBoard and the best checkpoint."""
        self._order.report(metrics)

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left, or the run was stopped."""
        return self._program.stopped is not None or self._hooks.is_over

    def finish(self) -> None:
        """The program's end: of a run whose loop was left early the epoch is ended first."""
        if self._order.in_epoch:
            self._end_epoch()
        if self._begun:
            self._begun = False
            self._hooks.finish()

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes the run's files, which an error may have ended, and releases the model."""
        self._order.close()
        if self._averager:
            self._averager.close()
        self._hooks.close(error)

    @property
    def _extent(self) -> UserSampling:
        return cast(UserSampling, self._hooks.extent)

    def _end_epoch(self) -> None:
        self._order.end_epoch()
        self._settle()
        self._agree_to_stop()
        values = report_epoch(self._hooks, self._extent, self._order.reported)
        self._hooks.end_epoch(self._hooks.progress.after_steps(self._extent), score(values, self._hooks.best))

    def _agree_to_stop(self) -> None:
        """Where any rank has called `stop`, this epoch is the last one of all."""
        if self._engine.sum(np.array([float(self._why is not None)]))[0]:
            hooks, why = self._hooks, self._why or "another rank called run.stop()"
            self._program.stopped = why
            hooks.extent = replace(self._extent, epochs=hooks.progress.epoch + 1)
            hooks.note(f"stopped after epoch {hooks.progress.epoch}: {why}")

    def _settle(self) -> None:
        """Where the steps of an epoch were left early: what is due after its last one."""
        if self._hooks.is_settled:
            return
        if self._averager:
            self._averager.leave()
        self._hooks.end_steps(self._program.lr)
        if not self._is_left_early:
            self._is_left_early = True
            self._hooks.note(_of_left_epoch(self._hooks.progress, self._extent))


class _Reading:
    """A rank's readers of a program's data sets, which are kept from epoch to epoch."""

    def __init__(self, engine: Engine) -> None:
        self._size, self._device = engine.size, engine.device
        self._kept: list[tuple[tuple[Any, ...], Examples, Loader]] = []
        """What each reader was made of, and the reader; the one that was used last is at the end."""

    def of(self, dataset: Any, collate: Collate, workers: int) -> tuple[Examples, Loader]:
        """The data set as a split, and what reads its requests. Raises DataError."""
        # A program may give new tuples of the same tensors each time.
        key = (*(dataset if isinstance(dataset, tuple) else (dataset,)), collate, workers)
        found = next(
            (kept for kept in self._kept if len(kept[0]) == len(key) and all(map(operator.is_, kept[0], key))), None
        )
        if found:
            self._kept.remove(found)
        else:
            examples = Examples(dataset, "the data set", collate)
            of_user = Dataset("own", examples, examples, None, (), (), (), draws=DRAWS)
            found = key, examples, Loader(UserReadSettings(workers), of_user, self._device)
        self._kept = [*self._kept, found][-MOST_KEPT:]
        return found[1:]

    def training(
        self, extent: UserSampling, progress: Progress, program: Program, examples: Examples, batch_size: int
    ) -> tuple[UserSampling, str]:
        """The extent of a run that trains on these examples in such global batches, and a line for the log where they
        are not those of its checkpoint: an epoch that they had begun begins anew. Raises LoopError, CheckpointError."""
        if batch_size < 1 or batch_size % self._size:
            rule = f"it must be a multiple of the {self._size} ranks" if self._size > 1 else "it must be at least 1"
            raise LoopError(f"batch_size counts the examples of all ranks: {rule}, got {batch_size}.")
        if batch_size > len(examples):
            raise LoopError(f"batch_size must be at most the {len(examples)} training examples, got {batch_size}.")
        now, before = {"batch_size": batch_size, **examples.contents()}, program.data
        news = take_data(before, now, progress)
        program.data = now
        return replace(extent, global_batch=batch_size, train_examples=len(examples)), news


def report_epoch(hooks: UserHooks[Any], extent: UserSampling, reported: dict[str, float]) -> dict[str, float]:
    """Reports the means over the epoch's steps, and what the program has reported; all of these numbers by name. Every
    rank calls it. Raises LoopError where there was no step, or the ranks differ."""
    progress, engine = hooks.progress, hooks.engine
    if not progress.train.count:
        raise LoopError(f"epoch {progress.epoch} ended without a step; train on run.batches() and call run.step().")
    values = {name: value + 0.0 for name, value in reported.items()}  # without the sign of a zero
    of_epoch = named("report", {f"steps of epoch {progress.epoch}": progress.updates(extent), **values})
    agreement.check(of_epoch, (engine.rank, engine.size), hooks.run.topology.host, engine.sum)
    train = {"loss": progress.train.mean_loss, **progress.train.means}
    values = {f"train_{name}": mean for name, mean in train.items()} | reported
    hooks.report(values)
    return values


def score(values: dict[str, float], best: Best) -> float:
    """What the best checkpoint has most of; Raises LoopError where it was not reported."""
    highest, lowest = best
    name = highest or lowest or ("valid_loss" if "valid_loss" in values else "train_loss")
    if name not in values:
        raise LoopError(f"{name} decides on the best checkpoint, but run.report() got {', '.join(values)}; report it.")
    return values[name] if highest else -values[name]


def seen(loss: Any, metrics: dict[str, Any], count: int) -> Seen:
    """A batch of so many examples: its mean loss, and metrics that are such means too or pairs (sum, count)."""
    pairs = {name: of if isinstance(of, tuple) else (number(of) * count, count) for name, of in metrics.items()}
    return Seen(number(loss), count, {name: (number(total), number(many)) for name, (total, many) in pairs.items()})


def _of_left_epoch(progress: Progress, extent: Extent) -> str:
    """A line on a program that has left the epoch's batches before their end."""
    steps = f"{progress.updates(extent)} of {extent.train_examples // extent.global_batch} steps"
    return (
        f"epoch {progress.epoch} was left after {steps}; a run that resumes inside such an epoch continues with the "
        "next batch, and cannot know where you would leave: decide by run.global_step, or give run.epochs(..., "
        "max_steps=)"
    )


def _of_nothing_to_do(progress: Progress, stopped: str | None) -> str:
    """A line on a run that resumes and has no epoch left."""
    why = f" was stopped ({stopped})" if stopped else " has no epoch left"
    return (
        f"this folder's run{why}: it is finished at epoch {progress.epoch}, step {progress.step}, and nothing is "
        "trained; another training, as of the next fold, needs a folder of its own"
    )
