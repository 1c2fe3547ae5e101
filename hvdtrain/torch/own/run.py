"""A run of a program that keeps its own loop: its epochs, batches, steps and reports."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import OwnSampling, Progress, each_once, train_requests
from hvdtrain.core.settings import OwnIntervals, OwnReadSettings
from hvdtrain.datasets import Dataset
from hvdtrain.errors import LoopError
from hvdtrain.run.ending import Ending
from hvdtrain.run.loop import Hooks
from hvdtrain.run.own import in_own_words, open_own
from hvdtrain.run.reporter import OwnReporter
from hvdtrain.torch import devices
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.examples import Examples
from hvdtrain.torch.meter import Meter
from hvdtrain.torch.objective import Seen
from hvdtrain.torch.own.gradients import Averager
from hvdtrain.torch.own.program import Program
from hvdtrain.torch.state import State
from hvdtrain.torch.trainer import Replica

RESERVED = {"kind", "step", "epoch", "seconds"}
"""Of a record in metrics.jsonl."""
Reader = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Place:
    """Where a program's run is: its folder, and the ranks that train it."""

    folder: Path
    ending: Ending
    engine: str
    own: Engine
    compression: str


def begin_run(place: Place, program: Program, intervals: OwnIntervals, best: tuple[str | None, str | None]) -> "Run":
    """The program's run, continued from its folder's last checkpoint. Raises HvdtrainError."""
    program.check(place.own.device)
    state = State(program.model, program.optimizer, program.scaler)
    replica = Replica(place.own, program.model, state, Meter(place.own.device))
    with in_own_words("world.run"):
        run = open_own(place.folder, program, "torch", place.engine, intervals, place.ending)
        hooks = Hooks(run, replica, OwnSampling(0, 0, place.own.size, program.seed, draws=DRAWS))
    if hooks.resumed_from:
        program.restore(hooks.resumed_from["program"], hooks.progress.step)
    averager = Averager(program.model, place.own, place.compression) if place.own.size > 1 else None
    return Run(hooks, program, averager, best)


