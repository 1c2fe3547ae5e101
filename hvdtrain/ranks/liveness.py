"""The failure detector: a rank that is lost, or silent too long, ends every other one, by its name and host.

A collective library waits for a rank that is gone, for ever or until a launcher kills everything, and names nobody.
So every rank holds a TCP connection to rank 0 and sends heartbeats on it. A connection that closes without a
farewell, or falls silent, is a rank that was lost; where the training thread does not come out of the library in
time, the process is ended by force.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from hvdtrain.errors import AbortedError, HvdtrainError, LoopError
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.peers import Peer, Peers
from hvdtrain.untrusted import one_line

UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class Liveness:
    """Whether all ranks live, and why training cannot continue where one does not.

    On rank 0 `on_lost` is called with that reason, at once and where the process has to be ended by force.
    Where no rank has reported it, `on_found` is called first with the lost rank, its host and why, and then, to end
    the others' tasks, `on_vanished`; where rank 0 is the one that was lost, other ranks do so for it.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers, self.topology = peers, peers.topology
        self.changed = threading.Condition(threading.RLock())
        """Held by whoever reads or changes the state of this rank's world; notified of every change."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_found: Callable[[int, str, str], None] = lambda rank, host, why: None
        self.on_vanished: Callable[[], None] = lambda: None
        self.on_named: Callable[[str, int, str], None] = lambda kind, rank, text: None
        """Called with each warning of a rank: slow or stuck, which rank, and the text."""
        self.in_steps = False
        """Whether this rank now looks after every step whether to stop."""
        self.is_ending = False
        """Whether this rank is ending by itself, so that no other one's loss matters to it."""
        self.reason: str | None = None
        """Why training cannot continue."""
        self.deadline = float("inf")
        """When this process is ended by force."""
        self.signal = signal.SIGTERM
        """That has set the deadline."""
        self._exit_code, self._reported = AbortedError.exit_code, False
        self._faulty: set[str] = set()
        """The diagnostics that had a fault."""

    def wait_for(self, condition: Callable[[], object], seconds: float | None = None) -> bool:
        """Waits, with `changed` held, until that is so or training cannot continue; False after so many seconds."""
        return bool(self.changed.wait_for(lambda: self.reason or condition(), seconds))

    def aborted(self) -> AbortedError:
        """The error of a rank that ends because of another one."""
        error = AbortedError(self.reason, self._exit_code)
        error.reported = self._reported
        return error

    def lost_message(self) -> messages.Lost | None:
        """What a rank that came late has missed, once training cannot continue."""
        return messages.Lost(text=messages.cut(self.reason), code=self._exit_code) if self.reason else None

    def forgive(self, now: float) -> None:
        """Starts all silences anew: this process was suspended, and the silence was its own."""
        for peer in self.peers.connections:
            peer.last_received = now

    def look_for_silence(self, now: float) -> None:
        """Gives up ranks of which nothing came for too long."""
        # Before the first step libraries are loaded from a busy file system.
        limit = timeouts.SILENCE if self.in_steps else timeouts.ARRIVAL
        for peer in [peer for peer in self.peers.connections if now - peer.last_received > limit]:
            if peer.rank >= 0 and not peer.left:
                self._silent(peer, limit)

    def unreadable(self, peer: Peer, error: Exception) -> None:
        """The peer sent what cannot be read."""
        self.peers.drop(peer)
        if peer.rank >= 0 and not peer.left:
            self.lost(f"{peer.name} sent what no rank sends ({type(error).__name__})", finds=peer)

    def disconnected(self, peer: Peer, error: OSError) -> None:
        """The connection to the peer has broken."""
        if peer.left or peer.rank < 0:
            self.peers.drop(peer)
        elif error.errno in UNREACHABLE:
            self._silent(peer, timeouts.UNREACHABLE)
        else:
            self.peers.drop(peer)
            self.lost(f"{peer.name} ended without a message: killed, out of memory, or crashed", finds=peer)

    def _silent(self, peer: Peer, seconds: float) -> None:
        self.peers.drop(peer)
        why = f"no heartbeat from {peer.name} for {seconds:.0f} seconds: its node is down or cut off, or it hangs"
        self.lost(why, finds=peer)

    def lost(self, why: str, code: int = AbortedError.exit_code, *, finds: Peer | None = None) -> None:
        """Another rank cannot continue, so this one cannot. `finds`: the rank, where no other one has reported it."""
        if self.reason or self.is_ending:
            return
        self.reason, self._exit_code = why, code
        self.deadline = min(self.deadline, time.monotonic() + timeouts.GRACE)
        if finds and self.topology.local_rank == 0:
            text = f"{why}; all ranks end. The same command continues from the last checkpoint."
            print_error(self.topology, AbortedError, text)
            self._reported = True
        if self.topology.is_rank_0:
            self.peers.send(messages.Lost(text=messages.cut(why), code=code))
            threading.Thread(target=self._record, args=(why,), daemon=True).start()  # its file system may hang
        # Where rank 0's node is gone, the first rank of the next one acts for it.
        acts = self.topology.local_rank == 0 and self.topology.node in {0, 1, None}
        if finds and (acts or self.topology.rank == 1):
            rank, host = finds.rank, finds.endpoint.host
            recording = threading.Thread(target=self.on_found, args=(rank, host, why), daemon=True)
            recording.start()
            recording.join(timeouts.LAST_STATUS)  # before this rank is ended too, but its file system may hang
        if finds and acts:
            with contextlib.suppress(OSError):
                self.on_vanished()

    def lost_together(self, why: str, kind: type[HvdtrainError] = LoopError) -> None:
        """No rank can continue: as they have parted, which rank 0 finds, or as this one cannot."""
        if not self.reason and not self.is_ending:
            print_error(self.topology, kind, f"{why.rstrip('.')}.")
            self._reported = True
            self.lost(why)

    @contextlib.contextmanager
    def diagnosing(self, what: str) -> Iterator[None]:
        """Around a diagnostic: its fault is reported once; it ends nothing, and is nobody else's."""
        try:
            yield
        except Exception as error:
            if what not in self._faulty:
                self._faulty.add(what)
                text = f"a diagnostic ({what}) has a fault of hvdtrain's own, and training continues: {_fault(error)}"
                print_warning(self.topology, text)

    def break_down(self, error: Exception) -> None:
        """This rank cannot watch the others any more, so that no rank can continue."""
        with self.changed:
            if not self.reason and not self.is_ending:
                text = str(error) if isinstance(error, HvdtrainError) else f"a fault of hvdtrain: {_fault(error)}"
                self.lost_together(f"rank {self.topology.rank} on {self.topology.host} failed: {text}", AbortedError)
                self.changed.notify_all()
                self.peers.send(messages.Failed(text=messages.cut(text), code=self._exit_code))

    def fail(self, why: str) -> None:
        """`signal` ends this rank whatever its training thread does."""
        self.reason, self._exit_code = f"{self.signal.name}{why}", 128 + self.signal
        self.peers.send(messages.Failed(text=self.reason, code=self._exit_code))

    def end(self) -> None:
        """Ends the process from here: the training thread may be inside C for ever."""
        with self.changed:
            if not self.reason:
                self.fail(f", and no step ended within {timeouts.CHECKPOINT:.0f} seconds")
            reason = self.reason or ""
        last = threading.Thread(target=self._record_end, args=(reason,), daemon=True)
        last.start()
        last.join(timeouts.LAST_STATUS)
        os._exit(self._exit_code)

    def _record_end(self, reason: str) -> None:
        if self.topology.is_rank_0:
            if not self._reported:
                print_error(self.topology, AbortedError, str(AbortedError(reason)))
            self._record(reason)

    def _record(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be what failed
            self.on_lost(reason)


def _fault(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}, {traceback.format_tb(error.__traceback__)[-1]}")


def print_error(topology: Topology, kind: type[HvdtrainError], text: str) -> None:
    """One line of this rank on stderr."""
    _print(f"{kind.__name__}{_where(topology)}: {text}")


def print_warning(topology: Topology, text: str) -> None:
    """One line of this rank on stderr."""
    _print(f"warning{_where(topology)}: {text}")


def _where(topology: Topology) -> str:
    return f" (rank {topology.rank} on {topology.host})" if topology.size > 1 else ""


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
        print(line, file=sys.stderr, flush=True)
