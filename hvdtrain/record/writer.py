"""A run's checkpoints: when all ranks make one, and how rank 0 writes it while training continues."""

import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.progress import due
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.sharing import Sum
from hvdtrain.core.wording import counted
from hvdtrain.record import checkpoint
from hvdtrain.record.checkpoint import Checkpoint, Layout
from hvdtrain.record.folder import RunFolder

LAST_CHECKPOINT = 3.0
"""Seconds that an error which ends the run waits, before it is reported, for a checkpoint that is being written."""
FIRST = 20
"""The interval in steps of a run's first three checkpoints, after which their cost is known."""
WARM_UP = 5
"""The first steps, which are not measured."""
LOGGED_AGAIN = 1.5
"""The factor by which the interval must change for another line of the log."""


class State(Protocol):
    """A training state: weights, momentum and statistics by name, and the loss scale."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The live tensors, not copies."""

    @property
    def scaler(self) -> Any:
        """The loss scale of float16, as a torch.amp.GradScaler; its `state_dict` is empty in another precision."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Creates the tensors that an optimizer would create only at its first update, as a checkpoint of this layout
        holds them. `values`: what `values()` returned for that checkpoint. Raises CheckpointError."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Copies the checkpoint's arrays into the tensors. Raises CheckpointError."""

    def share(self, engine: Any) -> None:
        """Gives all ranks what rank 0 keeps beside its tensors. Every rank calls it. Raises CheckpointError."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The tensors as they are now."""

    def snapshot(self) -> Mapping[str, np.ndarray]:
        """Copies of the tensors as they are now, on the host. The next call overwrites them."""

    def values(self) -> Mapping[str, Any]:
        """The parts of the optimizer's state that are no arrays, as JSON values by name."""

    def numbers(self) -> Mapping[str, Any]:
        """The numbers that an update depends on beside tensors: the LR, momentum and betas of each group of
        parameters, the loss scale, the count of updates."""


class Writer:
    """Rank 0's writer of checkpoints. The next one waits until the one before is written, so that there is never more
    than one snapshot in memory.

    An error in its thread is raised by the next call of any method but `leave`.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # One thread for all checkpoints: to start one means to wait until a processor, busy with training, has run it.
        # At the process's end the interpreter waits for its work.
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._last: futures.Future[None] | None = None
        self._process = os.getpid()
        self.seconds = 0.0
        """Seconds that it took to write the last checkpoint."""

    @property
    def is_writing(self) -> bool:
        return bool(self._under_way())

    def write(self, state: State, meta: Mapping[str, Any]) -> None:
        """Copies the state, and begins to write it. Raises OutputError where the checkpoint before could not
        be written."""
        self.wait()
        made = Checkpoint(state.snapshot(), copy.deepcopy(dict(meta)))
        self._last = self._thread.submit(self._commit, made)

    def check_written(self) -> None:
        """Raises OutputError where the one under way could not be written."""
        if self._last and self._last.done():
            done, self._last = self._last, None
            done.result()

    def wait(self) -> None:
        """Waits for the one under way. Raises OutputError where it could not be written."""
        futures.wait(self._under_way())
        self.check_written()

    def leave(self) -> None:
        """Waits for a short time, in a run that an error ends and whose other ranks wait for the report. What is not
        written by then is written while the process ends, unless its launcher kills it."""
        futures.wait(self._under_way(), LAST_CHECKPOINT)

    def _under_way(self) -> list[futures.Future[None]]:
        """The checkpoint that is being written; none in a forked child, which does not have the thread."""
        return [self._last] if self._last and not self._last.done() and os.getpid() == self._process else []

    def _commit(self, made: Checkpoint) -> None:
        began = time.monotonic()
        self._folder.check_held()
        if self._folder.holder:
            self._folder.holder.check_held()
        checkpoint.commit(self._folder.checkpoints, made, self._keep)
        self._folder.write_status("running", step=made.meta["step"])
        self._folder.mark_best()
        self.seconds = time.monotonic() - began


@dataclass
class Costs:
    """What rank 0 measures: the time of its steps, alone and while a checkpoint is being written, and how long each
    checkpoint stopped training. The first one, which also allocates the memory, is left out."""

    steps: np.ndarray = field(default_factory=lambda: np.zeros((2, 2)))
    """How many steps were measured, and their seconds: alone, and while a checkpoint was being written."""
    stalls: list[float] = field(default_factory=list)
    made: int = 0
    write_seconds: float = 0.0
    _last: float | None = None
    _skipped: int = 0
    _stalled: float = 0.0
    _is_beside: bool = False

    def pause(self) -> None:
        """Leaves the time until the next step out of the measurement, as an epoch begins."""
        self._last = None

    def stepped(self, now: float, *, is_writing: bool) -> None:
        """Measures a step that ends now."""
        if self._last is not None and self._skipped >= WARM_UP:
            seconds = now - self._last - self._stalled
            self.steps[int(self._is_beside or is_writing)] += 1, seconds
        self._skipped += 1
        self._last, self._stalled, self._is_beside = now, 0.0, is_writing

    def written(self, stall: float, write_seconds: float) -> None:
        """Measures a checkpoint that has begun: training stopped for `stall` seconds, and writing the one before took
        `write_seconds`."""
        self.made += 1
        self._stalled += stall
        self._is_beside = True
        if self.made == 1:
            return
        self.write_seconds = max(self.write_seconds, write_seconds)
        self.stalls.append(stall)
        if self.made == 2:
            self.steps[1] = 0

    @property
    def is_known(self) -> bool:
        return self.made >= 3 and bool(self.steps.any())

    @property
    def step_seconds(self) -> float:
        count, seconds = self.steps[0 if self.steps[0, 0] else 1]
        return float(seconds / count) if count else 0.0

    @property
    def cost(self) -> float:
        """Seconds that training loses by one checkpoint, while it stops and by slower steps. To be called
        when the next one begins."""
        slower = self.steps[1, 1] - self.steps[1, 0] * self.step_seconds
        return statistics.fmean(self.stalls) + max(0.0, float(slower)) / max(1, self.made - 2)


def daly(cost: float, mtbf: float) -> float:
    """The best time between two checkpoints, in seconds, where each costs `cost` seconds and there are `mtbf` seconds
    between failures.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (2006), equation 37; its first term alone is J. W. Young's, Communications of the ACM 17 (1974).
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class Pace:
    """The interval of `checkpoint_every_steps: auto`, in which training loses the least time by Daly's formula.

    Rank 0 measures, and all ranks have its interval. No checkpoint is due before the one before it is written.
    """

    def __init__(self, mtbf_hours: float, step: int) -> None:
        self.mtbf_hours, self.costs = mtbf_hours, Costs()
        self._next, self._logged = step + FIRST, 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step >= self._next

    def wanted(self) -> int:
        """On rank 0: the interval in steps, by what it has measured."""
        if not self.costs.is_known:
            return FIRST
        seconds = max(daly(self.costs.cost, self.mtbf_hours * 3600), self.costs.write_seconds)
        return min(10**9, max(1, math.ceil(seconds / self.costs.step_seconds)))

    def renew(self, step: int, interval: int) -> None:
        """Notes that a checkpoint was made at this step; the next is due `interval` steps later."""
        self._next = step + interval

    def news(self, interval: int) -> str | None:
        """A line for the log where the interval has changed."""
        costs = self.costs
        if not costs.is_known or (self._logged and 1 / LOGGED_AGAIN < interval / self._logged < LOGGED_AGAIN):
            return None
        self._logged = interval
        return (
            f"a checkpoint every {counted(interval, 'step')} ({interval * costs.step_seconds:.1f} s): one costs "
            f"training {costs.cost * 1e3:.0f} ms and is written in {costs.write_seconds:.1f} s; "
            f"mtbf_hours {self.mtbf_hours:g}"
        )


