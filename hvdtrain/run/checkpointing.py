"""A run's checkpoints: when one is due on all ranks, and rank 0's writing of it beside training."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.progress import due
from hvdtrain.core.settings import Intervals
from hvdtrain.core.sharing import Sum
from hvdtrain.run.folder import RunFolder
from hvdtrain.run.pace import Pace
from hvdtrain.run.snapshot import Snapshots, Writer


class Checkpointing:
    """Every rank has one, and calls the same methods in the same order; rank 0's writes."""

    def __init__(self, folder: RunFolder | None, intervals: Intervals, step: int, sum_over_ranks: Sum) -> None:
        """`folder` is rank 0's; `step`: how many updates the run has made before."""
        self.writer = Writer(folder, intervals.keep_checkpoints) if folder else None
        self._every, self._sum = intervals.checkpoint_every_steps, sum_over_ranks
        self.pace: Pace | None = None
        if self._every == "auto":
            assert intervals.mtbf_hours
            self.pace = Pace(intervals.mtbf_hours, step)

    def due(self, step: int) -> bool:
        """Whether one is due after this step, inside an epoch too."""
        return self.pace.due(step) if self.pace else self._every != "auto" and due(step, self._every)

    def pause(self) -> None:
        """The time until the next step is none of a step's: an epoch begins."""
        if self.pace:
            self.pace.costs.pause()

    def stepped(self) -> None:
        """A step has ended. Raises OutputError where the checkpoint under way could not be written."""
        if self.writer:
            self.writer.check()
            if self.pace:
                self.pace.costs.stepped(time.monotonic(), is_writing=self.writer.is_writing)

    def write(self, step: int, state: Snapshots, metadata: Callable[[], Mapping[str, Any]]) -> str | None:
        """Copies the state, on rank 0, and begins to write it beside training; a line for the log where the interval is
        a new one. Raises OutputError of the checkpoint before, which it waits for."""
        if self.writer:
            meta, began = metadata(), time.monotonic()
            self.writer.write(state, meta)
            if self.pace:
                self.pace.costs.written(time.monotonic() - began, self.writer.seconds)
        return self._renewed(self.pace, step) if self.pace else None

    def wait(self) -> None:
        """Waits for the one under way. Raises OutputError where it could not be written."""
        if self.writer:
            self.writer.wait()

    def leave(self) -> None:
        """Waits a little for the one under way, in a run that an error ends."""
        if self.writer:
            self.writer.leave()

    def _renewed(self, pace: Pace, step: int) -> str | None:
        """All ranks take rank 0's interval: they checkpoint together."""
        interval = int(self._sum(np.array([pace.wanted() if self.writer else 0]))[0])
        pace.renew(step, interval)
        return pace.news(interval)
