"""Signals, which a thread notices while the main thread is in a collective, and the agreement to stop.

A signal to any rank ends all ranks after the same step, with a checkpoint.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdtrain.errors import StoppedError
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.stacks import is_operation, waits_for_ranks
from hvdtrain.terminal import END_SIGNALS, STOP_SIGNALS, TIME_LIMIT_SIGNALS

LAUNCHER = "the launcher was ended by a signal"
MEANS = {signal.SIGTERM: "scancel, the time limit or kill", signal.SIGHUP: "the terminal or ssh session has ended"}


class StopAgreement:
    """The step after which all ranks stop, and the signal that has requested it.

    Where an engine is asynchronous, a rank may be many steps ahead of another. So rank 0 first asks every rank how many
    steps it has made. A rank that has replied makes one step more at most, and waits after it until rank 0 has chosen
    the last step, which is none that any rank has passed. Monitors reply, not training threads, and a rank that waits
    has begun every collective of its steps: so none of them waits for ever for a rank that waits here.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology
        self.signal: int | None = None
        self.too_early = False
        """Whether the signal came before the first step."""
        self.step: int | None = None
        """After how many steps of each process all ranks stop, once they have agreed."""
        self.cause = ""
        """The cause of the signal, where that is known, in parentheses."""
        self.stopped = False
        """Whether training has stopped in order."""
        self._requested = self._warned = self._has_replied = False
        self._made = 0
        """The number of steps that this process has made, in all its runs."""
        self._recording: threading.Thread | None = None

    def stops_after_step(self) -> bool:
        """Whether all ranks stop now. Every rank calls it after every step."""
        with self.liveness.changed:
            self.liveness.in_steps = True
            self._made += 1
            if self.liveness.reason and self.step is None:  # the library may live on, as where only a monitor is lost
                raise self.liveness.aborted()
            if self.step is None and self._requested and self.topology.is_rank_0 and self._all_reachable():
                self._choose()
            elif self._has_replied:
                self.liveness.wait_for(self.is_over)
            stops = self.step is not None and self._made >= self.step
            if stops:
                self.reacts()
            return stops

    def reacts(self) -> None:
        """The training thread begins to stop, and a checkpoint may take a while."""
        with self.liveness.changed:
            self.liveness.deadline = self.liveness.deadline if self.liveness.reason else float("inf")

    def _choose(self) -> None:
        """On rank 0: chooses the last step, which the rank that has made most steps may have begun."""
        self.peers.send(messages.StopPrepare())
        self.liveness.wait_for(lambda: all(peer.steps_made is not None for peer in self.peers.ranks()))
        if not self.liveness.reason:
            made = [self._made, *(peer.steps_made for peer in self.peers.ranks() if peer.steps_made is not None)]
            self.step = max(made) + (len(made) > 1)  # the same whether or not a rank has ended the step before
            self.peers.send(messages.StopAt(step=self.step, signal=self.signal or signal.SIGTERM))

    def prepare(self) -> None:
        """Replies to rank 0 how many steps this rank has made."""
        self._has_replied = True
        self.peers.send(messages.StopPrepared(steps=self._made))

    def is_over(self) -> bool:
        """On all ranks but rank 0: whether the last step is known, or rank 0 has left."""
        return self.step is not None or all(peer.left or peer.exited is not None for peer in self.peers.ranks())

    @is_operation
    @waits_for_ranks
    def exits(self, code: int) -> bool:
        """Called where the program exits with this code in the middle of the training. Waits until all ranks have
        exited after the same step, or training cannot continue; the latter returns False."""
        # A rank that waits here while others wait in their next step is named as one in another collective.
        with self.liveness.changed:
            self.peers.send(messages.Exited(steps=self._made, code=code))
            decides, ranks = self.topology.is_rank_0, self.peers.ranks
            self.liveness.wait_for(lambda: all(p.left or (decides and p.exited is not None) for p in ranks()))
            other = next((p for p in ranks() if decides and p.exited not in {None, self._made}), None)
            if other and not self.liveness.reason:
                here = f"rank 0 on {self.topology.host} after {self._made}"
                self.liveness.lost(f"{other.name} exited after {other.exited} steps of this launch, {here}")
            return not self.liveness.reason

    def error(self, step: int) -> StoppedError:
        """The error with which all ranks end after the last checkpoint, made at `step`."""
        self.stopped = self.liveness.is_ending = True
        if self._recording:
            self._recording.join(timeouts.LAST_STATUS)
        number = self.signal or signal.SIGTERM
        return StoppedError(step, f"{signal.Signals(number).name}{self.cause}", 128 + number)

    def agreed(self, message: messages.StopAt) -> None:
        """Notes the step that rank 0 has chosen."""
        self.step, self.signal = message.step, message.signal

    def signalled(self, number: int, now: float, *, launcher: bool = False) -> None:
        """Requests a stop of all ranks, as this process was sent a signal, or its launcher has ended."""
        if self.liveness.reason or self.stopped:  # all end already, or this package itself has called scancel
            return
        self.requested(number, launcher=launcher)
        if not self.topology.is_rank_0:
            self.peers.send(messages.StopRequest(signal=number, launcher=launcher))
        if number in END_SIGNALS:
            self.liveness.signal = signal.Signals(number)
            left = timeouts.CHECKPOINT if self.liveness.in_steps else 0.0
            self.liveness.deadline = min(self.liveness.deadline, now + left)
            if not left:
                self.liveness.fail(f"{self.cause} before the first step")

    def requested(self, number: int, where: str = "", *, launcher: bool = False) -> None:
        """Notes that a signal requests a stop. Rank 0 reports it once, and again where SIGTERM or SIGHUP comes after a
        warning."""
        again, self._requested = self.signal in {number, *END_SIGNALS}, True
        if again or self.liveness.reason:
            return
        self.cause = f" ({LAUNCHER})" * launcher
        name, in_steps = signal.Signals(number).name, self.liveness.in_steps
        self.signal, self.too_early = number, self.too_early or not in_steps
        if self.topology.is_rank_0:
            means = LAUNCHER if launcher else MEANS.get(signal.Signals(number), "the time limit is near")
            then = "a checkpoint after this step or validation, then the end" if in_steps else "no step was made yet"
            if number in END_SIGNALS:
                last = "it could report no more; the same command continues from the last checkpoint."
                given = (f"{name}{self.cause}: {last}",)
                self._recording = threading.Thread(target=self.liveness.listener.signalled, args=given, daemon=True)
                self._recording.start()
            self.liveness.listener.error(StoppedError, f"{name}{where} ({means}): {then}.")

    def _all_reachable(self) -> bool:
        """Whether every rank can learn of the stop, as none may stop where another would not."""
        reachable = len(self.peers.ranks()) == self.topology.size - 1
        if not (reachable or self._warned):
            self._warned = True
            self.liveness.listener.error(StoppedError, f"cannot stop in order: {self.peers.absent()}.")
        return reachable


