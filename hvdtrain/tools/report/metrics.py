"""What metrics.jsonl holds: the steps' and epochs' columns, thinned, and what the promises are checked against."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.tools.report.lines import HIGHEST, Record, number, text
from hvdtrain.tools.report.model import Series

POINTS = 600
"""Of a curve in a report."""
KEPT, MOST_KEPT = 1 << 12, 1 << 16
"""Points after thinning while a file is read, and those at which it is thinned."""


class Column:
    """Points (x, y) in the order in which they come."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        """Each [n, 5]: x, mean, lowest, highest, number of points."""
        self._count = 0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Points [n] each; where one is not finite it is left out."""
        known = np.isfinite(x) & np.isfinite(y)
        if not known.any():
            return
        x, y = x[known], y[known]
        self._rows.append(np.stack([x, y, y, y, np.ones(len(x))], axis=1))
        self._count += len(x)
        if self._count > MOST_KEPT:
            self._rows = [_thinned(np.concatenate(self._rows), KEPT)]
            self._count = len(self._rows[0])

    @property
    def rows(self) -> np.ndarray:
        """[n, 5]: x, mean, lowest, highest, number of points."""
        return np.concatenate(self._rows) if self._rows else np.zeros((0, 5))

    @property
    def last(self) -> float | None:
        """The last y."""
        return float(self._rows[-1][-1, 1]) if self._rows else None

    def median(self) -> float | None:
        """Of y."""
        return float(np.median(self.rows[:, 1])) if self._rows else None

    def series(self, label: str) -> Series:
        """A curve of at most POINTS points, by x, with a band where a point stands for several."""
        rows = _thinned(self.rows, POINTS)
        has_band = bool((rows[:, 4] > 1).any())
        low, high = (rows[:, 2], rows[:, 3]) if has_band else (None, None)
        return Series(label, rows[:, 0], rows[:, 1], low, high)


def column_of(records: Sequence[Record], key: str) -> np.ndarray:
    """[n] the key's values; NaN where there is no number."""
    values: list[Any] = [record.get(key) for record in records]
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.array([np.nan if (known := number(value)) is None else known for value in values])
    if found.ndim != 1:  # lists of one length
        return np.full(len(values), np.nan)
    found[~(np.abs(found) <= HIGHEST)] = np.nan
    return found


def _thinned(rows: np.ndarray, most: int) -> np.ndarray:
    """The rows by x, neighbours as one, so that each stands for an equal part of x or is a point of its own."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if len(rows) <= most:
        return rows
    first, last = rows[0, 0], rows[-1, 0]
    width = (last - first) / most or 1.0
    bucket = np.minimum((rows[:, 0] - first) / width, most - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.add.reduceat(rows[:, 4], starts)
    means = [np.add.reduceat(rows[:, which] * rows[:, 4], starts) / counts for which in (0, 1)]
    lowest, highest = np.minimum.reduceat(rows[:, 2], starts), np.maximum.reduceat(rows[:, 3], starts)
    return np.stack([*means, lowest, highest, counts], axis=1)


MOST_NAMES = 40
NOT_VALUES = {"kind", "step", "epoch", "time"}


@dataclass
class Metrics:
    """Of one run."""

    steps: dict[str, Column] = field(default_factory=dict)
    """By name, over steps: what the log lines say."""
    epochs: dict[str, Column] = field(default_factory=dict)
    """By name, over epochs: what the ends of epochs say."""
    last_step: int = 0
    last_epoch: int = 0
    """The last one that has ended."""
    last_time: float = 0.0
    """Seconds since 1970; 0 where nothing says so."""
    repeated: int = 0
    """Log lines of a step that had one before."""
    valid_examples: set[int] = field(default_factory=set)
    """That an epoch's validation has counted; at most a few."""
    counted_epochs: int = 0

    def add(self, records: Sequence[Record]) -> None:
        """More records, in the file's order."""
        steps = [record for record in records if record.get("kind") == "step"]
        epochs = [record for record in records if record.get("kind") == "epoch"]
        if steps:
            self._add_steps(steps)
        if epochs:
            self._add_epochs(epochs)

    def final(self, name: str) -> float | None:
        """The last value of an epoch's metric, else of a step's."""
        column = self.epochs.get(name) or self.steps.get(name)
        return column.last if column else None

    def _add_steps(self, records: Sequence[Record]) -> None:
        x = _whole(column_of(records, "step"))
        known = x[np.isfinite(x)]
        if len(known):
            before = np.maximum.accumulate(np.concatenate([[self.last_step], known]))[:-1]
            self.repeated += int((known <= before).sum())
            self.last_step = max(self.last_step, int(known.max()))
        self._add_columns(self.steps, records, x)

    def _add_epochs(self, records: Sequence[Record]) -> None:
        x = _whole(column_of(records, "epoch"))
        known = x[np.isfinite(x)]
        self.last_epoch = max(self.last_epoch, int(known.max(initial=0)))
        made = _whole(column_of(records, "step"))
        self.last_step = max(self.last_step, int(np.nanmax(made, initial=0)))
        counted = _whole(column_of(records, "valid_examples"))
        counted = counted[np.isfinite(counted)]
        self.counted_epochs += len(counted)
        self.valid_examples |= {int(count) for count in np.unique(counted)[: MOST_NAMES - len(self.valid_examples)]}
        self._add_columns(self.epochs, records, x)

    def _add_columns(self, columns: dict[str, Column], records: Sequence[Record], x: np.ndarray) -> None:
        times = column_of(records, "time")
        self.last_time = max(self.last_time, float(np.nanmax(np.where(times < 1e10, times, np.nan), initial=0)))
        for name in sorted(set[str]().union(*records) - NOT_VALUES):
            if name not in columns and len(columns) >= MOST_NAMES:
                continue
            y = column_of(records, name)
            if np.isfinite(y).any():
                columns.setdefault(text(name, 60), Column()).add(x, y)


def _whole(values: np.ndarray) -> np.ndarray:
    """The values, NaN where they are no whole numbers from 0 on."""
    with np.errstate(invalid="ignore"):
        return np.where((values >= 0) & (values == np.floor(values)), values, np.nan)
