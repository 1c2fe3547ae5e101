"""The failure detector: where a rank is lost, or silent for too long, it names the rank and ends all others.

A collective library waits for a rank that is gone, for ever or until a launcher kills everything, and does not name it.
So every rank has a TCP connection to rank 0, and sends heartbeats on it. A rank is lost whose connection closes without
a farewell, or becomes silent. Where the training thread then does not return from the library in time, the process
is ended by force.
"""

import collections
import contextlib
import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdtrain import processors
from hvdtrain.errors import AbortedError, HvdtrainError, LoopError
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.peers import Peer, Peers
from hvdtrain.ranks.stacks import kill, waits_for_ranks
from hvdtrain.terminal import counted
from hvdtrain.untrusted import one_line

UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}

KILLS = 30
"""How many looks at the clock ago a process may have been ended for lack of memory, to be named beside a lost rank."""


class Listener:
    """Receives what the ranks report to their run, from any thread. These methods do nothing. Those of the class in
    run/process.py print, and write into the run folder."""

    def error(self, kind: type[HvdtrainError], text: str) -> None:
        """This rank reports an error, for a person to read."""

    def warning(self, text: str) -> None:
        """This rank reports a problem that training survives, for a person to read."""

    def waiting(self, text: Callable[[], str]) -> None:
        """The ranks wait for one another; `text` returns for which ones at the moment."""

    def lost(self, reason: str) -> None:
        """On rank 0: training cannot continue. Called at once, and again where the process is ended by force."""

    def lost_rank_found(self, rank: int, host: str, why: str) -> None:
        """A rank was lost without a report. Called on one rank of a host that is still there."""

    def vanished(self) -> None:
        """After `lost_rank_found`, on one rank: the other tasks of the launch have to be ended."""

    def signalled(self, text: str) -> None:
        """On rank 0: a signal ends all ranks soon, maybe before they can report more."""

    def named(self, kind: str, rank: int, text: str) -> None:
        """On rank 0: a rank is "slow" or "stuck"; `text` is the warning."""

    def times(self, times: Mapping[int, messages.Times], hosts: Mapping[int, int]) -> None:
        """On rank 0: how long the steps of each rank take. `hosts`: for each rank, the first rank of its host."""

    def energy(self, totals: Callable[[], Mapping[str, Mapping[str, float]]], *, is_last: bool) -> None:
        """On rank 0: a counter was read. `totals` returns what all hosts have used since the run began."""


class Liveness:
    """Whether training can continue; where it cannot, why, and how this rank ends."""

    def __init__(self, peers: Peers, listener: Listener) -> None:
        self.peers, self.topology, self.listener = peers, peers.topology, listener
        self.changed = threading.Condition(threading.RLock())
        """Held by a thread that reads or changes the state of this rank's world; notified of every change."""
        self.in_steps = False
        """Whether this rank now checks after every step whether to stop."""
        self.is_ending = False
        """Whether this rank is ending by itself, so that it no longer matters that another rank is lost."""
        self.reason: str | None = None
        """Why training cannot continue."""
        self.left = ""
        """The first rank that has finished or exited, as far as this one knows."""
        self.left_code = AbortedError.exit_code
        """The exit code of those that it has left behind."""
        self.deadline = float("inf")
        """When this process is ended by force."""
        self.signal = signal.SIGTERM
        """The signal that has set the deadline."""
        self._kills = collections.deque([processors.memory_kills()], KILLS)
        self._exit_code, self._reported = AbortedError.exit_code, False
        self._faulty: set[str] = set()
        """The diagnostics that had a fault."""

    @waits_for_ranks
    def wait_for(self, condition: Callable[[], object], seconds: float | None = None) -> bool:
        """Waits, with `changed` held, until the condition is true or training cannot continue. False where the time is
        over."""
        return bool(self.changed.wait_for(lambda: self.reason or condition(), seconds))

    def aborted(self) -> AbortedError:
        """The error of a rank that ends because of another one."""
        error = AbortedError(self.reason, self._exit_code)
        error.reported = self._reported
        return error

    def count_kills(self) -> None:
        """Notes how many processes were ended for lack of memory by now. Called at each look at the clock."""
        self._kills.append(processors.memory_kills())

    def kills(self) -> int:
        """How many processes of this job, on this host, the kernel has lately ended for lack of memory."""
        return processors.memory_kills() - self._kills[0]

    def lost_message(self) -> messages.Lost | None:
        """The message for a rank that connects after training has ended; None while training continues."""
        return messages.Lost(text=messages.cut(self.reason), code=self._exit_code) if self.reason else None

    def lost(self, why: str, code: int = AbortedError.exit_code, *, finds: Peer | None = None) -> None:
        """Another rank cannot continue, so that this one cannot. `finds`: the rank, where this one has found it."""
        if self.reason or self.is_ending:
            return
        self.reason, self._exit_code = why, code
        self.deadline = min(self.deadline, time.monotonic() + timeouts.GRACE)
        if finds and (self.topology.local_rank == 0 or self.topology.rank == 1):  # the latter where rank 0 is lost
            text = f"{why}; all ranks end. The same command continues from the last checkpoint."
            self.listener.error(AbortedError, text)
            self._reported = True
        elif self.topology.local_rank == 0 and (kills := self.kills()):
            self.listener.warning(f"{ended_for_memory(kills)}.")
        if self.topology.is_rank_0:
            self.peers.send(messages.Lost(text=messages.cut(why), code=code))
            threading.Thread(target=self._record, args=(why, False), daemon=True).start()  # its file system may hang
        # Where rank 0's node is gone, the first rank of the next one acts for it.
        acts = self.topology.local_rank == 0 and self.topology.node in {0, 1, None}
        if finds and (acts or self.topology.rank == 1):
            # Before this rank is ended too.
            _within_time(self.listener.lost_rank_found, finds.rank, finds.endpoint.host, why)
        if finds and acts:
            with contextlib.suppress(OSError):
                self.listener.vanished()

    def lost_together(self, why: str, kind: type[HvdtrainError] = LoopError) -> None:
        """Ends all ranks, as rank 0 finds that they have diverged, or as this one cannot continue."""
        if not self.reason and not self.is_ending:
            self.listener.error(kind, f"{why.rstrip('.')}.")
            self._reported = True
            self.lost(why)

    @contextlib.contextmanager
    def diagnosing(self, what: str) -> Iterator[None]:
        """Around a diagnostic, as the search for slow ranks. An error in it is reported once, and ends no run."""
        try:
            yield
        except Exception as error:
            if what not in self._faulty:
                self._faulty.add(what)
                text = f"a diagnostic ({what}) has a fault of hvdtrain's own, and training continues: {_fault(error)}"
                self.listener.warning(text)

    def break_down(self, error: Exception) -> None:
        """This rank can no longer watch the others, so that no rank can continue."""
        with self.changed:
            if not self.reason and not self.is_ending:
                text = str(error) if isinstance(error, HvdtrainError) else f"a fault of hvdtrain: {_fault(error)}"
                if isinstance(error, OSError) and error.errno == errno.EBADF:
                    text = "its program has closed file descriptors that are not its own, as os.closerange does"
                    self.deadline = 0.0  # else Open MPI prints a line each turn, too
                self.lost_together(f"rank {self.topology.rank} on {self.topology.host} failed: {text}", AbortedError)
                self.changed.notify_all()
                self.peers.send(messages.Failed(text=messages.cut(text), code=self._exit_code))

    def fail(self, why: str) -> None:
        """Reports to the other ranks that `signal` ends this one."""
        self.reason, self._exit_code = f"{self.signal.name}{why}", 128 + self.signal
        self.peers.send(messages.Failed(text=self.reason, code=self._exit_code))

    def end(self) -> None:
        """Ends the process, as the training thread may be in C code for ever."""
        with self.changed:
            if not self.reason:
                self.fail(f", and no step ended within {timeouts.CHECKPOINT:.0f} seconds")
            reason = self.reason or ""
        if self.topology.is_rank_0:
            _within_time(self._record, reason, not self._reported)
        os._exit(self._exit_code)

    def _record(self, reason: str, prints: bool) -> None:
        if prints:
            self.listener.error(AbortedError, str(AbortedError(reason)))
        with contextlib.suppress(OSError):  # the disk may be what failed
            self.listener.lost(reason)


