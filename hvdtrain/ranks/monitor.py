"""The thread beside training, which reads messages and signals, and sends heartbeats."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.launch.ancestors import LauncherShell, discard_unread
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.admission import Admission
from hvdtrain.ranks.energy import EnergyWatch
from hvdtrain.ranks.joining import Readiness
from hvdtrain.ranks.liveness import FailureDetector, Liveness
from hvdtrain.ranks.messages import Message
from hvdtrain.ranks.peers import Peer
from hvdtrain.ranks.slow import SlowWatch
from hvdtrain.ranks.stop import SignalWatcher, StopAgreement
from hvdtrain.ranks.stuck import StuckWatch, look_at


@dataclass
class Inbox:
    """Gives each message to the part of the world that it concerns."""

    liveness: Liveness
    readiness: Readiness
    stop: StopAgreement
    stuck: StuckWatch
    slow: SlowWatch
    energy: EnergyWatch
    farewell: Message | None = None
    """This rank's last message, which is sent to ranks that connect late too."""

    def handle(self, peer: Peer, message: Message | None) -> None:
        """Acts on a message; None stands for a peer that has just proved to be a rank."""
        if message is None:
            self._catch_up(peer)
        elif isinstance(message, messages.DIAGNOSTIC):
            with self.liveness.diagnosing(message.kind):
                self._diagnose(peer, message)
        else:
            self._act(peer, message)

    def _diagnose(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.Times():
                self.slow.reported(peer.rank, message)
            case messages.Energy():
                self.energy.reported(peer.endpoint.label, message.joules)
            case messages.StackRequest():
                peer.send(self.stuck.own())
            case messages.Stack():
                self.stuck.answered(peer, message)
            case messages.ProcessRequest():
                peer.send(look_at(message))
            case messages.ProcessState():
                self.stuck.seen(message)

    def _act(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.Ready():
                peer.ready = True
            case messages.AllReady():
                self.readiness.all_ready(peer, message)
            case messages.StopRequest():
                self.stop.requested(message.signal, f" at {peer.name}", launcher=message.launcher)
            case messages.StopAt():
                self.stop.agreed(message)
            case messages.StopPrepare():
                self.stop.prepare()
            case messages.StopPrepared():
                peer.steps_made = message.steps
            case messages.Busy():
                peer.busy = message.text
            case messages.Exited():
                peer.exited = message.steps
                if not self.liveness.left:
                    self.liveness.left, self.liveness.left_code = peer.name, message.code or self.liveness.left_code
            case messages.Left():
                peer.left, self.liveness.left = True, self.liveness.left or peer.name
            case messages.Failed():
                peer.left = True
                self.liveness.lost(f"{peer.name} failed: {message.text.rstrip('.')}", message.code)
            case messages.Lost():
                self.liveness.lost(message.text, message.code)

    def _catch_up(self, peer: Peer) -> None:
        """Sends a peer that has just connected what it has missed."""
        if self.farewell:
            peer.send(self.farewell)
        self.readiness.catch_up(peer)
        if self.liveness.topology.is_rank_0:
            if lost := self.liveness.lost_message():
                peer.send(lost)
        elif self.stop.signal:
            peer.send(messages.StopRequest(signal=self.stop.signal, launcher=bool(self.stop.cause)))


class Monitor:
    """Runs the thread."""

    def __init__(self, admission: Admission, watcher: SignalWatcher, inbox: Inbox) -> None:
        self.admission, self.watcher, self.inbox = admission, watcher, inbox
        self.liveness, self.stop, self.stuck = inbox.liveness, inbox.stop, inbox.stuck
        self.peers, self.topology = self.liveness.peers, self.liveness.topology
        self.detector = FailureDetector(self.liveness)
        self.ended = False
        self._looked = time.monotonic()
        self._launcher = LauncherShell()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch signals and connections."""
        self.watcher.open(self.admission.close)
        self.peers.watch(self.watcher.readable)
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread, which has `ended`; releases signals and connections."""
        self.watcher.wake()
        if self._thread:
            self._thread.join()
        self.watcher.close()
        self._launcher.close()
        self.admission.close()

    def _work(self) -> None:
        self.watcher.unblock_here()
        with self.liveness.diagnosing("stacks"):
            self.stuck.stacks.answer_here()
        while not self.ended:
            try:
                if time.monotonic() >= self.liveness.deadline:
                    self.liveness.end()
                self._turn()
            except Exception as error:  # no other thread handles signals and the deadline: this one must not end
                with contextlib.suppress(Exception):
                    self.liveness.break_down(error)
                time.sleep(timeouts.TICK if time.monotonic() < self.liveness.deadline else 0)

    def _turn(self) -> None:
        time.sleep(min(timeouts.GATHER * self.topology.size, timeouts.LONGEST_GATHER))
        sources = self.peers.wait(max(0.0, self._looked + timeouts.TICK - time.monotonic()))
        # Outside the lock: a host that does not answer must not hold up the training thread.
        found = self.admission.connect()
        with self.liveness.changed:
            now = time.monotonic()
            if found:
                self.admission.greet(found, now)
            if self._launcher.take_end():  # first: the signals that it then sends, too, are for this reason
                discard_unread()
                self.stop.signalled(signal.SIGTERM, now, launcher=True)
            for source in sources:
                self._read_from(source, now)
            self.peers.flush()
            if now - self._looked >= timeouts.TICK:
                self._look(now)
            self.liveness.changed.notify_all()

    def _look(self, now: float) -> None:
        """Does what is due by the clock: heartbeats, silent ranks, slow handshakes, stuck ranks."""
        suspended, self._looked = now - self._looked > min(timeouts.UNREACHABLE, timeouts.SILENCE) / 2, now
        if suspended:
            self.detector.forgive(now)
        if now - self.peers.sent >= timeouts.of_each(timeouts.HEARTBEAT, self.topology.size, timeouts.SILENCE / 2.2):
            self.peers.send(messages.Heartbeat())
        self.admission.drop_slow(now)
        self.detector.look_for_silence(now)
        with self.liveness.diagnosing("stuck ranks"):
            if suspended:
                self.stuck.forgive(now)
            self.stuck.look(now)

    def _read_from(self, source: Any, now: float) -> None:
        if source is self.watcher.readable:
            for number in self.watcher.read():
                self.stop.signalled(number, now)
        elif source is self.admission.listener:
            self.admission.accept(now)
        elif isinstance(source, Peer):
            for message in self._messages(source, now):
                self.inbox.handle(source, message)

    def _messages(self, peer: Peer, now: float) -> Iterator[Message | None]:
        """The messages of a peer; None when it has proved to be a rank. An error in here is the peer's fault."""
        kind = messages.FROM_RANK if self.topology.is_rank_0 else messages.FROM_RANK_0
        try:
            for line in peer.receive(now):
                if peer.rank >= 0:
                    yield peer.read(line, kind)
                elif self.admission.advance(peer, line):
                    yield None
        except OSError as error:
            self.detector.disconnected(peer, error)
        except Exception as error:  # whatever a stranger sends must not end this run
            self.detector.unreadable(peer, error)
