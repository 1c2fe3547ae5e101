"""A line between the ranks beside the collective library: who is there, who went without a word, when to stop.

A collective library waits for a rank that is gone, for ever or until a launcher kills everything, and names nobody.
So every rank holds a TCP connection to the chief and shows a sign of life on it. A connection that closes without a
farewell, or falls silent, ends every rank, with a line that names the lost one and its host. Where the launcher
tells the chief's host (srun, torchrun) the ranks meet before the collective library starts, so that nobody waits
there for a rank that refused; elsewhere they learn its address through the library.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from hvdtrain import meeting
from hvdtrain.errors import AbortedError, StoppedError, TrainingError, WorldError
from hvdtrain.meeting import Meeting, Seat
from hvdtrain.signals import NEAR, Ear
from hvdtrain.topology import Topology
from hvdtrain.wire import CUT_OFF, Message, Peer, Wires

TICK = 0.5  # seconds between two looks at the clock
BEAT = 2.0  # seconds between two signs of life
CUT = 20.0  # seconds without an answer from a host's kernel after which its ranks are given up
SILENCE = 60.0  # seconds without a word of a rank, in steps: C code that holds Python's lock silences its thread too
GRACE = 8.0  # seconds the training thread has to end by itself once a rank is lost
STOPPING = 20.0  # seconds a SIGTERM leaves for a last checkpoint: SLURM kills 30 after it
ARRIVAL = 300.0  # seconds for all ranks to come: a busy file system starts them minutes apart
WELCOME = 5.0  # seconds for the chief to answer; who does not is somebody else
SPEAKING = 5.0  # seconds a rank that leaves the word to the chief waits for it
FAREWELL = 10.0  # seconds a rank that refused waits for the others, to tell them
MOST_TOLD = 1000  # characters of an error that other ranks are told
LAST_WORDS = 2.0  # seconds for the status of a run that ends by force: its file system may hang

Share = Callable[[np.ndarray], np.ndarray]
"""Adds an array of int64 over all ranks and gives every rank the result."""


class Lifeline:
    """This rank's end of the line, with an ear for the signals that ask a run to stop.

    On the chief `on_lost` is called with the reason why training cannot go on, at once and where the process has to be
    ended by force; `on_vanished` where a rank ended without a word.
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
        self.interface: str | None = None
        """The network interface over which this host talks to the others; None where it cannot be told, or yet."""
        self.reason: str | None = None
        """Why training cannot go on."""
        self._code = AbortedError.exit_code
        self._wires = Wires(topology, CUT)
        self._stop_at: int | None = None
        self._wanted = self._met = self._stopped = self._ended = self._spoken = self._warned = False
        self._failure: Message | None = None
        self._deadline = float("inf")
        self._changed = threading.Condition(threading.RLock())
        self._ear = Ear()
        self._thread: threading.Thread | None = None

    # What the training thread calls.

    def begin(self) -> None:
        """Listens for signals and, where the ranks can meet already, for them. Raises WorldError."""
        if self.place:
            self._arrive(self.place)
        self._ear.open(self._wires.close)
        self._wires.hear(self._ear.hears)
        self._thread = threading.Thread(target=self._work, name="lifeline", daemon=True)
        self._thread.start()

    def settle(self, place: Meeting) -> None:
        """Where the launcher told no place: the ranks will meet at this one. Raises WorldError."""
        with self._changed:
            self.place = place
            self._arrive(place)
            self._ear.wake()

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
                self._wires.tell({"is": "ready"})
            came = self._changed.wait_for(lambda: self.reason or self.seats or self._all_ready(), ARRIVAL)
            if self.reason:
                raise self._aborted()
            if not came:
                raise WorldError(
                    f"{self._wires.missing()} within {ARRIVAL:.0f} seconds; look at what that rank or its node said, "
                    "and whether the nodes may talk to one another by TCP."
                )
        if self.topology.is_chief:
            self._let_go(open_rendezvous)

    def chief_address(self) -> str:
        """The chief's address, as this rank reaches it."""
        near = self.topology.is_chief or self.seats[0].node == self.topology.node
        return "127.0.0.1" if near else self.seats[0].address

    def exchange(self, share: Share) -> None:
        """Where the ranks have not met, tells them the chief's address through the collective library."""
        if self.place or self.topology.size == 1:
            return
        card = np.zeros(256, dtype=np.int64)
        if self.topology.is_chief:
            self._wires.token = secrets.token_hex(8)
            own = f"{self._wires.token} {self._wires.listen(range(1))} {' '.join(meeting.addresses()[:8])}".encode()
            card[: len(own)] = list(own)
        token, port, *hosts = bytes(share(card).astype(np.uint8)).rstrip(b"\0").decode().split()
        with self._changed:
            self._wires.token = token
            if self.topology.is_chief:
                # A rank that is not heard from the first step on could not be told to stop.
                self._changed.wait_for(lambda: self.reason or self._wires.all_came(), FAREWELL)
            else:
                self._wires.addresses = [(host, int(port)) for host in hosts]
                self._ear.wake()

    def stops_at(self, step: int) -> bool:
        """Whether all ranks stop now, `step` steps having been made. Every rank asks after every step."""
        with self._changed:
            self.in_steps = True
            if self._stop_at is None and self._wanted and self.topology.is_chief and self._all_hear():
                # No rank is further than one step ahead of the chief: all hear of the stop before they reach it.
                self._stop_at = step + (self.topology.size > 1)
                self._wires.tell({"is": "stop", "step": self._stop_at, "signal": self.signal})
                self._changed.wait_for(lambda: self.reason or all(peer.stopping for peer in self._wires.ranks()))
            stops = self._stop_at is not None and step >= self._stop_at
            if stops and not self.reason:
                self._deadline = float("inf")  # the training thread has heard, and its checkpoint may take a while
            return stops

    def stopped(self, step: int) -> StoppedError:
        """The error with which all ranks end after the last checkpoint, made at `step`."""
        self._stopped = True
        number = self.signal or signal.SIGTERM
        return StoppedError(step, signal.Signals(number).name, 128 + number)

    def aborted(self) -> AbortedError:
        """The error of a rank whose collective library broke, with the reason if any rank has told one."""
        with self._changed:
            self._changed.wait_for(lambda: self.reason, TICK * 4)
            return self._aborted()

    def outlast_chief(self) -> None:
        """Waits for the chief's farewell, which may have a checkpoint to write first.

        A launcher ends all ranks when the first one ends with an error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.reason or self._wires.came, SPEAKING)
            limit = None if self._stopped else SPEAKING
            self._changed.wait_for(lambda: self.reason or all(peer.left for peer in self._wires.ranks()), limit)

    def serve_chief(self) -> None:
        """Waits, in another rank than the chief, until the chief has finished: for an engine that the chief alone
        drives. Raises StoppedError or AbortedError."""
        with self._changed:
            self.in_steps = True
            self._changed.wait_for(
                lambda: self.reason or self._stop_at is not None or not self._wires.peers or self._wires.peers[0].left
            )
            if self.reason:
                raise self._aborted()
            if self._stop_at is not None and self.stops_at(self._stop_at):
                raise self.stopped(self._stop_at)

    def leave(self, failure: str | None = None, code: int = TrainingError.exit_code) -> None:
        """Says farewell, or with what words and exit code this rank fails; lets go of signals and connections."""
        with self._changed:
            if self._ended:
                return
            self._failure = {"is": "left"}
            if failure is not None:
                self._failure = {"is": "failed", "text": " ".join(failure.split())[:MOST_TOLD], "code": code}
                self._deadline = float("inf")  # the training thread ends by itself
                if self.place and not self.seats:
                    self._changed.wait_for(self._wires.all_came, FAREWELL)
            self._wires.tell(self._failure)
            self._ended = True
        self._ear.wake()
        if self._thread:
            self._thread.join()
        self._ear.close()
        self._wires.close()

    def _arrive(self, place: Meeting) -> None:
        self._wires.token = place.token
        if self.topology.is_chief:
            self._wires.listen(place.ports[:-1])
        else:
            self._wires.addresses = [(place.host, port) for port in place.ports[:-1]]

    # What the line's own thread does.

    def _work(self) -> None:
        self._ear.listen_here()
        beat = looked = time.monotonic()
        while not self._ended:
            sources = self._wires.wait(TICK)
            # Outside the lock: a host that does not answer must not hold up the training thread.
            found = self._wires.knock()
            with self._changed:
                now = time.monotonic()
                if found:
                    self._wires.greet(found, now)
                if now - looked > min(CUT, SILENCE) / 2:  # this process was suspended: the silence was its own
                    for peer in self._wires.peers:
                        peer.heard = now
                looked = now
                for source in sources:
                    self._hear(source, now)
                if now - beat >= BEAT:
                    beat = now
                    self._wires.tell({"is": "beat"})
                self._look_for_silence(now)
                self._changed.notify_all()
            if now >= self._deadline and not self._ended:
                self._end()

    def _hear(self, source: Any, now: float) -> None:
        if source is self._ear.hears:
            for number in self._ear.read():
                self._heard_signal(number, now)
        elif source is self._wires.listener:
            self._wires.accept(now)
        elif peer := self._wires.peer_at(source):
            try:
                for message in peer.receive(now):
                    self._obey(peer, message)
            except OSError as error:
                self._gone(peer, error)
            except (LookupError, TypeError, ValueError, RecursionError):  # no rank of ours speaks like that
                self._wires.drop(peer)

    def _obey(self, peer: Peer, message: Message) -> None:
        match message["is"]:
            case "hello" | "welcome" | "here":
                if self._wires.introduced(peer, message):
                    self._welcome(peer)
            case _ if peer.rank < 0:
                self._wires.drop(peer)
            case "ready":
                peer.ready = True
            case "go":
                # Now, while the chief is sure to be there: a short run of its may be over before this rank has begun.
                far = peer.seat.node != self.topology.node
                self.interface = meeting.interface_of(peer.socket.getsockname()[0]) if far else message["interface"]
                self.rendezvous, self.seats = message["rendezvous"], [Seat(**seat) for seat in message["seats"]]
            case "wish":
                self._wish(message["signal"], f" at {peer.name}")
            case "stop":
                self._stop_at, self.signal = message["step"], message["signal"]
                self._wires.tell({"is": "stopping"})
            case "stopping":
                peer.stopping = True
            case "left":
                peer.left = True
            case "failed":
                peer.left = True
                self._lost(f"{peer.name} failed: {message['text'].rstrip('.')}", message["code"], speak=False)
            case "lost":
                self._lost(message["text"], message["code"], speak=False)

    def _welcome(self, peer: Peer) -> None:
        """Tells the other end what it has missed."""
        if self._failure:
            peer.send(self._failure)
        if self.topology.is_chief:
            if self.reason:
                peer.send({"is": "lost", "text": self.reason, "code": self._code})
            return
        if self._met:
            peer.send({"is": "ready"})
        if self.signal:
            peer.send({"is": "wish", "signal": self.signal})

    def _heard_signal(self, number: int, now: float) -> None:
        if self.reason or self._stopped:  # the end is near: scancel, which we may have called, adds nothing
            return
        self._wish(number, "")
        if not self.topology.is_chief:
            self._wires.tell({"is": "wish", "signal": number})
        if number == signal.SIGTERM and self.in_steps:
            self._deadline = min(self._deadline, now + STOPPING)
        elif number == signal.SIGTERM:
            self._deadline = now
            self._fail_here("SIGTERM before the first step")

    def _wish(self, number: int, where: str) -> None:
        """A signal asks for the end. One rank tells of it, once; of a SIGTERM after a warning too."""
        again, self._wanted = self.signal in {number, signal.SIGTERM}, True
        if again or self.reason:
            return
        name = signal.Signals(number).name
        self.signal, self.too_early = number, self.too_early or not self.in_steps
        if self.topology.is_chief:
            means = "the time limit is near" if number in NEAR else "scancel, the time limit or kill"
            then = "a checkpoint after this step, then the end" if self.in_steps else "no step was made yet"
            self._say(StoppedError, f"{name}{where} ({means}): {then}.")

    def _look_for_silence(self, now: float) -> None:
        for peer in list(self._wires.peers):
            if peer.rank < 0:
                limit = ARRIVAL if self.topology.is_chief else WELCOME
            else:
                limit = SILENCE if self.in_steps else ARRIVAL  # before, libraries are loaded from a busy file system
            if now - peer.heard > limit and not peer.left:
                self._silent(peer, limit)

    def _silent(self, peer: Peer, seconds: float) -> None:
        self._wires.drop(peer)
        if peer.rank >= 0:
            why = (
                f"no sign of life from {peer.name} for {seconds:.0f} seconds: its node is down or cut off, or it hangs"
            )
            self._lost(why, AbortedError.exit_code, speak=True)

    def _gone(self, peer: Peer, error: OSError) -> None:
        if peer.left or peer.rank < 0:
            self._wires.drop(peer)
        elif error.errno in CUT_OFF:
            self._silent(peer, CUT)
        else:
            self._wires.drop(peer)
            why = f"{peer.name} ended without a word: killed, out of memory, or crashed"
            self._lost(why, AbortedError.exit_code, speak=True)

    def _lost(self, why: str, code: int, *, speak: bool) -> None:
        """Another rank cannot go on, so this one cannot. `speak`: no rank has told of it."""
        if self.reason or self._stopped or self._failure:  # this one is ending by itself
            return
        self.reason, self._code = why, code
        self._deadline = min(self._deadline, time.monotonic() + GRACE)
        if speak and self.topology.local_rank == 0:
            self._say(AbortedError, f"{why}; all ranks end. The same command goes on from the last checkpoint.")
            self._spoken = True
        if self.topology.is_chief:
            self._wires.tell({"is": "lost", "text": why, "code": code})
            threading.Thread(target=self._record, args=(why,), daemon=True).start()  # its file system may hang
        # Where the chief's node is gone, the first rank of the next one acts for it.
        if speak and self.topology.local_rank == 0 and self.topology.node in {0, 1, None}:
            with contextlib.suppress(OSError):
                self.on_vanished()

    def _fail_here(self, why: str) -> None:
        """A SIGTERM ends this rank whatever its training thread does."""
        self.reason, self._code = why, 128 + signal.SIGTERM
        self._wires.tell({"is": "failed", "text": why, "code": self._code})

    def _end(self) -> None:
        """Ends the process from here: the training thread may be inside C for ever."""
        with self._changed:
            if not self.reason:
                self._fail_here(f"SIGTERM, and no step ended within {STOPPING:.0f} seconds")
            reason = self.reason or ""
        last = threading.Thread(target=self._last_words, args=(reason,), daemon=True)
        last.start()
        last.join(LAST_WORDS)
        os._exit(self._code)

    def _last_words(self, reason: str) -> None:
        if self.topology.is_chief:
            if not self._spoken:
                self._say(AbortedError, str(AbortedError(reason)))
            self._record(reason)

    def _record(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be what failed
            self.on_lost(reason)

    def _let_go(self, open_rendezvous: Callable[[list[Seat]], int | None]) -> None:
        """On the chief: all are ready, and learn what they need to start the collective library."""
        seats = self._wires.seats()
        far = [peer for peer in self._wires.ranks() if peer.seat.node != self.topology.node]
        self.interface = meeting.interface_of(far[0].socket.getsockname()[0] if far else "127.0.0.1")
        self.rendezvous = open_rendezvous(seats)
        with self._changed:
            self.seats = seats
            told = [asdict(seat) for seat in seats]
            go = {"rendezvous": self.rendezvous, "interface": self.interface, "seats": told}
            self._wires.tell({"is": "go", **go})

    def _say(self, kind: type[TrainingError], text: str) -> None:
        where = f" (rank {self.topology.rank} on {self.topology.host})" if self.topology.size > 1 else ""
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            print(f"{kind.__name__}{where}: {text}", file=sys.stderr, flush=True)

    def _all_hear(self) -> bool:
        """Whether every rank can be told to stop; where some cannot, none may."""
        all_hear = len(self._wires.ranks()) == self.topology.size - 1
        if not (all_hear or self._warned):
            self._warned = True
            self._say(StoppedError, f"cannot stop in order: {self._wires.missing()}.")
        return all_hear

    def _all_ready(self) -> bool:
        return self.topology.is_chief and sum(peer.ready for peer in self._wires.ranks()) == self.topology.size - 1

    def _aborted(self) -> AbortedError:
        error = AbortedError(self.reason, self._code)
        error.told = self._spoken
        return error
