"""Ranks that live but keep the others waiting: stuck in a loop, in a read, suspended. They are named, with their line.

A rank whose process lives sends heartbeats, be its training thread stuck for ever, and the others wait in an allreduce.
So where no step ends for a while, rank 0 requests from every rank where its training thread stands. Who stands
elsewhere than in a collective, while others wait in one, keeps them waiting. That is a warning, not an end: the read
may come back. A rank that does not even answer is looked at by another one of its host.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

from hvdtrain.engines.waiting import Place
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness, print_warning
from hvdtrain.ranks.peers import Peer
from hvdtrain.ranks.stacks import Stacks, State, observed

STEPS = 20  # whose median is the usual time of a step
DOES: dict[State, str] = {
    "stopped": "its process is stopped (SIGSTOP, or a debugger)",
    "disk": "the kernel waits for a disk or a file system",
    "python": "C code holds Python's lock",
    "unknown": "its process is stopped, or C code holds Python's lock",
}


def keeping_others_waiting(places: Mapping[int, Place | Literal["silent"]]) -> set[int]:
    """The ranks that keep others waiting: who does not answer, and who is outside a collective while at least as many
    others are in one. Where fewer are, a step takes long everywhere, and some are done a little earlier."""
    waiting = [place in {"collective", "framework"} for place in places.values()]
    silent = {rank for rank, place in places.items() if place == "silent"}
    outside = {rank for rank, place in places.items() if place == "outside"}
    if not any(waiting):
        return set()
    return silent | (outside if sum(waiting) >= len(outside) else set())


class StuckWatch:
    """Names ranks that keep the others waiting, on rank 0; on rank 1, rank 0 where it does not answer."""

    def __init__(self, liveness: Liveness, endpoint: Endpoint) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology
        self.endpoint, self.stacks = endpoint, Stacks()
        self.paused = False
        """Whether no step is to be expected soon: validation, the end of an epoch."""
        self._step_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._asked = 0.0
        self._answers: dict[int, messages.Stack] = {}
        self._since: dict[int, float] = {}
        """Since when each rank that others wait for was seen to keep them waiting."""
        self._named: dict[int, float] = {}
        """When each rank was named last."""
        self._seen: dict[int, messages.ProcessState] = {}
        self._steps = 0
        self._apart_at: float | None = None
        """Since when the ranks were seen to wait in different collectives."""

    def step_made(self) -> None:
        """A step has ended; the thread that trains calls it."""
        now = time.monotonic()
        if self._step_at is None:
            self.stacks.train_here()
        elif not self.paused:
            self._seconds.append(now - self._step_at)
        self._step_at, self.paused = now, False
        self._steps += 1

    def expect_steps(self, expected: bool) -> None:
        """Whether a step is to be expected soon; where it is, the time until it counts from now."""
        self.paused = not expected
        if self._step_at is not None and expected:
            self._step_at = time.monotonic()

    def forgive(self, now: float) -> None:
        """Begins anew: this process was suspended, and the silence was its own."""
        if self._step_at is not None:
            self._step_at = now
        self._since.clear()
        self._apart_at = None

    def look(self, now: float) -> None:
        """Requests, where no step has ended for a while, where the ranks stand, and names who keeps others waiting."""
        if self._step_at is None or self.liveness.reason or self.liveness.is_ending or self.topology.rank > 1:
            return
        if now - self._step_at < timeouts.STALLED:
            self._report_recovered(now)
        elif now - self._asked >= timeouts.of_each(timeouts.STACKS, self.topology.size):
            if self._asked > self._step_at:
                self._judge(now)
            self._request(now)

    def own(self) -> messages.Stack:
        """Where this rank stands."""
        place, long, where, operation, users = self.stacks.now()
        return messages.Stack(
            place=place,
            long=long or self.paused,
            where=messages.cut(where),
            operation=operation,
            users_line=messages.cut(users),
            steps=self._steps,
        )

    def answered(self, peer: Peer, message: messages.Stack) -> None:
        """A rank has said where it stands."""
        self._answers[peer.rank] = message

    def look_at(self, message: messages.ProcessRequest) -> messages.ProcessState:
        """What the process of another rank of this host does."""
        state, where = observed(message.process)
        return messages.ProcessState(rank=message.rank, state=state, where=messages.cut(where))

    def seen(self, message: messages.ProcessState) -> None:
        """A rank has looked at another one of its host."""
        self._seen[message.rank] = message

    def _request(self, now: float) -> None:
        self._asked = now
        self._answers = {self.topology.rank: self.own()}
        if self.topology.is_rank_0:
            self.peers.send(messages.StackRequest())

    def _judge(self, now: float) -> None:
        """What the ranks have answered since they were asked last."""
        places: dict[int, Place | Literal["silent"]] = {rank: each.place for rank, each in self._answers.items()}
        for peer in self.peers.ranks():
            # Of rank 0 nothing was requested, but for its heartbeats.
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
        """Ends all ranks where each waits in a collective, but not in the same one: none can come back. It takes longer
        where C code of a framework may compute yet, or two lines of the user's may have called the same one."""
        waits = [s for s in self._answers.values() if s.operation and (s.place == "collective" or not s.long)]
        kinds = {(stack.operation, stack.users_line) for stack in waits}
        if len(waits) < self.topology.size or len(kinds) == 1:
            self._apart_at = None
            return
        self._apart_at = self._apart_at or self._asked
        is_sure = len({s.operation for s in waits}) > 1 and all(s.place == "collective" for s in waits)
        if now - self._apart_at < max(self._limit(None), 0 if is_sure else timeouts.SILENCE):
            return
        of_each = {(s.operation, s.users_line): (rank, s) for rank, s in sorted(self._answers.items(), reverse=True)}
        parts = [
            f"{self._rank(rank)} has made {stack.steps} steps{' (its epoch is over)' if stack.long else ''} and waits "
            f"in {'an average of gradients' if stack.operation == 'gradients' else 'a sum or a broadcast'}, in "
            f"{stack.users_line or stack.where}"
            for rank, stack in sorted(of_each.values(), key=lambda one: one[0])
        ]
        self.liveness.lost_together(
            f"the ranks wait in different collectives, for ever: {'; '.join(parts)}. Every rank must make the same "
            "number of steps, and call the same collectives in the same order"
        )

    def _limit(self, stack: messages.Stack | None) -> float:
        """How long others wait for a rank before it is named."""
        if stack and stack.long:
            return timeouts.LONG
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(timeouts.STUCK, 2 * usual)

    def _name(self, rank: int, stack: messages.Stack | None, now: float) -> None:
        assert self._step_at is not None
        begins = f"{self._rank(rank)} keeps the others waiting: no step has ended for {now - self._step_at:.0f} seconds"
        if stack:
            busy = " validates, or writes a checkpoint; it" if stack.long else ""
            text = f"{begins}, and it{busy} stands in {stack.where}."
        else:
            seen = self._seen.get(rank) or messages.ProcessState(rank=rank, state="unknown", where="")
            line = f", in {seen.where}" if seen.where else ""
            if (peer := self._peer(rank)) and peer.process and peer.process.memory is None:
                peer.interrupt()
                line = ", and then prints its lines on stderr"
            given_up = f"after {timeouts.SILENCE:.0f} seconds without an answer it is given up"
            text = f"{begins}, and it does not answer: {DOES[seen.state]}{line}; {given_up}."
        print_warning(self.topology, text)
        self.liveness.on_named("stuck", rank, text)

    def _report_recovered(self, now: float) -> None:
        if self._named:
            for rank in self._named:
                print_warning(self.topology, f"{self._rank(rank)} has resumed: the others wait no longer.")
            self._named.clear()
        self._since.clear()
        self._apart_at = None

    def _observe(self, rank: int) -> None:
        """Looks at a silent rank's process from its host, or requests it of a rank that is there."""
        silent = self._peer(rank)
        if not silent or not silent.process:
            return
        request = messages.ProcessRequest(rank=rank, process=silent.process)
        if _is_beside(silent.endpoint, self.endpoint):
            self.seen(self.look_at(request))
            return
        beside = (peer for peer in self.peers.ranks() if _is_beside(silent.endpoint, peer.endpoint))
        if neighbour := next((peer for peer in beside if peer.rank in self._answers), None):
            neighbour.send(request)

    def _peer(self, rank: int) -> Peer | None:
        return next((peer for peer in self.peers.ranks() if peer.rank == rank), None)

    def _rank(self, rank: int) -> str:
        peer = self._peer(rank)
        return peer.name if peer else f"rank {rank} on {self.topology.host}"


def _is_beside(one: Endpoint, other: Endpoint) -> bool:
    """Whether the two ranks are on one host."""
    return (one.host, one.node) == (other.host, other.node)
