"""Names ranks that are slower than the others, and the cause: computing, reading or the network.

Each rank knows how long in a step it waited for its batch, and for the other ranks' gradients; the rest is computing.
Where the framework reads while it computes, the two cannot be distinguished. A rank is named that takes longer than the
others for one of them, where the others wait for it as long.
A slow network makes all ranks of a ring wait alike. It is found by the kernel's counters of connections (network.py).
"""

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from hvdtrain import processors
from hvdtrain.core.wording import duration
from hvdtrain.engines import Engine
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.ranks import messages, network, timeouts
from hvdtrain.ranks.liveness import Liveness

Cause = Literal["computing", "reading", "computing or reading", "network"]
STEPS = 10
"""A rank reports the median of at least so many steps."""
SAMPLED = 0.02
"""The fewest seconds between the beginnings of two steps that are measured: to read a clock in a graph takes time."""
TIMES, OF = 4, 5
"""A rank is named once it was slow in TIMES of the last OF comparisons."""
FACTOR = 1.5
PART = 0.2
SHORTEST = 0.002
EXPLAINED = 0.5
"""A slow rank takes FACTOR times as long as the others, and longer by PART of a step and by SHORTEST seconds.
The others wait for EXPLAINED of this extra time."""
T = TypeVar("T")


@dataclass(frozen=True)
class RankGauge:
    """A number that each rank measures of its process. A report shows the highest value, with its rank."""

    label: str
    read: Callable[[], float]
    """Measures the figure now."""
    write: Callable[[float], str]
    """The figure as text for a person."""


FIGURES: dict[str, RankGauge] = {
    "memory": RankGauge(
        "peak memory",
        read=processors.peak_memory,
        write=lambda size: f"{size / 2**30:.2f} GiB",
    ),
    "processor": RankGauge("most processor time", read=time.process_time, write=duration),
}
"""The figures, by their name in the journal's records."""


@dataclass(frozen=True)
class Slow:
    """A rank for which the others wait in every step."""

    rank: int
    cause: Cause
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"slow in {self.cause}: {self.seconds * 1000:.0f} ms of each step, where the others take "
            f"{self.others * 1000:.0f} ms and wait for it"
        )


@dataclass(frozen=True)
class SlowNetwork(Slow):
    """The first rank of a host whose slow link makes all wait."""

    size: float
    """The bytes that are communicated in these seconds."""
    is_awaited: bool
    """Whether the ranks are known to wait for it."""

    def __str__(self) -> str:
        return (
            f"slow in {self.cause}: {self.seconds * 1000:.0f} ms of each step for {self.size / 1e6:.1f} MB, which take "
            f"{self.others * 1000:.0f} ms between other hosts, and "
            f"{'all wait for it' if self.is_awaited else 'it is not known whether ranks wait for it'}"
        )


class LeaveOneOutMedian:
    """Gives the median of all numbers but one. They are sorted once, as there may be thousands."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self._sorted = sorted(numbers)

    def median(self, one: float) -> float:
        """The median of all numbers but `one` of them."""
        index, middle = bisect.bisect_left(self._sorted, one), (len(self._sorted) - 1) // 2
        upper = self._sorted[middle + (middle >= index)]
        if len(self._sorted) % 2 == 0:
            return upper
        return (self._sorted[middle - 1 + (middle > index)] + upper) / 2


def slow_ranks(times: Mapping[int, messages.Times]) -> list[Slow]:
    """The ranks that are slower than the others, with the cause."""
    least = _least(times)
    reading = LeaveOneOutMedian(each.reading or 0.0 for each in times.values())
    rest = LeaveOneOutMedian(each.rest for each in times.values())
    known = {rank: each.waiting for rank, each in times.items() if each.waiting is not None}
    computing = {rank: times[rank].rest - seconds for rank, seconds in known.items()}
    waiting, working = LeaveOneOutMedian(known.values()), LeaveOneOutMedian(computing.values())
    found = []
    for rank, own in times.items():
        own_reading, usual = own.reading or 0.0, reading.median(own.reading or 0.0)
        if _is_slow(own_reading, usual, least, rest.median(own.rest) - own.rest):
            found.append(Slow(rank, "reading", own_reading, usual))
        if len(known) < len(times):
            continue
        usual, waited = working.median(computing[rank]), waiting.median(known[rank]) - known[rank]
        if _is_slow(computing[rank], usual, least, waited):
            cause: Cause = "computing or reading" if own.reading is None else "computing"
            found.append(Slow(rank, cause, computing[rank], usual))
    return found


def slow_networks(times: Mapping[int, messages.Times], hosts: Mapping[int, int]) -> list[SlowNetwork]:
    """The hosts whose link is slow, where the ranks wait for the network. `hosts`: the first rank of each rank's."""
    least = _least(times)
    known = [each.waiting for each in times.values() if each.waiting is not None]
    if known and statistics.median(known) < least:
        return []
    edges = network.edges({rank: each.traffic for rank, each in times.items() if rank in hosts}, hosts)
    return [
        SlowNetwork(each.host, "network", each.seconds, each.others, each.size, bool(known))
        for each in network.slow_links(edges, least)
    ]


