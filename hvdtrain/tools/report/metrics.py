"""What metrics.jsonl holds: the steps' and epochs' columns, thinned, and what the promises are checked against."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.tools.report.lines import Record, text
from hvdtrain.tools.report.thinning import Column, column_of

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