_BLOCKED = (signal.SIGHUP, *TIME_LIMIT_SIGNALS)


class SignalWatcher:
    """Makes SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 readable as bytes at `readable`. Where another thread than
    the main one opens it, it gets no signals, as Python's handlers."""

    # A Python handler runs only when the main thread returns from C code, which it never does from a broken
    # collective. The byte that the handler in C writes can be read by any thread.

    def __init__(self) -> None:
        self.readable, self._written = socket.socketpair()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def open(self, in_child: Callable[[], None]) -> None:
        """Begins to watch. A forked child, which does not watch, calls `in_child`."""
        self.readable.setblocking(False)
        self._written.setblocking(False)
        _open_watchers[self] = in_child
        if threading.current_thread() is not threading.main_thread():
            return
        self._wakeup = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            before = signal.getsignal(number)
            signal.signal(number, _followed(before) if callable(before) else _nothing)
            # A warning that comes after the run's end must not kill a process that has all its results.
            is_ignored = number in TIME_LIMIT_SIGNALS and before == signal.SIG_DFL
            self._before[number] = signal.SIG_IGN if is_ignored else before
            signal.siginterrupt(number, False)  # not every library repeats a call that a signal has interrupted
        # SLURM may send signals to every process of a step, and so does a terminal that closes. They would kill a
        # process that reads data, which has no handler. It inherits that they are blocked here.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

    def unblock_here(self) -> None:
        """Lets the calling thread receive the signals that the main thread blocks."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def read(self) -> list[int]:
        """The signals that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in self.readable.recv(64) if number in STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """Makes `readable` readable, with no signal to read."""
        with contextlib.suppress(BlockingIOError):
            self._written.send(b"\0")

    def close(self) -> None:
        """Restores the handlers of before. A warning signal that had none is ignored from now on."""
        if self._before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Does the same in a forked child, where the warning signals stay blocked."""
        _open_watchers.pop(self, None)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.readable.close()
        self._written.close()


def _followed(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    """The program's own handler, but for its exit: the run ends after this step, with a checkpoint."""

    def call(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            handler(number, frame)

    return call


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: without a handler, Python writes no byte for a signal."""


_open_watchers: dict[SignalWatcher, Callable[[], None]] = {}


def _close_in_child() -> None:
    # A child shares the socket, so that a signal to the child would stop the parent.
    for watcher, in_child in list(_open_watchers.items()):
        watcher.close_in_child()
        in_child()


os.register_at_fork(after_in_child=_close_in_child)