def _least(times: Mapping[int, messages.Times]) -> float:
    """A slow rank takes longer than the others by at least so many seconds."""
    step = statistics.median((each.reading or 0.0) + each.rest for each in times.values())
    return max(PART * step, SHORTEST)


def _is_slow(seconds: float, others: float, least: float, waited: float) -> bool:
    """Whether a rank is slow that takes so many seconds, the others `others`, and they wait for `waited`
    seconds more."""
    longer = seconds - others
    return seconds >= FACTOR * others and longer >= least and waited >= EXPLAINED * longer


def slowest(times: Mapping[int, messages.Times], hosts: Mapping[int, int]) -> list[int]:
    """The rank of each host that works longest in a step. `hosts`: the first rank of each rank's host."""
    found: dict[int, int] = {}
    for rank, own in sorted(times.items()):
        best = found.setdefault(hosts.get(rank, rank), rank)
        if _working(own) > _working(times[best]):
            found[hosts.get(rank, rank)] = rank
    return sorted(found.values())


def columns(times: Mapping[int, messages.Times], shown: Iterable[int]) -> dict[str, list[float | None]]:
    """For a record of the journal: the seconds of a step in which each of these ranks waits for its batch, computes,
    and waits for other ranks. Where nothing shows how long a rank waits, nothing shows how long it computes."""
    waiting = {rank: 0.0 if len(times) == 1 else times[rank].waiting for rank in shown}
    rows = [
        (times[rank].reading, None if waits is None else max(0.0, times[rank].rest - waits), times[rank].waiting)
        for rank, waits in waiting.items()
    ]
    rounded = [[None if seconds is None else round(seconds, 6) for seconds in row] for row in rows]
    return {name: [row[index] for row in rounded] for index, name in enumerate(("reading", "computing", "waiting"))}


def _working(times: messages.Times) -> float:
    """The seconds of a step without those of waiting for other ranks."""
    return (times.reading or 0.0) + times.rest - (times.waiting or 0.0)


