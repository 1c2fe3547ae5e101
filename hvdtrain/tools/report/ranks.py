"""The time of each rank's own step over the run, and what the ranks say of the parts of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.tools.report.launches import MOST_RANKS, Launch, Times
from hvdtrain.tools.report.model import HeatMap
from hvdtrain.tools.report.waterfall import Axis

COLUMNS = 300
MARK = " is "
"""In the text of a slow rank's event, between its name and what is said of it."""


@dataclass(frozen=True)
class StepParts:
    """Median seconds of a step over the ranks and the run; None where nobody knows."""

    reading: float | None
    computing: float | None
    waiting: float | None

    @property
    def known(self) -> dict[str, float]:
        named = {"reading": self.reading, "computing": self.computing, "waiting for other ranks": self.waiting}
        return {name: seconds for name, seconds in named.items() if seconds is not None}


def step_parts(launches: Sequence[Launch]) -> StepParts:
    """Of all records of the ranks' times; the first one of a launch has its warm-up, and is left out among others."""
    records = [times for launch in launches for times in (launch.times[1:] or launch.times)]

    def middle(name: str) -> float | None:
        values = [getattr(times, name) for times in records]
        known = np.concatenate(values) if values else np.zeros(0)
        known = known[np.isfinite(known)]
        return float(np.median(known)) if len(known) else None

    return StepParts(middle("reading"), middle("computing"), middle("waiting"))


def slow_ranks(launches: Sequence[Launch]) -> dict[int, str]:
    """Rank -> why the run has named it, as "slow in computing: 40 ms of each step, ..."."""
    found = {}
    for launch in launches:
        for event in launch.events:
            if event.kind == "slow" and event.rank is not None:
                _, mark, why = event.text.partition(MARK)
                found[event.rank] = why.rstrip(".") if mark else event.text.rstrip(".")
    return found


def heat_map(launches: Sequence[Launch], axis: Axis) -> HeatMap | None:
    """None where the ranks' times were not recorded, or of one rank alone."""
    records = [
        (begins + times.clock, times)
        for launch, begins in zip(launches, axis.launches, strict=True)
        for times in launch.times
    ]
    ranks = _ranks([times for _, times in records], slow_ranks(launches))
    if len(ranks) < 2:
        return None
    grouped = np.array_split(np.arange(len(records)), min(len(records), COLUMNS))
    row_of = {rank: row for row, rank in enumerate(ranks)}
    at = np.array([records[group[-1]][0] for group in grouped])
    columns = [_mean([_own(records[index][1], row_of) for index in group]) for group in grouped]
    slow = {row_of[rank]: why for rank, why in slow_ranks(launches).items() if rank in row_of}
    names = {rank: launch.name_of(rank) for launch in launches for rank in ranks if launch.times}
    return HeatMap(at, tuple(names[rank] for rank in ranks), np.stack(columns, axis=1), slow)


def _ranks(records: Sequence[Times], slow: Mapping[int, str]) -> list[int]:
    """The rows: all ranks, of too many those that were named and then those that took the longest."""
    longest: dict[int, float] = {}
    for times in records:
        own = np.nan_to_num(times.computing) + np.nan_to_num(times.reading)
        for rank, seconds in zip(times.ranks, own.tolist(), strict=True):
            longest[rank] = max(longest.get(rank, 0.0), seconds)
    by_need = sorted(longest, key=lambda rank: (rank not in slow, -longest[rank], rank))
    return sorted(by_need[:MOST_RANKS])


def _own(times: Times, row_of: Mapping[int, int]) -> np.ndarray:
    """[rows] seconds of a step without waiting."""
    column = np.full(len(row_of), np.nan)
    own = times.computing + np.nan_to_num(times.reading)
    for rank, seconds in zip(times.ranks, own.tolist(), strict=True):
        if rank in row_of:
            column[row_of[rank]] = seconds
    return column


def _mean(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[rows] of the known values."""
    stacked = np.stack(columns)
    known = np.isfinite(stacked)
    total, count = np.where(known, stacked, 0.0).sum(axis=0), known.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
