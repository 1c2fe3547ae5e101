"""Checkpoints that are written beside training: a snapshot in memory, then a thread that commits it."""

import copy
import threading
import time
from collections.abc import Mapping
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
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """That the last whole one took, beside training."""

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(self, state: Snapshots, meta: Mapping[str, Any]) -> None:
        """Copies the state, and begins to write it. Raises OutputError of the one before."""
        self.wait()
        made = Checkpoint(state.snapshot(), copy.deepcopy(dict(meta)))
        # Not a daemon: the interpreter waits for it at the process's end.
        self._thread = threading.Thread(target=self._commit, args=(made,), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raises OutputError where the one under way could not be written."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Waits for the one under way. Raises OutputError where it could not be written."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self.check()

    def leave(self) -> None:
        """Waits a little, in a run that an error ends: other ranks wait for its report. What is not written by then is
        written while the process ends, unless its launcher kills it."""
        if self._thread:
            self._thread.join(timeouts.LAST_CHECKPOINT)

    def _commit(self, made: Checkpoint) -> None:
        began = time.monotonic()
        try:
            checkpoint.commit(self._folder.checkpoints, made, self._keep)
            self._folder.write_status("running", step=made.meta["step"])
        except BaseException as error:  # the training thread's to raise
            self._error = error
        self.seconds = time.monotonic() - began
