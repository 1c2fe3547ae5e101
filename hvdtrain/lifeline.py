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
from typing import Any

import numpy as np

from hvdtrain import keys, meeting, messages
from hvdtrain.errors import AbortedError, StoppedError, TrainingError, WorldError
from hvdtrain.meeting import Meeting, Seat
from hvdtrain.messages import Message
from hvdtrain.signals import NEAR, Ear
from hvdtrain.topology import Topology
from hvdtrain.wire import CUT_OFF, Peer, Wires

TICK = 0.5  # seconds between two looks at the clock
BEAT = 2.0  # seconds between two signs of life
CUT = 20.0  # seconds without an answer from a host's kernel after which its ranks are given up
SILENCE = 60.0  # seconds without a word of a rank, in steps: C code that holds Python's lock silences its thread too
GRACE = 8.0  # seconds the training thread has to end by itself once a rank is lost
STOPPING = 20.0  # seconds a SIGTERM leaves for a last checkpoint: SLURM kills 30 after it
ARRIVAL = 300.0  # seconds for all ranks to come: a busy file system starts them minutes apart
WELCOME = 5.0  # seconds for either end of a connection to prove what it is
SPEAKING = 5.0  # seconds a rank that leaves the word to the chief waits for it
FAREWELL = 10.0  # seconds a rank that refused waits for the others, to tell them
LAST_WORDS = 2.0  # seconds for the status of a run that ends by force: its file system may hang

Share = Callable[[np.ndarray], np.ndarray]
"""Adds an array of int64 over all ranks and gives every rank the result."""


