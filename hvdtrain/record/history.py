"""What a run's records say: the curves of metrics.jsonl, the launches of launches.jsonl.

It takes bounded memory, and raises nothing, whatever the records hold.
"""

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from hvdtrain import untrusted
from hvdtrain.core.sharing import MOST_RANKS
from hvdtrain.untrusted import HIGHEST, items, mapping, text, unix_time, whole

Record = dict[str, Any]
POINTS = 600
"""The most points that a curve has."""
KEPT, MOST_KEPT = 1 << 12, 1 << 16
"""While a file is read, a column of more than MOST_KEPT points is thinned to KEPT."""
MOST_NAMES = 40
NOT_VALUES = {"kind", "step", "epoch", "time"}
PHASES = ("start", "import", "rendezvous", "data", "model", "first_step", "training", "validation", "checkpoint", "end")
"""The phases of a launch in their order."""
STEPS = ("first_step", "training")
KINDS = ("launch", "world", "job", "length", "phases", "event", "ranks", "energy", "end")
"""The kinds of records of a launch; a file that others may write names no other method of it."""
MOST_LAUNCHES = 1000
ENDLESS = 10**9
"""A run of more epochs names no end."""
MOST_EVENTS, MOST_KINDS, MOST_FIGURES = 500, 20, 20
"""The most events of one kind, kinds of events, and figures of the ranks, that are kept of a launch."""
MOST_COLUMNS = 600
MOST_HOSTS = 20_000
TIMES = ("reading", "computing", "waiting")


class Column:
    """Points (x, y) in the order in which they were added; y is NaN where it is not finite. Where there are too many,
    neighbours are merged into one."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        """Each [n, 5]: x, mean, lowest, highest, number of points; the three are NaN where no y is finite."""
        self.count = self.lost = 0
        """How many points were added, and how many of them are not finite."""
        self.first_lost = math.nan
        """The x of the first y that is not finite."""
        self.last: float | None = None
        self.last_x = math.nan
        """The last y, NaN where it is not finite, and its x."""

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Adds n points, but for those whose x is not finite."""
        known = np.isfinite(x)
        if not known.any():
            return
        x, y = x[known], np.where(np.isfinite(y[known]), y[known], np.nan)
        lost = x[np.isnan(y)]
        if len(lost):
            self.first_lost = float(np.nanmin([self.first_lost, lost.min()]))
        self.count, self.lost = self.count + len(x), self.lost + len(lost)
        self.last_x, self.last = float(x[-1]), float(y[-1])
        self._rows.append(np.stack([x, y, y, y, np.ones(len(x))], axis=1))
        if sum(map(len, self._rows)) > MOST_KEPT:
            self._rows = [_thinned(np.concatenate(self._rows), KEPT)]

    def median(self) -> float | None:
        """The median of the finite y."""
        known = np.concatenate([np.zeros(0), *(rows[np.isfinite(rows[:, 1]), 1] for rows in self._rows)])
        return float(np.median(known)) if len(known) else None

    def total(self) -> float:
        """The sum of the finite y."""
        return float(sum(np.nansum(rows[:, 1] * rows[:, 4]) for rows in self._rows))

    def thinned(self) -> np.ndarray:
        """[n, 5]: x, mean, lowest, highest, number of points; at most POINTS rows, by x."""
        return _thinned(np.concatenate([np.zeros((0, 5)), *self._rows]), POINTS)


