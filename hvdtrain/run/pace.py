"""When a checkpoint inside an epoch is due: every so many steps, or as often as it is worth what it costs."""

import math
import statistics
from dataclasses import dataclass, field

from hvdtrain.core.interval import daly

FIRST = 20
"""Steps to the first checkpoint of a run, and to the second and third: then it is known what one costs."""
WARM_UP = 5
"""Steps that are not measured."""
LOGGED_AGAIN = 1.5
"""Change of the interval that is worth another line of the log."""


@dataclass
class Steps:
    """How many steps were measured, and their seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    @property
    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass
class Costs:
    """What rank 0 measures: its steps alone and beside a checkpoint that is being written, and how long each checkpoint
    has held them up. The first one, which also takes the memory of all, is left out."""

    alone: Steps = field(default_factory=Steps)
    beside: Steps = field(default_factory=Steps)
    stalls: list[float] = field(default_factory=list)
    made: int = 0
    write_seconds: float = 0.0
    _last: float | None = None
    _skipped: int = 0
    _stalled: float = 0.0
    _is_beside: bool = False

    def pause(self) -> None:
        """The time until the next step is none of a step's: an epoch begins."""
        self._last = None

    def stepped(self, now: float, *, is_writing: bool) -> None:
        """A step has ended."""
        if self._last is not None and self._skipped >= WARM_UP:
            seconds = now - self._last - self._stalled
            (self.beside if self._is_beside or is_writing else self.alone).add(seconds)
        self._skipped += 1
        self._last, self._stalled, self._is_beside = now, 0.0, is_writing

    def written(self, stall: float, write_seconds: float) -> None:
        """A checkpoint has begun, and has held training up for so long; that before it took `write_seconds`."""
        self.made += 1
        self._stalled += stall
        self._is_beside = True
        if self.made == 1:
            return
        self.write_seconds = max(self.write_seconds, write_seconds)
        self.stalls.append(stall)
        if self.made == 2:
            self.beside = Steps()

    @property
    def is_known(self) -> bool:
        return self.made >= 3 and bool(self.alone.count or self.beside.count)

    @property
    def step_seconds(self) -> float:
        return self.alone.mean or self.beside.mean

    @property
    def cost(self) -> float:
        """Seconds that training loses by one checkpoint: held up, and by slower steps beside it. To be asked when the
        next begins."""
        slower = self.beside.seconds - self.beside.count * self.step_seconds
        return statistics.fmean(self.stalls) + max(0.0, slower) / max(1, self.made - 2)


class Pace:
    """`checkpoint_every_steps: auto`. Every rank has the same: rank 0 measures, and the others are given its interval.

    Training loses least with Daly's interval. No checkpoint is due before the one before it is written.
    """

    def __init__(self, mtbf_hours: float, step: int) -> None:
        self.mtbf_hours, self.costs = mtbf_hours, Costs()
        self._next, self._logged = step + FIRST, 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step >= self._next

    def wanted(self) -> int:
        """Rank 0's interval in steps, by what it has measured."""
        if not self.costs.is_known:
            return FIRST
        seconds = max(daly(self.costs.cost, self.mtbf_hours * 3600), self.costs.write_seconds)
        return min(10**9, max(1, math.ceil(seconds / self.costs.step_seconds)))

    def renew(self, step: int, interval: int) -> None:
        """A checkpoint was made at this step; the next is due `interval` steps later."""
        self._next = step + interval

    def news(self, interval: int) -> str | None:
        """A line for the log, where the interval is a new one."""
        costs = self.costs
        if not costs.is_known or (self._logged and 1 / LOGGED_AGAIN < interval / self._logged < LOGGED_AGAIN):
            return None
        self._logged = interval
        return (
            f"a checkpoint every {interval} steps ({interval * costs.step_seconds:.1f} s): one costs training "
            f"{costs.cost * 1e3:.0f} ms and is written in {costs.write_seconds:.1f} s; mtbf_hours {self.mtbf_hours:g}"
        )
