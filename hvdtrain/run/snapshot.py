"""Checkpoints that are written beside training: a snapshot in memory, then a thread that commits it."""

import copy
import os
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any, Protocol

import numpy as np

from hvdtrain.run import checkpoint, timeouts
from hvdtrain.run.checkpoint import Checkpoint
from hvdtrain.run.folder import RunFolder


class Snapshots(Protocol):
    """A training state that can be copied."""

    def snapshot(self) -> Mapping[str, np.ndarray]:
        """Copies of the tensors as they are now. The next call overwrites them."""


class Writer:
    """Rank 0's writer of checkpoints. At most one is under way: the next waits for it, so that there is never more than
    one snapshot in memory.

    What goes wrong in the thread is raised by the next call of any method but `leave`.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # One thread for all: who starts one waits until a processor, busy with training, has run it. The interpreter
        # waits for its work at the process's end.
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._last: futures.Future[None] | None = None
        self._process = os.getpid()
        self.seconds = 0.0
        """That the last whole one took, beside training."""

    @property
    def is_writing(self) -> bool:
        return bool(self._under_way())

    def write(self, state: Snapshots, meta: Mapping[str, Any]) -> None:
        """Copies the state, and begins to write it. Raises OutputError of the one before."""
        self.wait()
        made = Checkpoint(state.snapshot(), copy.deepcopy(dict(meta)))
        self._last = self._thread.submit(self._commit, made)

    def check(self) -> None:
        """Raises OutputError where the one under way could not be written."""
        if self._last and self._last.done():
            done, self._last = self._last, None
            done.result()

    def wait(self) -> None:
        """Waits for the one under way. Raises OutputError where it could not be written."""
        futures.wait(self._under_way())
        self.check()

    def leave(self) -> None:
        """Waits a little, in a run that an error ends: other ranks wait for its report. What is not written by then is
        written while the process ends, unless its launcher kills it."""
        futures.wait(self._under_way(), timeouts.LAST_CHECKPOINT)

    def _under_way(self) -> list[futures.Future[None]]:
        """The last one while it is; none in a forked child, which has no such thread."""
        return [self._last] if self._last and not self._last.done() and os.getpid() == self._process else []

    def _commit(self, made: Checkpoint) -> None:
        began = time.monotonic()
        if self._folder.holder:
            self._folder.holder.check()
        checkpoint.commit(self._folder.checkpoints, made, self._keep)
        self._folder.write_status("running", step=made.meta["step"])
        self.seconds = time.monotonic() - began