class Lifeline:
    """This rank's end of the line, with an ear for the signals that ask a run to stop.

    On the chief `on_lost` is called with the reason why training cannot go on, at once and where the process has to be
    ended by force; `on_vanished` where a rank ended without a word.
    """

    def __init__(self, topology: Topology, place: Meeting | None = None, *, insecure: bool = False) -> None:
        """`insecure`: ranks need not prove that they belong together."""
        self.topology, self.place, self.insecure = topology, place, insecure
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
        self._code, self._doing = AbortedError.exit_code, ""
        self._wires = Wires(topology, CUT, self._warn)
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
            self._arrive(self.place, *self._key_at(self.place))
        self._ear.open(self._wires.close)
        self._wires.hear(self._ear.hears)
        self._thread = threading.Thread(target=self._work, name="lifeline", daemon=True)
        self._thread.start()

    def settle(self, place: Meeting) -> None:
        """Where the launcher told no place: the ranks will meet at this one. Raises WorldError."""
        key = self._key_at(place)
        with self._changed:
            self._arrive(place, *key)
            self.place = place
            self._ear.wake()

    def meet(self, open_rendezvous: Callable[[list[Seat]], int | None]) -> None:
        """Waits until every rank is ready to start the collective library; fills `seats` and `rendezvous`.

        Returns at once where the ranks cannot meet yet. Raises AbortedError where one refused, WorldError
        where one did not come.
        """
        if not self.place:
            return
        with self._changed:
            self._met, self._doing = True, "waits for the other ranks" if self.topology.is_chief else ""
            self._wires.send(messages.Doing(text=self._doing) if self.topology.is_chief else messages.Ready())
            while not self._changed.wait_for(lambda: self.reason or self.seats or self._all_ready(), ARRIVAL):
                self._keep_waiting()
            if self.reason:
                raise self._aborted()
        if self.topology.is_chief:
            self._let_go(open_rendezvous)

    def doing(self, text: str) -> None:
        """Tells the other ranks why this one lets them wait, as in "copies the data": they then wait on, while this
        process lives."""
        with self._changed:
            self._doing = messages.cut(text)
            self._wires.send(messages.Doing(text=self._doing))

    def _keep_waiting(self) -> None:
        """Raises WorldError where a rank did not come, or does not say what it is doing."""
        awaited = [peer for peer in self._wires.ranks() if not (peer.ready and self.topology.is_chief)]
        silent = next((peer for peer in awaited if not peer.doing), None)
        if not self._wires.all_came():
            raise _late(self._wires.missing())
        if silent:
            raise _late(f"{silent.name} was not ready")
        if self.topology.is_chief and awaited:
            self._warn(f"waiting for {awaited[0].name}, which {awaited[0].doing}.")

    def chief_address(self) -> str:
        """The chief's address, as all ranks reach it."""
        return self.seats[0].address

    def horovod_key(self) -> bytes:
        """The key of the rendezvous server that the chief opens; every rank that has met it has the same."""
        assert self._wires.key is not None
        return keys.derived(self._wires.key, "horovod", self._wires.token)

    def exchange(self, share: Share) -> None:
        """Where the ranks have not met, tells them the chief's address through the collective library."""
        if self.place or self.topology.size == 1:
            return
        card = np.zeros(256, dtype=np.int64)
        if self.topology.is_chief:
            secret = secrets.token_bytes(keys.BYTES)
            self._wires.key = self._shared(secret)
            host = self._own_address()
            port = self._wires.listen(host, range(1))
            own = " ".join([secret.hex(), str(port), *([host] if host else meeting.addresses()[:8])]).encode()
            card[: len(own)] = list(own)
        drawn, told_port, *hosts = bytes(share(card).astype(np.uint8)).rstrip(b"\0").decode().split()
        with self._changed:
            self._wires.key = self._shared(bytes.fromhex(drawn))
            if self.topology.is_chief:
                # A rank that is not heard from the first step on could not be told to stop.
                self._changed.wait_for(lambda: self.reason or self._wires.all_came(), FAREWELL)
            else:
                self._wires.addresses = [(host, int(told_port)) for host in hosts]
                self._ear.wake()

    def stops_at(self, step: int) -> bool:
        """Whether all ranks stop now, `step` steps having been made. Every rank asks after every step."""
        with self._changed:
            self.in_steps = True
            if self._stop_at is None and self._wanted and self.topology.is_chief and self._all_hear():
                # No rank is further than one step ahead of the chief: all hear of the stop before they reach it.
                self._stop_at = step + (self.topology.size > 1)
                self._wires.send(messages.Stop(step=self._stop_at, signal=self.signal or signal.SIGTERM))
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
            self._failure = messages.Left()
            if failure is not None:
                self._failure = messages.Failed(text=messages.cut(" ".join(failure.split())), code=code)
                self._deadline = float("inf")  # the training thread ends by itself
                if self.place and not self.seats:
                    self._changed.wait_for(self._wires.all_came, FAREWELL)
            self._wires.send(self._failure)
            self._ended = True
        self._ear.wake()
        if self._thread:
            self._thread.join()
        self._ear.close()
        self._wires.close()

    def _arrive(self, place: Meeting, key: bytes | None, credential: str | None) -> None:
        self._wires.key, self._wires.credential = key, credential
        # Two runs of one user on two hosts may have one name.
        self._wires.token = f"{place.token} {keys.boot_id()}" if self._own_address() else place.token
        if self.topology.is_chief:
            self._wires.listen(self._own_address(), place.ports[:-1])
        else:
            host = self._own_address() or place.host
            self._wires.addresses = [(host, port) for port in place.ports[:-1]]

    def _own_address(self) -> str:
        """Where the chief listens: on the loopback where all ranks are on one host, else on all its addresses."""
        return "127.0.0.1" if self.topology.local_size == self.topology.size else ""

    def _key_at(self, place: Meeting) -> tuple[bytes | None, str | None]:
        """The key, where this rank has one, and on the chief its credential. Raises WorldError."""
        if self.insecure:
            if self.topology.is_chief:
                self._warn(keys.WARNING)
            return keys.OPEN, None
        if place.key:
            return self._shared(place.key), None
        return keys.of_run(os.environ, self.topology)

    def _shared(self, secret: bytes) -> bytes:
        """A secret that MPI has carried to all ranks, and what their launcher gave them."""
        return keys.derived(keys.inherited(os.environ) or b"", secret.hex())

    # What the line's own thread does.

    def _work(self) -> None:
        self._ear.listen_here()
        beat = looked = time.monotonic()
        while not self._ended:
            sources = self._wires.wait(TICK)
            # Outside the lock: a host that does not answer must not hold up the training thread.
            found = self._wires.connect()
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
                self._wires.flush()
                if now - beat >= BEAT:
                    beat = now
                    self._wires.send(messages.Beat())
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
                for line in peer.receive(now):
                    self._read(peer, line)
            except OSError as error:
                self._gone(peer, error)
            except Exception as error:  # whatever a stranger has thought of is no matter of this run's
                self._misread(peer, error)

    def _read(self, peer: Peer, line: bytes) -> None:
        if peer.rank < 0:
            if self._wires.introduce(peer, line):
                self._welcome(peer)
        elif self.topology.is_chief:
            self._obey_rank(peer, peer.read(line, messages.FROM_RANK))
        else:
            self._obey_chief(peer, peer.read(line, messages.FROM_CHIEF))

    def _misread(self, peer: Peer, error: Exception) -> None:
        self._wires.drop(peer)
        if peer.rank >= 0 and not peer.left:
            self._lost(
                f"{peer.name} sent what no rank sends ({type(error).__name__})", AbortedError.exit_code, speak=True
            )

    def _obey_rank(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.Ready():
                peer.ready = True
            case messages.Wish():
                self._wish(message.signal, f" at {peer.name}")
            case messages.Stopping():
                peer.stopping = True
            case _:
                self._obey_any(peer, message)

    def _obey_chief(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.Go():
                # Now, while the chief is sure to be there: a short run of its may be over before this rank has begun.
                far = peer.seat.node != self.topology.node
                own = peer.socket.getsockname()[0]
                self.interface = meeting.interface_of(own) if far else message.interface
                if len(message.seats) != self.topology.size:
                    raise ValueError("seats of another world")
                self.rendezvous, self.seats = message.rendezvous, message.seats
            case messages.Stop():
                self._stop_at, self.signal = message.step, message.signal
                self._wires.send(messages.Stopping())
            case messages.Lost():
                self._lost(message.text, message.code, speak=False)
            case _:
                self._obey_any(peer, message)

    def _obey_any(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.Doing():
                peer.doing = message.text
            case messages.Left():
                peer.left = True
            case messages.Failed():
                peer.left = True
                self._lost(f"{peer.name} failed: {message.text.rstrip('.')}", message.code, speak=False)

    def _welcome(self, peer: Peer) -> None:
        """Tells the other end what it has missed."""
        if self._failure:
            peer.send(self._failure)
        if self._doing:
            peer.send(messages.Doing(text=self._doing))
        if self.topology.is_chief:
            if self.reason:
                peer.send(messages.Lost(text=messages.cut(self.reason), code=self._code))
            return
        if self._met:
            peer.send(messages.Ready())
        if self.signal:
            peer.send(messages.Wish(signal=self.signal))

    def _heard_signal(self, number: int, now: float) -> None:
        if self.reason or self._stopped:  # the end is near: scancel, which we may have called, adds nothing
            return
        self._wish(number, "")
        if not self.topology.is_chief:
            self._wires.send(messages.Wish(signal=number))
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
        limit = SILENCE if self.in_steps else ARRIVAL  # before, libraries are loaded from a busy file system
        for peer in list(self._wires.peers):
            # Rank 0 has proved itself and may count this rank in already: its welcome takes as long as it takes.
            is_chief = peer.signatures is not None and not self.topology.is_chief
            if peer.rank < 0 and now - peer.opened > (ARRIVAL if is_chief else WELCOME):
                self._wires.drop(peer)
            elif peer.rank >= 0 and now - peer.heard > limit and not peer.left:
                self._silent(peer, limit)

    def _silent(self, peer: Peer, seconds: float) -> None:
        self._wires.drop(peer)
        why = f"no sign of life from {peer.name} for {seconds:.0f} seconds: its node is down or cut off, or it hangs"
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
            self._wires.send(messages.Lost(text=messages.cut(why), code=code))
            threading.Thread(target=self._record, args=(why,), daemon=True).start()  # its file system may hang
        # Where the chief's node is gone, the first rank of the next one acts for it.
        if speak and self.topology.local_rank == 0 and self.topology.node in {0, 1, None}:
            with contextlib.suppress(OSError):
                self.on_vanished()

    def _fail_here(self, why: str) -> None:
        """A SIGTERM ends this rank whatever its training thread does."""
        self.reason, self._code = why, 128 + signal.SIGTERM
        self._wires.send(messages.Failed(text=why, code=self._code))

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
            self._wires.send(messages.Go(rendezvous=self.rendezvous, interface=self.interface, seats=seats))

    def _warn(self, text: str) -> None:
        self._print(f"warning{self._where()}: {text}")

    def _say(self, kind: type[TrainingError], text: str) -> None:
        self._print(f"{kind.__name__}{self._where()}: {text}")

    def _where(self) -> str:
        return f" (rank {self.topology.rank} on {self.topology.host})" if self.topology.size > 1 else ""

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            print(line, file=sys.stderr, flush=True)

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


def _late(who: str) -> WorldError:
    return WorldError(
        f"{who} within {ARRIVAL:.0f} seconds; look at what that rank or its node said, and whether the nodes may talk "
        "to one another by TCP."
    )