class Run:
    """A program's run: epochs and batches that continue where the run was, and what is due after each step.

    Made by `world.run`. Every rank calls the same methods in the same order.

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

    def __init__(
        self, hooks: Hooks[Replica], program: Program, averager: Averager | None, best: tuple[str | None, str | None]
    ) -> None:
        self._hooks, self._program, self._averager, self._best = hooks, program, averager, best
        self._engine: Engine = hooks.trainer.engine  # type: ignore[assignment]
        self._loaders: dict[Any, tuple[Loader, Examples]] = {}
        self._in_epoch = self._read = self._pending = self._begun = False
        self._settled = True
        """Whether what is due at the end of an epoch's steps is done."""
        self._reported: dict[str, float] = {}

    @property
    def global_step(self) -> int:
        """How many updates were made."""
        return self._hooks.progress.step

    def epochs(self, number: int, *, max_steps: int | None = None) -> Iterator[int]:
        """The epochs that are left of so many, each by its number from 0; with `max_steps` the run ends after so many
        updates. A checkpoint is written when an epoch's body has ended."""
        if number < 1 or (max_steps is not None and max_steps < 1):
            raise LoopError(f"epochs and max_steps must be at least 1, got {number} and {max_steps}.")
        hooks, self._begun = self._hooks, True
        hooks.extent = replace(self._extent, epochs=number, max_steps=max_steps)
        while not hooks.is_over:
            self._in_epoch, self._read, self._reported = True, False, {}
            hooks.begin_epoch()
            yield hooks.progress.epoch
            self._end_epoch()

    def batches(
        self, dataset: Any, batch_size: int, *, collate: Reader = default_collate, workers: int = 0
    ) -> Iterator[Any]:
        """This rank's part of each global batch that is left of the epoch, on its device.

        `dataset` is map-style, or a tuple of tensors; `batch_size` counts the examples of all ranks. The global batches
        are the same for every number of ranks, and what is left over of an epoch are other examples each time.
        `workers`: processes that read; 0 reads between steps. Raises LoopError and DataError.
        """
        if not self._in_epoch or self._read:
            when = "twice in one epoch" if self._in_epoch else "outside of run.epochs()"
            raise LoopError(f"run.batches() was called {when}; take run.each_once() to validate.")
        loader, examples = self._loader(dataset, collate, workers)
        self._take_data(len(examples), batch_size)
        self._read, hooks = True, self._hooks
        _, requests = train_requests(self._extent, hooks.progress, self._engine.rank)
        for batch in loader.batches(examples, requests):
            devices.seed(self._program.seed, hooks.progress.step, self._engine.rank, self._engine.device)
            self._pending = True
            self._settled = False
            yield batch.data
            if self._pending:
                raise LoopError("run.step() was not called after a batch; call it after each optimizer.step().")
            if hooks.progress.is_done(self._extent):
                break

    def each_once(
        self, dataset: Any, batch_size: int, *, collate: Reader = default_collate, workers: int = 0
    ) -> Iterator[Any]:
        """For validation, on this rank's device: its part of the examples in order, each of them on one rank, none
        padded. `batch_size` counts the examples of all ranks; ranks may differ by a batch, so a sum over the ranks
        belongs behind the loop."""
        self._settle()
        loader, examples = self._loader(dataset, collate, workers)
        size = self._engine.size
        requests = each_once(len(examples), max(1, batch_size // size), self._engine.rank, size)
        for batch in loader.batches(examples, requests):
            yield batch.data

    @contextlib.contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Around the backward() of all micro-batches of an update but the last: their gradients add up on this rank,
        without communication."""
        if self._averager:
            self._averager.accumulating = enabled
        try:
            yield
        finally:
            if self._averager:
                self._averager.accumulating = False

    def step(self, loss: Any, **metrics: Any) -> None:
        """To be called after each optimizer.step(): counts the update, and does what is due: log, comparison of the
        replicas, checkpoint, stop.

        `loss` is the mean over this rank's batch; a metric is such a mean too, or a pair (sum, count). Raises
        StoppedError, DivergedError, ReplicaError and LoopError.
        """
        if not self._pending:
            raise LoopError("run.step() comes once after each batch of run.batches(), not without one.")
        self._pending, hooks, extent = False, self._hooks, self._extent
        count = extent.global_batch // extent.size
        pairs = {name: of if isinstance(of, tuple) else (_number(of) * count, count) for name, of in metrics.items()}
        hooks.trainer.meter.add(
            Seen(_number(loss), count, {name: (_number(a), _number(b)) for name, (a, b) in pairs.items()})
        )
        if self._averager and (never := self._averager.take_unreached()):
            hooks.note(f"backward reached none of {', '.join(never)}: the optimizer leaves them as they are")
        hooks.progress.advance(extent)
        self._settled = hooks.progress.is_done(extent) or hooks.progress.is_epoch_done(extent)
        hooks.after_update(self._program.lr)

    def report(self, **metrics: Any) -> None:
        """Numbers of this epoch, the same on all ranks, for log, metrics.jsonl, TensorBoard and the best checkpoint."""
        if not self._in_epoch:
            raise LoopError("run.report() was called outside of run.epochs(); call it at the end of an epoch.")
        for name, value in metrics.items():
            if name in RESERVED:
                raise LoopError(
                    f"a reported number must not be called {name}, which each record has; take another name."
                )
            self._reported[name] = float(_number(value))

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left."""
        return self._hooks.is_over

    def finish(self) -> None:
        """The program's end: of a run whose loop was left early the epoch is ended first."""
        if self._in_epoch:
            self._end_epoch()
        if self._begun:
            self._begun = False
            self._hooks.finish()

    def close(self) -> None:
        """Closes the run's files, and releases the model."""
        if self._averager:
            self._averager.close()
        if self._hooks.reporter:
            self._hooks.reporter.close()
            self._hooks.reporter = None

    @property
    def _extent(self) -> OwnSampling:
        assert isinstance(self._hooks.extent, OwnSampling)
        return self._hooks.extent

    def _end_epoch(self) -> None:
        self._in_epoch = self._pending = False
        hooks, progress = self._hooks, self._hooks.progress
        self._settle()
        if not progress.train.count:
            raise LoopError(f"epoch {progress.epoch} ended without a step; train on run.batches() and call run.step().")
        train = {"train_loss": progress.train.mean_loss}
        train |= {f"train_{name}": mean for name, mean in progress.train.means.items()}
        values = train | self._reported
        if isinstance(hooks.reporter, OwnReporter):
            hooks.reporter.values(progress.step, progress.epoch + 1, values)
        ended = progress.is_epoch_done(self._extent) or not progress.is_stopped(self._extent)
        after = Progress(progress.step, progress.epoch + 1) if ended else progress
        hooks.end_epoch(after, self._score(values))

    def _settle(self) -> None:
        """Where the steps of an epoch were left early: what is due after its last one."""
        if not self._settled:
            self._settled = True
            self._hooks.settle(self._program.lr)

    def _score(self, values: dict[str, float]) -> float:
        """What the best checkpoint has most of. Raises LoopError where it was not reported."""
        highest, lowest = self._best
        name = highest or lowest or ("valid_loss" if "valid_loss" in values else "train_loss")
        if name not in values:
            raise LoopError(
                f"{name} decides on the best checkpoint, but run.report() got {', '.join(values)}; report it."
            )
        return values[name] if highest else -values[name]

    def _take_data(self, examples: int, batch_size: int) -> None:
        """The training set and its batch are the run's from here on. Raises LoopError."""
        size, hooks = self._engine.size, self._hooks
        if batch_size < 1 or batch_size % size:
            rule = f"it must be a multiple of the {size} ranks" if size > 1 else "it must be at least 1"
            raise LoopError(f"batch_size counts the examples of all ranks: {rule}, got {batch_size}.")
        if batch_size > examples:
            raise LoopError(f"batch_size must be at most the {examples} training examples, got {batch_size}.")
        now, before = {"batch_size": batch_size, "examples": examples}, self._program.data
        for name, value in now.items():
            if hooks.progress.sample and before.get(name, value) != value:
                raise LoopError(
                    f"this epoch began with {name.replace('_', ' ')} {before[name]}, got {value}; it can change only "
                    "between epochs, or in another folder."
                )
        self._program.data = now
        hooks.extent = replace(self._extent, global_batch=batch_size, train_examples=examples)

    def _loader(self, dataset: Any, collate: Reader, workers: int) -> tuple[Loader, Examples]:
        key = id(dataset), collate, workers
        if key not in self._loaders:
            examples = Examples(dataset, "the data set", collate)
            of = Dataset("own", examples, examples, None, (), (), (), draws=DRAWS)
            self._loaders[key] = Loader(OwnReadSettings(workers), of, self._engine.device), examples
        return self._loaders[key]


def _number(value: Any) -> Any:
    """Without gradient; a tensor of one element as a scalar. Raises LoopError."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise LoopError(f"a loss or metric must be one number, got shape {list(value.shape)}; take its mean().")
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise LoopError(f"a loss or metric must be a number, got a {type(value).__name__}.") from None
