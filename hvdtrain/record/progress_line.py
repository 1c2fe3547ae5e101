"""How long a run still takes: the steps that are left by recent ones' time, the validations by that of those before."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.core.progress import Extent, Progress

WINDOW = 10.0
"""Seconds of training over which the step's time is averaged, where that is ten steps or more."""
FORWARD_SHARE = 1 / 3
"""The forward pass's part of a step's time: the backward pass takes twice as long, and a validation has none."""
MOST_STEPS = 10**12
"""The most steps of a run that has an end; a user's loop that names none has more."""


@dataclass(frozen=True)
class Ahead:
    """What is left when an epoch begins."""

    total: int | None
    """Steps of the run; None for a loop that names no end."""
    in_epoch: int
    """Steps that are left of this epoch."""
    an_epoch: int
    """Steps of a whole epoch."""

    @classmethod
    def of(cls, progress: Progress, extent: Extent) -> "Ahead":
        batch = max(1, extent.global_batch)
        an_epoch, in_epoch = extent.train_examples // batch, (extent.train_examples - progress.sample) // batch
        total = progress.step + in_epoch + max(0, extent.epochs - progress.epoch - 1) * an_epoch
        if extent.max_steps is not None:
            total = min(total, extent.max_steps)
        endless = total > MOST_STEPS
        return cls(None if endless else total, min(in_epoch, total - progress.step), an_epoch)


class Estimate:
    """The clock of a run's steps and of the pauses between its epochs, which are validations and checkpoints."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._valid_batches = 0.0
        self._made = 0
        self._step_seconds = 0.0
        self._pause: float | None = None
        self._since = clock()
        self._step = self._epoch_ends = 0
        self.ahead: Ahead | None = None

    def begin_epoch(self, step: int) -> None:
        """An epoch begins after `step` steps."""
        now = self._clock()
        if self._made:
            self._pause = now - self._since
        self._step, self._since, self.ahead = step, now, None

    def expect(self, ahead: Ahead, valid_batches: float = 0.0) -> None:
        """What is left from now on. The epoch's validation reads `valid_batches` global batches, which gives its time
        for as long as none was measured."""
        self.ahead, self._valid_batches = ahead, valid_batches
        self._epoch_ends = self._step + ahead.in_epoch

    def stepped(self, step: int) -> None:
        """Notes that so many steps of the run are made."""
        now = self._clock()
        self._made += 1
        seconds = now - self._since
        # The first one also compiles: it counts only until there is another.
        weight = max(1 / max(1, self._made - 1), min(0.1, seconds / WINDOW))
        self._step_seconds += (seconds - self._step_seconds) * weight
        self._step, self._since = step, now

    @property
    def step(self) -> int:
        """The number of steps made."""
        return self._step

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made since the process began."""
        return self._made > 0

    @property
    def is_in_pause(self) -> bool:
        """Whether the epoch's last step is made."""
        return self.ahead is not None and self._step >= self._epoch_ends

    @property
    def running(self) -> float:
        """Seconds in this step, or in this pause."""
        return self._clock() - self._since

    @property
    def is_slow(self) -> bool:
        """Whether this step or pause takes so long that a person wonders."""
        return self.running > max(2.0, 0.0 if self.is_in_pause else 2 * self._step_seconds)

    def seconds_left(self) -> float | None:
        """Seconds until the run's end; None before a step is measured, or where the end is not known."""
        ahead = self.ahead  # another thread may set it anew
        if not self._made or not ahead or ahead.total is None:
            return None
        steps = ahead.total - self._step
        after_epoch = ahead.total - self._epoch_ends
        pauses = 1 + math.ceil(after_epoch / max(1, ahead.an_epoch))
        pause = self._pause
        if pause is None:
            pause = self._valid_batches * self._step_seconds * FORWARD_SHARE
        now = pause if self.is_in_pause else self._step_seconds
        return max(0.0, steps * self._step_seconds + pauses * pause - min(self.running, now))
