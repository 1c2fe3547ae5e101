"""A line between the ranks beside the collective library: who is there, who went without a word, when to stop.

A collective library waits for a rank that is gone, for ever or until a launcher kills everything, and names nobody.
So every rank holds a TCP connection to the chief and shows a sign of life on it. A connection that closes without a
farewell, or falls silent, ends every rank, with a line that names the lost one and its host. Where the launcher
tells the chief's host (srun, torchrun) the ranks meet before the collective library starts, so that nobody waits
there for a rank that refused; elsewhere they learn its address through the library.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvdtrain import meeting
from hvdtrain.errors import AbortedError, StoppedError, TrainingError, WorldError
from hvdtrain.meeting import Meeting, Seat
from hvdtrain.signals import Ear
from hvdtrain.topology import Topology

TICK = 0.5  # seconds between two looks at the clock
BEAT = 2.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one after which a rank is given up
GRACE = 8.0  # seconds the training thread has to end by itself once a rank is lost
STOPPING = 20.0  # seconds a SIGTERM leaves for a last checkpoint: SLURM kills 30 after it
ARRIVAL = 300.0  # seconds for all ranks to come: a busy file system starts them minutes apart
OUTLASTING = 60.0  # seconds the others wait for the chief's last checkpoint
FAREWELL = 10.0  # seconds a rank that refused waits for the others, to tell them
LONGEST = 65_536  # bytes of a message
UNKNOWN = Seat("", 0, 0)
NEAR = {signal.SIGUSR1, signal.SIGUSR2}  # what a job script has SLURM send before its time limit

Message = dict[str, Any]
Share = Callable[[np.ndarray], np.ndarray]
"""Adds an array of int64 over all ranks and gives every rank the result."""


@dataclass
class _Peer:
    """The other end of a connection; its rank is -1 until it has said it."""

    socket: socket.socket
    heard: float
    rank: int = -1
    seat: Seat = UNKNOWN
    ready: bool = False
    stopping: bool = False
    left: bool = False
    unread: bytes = b""


class Lifeline:
    """This rank's end of the line, with an ear for the signals that ask a run to stop.

    On the chief `on_lost` is called once, with the reason why training cannot go on, and `on_vanished` besides where a
    rank ended without a word.
    """

    def __init__(self, topology: Topology, place: Meeting | None = None) -> None:
        self.topology, self.place = topology, place
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_vanished: Callable[[], None] = lambda: None
        self.in_steps = False
        """Whether the run now comes by `stops_at` after every step."""
        self.signal: int | None = None
        self.too_early = False
        """Whether that signal came before the first step."""
        self.seats: list[Seat] = []
        """Every rank's seat, once they have met."""
        self.rendezvous: int | None = None
        """The port of the rendezvous server that the chief opened for the ranks, once they have met."""
        self.reason: str | None = None
        self._code = AbortedError.exit_code
        self._peers: list[_Peer] = []
        self._came: set[int] = set()
        self._listener: socket.socket | None = None
        self._addresses: list[tuple[str, int]] = []
        self._stop_at: int | None = None
        self._chiefs_interface: str | None = None
        self._wanted = self._met = self._ended = self._spoken = False
        self._failure: Message | None = None
        self._deadline = float("inf")
        self._changed = threading.Condition(threading.RLock())
        self._selector = selectors.DefaultSelector()
        self._ear = Ear()
        self._thread: threading.Thread | None = None

    # What the training thread calls.

    def begin(self) -> None:
        """Listens for signals and, where the ranks can meet already, for them."""
        self._ear.open(self._close_after_fork)
        self._selector.register(self._ear.hears, selectors.EVENT_READ)
        if self.place and self.topology.is_chief:
            self._listen(self.place.ports[:-1])
        elif self.place:
            self._addresses = [(self.place.host, port) for port in self.place.ports[:-1]]
        self._thread = threading.Thread(target=self._work, name="lifeline", daemon=True)
        self._thread.start()

    def meet(self, open_rendezvous: Callable[[list[Seat]], int | None]) -> None:
        """Waits until every rank is ready to start the collective library; fills `seats` and `rendezvous`.

        Returns at once where the ranks cannot meet yet. Raises AbortedError where one refused, WorldError
        where one did not come.
        """
        if not self.place:
            return
        with self._changed:
            self._met = True
            if not self.topology.is_chief:
                self._tell({"is": "ready"})
            came = self._changed.wait_for(lambda: self.reason or self.seats or self._all_ready(), ARRIVAL)
            if self.reason:
                raise self._aborted()
            if not came:
                raise WorldError(f"{self._missing()} within {ARRIVAL:.0f} seconds; {self._remedy()}")
            if self.topology.is_chief:
                by_rank = {peer.rank: peer.seat for peer in self._peers}
                self.seats = [self._seat(), *(by_rank[rank] for rank in range(1, self.topology.size))]
                self.rendezvous = open_rendezvous(self.seats)
                one_host = len({seat.node for seat in self.seats}) == 1
                self._chiefs_interface = meeting.interface_of("127.0.0.1") if one_host else self.interface()
                seats = [asdict(seat) for seat in self.seats]
                go = {"rendezvous": self.rendezvous, "interface": self._chiefs_interface, "seats": seats}
                self._tell({"is": "go", **go})

    def chief_address(self) -> str:
        """The chief's address, as this rank reaches it."""
        near = self.topology.is_chief or self.seats[0].node == self.topology.node
        return "127.0.0.1" if near else str(self._peers[0].socket.getpeername()[0])

    def interface(self) -> str | None:
        """The network interface over which this host talks to the others; None where it cannot be told."""
        far = [peer for peer in self._peers if peer.seat.node != self.topology.node]
        return meeting.interface_of(far[0].socket.getsockname()[0]) if far else self._chiefs_interface

    def exchange(self, share: Share) -> None:
        """Where the ranks have not met, tells them the chief's address through the collective library."""
        if self.place or self.topology.size == 1:
            return
        card = np.zeros(256, dtype=np.int64)
        if self.topology.is_chief:
            self._listen(range(1))
            assert self._listener
            own = f"{self._listener.getsockname()[1]} {secrets.token_hex(8)} {' '.join(meeting.addresses())}"
            text = own.encode()[: card.size]
            card[: len(text)] = list(text)
        text = bytes(share(card).astype(np.uint8)).rstrip(b"\0")
        port, token, *hosts = text.decode().split()
        with self._changed:
            self.place = Meeting(hosts[0], range(int(port), int(port) + 1), token)
            if not self.topology.is_chief:
                self._addresses = [(host, int(port)) for host in hosts]

    def stops_at(self, step: int) -> bool:
        """Whether all ranks stop now, `step` steps having been made. Every rank asks after every step."""
        with self._changed:
            self.in_steps = True
            if self._stop_at is None and self._wanted and self.topology.is_chief and self._all_hear():
                # No rank is further than one step ahead of the chief: all hear of the stop before they reach it.
                self._stop_at = step + (self.topology.size > 1)
                self._tell({"is": "stop", "step": self._stop_at})
                self._changed.wait_for(lambda: self.reason or all(peer.stopping for peer in self._peers))
            return self._stop_at is not None and step >= self._stop_at

    def stopped(self, step: int) -> StoppedError:
        """The error with which all ranks end after the last checkpoint, made at `step`."""
        number = self.signal or signal.SIGTERM
        return StoppedError(step, signal.Signals(number).name, 128 + number)

    def aborted(self) -> AbortedError:
        """The error of a rank whose collective library broke, with the reason if any rank has told one."""
        with self._changed:
            self._changed.wait_for(lambda: self.reason, TICK * 4)
            return self._aborted()

    def outlast_chief(self) -> bool:
        """Waits for the chief's farewell, which may have a checkpoint to write first; False where nobody is heard.

        A launcher ends all ranks when the first one ends with an error.
        """
        with self._changed:
            heard = bool(self._came)
            self._changed.wait_for(lambda: self.reason or not self._peers or self._peers[0].left, OUTLASTING)
            return heard

    def leave(self, failure: str | None = None, code: int = TrainingError.exit_code) -> None:
        """Says farewell, or with what words and exit code this rank fails; lets go of signals and connections."""
        with self._changed:
            if self._ended:
                return
            self._failure = {"is": "left"} if failure is None else {"is": "failed", "text": failure, "code": code}
            if failure is not None and self.place and not self.seats and not self.reason:
                self._changed.wait_for(self._all_came, FAREWELL)
            self._tell(self._failure)
            self._ended = True
        self._ear.wake()
        if self._thread:
            self._thread.join()
        self._ear.close()
        self._close()

    # What the line's own thread does.

    def _work(self) -> None:
        beat = looked = time.monotonic()
        while not self._ended:
            ready = self._selector.select(TICK)
            with self._changed:
                now = time.monotonic()
                if now - looked > SILENCE / 2:  # this process was suspended: the others' silence says nothing
                    for peer in self._peers:
                        peer.heard = now
                looked = now
                for key, _ in ready:
                    self._read(key.fileobj, now)
                if self._addresses and not self._peers:
                    self._connect(now)
                if now - beat >= BEAT:
                    beat = now
                    self._tell({"is": "beat"})
                self._look_for_silence(now)
                self._changed.notify_all()
            if now > self._deadline:
                os._exit(self._code)

    def _read(self, source: Any, now: float) -> None:
        if source is self._ear.hears:
            for number in self._ear.read():
                self._heard_signal(number, now)
        elif source is self._listener:
            with contextlib.suppress(OSError):
                self._add(_Peer(self._listener.accept()[0], now))
        else:
            peer = next((peer for peer in self._peers if peer.socket is source), None)
            if peer:
                self._receive(peer, now)

    def _receive(self, peer: _Peer, now: float) -> None:
        try:
            received = peer.socket.recv(LONGEST)
        except OSError:
            received = b""
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        peer.heard = now
        for line in lines:
            try:
                self._obey(peer, json.loads(line))
            except (ValueError, KeyError, TypeError):  # no rank of ours speaks like that
                self._drop(peer)
                return
        if not received or len(peer.unread) > LONGEST:
            self._gone(peer)

    def _obey(self, peer: _Peer, message: Message) -> None:
        match message["is"]:
            case "here":
                self._welcome(peer, message)
            case "ready":
                peer.ready = True
            case "go":
                self.rendezvous, self._chiefs_interface = message["rendezvous"], message["interface"]
                self.seats = [Seat(**seat) for seat in message["seats"]]
            case "wish":
                self._wish(message["signal"], f" at {_name(peer)}")
            case "stop":
                self._stop_at = message["step"]
                self._tell({"is": "stopping"})
            case "stopping":
                peer.stopping = True
            case "left":
                peer.left, self._addresses = True, []
            case "failed" if peer.rank >= 0:
                self._lost(f"{_name(peer)} failed: {message['text']}", message["code"], speak=False)
            case "lost":
                self._lost(message["text"], message["code"], speak=False)

    def _welcome(self, peer: _Peer, message: Message) -> None:
        assert self.place
        if message["token"] != self.place.token:
            self._drop(peer)
            return
        peer.rank, peer.seat = message["rank"], Seat(**message["seat"])
        self._came.add(peer.rank)
        _send(peer, {"is": "welcome", "seat": asdict(self._seat())})
        if self._failure:
            _send(peer, self._failure)

    def _heard_signal(self, number: int, now: float) -> None:
        if number == signal.SIGTERM:
            self._code = 128 + number
            self._deadline = min(self._deadline, now + (STOPPING if self.in_steps else 0))
        self._wish(number, "")
        if not self.topology.is_chief:
            self._tell({"is": "wish", "signal": number})

    def _wish(self, number: int, where: str) -> None:
        """A signal asks for the end. One rank tells of it, once; of a SIGTERM after a warning too."""
        again, self._wanted = self.signal in {number, signal.SIGTERM}, True
        if again or self.reason:
            return
        self.signal, self.too_early = number, self.too_early or not self.in_steps
        if self.topology.is_chief or not self._peers:
            means = "the time limit is near" if number in NEAR else "scancel, the time limit or kill"
            then = "a checkpoint after this step, then the end" if self.in_steps else "no step was made yet"
            self._say(f"{signal.Signals(number).name}{where} ({means}): {then}.")

    def _look_for_silence(self, now: float) -> None:
        for peer in list(self._peers):
            if now - peer.heard > SILENCE and not peer.left:
                if peer.rank < 0:
                    self._drop(peer)
                else:
                    why = f"no sign of life from {_name(peer)} for {SILENCE:.0f} seconds: its node is down or cut off"
                    self._lost(why, AbortedError.exit_code, speak=True)

    def _gone(self, peer: _Peer) -> None:
        self._drop(peer)
        if peer.rank >= 0 and not peer.left:
            why = f"{_name(peer)} ended without a word: killed, out of memory, or crashed"
            self._lost(why, AbortedError.exit_code, speak=True)

    def _lost(self, why: str, code: int, *, speak: bool) -> None:
        if self.reason or self._ended:
            return
        self.reason, self._code = why, code
        self._deadline = min(self._deadline, time.monotonic() + GRACE)
        if speak and self.topology.local_rank == 0:
            self._spoken = True
            self._say(f"{why}; all ranks end. The same command goes on from the last checkpoint.")
        if self.topology.is_chief:
            self._tell({"is": "lost", "text": why, "code": code})
            with contextlib.suppress(OSError):  # the disk may be what failed
                self.on_lost(why)
            if speak:
                self.on_vanished()

    def _connect(self, now: float) -> None:
        """One try of the next address."""
        assert self.place
        address = self._addresses[0]
        self._addresses = [*self._addresses[1:], address]
        here = {"is": "here", "rank": self.topology.rank, "seat": asdict(self._seat()), "token": self.place.token}
        try:
            peer = _Peer(socket.create_connection(address, TICK * 2), now, 0)
            _send(peer, here)
            reply = json.loads(peer.socket.recv(LONGEST).partition(b"\n")[0])
            peer.seat = Seat(**reply["seat"])
        except (OSError, ValueError, KeyError, TypeError):  # not there yet, or somebody else's port
            return
        self._add(peer)
        self._came.add(0)
        if self._met:
            _send(peer, {"is": "ready"})

    def _listen(self, ports: range) -> None:
        for port in ports:
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(("", port), backlog=self.topology.size)
                self._selector.register(self._listener, selectors.EVENT_READ)
                return
        raise WorldError(f"ports {ports[0]} to {ports[-1]} of {self.topology.host} are all taken; start again.")

    def _add(self, peer: _Peer) -> None:
        peer.socket.settimeout(TICK * 2)
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ)

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def _tell(self, message: Message) -> None:
        for peer in self._peers:
            if peer.rank >= 0 and not peer.left:
                _send(peer, message)

    def _say(self, text: str) -> None:
        where = f" (rank {self.topology.rank} on {self.topology.host})" if self.topology.size > 1 else ""
        name = StoppedError.__name__ if self.signal else AbortedError.__name__
        print(f"{name}{where}: {text}", file=sys.stderr, flush=True)

    def _seat(self) -> Seat:
        return Seat(self.topology.host, self.topology.node or 0, self.topology.local_rank)

    def _all_came(self) -> bool:
        return len(self._came) == (self.topology.size - 1 if self.topology.is_chief else 1)

    def _all_hear(self) -> bool:
        """Whether every rank can be told to stop; where some cannot, none may, and the wish is dropped."""
        if sum(peer.rank >= 0 for peer in self._peers) == self.topology.size - 1:
            return True
        self._wanted = False
        self._say(f"cannot stop in order: {self._missing()}.")
        return False

    def _all_ready(self) -> bool:
        return self.topology.is_chief and sum(peer.ready for peer in self._peers) == self.topology.size - 1

    def _aborted(self) -> AbortedError:
        error = AbortedError(self.reason, self._code)
        error.told = self._spoken
        return error

    def _missing(self) -> str:
        assert self.place
        if not self.topology.is_chief:
            return f"rank 0 was not met at {self.place.host}, ports {self.place.ports[0]} to {self.place.ports[-2]},"
        absent = [str(rank) for rank in range(1, self.topology.size) if rank not in self._came]
        return f"rank {', '.join(absent[:8])} of {self.topology.size} did not come"

    def _remedy(self) -> str:
        return "look at what that rank or its node said, and whether the nodes may talk to one another by TCP."

    def _close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        if self._listener:
            self._listener.close()
        self._selector.close()

    def _close_after_fork(self) -> None:
        """In a child: the connections are the parent's, and must close when the parent ends."""
        for peer in self._peers:
            os.close(peer.socket.fileno())
        if self._listener:
            os.close(self._listener.fileno())


def _send(peer: _Peer, message: Message) -> None:
    with contextlib.suppress(OSError):  # a broken connection is found when it is read
        peer.socket.sendall(json.dumps(message).encode() + b"\n")


def _name(peer: _Peer) -> str:
    return f"rank {peer.rank} on {peer.seat.host}"
