"""The exercises' checks, a module a lab, and what they have in common: gaps, hints, and how a mistake is shown.

A check never reads the learner's code: it judges what that code returns and does.
"""

import functools
import linecache
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hvdtrain.errors import LabError
from labtools import progress
from labtools.ranks import Ranks
from labtools.worker import location

SECONDS = 20.0  # for ranks that wait for one another; a check takes less than five
QUIET = {"HVDTRAIN_REPORT": "off"}


class Exercise:
    """The checks of one lab: a method a gap, which prints a line where the gap is filled right, and raises LabError
    that says what is wrong where it is not."""

    lab: ClassVar[int] = 0
    hints: ClassVar[Mapping[str, Sequence[str]]]
    """By gap, in the lab's order: hints, each saying more than the one before. None is the solution."""

    def __init_subclass__(cls) -> None:
        for gap in vars(cls).get("hints", ()):
            setattr(cls, gap, _kept(gap, getattr(cls, gap)))

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()
        self._filled: set[str] = set()
        progress.announce()

    def needs(self, *gaps: str) -> None:
        """Raises LabError, with the cells to fill, unless these gaps are right; by default all of the lab."""
        names = list(self.hints)
        wrong = [gap for gap in gaps or names if gap not in self._filled]
        if wrong:
            cells = "\n".join(f"    gap {names.index(gap) + 1}, {gap}: the cell above check.{gap}" for gap in wrong)
            raise LabError(
                f"This cell needs what is not right yet:\n{cells}\nFill it, run it and its check, and then this."
            )

    def hint(self, gap: str | Callable[..., Any]) -> None:
        """Prints a hint for a gap, and another one each time. Raises LabError for a gap that the lab does not have."""
        name = gap if isinstance(gap, str) else getattr(gap, "__name__", repr(gap))
        if name not in self.hints:
            raise LabError(f"{name} is not a gap of this lab; they are {', '.join(self.hints)}.")
        hints = self.hints[name]
        self._shown[name] = number = min(self._shown[name] + 1, len(hints))
        beside = "; the solution is the notebook beside this one" if any(Path().glob(f"{self.lab}-solution-*")) else ""
        more = "" if number < len(hints) else f" (the last one{beside})"
        print(textwrap.fill(f"Hint {number} of {len(hints)} for {name}: {hints[number - 1]}{more}", 80))

    def _keep(self, gap: str, mistake: str) -> None:
        """For `needs`, and for the class's progress: the gap is right, or the check named a mistake."""
        number = list(self.hints).index(gap) + 1
        if mistake:
            self._filled.discard(gap)
            mistake = mistake.splitlines()[0].removeprefix(f"Gap {number}, {gap}, ")
        else:
            self._filled.add(gap)
        progress.note(self.lab, f"{number} {gap}", mistake)

    def _judge(self, gap: str, mistake: str | None) -> None:
        if mistake:
            raise self._wrong(gap, mistake)

    def _wrong(self, gap: str, mistake: str) -> LabError:
        """The mistake continues "Gap 2, shard, "."""
        number = list(self.hints).index(gap) + 1
        return LabError(f'Gap {number}, {gap}, {mistake}\nA hint: check.hint("{gap}")')

    def _call(self, gap: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the learner's function returns. What it raises is explained with the learner's own line of code."""
        try:
            return function(*arguments)
        except Exception as error:
            raise self._wrong(gap, stopped(error)) from None


def _kept(gap: str, check: Callable[..., None]) -> Callable[..., None]:
    """The check of a gap, which also keeps what it found."""

    @functools.wraps(check)
    def kept(self: Exercise, *arguments: Any) -> None:
        try:
            check(self, *arguments)
        except LabError as error:
            self._keep(gap, str(error))
            raise
        self._keep(gap, "")

    return kept


class OnRanks(Exercise):
    """The checks of a lab that tries gaps on real ranks, by functions that call `tell` once the learner's has
    returned."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def _run(self, gap: str, function: Any, *arguments: Any, ranks: int = 4, watch: Any = None) -> list[Any]:
        past: list[int] = []
        watch = watch or (lambda rank, _: past.append(rank))
        try:
            return self._ranks.run(function, *arguments, ranks=ranks, seconds=SECONDS, watch=watch, environ=QUIET)
        except LabError as error:
            if "wait" in str(error) and 0 < len(past) < ranks:
                what = (
                    f"is not for some ranks only: {listed(sorted(past))} of {ranks} went past it, and the others wait."
                )
            else:
                what = "makes ranks wait for one another:" if "wait" in str(error) else "stopped:"
            raise self._wrong(gap, f"{what}\n{error}") from None


def stopped(error: Exception) -> str:
    """Continues "Gap 2, shard, ": the learner's own line that failed, and the error."""
    place = location(error.__traceback__)
    where = f" in {place[2]}(), line {place[1]}" if place else ""
    line = f"\n    {linecache.getline(place[0], place[1]).strip()}" if place else ""
    return f"stopped{where}:{line}\n{type(error).__name__}: {error}"


def of_empty_part(error: str, what: str) -> str | None:
    """From what stopped a gap where a rank has none of `what`, and only there."""
    if "ZeroDivisionError" not in error:
        return None
    return (
        f"is right while each rank has {what}, but a rank that has none divides by 0: it divides by its own count. "
        "First sum over the ranks, then divide one sum by the other."
    )


def print_right(text: str) -> None:
    """The line of a gap that is filled right, in green."""
    print(f"\x1b[32m{textwrap.fill(f'Right: {text}', 80)}\x1b[0m")


def listed(values: Sequence[Any] | range) -> str:
    """Values behind one another, separated by commas; floats with two digits."""
    return ", ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)


def first_of(*rows: tuple[Any, str]) -> str | None:
    """The text of the first row (condition, text) that holds."""
    return next((text for holds, text in rows if holds), None)
