"""Signals that a thread notices while the main thread is inside a collective."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdtrain.terminal import STOP_SIGNALS, TIME_LIMIT_SIGNALS

_BLOCKED = (signal.SIGHUP, *TIME_LIMIT_SIGNALS)


class SignalWatcher:
    """SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 as bytes at `readable`; opened elsewhere than in the main thread it gets
    none, as Python's handlers do."""

    # A Python handler runs only once the main thread comes back from C, which a broken collective never does;
    # the byte that C's handler writes can be read by any thread.

    def __init__(self) -> None:
        self.readable, self._written = socket.socketpair()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def open(self, in_child: Callable[[], None]) -> None:
        """Begins to watch. `in_child` runs after a fork in the child, which watches no longer."""
        self.readable.setblocking(False)
        self._written.setblocking(False)
        _open_watchers[self] = in_child
        if threading.current_thread() is not threading.main_thread():
            return
        self._wakeup = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            before = signal.signal(number, _nothing)
            # A warning that comes once the run has ended must not kill what has all its results.
            unheard = number in TIME_LIMIT_SIGNALS and before == signal.SIG_DFL
            self._before[number] = signal.SIG_IGN if unheard else before
            signal.siginterrupt(number, False)  # not every library tries again where a signal cut its call short
        # SLURM may signal every process of a step, and a terminal does as it closes: that would kill a reader of data,
        # which has no handler. Readers inherit that they are blocked here.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

    def unblock_here(self) -> None:
        """Lets the calling thread take the signals that the main thread does not."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def read(self) -> list[int]:
        """The signals since the last time."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in self.readable.recv(64) if number in STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """Makes `readable` readable, with no signal to read."""
        with contextlib.suppress(BlockingIOError):
            self._written.send(b"\0")

    def close(self) -> None:
        """Gives the signals back; a warning that nobody handled before is ignored from now on."""
        if self._before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        self.close_in_child()

    def close_in_child(self) -> None:
        """The same in a forked child, where the warning stays blocked."""
        _open_watchers.pop(self, None)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.readable.close()
        self._written.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must be set for the byte to be written."""


_open_watchers: dict[SignalWatcher, Callable[[], None]] = {}


def _close_in_child() -> None:
    # A child shares the socket: a signal of its own would stop the parent.
    for watcher, in_child in list(_open_watchers.items()):
        watcher.close_in_child()
        in_child()


os.register_at_fork(after_in_child=_close_in_child)
