"""What launches.jsonl holds: each launch of a run, with its clock."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.tools.report import lines
from hvdtrain.tools.report.lines import Record

PHASES = ("start", "import", "rendezvous", "data", "model", "first_step", "training", "validation", "checkpoint", "end")
"""In the order in which a launch comes to them; a newer version may have others, which come behind."""
MOST_PHASES = 20
STEPS = ("first_step", "training")
MOST_LAUNCHES = 1000
MOST_EVENTS, MOST_KINDS = 500, 20
"""Of one kind, of one launch."""
MOST_COLUMNS = 600
MOST_RANKS = 256
MOST_HOSTS = 20_000


@dataclass(frozen=True)
class Happening:
    """An event, by the launch's clock."""

    kind: str
    clock: float
    text: str
    step: int | None
    rank: int | None


@dataclass(frozen=True)
class Times:
    """Median seconds of a step by rank; NaN where nobody knows."""

    clock: float
    ranks: tuple[int, ...]
    reading: np.ndarray
    computing: np.ndarray
    waiting: np.ndarray
    records: int = 1
    """How many of the file it is the mean of."""


@dataclass(frozen=True)
class End:
    """What a launch said of its end."""

    state: str
    text: str
    replica_checks: int | None


@dataclass
class Launch:
    """One process of rank 0."""

    about: Record
    """Its own record; empty where that is lost."""
    clock: float = 0.0
    """Of its last sign of life."""
    last_step: int = 0
    hosts: list[str] = field(default_factory=list)
    """By rank; of very many ranks, one a node."""
    submit: float | None = None
    start: float | None = None
    """Of the job, seconds since 1970, as SLURM says."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each, until `phases_clock`."""
    grew: str = ""
    """The phase that grew in the last record of them."""
    marks: "array[float]" = field(default_factory=lambda: array("d"))
    """Step, and seconds of steps by then; a pair a record of phases."""
    checkpoints: "array[float]" = field(default_factory=lambda: array("d"))
    """Their steps."""
    events: list[Happening] = field(default_factory=list)
    events_left_out: int = 0
    times: list[Times] = field(default_factory=list)
    joules: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    joules_clock: float = 0.0
    end: End | None = None
    _kinds: dict[str, int] = field(default_factory=dict)
    _together: int = 1
    """Records of times that become one, as there are so many."""

    @property
    def time(self) -> float | None:
        """When it began, seconds since 1970."""
        return lines.unix_time(self.about.get("time"))

    @property
    def first_step(self) -> int:
        """The step that it resumed from."""
        return lines.whole(self.about.get("step")) or 0

    @property
    def valid_examples(self) -> int | None:
        """That its data set had for each validation."""
        return lines.whole(self.about.get("valid_examples"))

    @property
    def ranks(self) -> int | None:
        return lines.whole(self.about.get("ranks"), 1)

    @property
    def job_id(self) -> str:
        return lines.text(lines.mapping(self.about.get("job")).get("id"), 60)

    @property
    def job(self) -> tuple[str, str]:
        """The job, and how often SLURM has started it again."""
        return self.job_id, lines.text(lines.mapping(self.about.get("job")).get("restart"), 20)

    def name_of(self, rank: int) -> str:
        """As in "rank 3 on node2"."""
        hosts = self.hosts
        return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) and len(hosts) == self.ranks else f"rank {rank}"

    def step_seconds_until(self, step: int) -> float:
        """Seconds of the steps up to that one, by the first record of phases that has it, or the last before it."""
        best, found = -1.0, 0.0
        for made, spent in zip(self.marks[::2], self.marks[1::2], strict=True):
            if best < made <= step:
                best, found = made, spent
        return found

    def add(self, record: Record) -> None:
        """One of its records, whatever it holds."""
        clock = lines.seconds(record.get("clock")) or 0.0
        self.clock = max(self.clock, clock)
        self.last_step = max(self.last_step, lines.whole(record.get("step")) or 0)
        take = {
            "launch": self._add_hosts,
            "world": self._add_hosts,
            "job": self._add_job,
            "phases": self._add_phases,
            "event": self._add_event,
            "ranks": self._add_times,
            "energy": self._add_energy,
            "end": self._add_end,
        }.get(str(record.get("kind")))
        if take:
            take(record, clock)

    def shorten(self) -> None:
        """Forgets what is shown of the last launch alone."""
        numbers = {name: getattr(self, name) for name in ("time", "ranks", "valid_examples")}
        of_job = dict(zip(("id", "restart"), self.job, strict=True))
        self.about = {**numbers, "step": self.first_step, "job": of_job}
        self.hosts = self.hosts if len(self.hosts) <= MOST_RANKS else []

    def _add_hosts(self, record: Record, clock: float) -> None:
        hosts = [lines.text(host, 100) for host in lines.items(record.get("hosts"), MOST_HOSTS)]
        self.hosts = hosts or self.hosts

    def _add_job(self, record: Record, clock: float) -> None:
        self.submit, self.start = lines.unix_time(record.get("submit")), lines.unix_time(record.get("start"))

    def _add_phases(self, record: Record, clock: float) -> None:
        given = lines.mapping(record.get("phases"))
        names = [*(name for name in PHASES if name in given), *sorted(map(str, given.keys() - set(PHASES)))]
        spent = {lines.text(name, 30): lines.seconds(given.get(name)) for name in names[:MOST_PHASES]}
        known = {name: each for name, each in spent.items() if each is not None}
        if not known or sum(known.values()) < sum(self.phases.values()):
            return  # damaged: they only grow
        growth = {name: each - self.phases.get(name, 0.0) for name, each in known.items()}
        self.grew, self.phases = max(growth, key=growth.__getitem__), known
        self.clock = max(self.clock, sum(known.values()))
        step = lines.whole(record.get("step"))
        if step is not None:
            self.marks.extend((step, sum(known.get(name, 0.0) for name in STEPS)))

    def _add_event(self, record: Record, clock: float) -> None:
        kind, step = lines.text(record.get("event"), 20) or "event", lines.whole(record.get("step"))
        if kind == "checkpoint" and step is not None:
            self.checkpoints.append(step)
        seen = self._kinds.get(kind, 0) + 1
        if seen > MOST_EVENTS or (len(self._kinds) == MOST_KINDS and kind not in self._kinds):
            self.events_left_out += 1
            return
        self._kinds[kind] = seen
        rank = lines.whole(record.get("rank"))
        self.events.append(Happening(kind, clock, lines.text(record.get("text")), step, rank))

    def _add_times(self, record: Record, clock: float) -> None:
        ranks = record.get("of")
        columns = {name: _numbers(record.get(name)) for name in ("reading", "computing", "waiting")}
        count = max(map(len, columns.values()))
        of = [lines.whole(rank) for rank in lines.items(ranks, count)] if ranks is not None else list(range(count))
        if not count or len(of) != count or None in of:
            return
        filled = {name: column if len(column) == count else np.full(count, np.nan) for name, column in columns.items()}
        times = Times(clock, tuple(of), **filled)  # type: ignore[arg-type]
        if self.times and self.times[-1].records < self._together and self.times[-1].ranks == times.ranks:
            self.times[-1] = _mean(self.times[-1], times)
            return
        self.times.append(times)
        if len(self.times) > MOST_COLUMNS:
            self.times, self._together = _halved(self.times), 2 * self._together

    def _add_energy(self, record: Record, clock: float) -> None:
        joules, nodes = lines.mapping(record.get("joules")), lines.mapping(record.get("nodes"))
        known = {
            lines.text(name, 40): value
            for name, given in list(joules.items())[:10]
            if (value := lines.number(given, 0)) is not None
        }
        if known:
            self.joules, self.joules_clock = known, clock
            counts = {name: lines.whole(nodes.get(name), 1) for name in known}
            self.nodes = {name: count for name, count in counts.items() if count}

    def _add_end(self, record: Record, clock: float) -> None:
        self._add_phases(record, clock)
        checks = lines.whole(record.get("replica_checks"))
        self.end = End(lines.text(record.get("state"), 20), lines.text(record.get("text")), checks)