def _median(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return statistics.median(known) if known else None


class SlowWatch:
    """Measures this rank's steps; on rank 0, names ranks that are slow."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness, self.peers, self.topology = liveness, liveness.peers, liveness.topology
        self._began = self._measured = 0.0
        """When this step began, and when the last step that was measured began."""
        self.is_measuring = False
        """Whether this step is measured."""
        self._steps: list[tuple[float | None, float, float | None]] = []
        self.made = 0
        """The number of steps since the last report."""
        self._connections: dict[network.Connection, network.Counters] | None = None
        """The kernel's counters of each connection at the last report."""
        self._reported = 0.0
        self._times: dict[int, messages.Times] = {}
        """What each rank has reported since they were compared last."""
        self._found: deque[set[tuple[int, Cause]]] = deque(maxlen=OF)
        """The ranks that were slow, in each of the last comparisons."""
        self._named: set[tuple[int, Cause]] = set()

    def step_begins(self) -> None:
        """Begins a step, as this rank begins to read its batch."""
        now = time.monotonic()
        self.is_measuring = now - self._measured >= SAMPLED
        if self.is_measuring:
            self._began = now
            if self._connections is None and self.topology.size > 1:
                self._connections = network.connections()

    def step_ended(self, reading: float | None, waiting: float | None) -> None:
        """Ends a step that is measured: the seconds since `step_begins` in which this rank waited for its
        batch, and for the other ranks, None where that is not known."""
        now = time.monotonic()
        self._steps.append((reading, now - self._began - (reading or 0.0), waiting))
        self._measured, self.is_measuring = self._began, False
        if len(self._steps) >= STEPS and now - self._reported >= timeouts.of_each(timeouts.TIMES, self.topology.size):
            self._report(now)

    def reported(self, rank: int, times: messages.Times) -> None:
        """On rank 0: a rank has reported its times."""
        self._times[rank] = times
        if len(self._times) == self.topology.size:
            self._compare()

    def _report(self, now: float) -> None:
        reading, rest, waiting = zip(*self._steps, strict=True)
        made, before = self.made, self._connections or {}
        self.made, self._steps, self._reported = 0, [], now
        if self.topology.size > 1:
            self._connections = network.connections()
        times = messages.Times(
            reading=_median(reading),
            rest=statistics.median(rest),
            waiting=_median(waiting),
            traffic=network.traffic(before, self._connections or {}, made),
            figures={name: figure.read() for name, figure in FIGURES.items()},
        )
        with self.liveness.changed:
            if self.topology.is_rank_0:
                self.reported(0, times)
            else:
                self.peers.send(times)

    def _compare(self) -> None:
        times, self._times = self._times, {}
        hosts = self.hosts()
        self.liveness.listener.times(times, hosts)
        if self.topology.size == 1:
            return
        found = [*slow_ranks(times), *slow_networks(times, hosts)]
        slow = {(each.rank, each.cause): each for each in found}
        self._found.append(set(slow))
        for which, each in slow.items():
            if sum(which in found for found in self._found) >= TIMES and which not in self._named:
                self._named.add(which)
                self._name(each)

    def hosts(self) -> dict[int, int]:
        """The first rank of each rank's host."""
        own = Endpoint(self.topology.host, self.topology.node or 0, self.topology.local_rank)
        labels = {0: own.label} | {peer.rank: peer.endpoint.label for peer in self.peers.ranks()}
        first = {label: rank for rank, label in sorted(labels.items(), reverse=True)}
        return {rank: first[label] for rank, label in labels.items()}

    def _name(self, slow: Slow) -> None:
        text = f"{self.peers.name_of(slow.rank)} is {slow}."
        self.liveness.listener.warning(text)
        self.liveness.listener.named("slow", slow.rank, text)


class Clocks:
    """Measures for SlowWatch how long each step of this rank reads and waits."""

    def __init__(self, engine: Engine, watch: SlowWatch) -> None:
        self._engine, self._watch = engine, watch
        self._reading: float | None = None
        """The seconds in which this step has read; None where no batches go through `read`."""
        self._waited = 0.0

    def read(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches. The time in which this rank waits for one counts as reading."""
        began = time.monotonic()
        for batch in batches:
            self._reading = (self._reading or 0.0) + time.monotonic() - began
            yield batch
            began = time.monotonic()

    def begin_step(self) -> None:
        """Begins a step, as this rank begins to read its batch."""
        if self._reading is not None:
            self._reading = 0.0
        with self._watch.liveness.diagnosing("slow ranks"):
            self._watch.step_begins()
        if self._watch.is_measuring:
            self._waited = self._engine.waited or 0.0

    def end_step(self) -> None:
        """Ends a step, whose update was made."""
        self._watch.made += 1
        if self._watch.is_measuring:
            waited = self._engine.waited
            with self._watch.liveness.diagnosing("slow ranks"):
                self._watch.step_ended(self._reading, None if waited is None else waited - self._waited)
