"""The run of a program with its own loop: its epochs, batches, steps and reports."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import default_collate

from hvdtrain.core.progress import Request, each_once, train_requests
from hvdtrain.errors import LoopError
from hvdtrain.run.session import take_data
from hvdtrain.torch.data import Collate, Examples, Loader, loader_of
from hvdtrain.torch.engines import seed
from hvdtrain.torch.user_loop.ending import Ending
from hvdtrain.torch.user_loop.hooks import LoopHooks
from hvdtrain.torch.user_loop.program import UNEQUAL, Batches, Order, check_source

MOST_KEPT = 8
"""The largest number of data sets whose readers wait for the next epoch."""
Given = tuple[Any, Collate, int]
"""A data set, its collate, and the number of processes that read it."""


class Run(Ending):
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

    def __init__(self, hooks: LoopHooks, number: int) -> None:
        """`number`: that of this run in the program, from 1."""
        self._hooks, self._averager, self._order, self._number = hooks, hooks.averager, Order(hooks.program), number
        self._reading = _Reading(hooks, self._order)

    @property
    def global_step(self) -> int:
        """The number of updates since the training began, also before the last start."""
        return self._hooks.progress.step

    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[int]:
        """The numbers, from 0, of those of the `count` epochs that are left. With `max_steps` the run ends after so
        many updates. A checkpoint is written when an epoch's body has ended. After a `break` the next start continues
        with the epochs that are left; `stop` ends them for good. Raises LoopError."""
        hooks = self._hooks
        hooks.set_end(count, max_steps)
        self._begun = True
        hooks.look()
        while not hooks.is_over:
            self._order.begin_epoch()
            hooks.begin_epoch()
            hooks.seeds.outside(hooks.progress.epoch, -1)
            try:
                yield hooks.progress.epoch
            except GeneratorExit:
                self.is_left = True
                raise
            hooks.end_user_epoch(self._order, leaves=False)
        hooks.seeds.outside(hooks.progress.epoch, -self._number << 32)  # for the next run, also where this one is over

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
        return Batches(self._reading.batches(batch_size, given), lambda: self._reading.left(batch_size, given))

    def each_once(
        self, dataset: Any, batch_size: int, *, collate: Collate = default_collate, workers: int = 0, **others: Any
    ) -> Iterator[Any]:
        """This rank's part of a validation set, in batches on the rank's device. Each example is on one rank, in order
        and without padding. `batch_size` counts the examples of all ranks together. Ranks may differ by a batch, so
        call `world.sum` and `world.mean` after the loop, not inside. Raises LoopError and DataError."""
        check_source(dataset, others)
        return self._reading.each_once(batch_size, (dataset, collate, workers))

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The block for backward() of each micro-batch of an update but the last. Within it gradients add up on this
        rank without communication; with `enabled` False the block changes nothing."""
        self._hooks.losses.add_up(enabled)
        return self._averager.pause(enabled) if self._averager else contextlib.nullcontext()

    def loss(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss for backward() of a mean over tokens, pixels or weights, not examples: the sum of all ranks' totals
        divided by the sum of their counts. Every rank calls it before each backward().

        `total` is this rank's sum over the micro-batch, a scalar tensor; `count` is this rank's count in all
        micro-batches of the update. Raises LoopError.
        """
        return self._hooks.losses.mean(total, count)

    def step(self, loss: Any = None, **metrics: Any) -> None:
        """Counts an update, and does what is due after it: log, comparison of the replicas, checkpoint, stop. To be
        called after each optimizer.step().

        `loss` is the mean over this rank's batch, or the result of `loss`. Where `accumulating` is
        used it may be left out: then, or where it is that of the last part, it is the sum of the losses at which the
        update's backwards have begun. A metric is such a mean, too, or a pair (sum, count). Raises StoppedError,
        DivergedError, ReplicaError and LoopError.
        """
        self._order.step()
        self._hooks.user_step(self._hooks.losses.of_update(loss), metrics)

    def skip(self) -> None:
        """Leaves this batch out, on all ranks: it counts as a step without an update. Every rank calls it in the same
        step, by a number that all have, as of world.sum, and in place of optimizer.step() and run.step(). Raises
        LoopError."""
        self._order.skip()
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
        return self._hooks.seeds.generator(self._hooks.progress.step)

    def report(self, **metrics: Any) -> None:
        """Reports numbers of this epoch, which are the same on all ranks, to the log, metrics.jsonl, TensorBoard and
        for the choice of the best checkpoint. Raises LoopError outside of an epoch."""
        self._order.report(metrics)

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes the run's files, with the error that has ended the run, if any, and removes all hooks."""
        self._order.close()
        self._hooks.close(error)


class _Reading:
    """A rank's readers of a program's data sets, kept from epoch to epoch, and what is due while they are read."""

    def __init__(self, hooks: LoopHooks, order: Order) -> None:
        self._hooks, self._order, self._samples = hooks, order, hooks.run.samples
        self._kept: dict[tuple[int, ...], tuple[Any, Examples, Loader]] = {}
        """The data set and its reader by the identities of their arguments, the one that was used last at the end."""

    def batches(self, batch_size: int, given: Given) -> Iterator[Any]:
        """See `Run.batches`."""
        order, hooks, engine, averager = self._order, self._hooks, self._hooks.engine, self._hooks.averager
        examples, loader = self.reader_of(*given, number := order.read())
        batches = loader.batches(examples, self._requests(examples, batch_size, number))
        if number:
            for update, batch in enumerate(batches, hooks.progress.updates(hooks.length)):
                order.beside(update == hooks.progress.updates(hooks.length))
                yield batch.data
            order.is_short = True
            return
        try:
            for batch in self._samples.read(hooks.clocks.read(batches)):
                seed(hooks.program.seed, hooks.progress.step, engine.rank, engine.device)
                if averager:
                    averager.refusal = ""
                    averager.begin_batch()
                order.has_batch = True
                hooks.losses.begin_batch()
                hooks.is_settled = False
                yield batch.data
                order.end_batch(hooks.is_settled)
                if hooks.progress.is_done(hooks.length):
                    break
        finally:
            order.is_reading = False
            hooks.seeds.outside(hooks.progress.epoch, -2)

    def each_once(self, batch_size: int, given: Given) -> Iterator[Any]:
        """See `Run.each_once`."""
        self._hooks.settle(is_within=self._order.is_reading)
        engine, (examples, loader) = self._hooks.engine, self.reader_of(*given)
        requests = each_once(len(examples), max(1, batch_size // engine.size), engine.rank, engine.size)
        averager = self._hooks.averager if len(examples) % engine.size and not self._order.has_batch else None
        if averager:
            averager.refusal = UNEQUAL
        try:
            for batch in loader.batches(examples, requests):
                yield batch.data
        finally:
            if averager:
                averager.refusal = ""

    def left(self, batch_size: int, given: Given) -> int:
        """How many batches of these examples are left of the epoch."""
        progress, length = self._hooks.progress, self._hooks.length
        made = progress.sample // (length.global_batch or batch_size)
        count, most = len(self.reader_of(*given)[0]) // max(1, batch_size) - made, length.max_steps
        return max(0, count if most is None else min(count, most - progress.step))

    def reader_of(self, dataset: Any, collate: Collate, workers: int, number: int = 0) -> tuple[Examples, Loader]:
        """The data set as a split, and its reader, another one for each set beside others. Raises DataError."""
        # A program may give new tuples of the same tensors each time.
        key = (*map(id, dataset if isinstance(dataset, tuple) else (dataset,)), id(collate), workers, number)
        if not (found := self._kept.pop(key, None)):
            device, seed = self._hooks.engine.device, self._hooks.program.seed
            examples = Examples(dataset, "the data set", collate)
            found = (dataset, collate), examples, loader_of(examples, workers, device, self._samples, seed)
        self._kept = dict([*self._kept.items(), (key, found)][-MOST_KEPT:])
        return found[1:]

    def _requests(self, examples: Examples, batch_size: int, number: int) -> Sequence[Request]:
        """This rank's local batches of what is left of the epoch, of examples read beside `number` sets. Where they are
        others than the checkpoint's, an epoch that was begun begins anew. Raises LoopError and CheckpointError."""
        hooks, size = self._hooks, self._hooks.engine.size
        if batch_size < 1 or batch_size % size:
            rule = f"it must be a multiple of the {size} ranks" if size > 1 else "it must be at least 1"
            raise LoopError(f"batch_size counts the examples of all ranks: {rule}, got {batch_size}.")
        if batch_size > len(examples):
            raise LoopError(f"batch_size must be at most the {len(examples)} training examples, got {batch_size}.")
        now: dict[str, Any] = {"batch_size": batch_size, **examples.contents()}
        now = {**hooks.program.data, **({f"set {number + 1}": list(now.values())} if number else now)}
        # The program draws its sets: the epoch before had another one.
        is_drawn = not hooks.progress.sample and (hooks.length.global_batch > 0 or self._samples.is_drawn)
        news = take_data(hooks.program.data, now, hooks.progress)
        hooks.program.data = now
        if news and not is_drawn:
            hooks.note(news)
        length = replace(hooks.length, global_batch=batch_size, train_examples=len(examples))
        if number:
            begins = replace(hooks.progress, sample=hooks.progress.updates(hooks.length) * batch_size)
            return train_requests(replace(length, seed=length.seed + number), begins, hooks.engine.rank)[1]
        hooks.length = length
        hooks.comparison.length(length)
        return train_requests(length, hooks.progress, hooks.engine.rank)[1]
