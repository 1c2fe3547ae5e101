"""Signals that a thread hears while the main thread is inside a collective."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

NEAR = (signal.SIGUSR1, signal.SIGUSR2)  # what a job script has SLURM send before its time limit
ASKING_TO_STOP = (signal.SIGTERM, *NEAR)


class Ear:
    """Hears SIGTERM, SIGUSR1 and SIGUSR2 at `hears`, which turns readable; opened elsewhere than in the main thread
    it is deaf, as Python's signals are."""

    # A Python handler runs only once the main thread comes back from C, which a broken collective never does;
    # the byte that C's handler writes can be read by any thread.

    def __init__(self) -> None:
        self.hears, self._mouth = socket.socketpair()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def open(self, in_child: Callable[[], None]) -> None:
        """Begins to hear. `in_child` runs after a fork in the child, which is deaf."""
        self.hears.setblocking(False)
        self._mouth.setblocking(False)
        _open_ears[self] = in_child
        if threading.current_thread() is not threading.main_thread():
            return
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for number in ASKING_TO_STOP:
            self._before[number] = signal.signal(number, _nothing)
            signal.siginterrupt(number, False)  # not every library asks again where a signal cut its call short
        # SLURM may signal every process of a step, and the warning would kill a reader of data, which has no handler:
        # readers inherit that it is blocked here.
        signal.pthread_sigmask(signal.SIG_BLOCK, NEAR)

    def listen_here(self) -> None:
        """Lets the calling thread take the signals that the main thread does not."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NEAR)

    def read(self) -> list[int]:
        """The signals since the last time."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in self.hears.recv(64) if number in ASKING_TO_STOP]
        return []

    def wake(self) -> None:
        """Makes `hears` readable, with no signal to read."""
        with contextlib.suppress(BlockingIOError):
            self._mouth.send(b"\0")

    def close(self) -> None:
        """Gives the signals back."""
        if self._before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NEAR)
        self.deafen()

    def deafen(self) -> None:
        """The same in a forked child, where the warning stays blocked."""
        _open_ears.pop(self, None)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.hears.close()
        self._mouth.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must be set for the byte to be written."""


_open_ears: dict[Ear, Callable[[], None]] = {}


def _deafen_child() -> None:
    # A child shares the socket: a signal of its own would stop the parent.
    for ear, in_child in list(_open_ears.items()):
        ear.deafen()
        in_child()


os.register_at_fork(after_in_child=_deafen_child)