def _thinned(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many rows, by x. Where there are more, each stands for an equal part of the range of x."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if len(rows) <= most:
        return rows
    first, last = rows[0, 0], rows[-1, 0]
    width = (last - first) / most or 1.0
    bucket = np.minimum((rows[:, 0] - first) / width, most - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts, known = rows[:, 4], np.where(np.isfinite(rows[:, 1]), rows[:, 4], 0.0)
    x = np.add.reduceat(rows[:, 0] * counts, starts) / np.add.reduceat(counts, starts)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.nan_to_num(rows[:, 1]) * known, starts) / np.add.reduceat(known, starts)
    lowest, highest = np.fmin.reduceat(rows[:, 2], starts), np.fmax.reduceat(rows[:, 3], starts)
    return np.stack([x, mean, lowest, highest, np.add.reduceat(counts, starts)], axis=1)


@dataclass
class Metrics:
    """What metrics.jsonl holds."""

    steps: dict[str, Column] = field(default_factory=dict)
    """The curves over steps by name, from the log lines."""
    epochs: dict[str, Column] = field(default_factory=dict)
    """The curves over epochs by name, from the ends of epochs."""
    last_step: int = 0
    last_epoch: int = 0
    """The last epoch that has ended."""
    last_time: float = 0.0
    """When the last record was written, in seconds since 1970; 0 where that is not known."""
    repeated: int = 0
    """How many log lines are of a step that an earlier line was of."""
    valid_examples: set[int] = field(default_factory=set)
    """The different numbers of examples that validations have counted, at most MOST_NAMES."""
    counted_epochs: int = 0

    def add(self, records: Sequence[Record]) -> None:
        """Adds records, in the file's order."""
        steps = [record for record in records if record.get("kind") == "step"]
        # Without validation its loss is null.
        ended = (record for record in records if record.get("kind") == "epoch")
        epochs = [each | {"valid_loss": ""} if each.get("valid_examples") == 0 else each for each in ended]
        made, until = (_whole(_column(of_kind, "step")) for of_kind in (steps, epochs))
        ends = _whole(_column(epochs, "epoch"))
        known = made[np.isfinite(made)]
        before = np.maximum.accumulate(np.concatenate([[self.last_step], known]))[:-1]
        self.repeated += int((known <= before).sum())
        self.last_step = max(self.last_step, int(np.nanmax(np.concatenate([known, until]), initial=0)))
        self.last_epoch = max(self.last_epoch, int(np.nanmax(ends, initial=0)))
        counted = _whole(_column(epochs, "valid_examples"))
        counted = counted[np.isfinite(counted)]
        self.counted_epochs += len(counted)
        self.valid_examples |= {int(count) for count in np.unique(counted)[: MOST_NAMES - len(self.valid_examples)]}
        self._add_columns(self.steps, steps, made)
        self._add_columns(self.epochs, epochs, ends)

    def final(self, name: str) -> float | None:
        """The last value of an epoch's metric, else of a step's; NaN where it is not finite."""
        column = self.epochs.get(name) or self.steps.get(name)
        return column.last if column else None

    def _add_columns(self, columns: dict[str, Column], records: Sequence[Record], x: np.ndarray) -> None:
        times = _column(records, "time")
        self.last_time = max(self.last_time, float(np.nanmax(np.where(times < 1e10, times, np.nan), initial=0)))
        for name in sorted(set[str]().union(*records) - NOT_VALUES):
            if name not in columns and len(columns) >= MOST_NAMES:
                continue
            y = _column(records, name)
            given = np.isfinite(y)
            if not given.all():  # null is written for what is not finite
                given |= [name in record and isinstance(record[name], float | None) for record in records]
            if given.any():
                columns.setdefault(text(name, 60), Column()).add(x[given], y[given])


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    """[n] the key's values; NaN where there is no number."""
    values: list[Any] = [record.get(key) for record in records]
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = _numbers(values, -HIGHEST)
    if found.ndim != 1:  # lists of one length
        return np.full(len(values), np.nan)
    found[~(np.abs(found) <= HIGHEST)] = np.nan
    return found


def _numbers(values: Sequence[object], low: float, high: float = HIGHEST) -> np.ndarray:
    """[n] the numbers in [low, high]; NaN for every other value."""
    known = [untrusted.number(value, low, high) for value in values]
    return np.array([np.nan if value is None else value for value in known], np.float64)


def _whole(values: np.ndarray) -> np.ndarray:
    """The values that are whole numbers from 0 on; NaN for the others."""
    with np.errstate(invalid="ignore"):
        return np.where((values >= 0) & (values == np.floor(values)), values, np.nan)


@dataclass(frozen=True)
class Event:
    """Something that happened once."""

    at: float
    """Seconds since the launch's beginning; in a report since the report's, the submit or else the first launch."""
    kind: str
    """launch, resume, checkpoint, slow, lost, signal, requeue, end, ..."""
    text: str
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Times:
    """Median seconds that a step took, by rank; NaN where they are not known."""

    clock: float
    ranks: tuple[int, ...]
    reading: np.ndarray
    computing: np.ndarray
    waiting: np.ndarray
    processor: np.ndarray
    """The processor seconds that each rank has used since its process began."""

    @property
    def own(self) -> np.ndarray:
        """Seconds of a step without waiting for other ranks."""
        own: np.ndarray = self.computing + np.nan_to_num(self.reading)
        return own


@dataclass(frozen=True)
class End:
    """How a launch ended, as it has recorded itself."""

    state: str
    text: str
    replica_checks: int | None


@dataclass
class Launch:
    """One process of rank 0."""

    about: Record
    """The record with which it began; empty where it is lost, and of every launch but the last."""
    clock: float = 0.0
    """Seconds from its beginning to its last sign of life."""
    last_step: int = 0
    hosts: list[str] = field(default_factory=list)
    """The host of each rank; where there are very many ranks, each host once."""
    submit: float | None = None
    start: float | None = None
    """When the job was submitted and started, in seconds since 1970, as SLURM reports it."""
    phases: dict[str, float] = field(default_factory=dict)
    """The seconds that were spent in each phase, by the last record of phases."""
    grew: str = ""
    """The phase that took the most time between the last two records of phases."""
    marks: "array[float]" = field(default_factory=lambda: array("d"))
    """Two numbers for each record of phases: a step, and the seconds that all steps up to it took."""
    checkpoints: "array[float]" = field(default_factory=lambda: array("d"))
    """The steps at which checkpoints were written."""
    times: list[Times] = field(default_factory=list)
    figures: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The highest value of each figure that ranks have reported, and its rank."""
    joules: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    joules_clock: float = 0.0
    end: End | None = None
    epochs: int | None = None
    """After how many epochs the run was to end; None where that is not known, or endless."""
    _events: dict[str, list[Event]] = field(default_factory=dict)
    _times_seen: int = 0
    _every: int = 1
    """Of how many records of times one is kept."""

    def __post_init__(self) -> None:
        job = mapping(self.about.get("job"))
        self.ranks = whole(self.about.get("ranks"), 1)
        self.time = unix_time(self.about.get("time"))
        """When it began, in seconds since 1970."""
        self.first_step = whole(self.about.get("step")) or 0
        """The step that it resumed from."""
        self.valid_examples = whole(self.about.get("valid_examples"))
        """How many examples its data set had for each validation."""
        self.classes, self.gpus = whole(self.about.get("classes"), 2), whole(self.about.get("gpus"))
        """How many classes its data set has, and how many GPUs rank 0 could use; None where that is not recorded."""
        self.job_id = text(job.get("id"), 60)
        self.job = self.job_id, text(job.get("restart"), 20)
        """The job's number, and how often SLURM has started the job again."""

    @property
    def events(self) -> list[Event]:
        """The events in order of time; of very many of one kind, the first and the last ones."""
        return sorted(itertools.chain(*self._events.values()), key=attrgetter("at"))

    def name_of(self, rank: int) -> str:
        """The rank's name, as in "rank 3 on node2"."""
        hosts = self.hosts
        return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) and len(hosts) == self.ranks else f"rank {rank}"

    def step_seconds_until(self, step: int) -> float:
        """The seconds that all steps up to this one took, by the last record of phases that is not after it."""
        marks = zip(self.marks[::2], self.marks[1::2], strict=True)
        return max((mark for mark in marks if mark[0] <= step), key=itemgetter(0), default=(0.0, 0.0))[1]

    def add(self, record: Record) -> None:
        """Adds one of its records, whatever the record holds."""
        clock = untrusted.seconds(record.get("clock")) or 0.0
        self.clock = max(self.clock, clock)
        self.last_step = max(self.last_step, whole(record.get("step")) or 0)
        if (kind := record.get("kind")) in KINDS:
            getattr(self, f"_add_{kind}")(record, clock)

    def _add_launch(self, record: Record, clock: float) -> None:
        hosts = [text(host, 100) for host in items(record.get("hosts"), MOST_HOSTS)]
        self.hosts = hosts or self.hosts

    _add_world = _add_launch

    def _add_job(self, record: Record, clock: float) -> None:
        self.submit, self.start = unix_time(record.get("submit")), unix_time(record.get("start"))

    def _add_length(self, record: Record, clock: float) -> None:
        epochs = whole(record.get("epochs"), 1)
        self.epochs = epochs if epochs and epochs < ENDLESS else None

    def _add_phases(self, record: Record, clock: float) -> None:
        given = mapping(record.get("phases"))
        known = {name: each for name in PHASES if (each := untrusted.seconds(given.get(name))) is not None}
        if not known or sum(known.values()) < sum(self.phases.values()):
            return  # damaged, as they only grow
        growth = {name: each - self.phases.get(name, 0.0) for name, each in known.items()}
        self.grew, self.phases = max(growth, key=growth.__getitem__), known
        self.clock = max(self.clock, sum(known.values()))
        step = whole(record.get("step"))
        if step is not None:
            self.marks.extend((step, sum(known.get(name, 0.0) for name in STEPS)))

    def _add_event(self, record: Record, clock: float) -> None:
        kind, step = text(record.get("event"), 20) or "event", whole(record.get("step"))
        if kind == "checkpoint" and step is not None:
            self.checkpoints.append(step)
        if kind not in self._events and len(self._events) == MOST_KINDS:
            return
        alike = self._events.setdefault(kind, [])
        alike.append(Event(clock, kind, text(record.get("text")), step, whole(record.get("rank"))))
        if len(alike) > MOST_EVENTS:
            del alike[MOST_EVENTS // 2]

    def _add_ranks(self, record: Record, clock: float) -> None:
        columns = [_numbers(items(record.get(name), MOST_RANKS), 0, 1e9) for name in TIMES]
        count, listed = max(map(len, columns)), record.get("of")
        ranks = list(range(count)) if listed is None else [whole(rank) for rank in items(listed, count)]
        if not count or len(ranks) != count or None in ranks:
            return
        figures = mapping(record.get("figures"))
        given = {name: _numbers(items(values, MOST_RANKS), 0) for name, values in figures.items()}
        for name, column in given.items():
            known = [(float(value), rank) for value, rank in zip(column, ranks, strict=False) if math.isfinite(value)]
            if known and (name in self.figures or len(self.figures) < MOST_FIGURES):
                self.figures[name] = max(*known, self.figures.get(name, known[0]))  # type: ignore[assignment]
        columns.append(given.get("processor", np.empty(0)))
        self._times_seen += 1
        if self._times_seen % self._every:
            return
        filled = [column if len(column) == count else np.full(count, np.nan) for column in columns]
        self.times.append(Times(clock, tuple(ranks), *filled))  # type: ignore[arg-type]
        if len(self.times) > MOST_COLUMNS:
            self.times, self._every = self.times[1::2], 2 * self._every

    def _add_energy(self, record: Record, clock: float) -> None:
        joules, nodes = mapping(record.get("joules")), mapping(record.get("nodes"))
        given = {text(name, 40): untrusted.number(value, 0) for name, value in list(joules.items())[:10]}
        known = {name: value for name, value in given.items() if value is not None}
        if known:
            self.joules, self.joules_clock = known, clock
            counts = {name: whole(nodes.get(name), 1) for name in known}
            self.nodes = {name: count for name, count in counts.items() if count}

    def _add_end(self, record: Record, clock: float) -> None:
        self._add_phases(record, clock)
        checks = whole(record.get("replica_checks"))
        self.end = End(text(record.get("state"), 20), text(record.get("text")), checks)


def add_launches(launches: list[Launch], records: Sequence[Record]) -> int:
    """Adds each record to the launch that it follows; how many launches beyond MOST_LAUNCHES were left out."""
    left_out = 0
    for record in records:
        if record.get("kind") == "launch":
            if len(launches) >= MOST_LAUNCHES:
                left_out += 1
                continue
            for last in launches[-1:]:  # forgets what is shown of the last launch alone
                last.about, last.hosts = {}, last.hosts if len(last.hosts) <= MOST_RANKS else []
            launches.append(Launch(record))
        elif not launches:
            launches.append(Launch({}))
        if left_out == 0:
            launches[-1].add(record)
    return left_out
