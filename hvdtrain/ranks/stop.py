"""The agreement to stop: a signal to any rank ends all of them after the same step, with a checkpoint."""

import signal
import threading
from collections.abc import Callable

from hvdtrain.errors import StoppedError
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness, print_error
from hvdtrain.terminal import END_SIGNALS

MEANS = {signal.SIGTERM: "scancel, the time limit or kill", signal.SIGHUP: "the terminal or ssh session has ended"}


class StopAgreement:
    """After which step all ranks stop, and by which signal."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology
        self.signal: int | None = None
        self.too_early = False
        """Whether that signal came before the first step."""
        self.step: int | None = None
        """The step after which all ranks stop, once they have agreed."""
        self.stopped = False
        """Whether training has stopped in order."""
        self._requested = self._warned = False
        self.on_end: Callable[[str], None] = lambda text: None
        """Called on rank 0, in a thread, where a launcher may kill all ranks soon: Open MPI's in a quarter second."""
        self._recording: threading.Thread | None = None

    def stops_at(self, step: int) -> bool:
        """Whether all ranks stop now, `step` steps having been made. Every rank calls it after every step."""
        with self.liveness.changed:
            self.liveness.in_steps = True
            if self.step is None and self._requested and self.topology.is_rank_0 and self._all_reachable():
                # No rank is further than one step ahead of rank 0: all learn of the stop before they reach it.
                self.step = step + (self.topology.size > 1)
                self.peers.send(messages.StopAt(step=self.step, signal=self.signal or signal.SIGTERM))
                self.liveness.wait_for(lambda: all(peer.stop_acknowledged for peer in self.peers.ranks()))
            stops = self.step is not None and step >= self.step
            if stops and not self.liveness.reason:
                self.liveness.deadline = float("inf")  # the training thread has reacted; a checkpoint may take a while
            return stops

    def error(self, step: int) -> StoppedError:
        """The error with which all ranks end after the last checkpoint, made at `step`."""
        self.stopped = self.liveness.is_ending = True
        if self._recording:
            self._recording.join(timeouts.LAST_STATUS)
        number = self.signal or signal.SIGTERM
        return StoppedError(step, signal.Signals(number).name, 128 + number)

    def agreed(self, message: messages.StopAt) -> None:
        """Rank 0 has chosen the step."""
        self.step, self.signal = message.step, message.signal
        self.peers.send(messages.StopAcknowledged())

    def signalled(self, number: int, now: float) -> None:
        """This process was sent a signal."""
        if self.liveness.reason or self.stopped:  # the end is near: scancel, which we may have called, adds nothing
            return
        self.requested(number)
        if not self.topology.is_rank_0:
            self.peers.send(messages.StopRequest(signal=number))
        if number in END_SIGNALS:
            self.liveness.signal = signal.Signals(number)
            left = timeouts.CHECKPOINT if self.liveness.in_steps else 0.0
            self.liveness.deadline = min(self.liveness.deadline, now + left)
            if not left:
                self.liveness.fail(" before the first step")

    def requested(self, number: int, where: str = "") -> None:
        """A signal requests a stop. Rank 0 reports it, once; SIGTERM or SIGHUP after a warning too."""
        again, self._requested = self.signal in {number, *END_SIGNALS}, True
        if again or self.liveness.reason:
            return
        name, in_steps = signal.Signals(number).name, self.liveness.in_steps
        self.signal, self.too_early = number, self.too_early or not in_steps
        if self.topology.is_rank_0:
            means = MEANS.get(signal.Signals(number), "the time limit is near")
            then = "a checkpoint after this step, then the end" if in_steps else "no step was made yet"
            if number in END_SIGNALS:
                text = f"{name}: it could report no more; the same command continues from the last checkpoint."
                self._recording = threading.Thread(target=self.on_end, args=(text,), daemon=True)
                self._recording.start()
            print_error(self.topology, StoppedError, f"{name}{where} ({means}): {then}.")

    def _all_reachable(self) -> bool:
        """Whether every rank can learn of the stop; where some cannot, none may stop."""
        reachable = len(self.peers.ranks()) == self.topology.size - 1
        if not (reachable or self._warned):
            self._warned = True
            print_error(self.topology, StoppedError, f"cannot stop in order: {self.peers.absent()}.")
        return reachable
