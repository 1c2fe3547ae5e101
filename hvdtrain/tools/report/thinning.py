"""Columns of any length in bounded memory: neighbouring points become one with their mean, lowest and highest."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.tools.report.lines import HIGHEST, Record, number
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