def _numbers(values: object) -> np.ndarray:
    """[n] seconds; NaN for what is none."""
    known = [lines.seconds(value) for value in lines.items(values, MOST_RANKS)]
    return np.array([np.nan if value is None else value for value in known], np.float64)


def _mean(first: Times, second: Times) -> Times:
    """Two records of the same ranks as one."""
    means: dict[str, Any] = {}
    for name in ("reading", "computing", "waiting"):
        one, other = getattr(first, name), getattr(second, name)
        both = (first.records * one + second.records * other) / (first.records + second.records)
        means[name] = np.where(np.isnan(one), other, np.where(np.isnan(other), one, both))
    return Times(second.clock, first.ranks, **means, records=first.records + second.records)


def _halved(times: Sequence[Times]) -> list[Times]:
    """Two neighbours as one; of other ranks, the later of them."""
    pairs = itertools.zip_longest(times[::2], times[1::2])
    return [_mean(*pair) if pair[1] and pair[0].ranks == pair[1].ranks else pair[1] or pair[0] for pair in pairs]


def add_all(launches: list[Launch], records: Sequence[Record]) -> int:
    """More records, each to the launch above it; how many belong to launches beyond the most."""
    left_out = 0
    for record in records:
        if record.get("kind") == "launch":
            if len(launches) >= MOST_LAUNCHES:
                left_out += 1
                continue
            for last in launches[-1:]:
                last.shorten()
            launches.append(Launch(record))
        elif not launches:
            launches.append(Launch({}))
        if left_out == 0:
            launches[-1].add(record)
    return left_out
