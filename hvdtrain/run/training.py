"""How far a training is, in a line: for the bottom of the terminal, and for the log where nothing else was printed."""

import sys
from dataclasses import dataclass, field

from hvdtrain.run.estimate import Estimate, duration

BAR, SHORTEST_BAR = 30, 4
"""Columns of the bar, which takes what the numbers leave."""


@dataclass
class Training:
    """The numbers of the newest log line, and a clock that knows how many steps are made."""

    estimate: Estimate
    epoch: int = 0
    is_ending: bool = False
    """Whether the epoch is reported, and its checkpoint is written."""
    silence: float = field(default=4.0, init=False)
    _numbers: tuple[str, ...] = ()

    def logged(self, loss: float, lr: float, rate: float) -> None:
        """What the newest log line has."""
        self._numbers = f"loss {loss:.4f}", f"LR {lr:.4g}", f"{rate:.1f} img/s"

    def bar(self, width: int) -> str:
        """Step of total, percent, a bar, and the rest."""
        step, total = self.estimate.step, self._total
        where = f"{step}/{total} {step / total:4.0%}" if total else f"step {step}"
        ends = [where, *self._left(), *self._running()]
        parts = [*ends, f"epoch {self.epoch}", *self._numbers]
        room = width - sum(map(len, parts)) - 2 * len(parts)
        if total and room >= SHORTEST_BAR:
            parts.insert(len(ends), _bar(step / total, min(room, BAR)))
        return "  ".join(parts)

    def line(self) -> str:
        """The same in words."""
        step, total = self.estimate.step, self._total
        where = f"step {step}/{total} ({step / total:.0%})" if total else f"step {step}"
        return ", ".join([where, f"epoch {self.epoch}", *self._numbers, *self._running(), *self._left()])

    @property
    def _total(self) -> int | None:
        ahead = self.estimate.ahead  # another thread may set it anew
        return ahead.total if ahead else None

    def _left(self) -> list[str]:
        left = self.estimate.seconds_left()
        return [] if left is None else [f"{duration(left)} left"]

    def _running(self) -> list[str]:
        """What takes its time, and for how long so far."""
        estimate = self.estimate
        if not estimate.is_slow:
            return []
        if estimate.is_in_pause:
            what = "checkpoint" if self.is_ending else "validation"
        else:
            what = "this step" if estimate.has_stepped else "the first step, which may compile"
        return [f"{what} {duration(estimate.running)}"]


def _bar(share: float, width: int) -> str:
    done = int(share * width)
    full, empty = "━─" if "utf" in (getattr(sys.__stdout__, "encoding", None) or "").lower() else "#-"
    return full * done + empty * (width - done)
