"""Names ranks that live but keep the others waiting, with the line they are in: stuck in a loop or a read, or
suspended.

A process sends heartbeats even where its training thread is stuck for ever, while the others wait in an
allreduce. So where no step ends for a while, rank 0 asks every rank where its training thread is. A rank that
is not in a collective, while others wait in one, keeps them waiting. That is a warning and ends nothing, as a
read may yet return. The process of a rank that does not even answer is examined by another rank of its host.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

from hvdtrain.core.wording import counted
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.peers import Peer
from hvdtrain.ranks.stacks import Place, Stacks, State, observed

STEPS = 20  # whose median is the usual time of a step
DOES: dict[State, str] = {
    "stopped": "its process is stopped (SIGSTOP, or a debugger)",
    "disk": "the kernel waits for a disk or a file system",
    "python": "C code holds Python's lock",
    "unknown": "its process is stopped, or C code holds Python's lock",
}


def keeping_others_waiting(places: Mapping[int, Place | Literal["silent"]]) -> set[int]:
    """The ranks that keep others waiting: those that do not answer, and those outside a collective while at least as
    many others are in one. Where fewer are in one, a step takes long everywhere, and some ranks finish earlier."""
    waiting = [place in {"collective", "framework"} for place in places.values()]
    silent = {rank for rank, place in places.items() if place == "silent"}
    outside = {rank for rank, place in places.items() if place == "outside"}
    if not any(waiting):
        return set()
    return silent | (outside if sum(waiting) >= len(outside) else set())


class CollectiveMismatch:
    """Finds that the ranks wait in different collectives, so that none can ever return."""

    def __init__(self) -> None:
        self._since: float | None = None

    def judge(
        self, answers: Mapping[int, messages.Stack], size: int, asked: float, now: float, limit: float
    ) -> list[tuple[int, messages.Stack]]:
        """The first rank of each collective that ranks wait in, where these were different for `limit` seconds since
        the ranks were `asked`; for longer where a framework's C code may still compute, or two lines of the user's
        code may have called the same collective."""
        waits = [s for s in answers.values() if s.operation and (s.place == "collective" or not s.long)]
        if len(waits) < size or len({(stack.operation, stack.users_line) for stack in waits}) == 1:
            self._since = None
            return []
        self._since = self._since or asked
        is_sure = len({s.operation for s in waits}) > 1 and all(s.place == "collective" for s in waits)
        if now - self._since < max(limit, 0 if is_sure else timeouts.SILENCE):
            return []
        of_each = {(s.operation, s.users_line): (rank, s) for rank, s in sorted(answers.items(), reverse=True)}
        return sorted(of_each.values(), key=lambda one: one[0])


class StuckWatch:
    """On rank 0, names ranks that keep the others waiting; on rank 1, names rank 0 where it does not answer."""

    def __init__(self, liveness: Liveness, endpoint: Endpoint) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology
        self.endpoint, self.stacks = endpoint, Stacks()
        self.paused = False
        """Whether no step is expected soon, as in a validation or at the end of an epoch."""
        self._step_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._asked = 0.0
        self._answers: dict[int, messages.Stack] = {}
        self._since: dict[int, float] = {}
        """Since when each rank keeps others waiting."""
        self._named: dict[int, float] = {}
        """When each rank was named last."""
        self._seen: dict[int, messages.ProcessState] = {}
        self._steps = 0
        self._parting = CollectiveMismatch()

    def step_made(self) -> None:
        """Notes that a step has ended. The training thread calls it."""
        now = time.monotonic()
        if self._step_at is None:
            self.stacks.train_here()
        elif not self.paused:
            self._seconds.append(now - self._step_at)
        self._step_at, self.paused = now, False
        self._steps += 1

    def expect_steps(self, expected: bool) -> None:
        """Says whether a step is expected soon; if so, the time until it counts from now."""
        self.paused = not expected
        if self._step_at is not None and expected:
            self._step_at = time.monotonic()

    def forgive(self, now: float) -> None:
        """Starts to measure anew, after this process was suspended."""
        if self._step_at is not None:
            self._step_at = now
        self._since.clear()
        self._parting = CollectiveMismatch()

    def look(self, now: float) -> None:
        """Where no step has ended for a while, asks the ranks where they are, and names who keeps others waiting."""
        if self._step_at is None or self.liveness.reason or self.liveness.is_ending or self.topology.rank > 1:
            return
        if now - self._step_at < timeouts.STALLED:
            self._report_recovered(now)
        elif now - self._asked >= timeouts.of_each(timeouts.STACKS, self.topology.size):
            if self._asked > self._step_at:
                self._judge(now)
            self._asked, self._answers = now, {self.topology.rank: self.own()}
            if self.topology.is_rank_0:
                self.peers.send(messages.StackRequest())

    def own(self) -> messages.Stack:
        """The message that says where this rank's training thread is."""
        place, long, where, operation, users = self.stacks.now()
        where, users = messages.cut(where), messages.cut(users)
        return messages.Stack(
            place=place, long=long or self.paused, where=where, operation=operation, users_line=users, steps=self._steps
        )

    def answered(self, peer: Peer, message: messages.Stack) -> None:
        """Takes a rank's answer to where its training thread is."""
        self._answers[peer.rank] = message

    def seen(self, message: messages.ProcessState) -> None:
        """Takes what a rank has found out about another process of its host."""
        self._seen[message.rank] = message

    def _judge(self, now: float) -> None:
        """Finds and names those who keep the others waiting, by the ranks' answers to the last request."""
        places: dict[int, Place | Literal["silent"]] = {rank: each.place for rank, each in self._answers.items()}
        for peer in self.peers.ranks():
            # Rank 0 is asked nothing; it sends heartbeats.
            apart = timeouts.of_each(timeouts.STALLED, self.topology.size, timeouts.SILENCE / 2)
            since = self._asked if self.topology.is_rank_0 else now - apart
            if not peer.left and peer.last_received < since:
                places[peer.rank] = "silent"
        self._judge_collectives(now)
        suspects = keeping_others_waiting(places)
        self._since = {rank: self._since.get(rank, self._asked) for rank in suspects}
        self._seen = {rank: state for rank, state in self._seen.items() if rank in suspects}
        for rank, since in self._since.items():
            stack = self._answers.get(rank) if places[rank] != "silent" else None
            if not stack and rank not in self._named:
                self._observe(rank)
            if now - since >= self._limit(stack) and now - self._named.get(rank, -timeouts.REPEAT) >= timeouts.REPEAT:
                self._named[rank] = now
                self._name(rank, stack, now)

    def _judge_collectives(self, now: float) -> None:
        """Ends all ranks where each waits in a collective, but not in the same one: none can ever return."""
        if parted := self._parting.judge(self._answers, self.topology.size, self._asked, now, self._limit(None)):
            self.liveness.lost_together(
                "the ranks wait in different collectives, for ever: "
                f"{'; '.join(_wait(self.peers.name_of(rank), stack) for rank, stack in parted)}. Every rank must make "
                "the same number of steps, and call the same collectives in the same order; one that has nothing to "
                "learn from calls (loss * 0).backward()"
            )

    def _limit(self, stack: messages.Stack | None) -> float:
        """After how many seconds in which others wait for it a rank is named."""
        if stack and stack.long:
            return timeouts.LONG
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(timeouts.STUCK, 2 * usual)

    def _name(self, rank: int, stack: messages.Stack | None, now: float) -> None:
        assert self._step_at is not None
        text = (
            f"{self.peers.name_of(rank)} keeps the others waiting: no step has ended for {now - self._step_at:.0f} "
            f"seconds, and it {_stands(stack) if stack else self._does(rank)}."
        )
        self.liveness.listener.warning(text)
        self.liveness.listener.named("stuck", rank, text)

    def _does(self, rank: int) -> str:
        """What the process of a rank does that does not answer, as text."""
        peer, seen = self.peers.peer(rank), self._seen.get(rank)
        line = f", in {seen.where}" if seen and seen.where else ""
        if peer and peer.process and peer.process.memory is None:
            peer.interrupt()
            line = ", and then prints its lines on stderr"
        given_up = f"after {timeouts.SILENCE:.0f} seconds without an answer it is given up"
        return f"does not answer: {DOES[seen.state if seen else 'unknown']}{line}; {given_up}"

    def _report_recovered(self, now: float) -> None:
        for rank in self._named:
            self.liveness.listener.warning(f"{self.peers.name_of(rank)} has resumed: the others wait no longer.")
        self._named.clear()
        self._since.clear()
        self._parting = CollectiveMismatch()

    def _observe(self, rank: int) -> None:
        """Examines a silent rank's process, or asks a rank of its host to do so."""
        silent = self.peers.peer(rank)
        if not silent or not silent.process:
            return
        request = messages.ProcessRequest(rank=rank, process=silent.process)
        if _is_beside(silent.endpoint, self.endpoint):
            self.seen(look_at(request))
            return
        beside = (peer for peer in self.peers.ranks() if _is_beside(silent.endpoint, peer.endpoint))
        if neighbour := next((peer for peer in beside if peer.rank in self._answers), None):
            neighbour.send(request)


def look_at(message: messages.ProcessRequest) -> messages.ProcessState:
    """What the process of another rank of this host does."""
    state, where = observed(message.process)
    return messages.ProcessState(rank=message.rank, state=state, where=messages.cut(where))


def _stands(stack: messages.Stack) -> str:
    """Where a rank's training thread is, as text."""
    return f"{'validates, or writes a checkpoint; it ' if stack.long else ''}stands in {stack.where}"


def _wait(name: str, stack: messages.Stack) -> str:
    """In which collective a rank of that name waits, as text."""
    return (
        f"{name} has made {counted(stack.steps, 'step')}{' (its epoch is over)' if stack.long else ''} and waits in "
        f"{'an average of gradients' if stack.operation == 'gradients' else 'a sum or a broadcast'}, in "
        f"{stack.users_line or stack.where}"
    )


def _is_beside(one: Endpoint, other: Endpoint) -> bool:
    """Whether the two ranks are on one host."""
    return (one.host, one.node) == (other.host, other.node)