class FailureDetector:
    """Finds the ranks that are silent for too long, end without a message or send what no rank sends."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology

    def forgive(self, now: float) -> None:
        """Measures every silence anew, after this process was suspended and could read nothing."""
        for peer in self.peers.connections:
            peer.last_received = now

    def look_for_silence(self, now: float) -> None:
        """Declares ranks lost that have sent nothing for too long."""
        self.liveness.count_kills()
        # Before the first step libraries are loaded from a busy file system.
        limit = timeouts.SILENCE if self.liveness.in_steps else timeouts.ARRIVAL
        for peer in [peer for peer in self.peers.connections if now - peer.last_received > limit]:
            if peer.rank >= 0 and not peer.left:
                self._silent(peer, limit)

    def unreadable(self, peer: Peer, error: Exception) -> None:
        """The peer has sent what cannot be read."""
        self.peers.drop(peer)
        if peer.rank >= 0 and not peer.left:
            self.liveness.lost(f"{peer.name} sent what no rank sends ({type(error).__name__})", finds=peer)

    def disconnected(self, peer: Peer, error: OSError) -> None:
        """The connection to the peer has broken."""
        if peer.left or peer.rank < 0:
            self.peers.drop(peer)
        elif error.errno in UNREACHABLE:
            self._silent(peer, timeouts.UNREACHABLE)
        else:
            self.peers.drop(peer)
            why = "killed, out of memory, or crashed"
            if kills := peer.endpoint.host == self.topology.host and self.liveness.kills():
                why = "out of memory" if kills == 1 else f"{why}; {ended_for_memory(kills)}"
            self.liveness.lost(f"{peer.name} ended without a message: {why}", finds=peer)

    def _silent(self, peer: Peer, seconds: float) -> None:
        self.peers.drop(peer)
        why = f"no heartbeat from {peer.name} for {seconds:.0f} seconds: its node is down or cut off, or it hangs"
        self.liveness.lost(why, finds=peer)
        # Rank 1 reports the silence of rank 0, which another rank of the host must not end before.
        if peer.process and peer.endpoint.host == self.topology.host and self.topology.local_rank <= 1:
            kill(peer.process)


def ended_for_memory(number: int) -> str:
    """As a part of a message."""
    return f"{counted(number, 'process')} of this job {'was' if number == 1 else 'were'} ended for lack of memory"


def _within_time(call: Callable[..., None], *arguments: Any) -> None:
    """Calls it in a thread, and waits for it for a short time: its file system may hang."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(timeouts.LAST_STATUS)


def _fault(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}, {traceback.format_tb(error.__traceback__)[-1]}")
