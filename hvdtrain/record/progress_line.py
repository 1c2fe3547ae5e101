"""How long a run will still take: the remaining steps by the time of recent steps, validations by earlier ones."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.core.progress import Progress, RunLength

WINDOW = 10.0
"""The time of a step is averaged over the last WINDOW seconds of training, or over the last ten steps."""
FORWARD_SHARE = 1 / 3
"""The forward pass's part of a step's time. A validation has no backward pass, which takes twice as long."""
MOST_STEPS = 10**12
"""A run of more steps is a user's loop that names no end."""


@dataclass(frozen=True)
class Ahead:
    """What is left when an epoch begins."""

    total: int | None
    """The number of steps of the run; None for a loop that names no end."""
    in_epoch: int
    """How many steps are left of this epoch."""
    an_epoch: int
    """The number of steps of a whole epoch."""

    @classmethod
    def from_progress(cls, progress: Progress, length: RunLength) -> "Ahead":
        batch = max(1, length.global_batch)
        an_epoch, in_epoch = length.train_examples // batch, (length.train_examples - progress.sample) // batch
        total = progress.step + in_epoch + max(0, length.epochs - progress.epoch - 1) * an_epoch
        if length.max_steps is not None:
            total = min(total, length.max_steps)
        endless = total > MOST_STEPS
        return cls(None if endless else total, min(in_epoch, total - progress.step), an_epoch)


def steps_made(progress: Progress, length: RunLength) -> str:
    """How many steps a run has made, of how many where that is known, as text."""
    total = Ahead.from_progress(progress, length).total if length.global_batch else None
    return f"{progress.step}{f' of {total}' if total else ''} steps"


class Estimate:
    """Measures a run's steps and the pauses between its epochs, which are validations and checkpoints."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._valid_batches = 0.0
        self.made = 0
        """The number of steps made since the process began."""
        self._step_seconds = 0.0
        self._pause: float | None = None
        self._since = clock()
        self.step = self._epoch_ends = 0
        self.ahead: Ahead | None = None

    def begin_epoch(self, step: int) -> None:
        """Begins an epoch, after `step` steps of the run."""
        now = self._clock()
        if self.made:
            self._pause = now - self._since
        self.step, self._since, self.ahead = step, now, None

    def expect(self, ahead: Ahead, valid_batches: float = 0.0) -> None:
        """Sets what is left from now on. The time of a validation follows from its number of global batches until one
        was measured."""
        self.ahead, self._valid_batches = ahead, valid_batches
        self._epoch_ends = self.step + ahead.in_epoch

    def stepped(self, step: int) -> None:
        """Notes that the run has now made so many steps."""
        now = self._clock()
        self.made += 1
        seconds = now - self._since
        # The first one also compiles: it counts only until there is another.
        weight = max(1 / max(1, self.made - 1), min(0.1, seconds / WINDOW))
        self._step_seconds += (seconds - self._step_seconds) * weight
        self.step, self._since = step, now

    @property
    def is_in_pause(self) -> bool:
        """Whether the epoch's last step is made."""
        return self.ahead is not None and self.step >= self._epoch_ends

    @property
    def running(self) -> float:
        """For how many seconds this step, or this pause, has lasted."""
        return self._clock() - self._since

    @property
    def is_slow(self) -> bool:
        """Whether this step or pause takes unusually long."""
        return self.running > max(2.0, 0.0 if self.is_in_pause else 2 * self._step_seconds)

    def seconds_left(self) -> float | None:
        """Seconds until the run's end; None before a step is measured, or where the end is not known."""
        ahead = self.ahead  # another thread may set it anew
        if not self.made or not ahead or ahead.total is None:
            return None
        steps = ahead.total - self.step
        after_epoch = ahead.total - self._epoch_ends
        pauses = 1 + math.ceil(after_epoch / max(1, ahead.an_epoch))
        pause = self._pause
        if pause is None:
            pause = self._valid_batches * self._step_seconds * FORWARD_SHARE
        now = pause if self.is_in_pause else self._step_seconds
        return max(0.0, steps * self._step_seconds + pauses * pause - min(self.running, now))