class Checkpointing:
    """A run's checkpoints. Every rank has one and calls the same methods in the same order; rank 0's writes."""

    def __init__(self, folder: RunFolder | None, recipe: Recipe, step: int, sum_over_ranks: Sum) -> None:
        """`folder`: the run folder on rank 0, else None; `step`: how many updates the run has made before."""
        self.writer = Writer(folder, recipe.keep_checkpoints) if folder else None
        self._every, self._sum = recipe.checkpoint_every_steps, sum_over_ranks
        self.pace: Pace | None = None
        if self._every == "auto":
            assert recipe.mtbf_hours
            self.pace = Pace(recipe.mtbf_hours, step)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return self.pace.due(step) if self.pace else self._every != "auto" and due(step, self._every)

    def pause(self) -> None:
        """Leaves the time until the next step out of the measurement, as an epoch begins."""
        if self.pace:
            self.pace.costs.pause()

    def stepped(self) -> None:
        """Notes that a step has ended. Raises OutputError where the checkpoint under way could not be written."""
        if self.writer:
            self.writer.check_written()
            if self.pace:
                self.pace.costs.stepped(time.monotonic(), is_writing=self.writer.is_writing)

    def write(self, step: int, state: State, metadata: Callable[[], Mapping[str, Any]]) -> str | None:
        """Copies the state, on rank 0, and begins to write it. Returns a line for the log where the interval has
        changed. Waits for the checkpoint before, and raises its OutputError."""
        if self.writer:
            meta, began = metadata(), time.monotonic()
            self.writer.write(state, meta)
            if self.pace:
                self.pace.costs.written(time.monotonic() - began, self.writer.seconds)
        if not self.pace:
            return None
        # All ranks take rank 0's interval: they checkpoint together.
        interval = int(self._sum(np.array([self.pace.wanted() if self.writer else 0]))[0])
        self.pace.renew(step, interval)
        return self.pace.news(interval)

    def wait(self) -> None:
        """Waits for the one under way. Raises OutputError where it could not be written."""
        if self.writer:
            self.writer.wait()

    def leave(self) -> None:
        """Waits for the one under way for a short time, in a run that an error ends."""
        if self.writer:
            self.writer.leave()
