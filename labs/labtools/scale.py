"""How much work a lab does: all of it in front of a class, a little in the tests, more on a large machine. And how
much of it is done, where a cell takes long."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from hvdtrain import files
from hvdtrain.errors import LabError

VARIABLE = "HVDTRAIN_LAB_SCALE"
PATIENCE = 2.0  # seconds that a cell may be silent
REDRAW = 0.5  # seconds between two updates of the line
LOOK = 0.3  # seconds for which the machine's processors are watched
BUSY = 0.25  # the fraction of them at work for others, from which on timings scatter

Item = TypeVar("Item")


def scaled(count: int, least: int = 1) -> int:
    """`count` times HVDTRAIN_LAB_SCALE (1 where it is not set), rounded, and at least `least`.

    Raises LabError for a scale that is not a positive number.
    """
    text = os.environ.get(VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise LabError(f"{VARIABLE} must be a positive number, got {text!r}; unset it for a lab of a minute.")
    return max(least, round(count * scale))


def machine(ranks: int) -> int:
    """The cores of this machine. Prints what they, and what else runs on them, do to timings of so many ranks."""
    cores, busy = len(os.sched_getaffinity(0)), _busy()
    few = ranks > cores
    print(
        f"This machine has {cores} core{'s' * (cores > 1)} for {ranks} ranks"
        + (": they are interleaved, so that more ranks than cores are slower here, whatever the software." * few or ".")
    )
    if few:
        print("On a cluster every rank has a GPU, or cores, of its own, and the figures below look different.")
    if busy > BUSY:
        print(f"It is busy: {busy:.0%} of its processors' time goes to something else just now. The timings below will")
        print("scatter, and look slow. End what else runs here, or run the cells below again later.")
    return cores


def _busy() -> float:
    """The fraction of the processors' time that was used in a moment in which this process sleeps."""
    before = _processor_times()
    time.sleep(LOOK)
    spent = [now - then for now, then in zip(_processor_times(), before, strict=True)]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent)) if spent else 0.0


def _processor_times() -> list[int]:
    """The kernel's counters of user, nice, system, idle, I/O wait, ...; none where the system has no such file."""
    with contextlib.suppress(OSError, ValueError):
        return [int(each) for each in files.read(Path("/proc/stat"), 1 << 20).splitlines()[0].split()[1:9]]
    return []


class Progress:
    """A line below the cell, `12 of 50 trainings, 9 s`, that is updated in place once a cell has taken 2 s, and erased
    by `close`."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._shown = what, total, ""
        self._began = time.monotonic()
        self._next = self._began + PATIENCE

    def show(self, done: int) -> None:
        """Shows that so many are done."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REDRAW
            self._print(f"{done} of {self._total} {self._what}, {now - self._began:.0f} s")

    def close(self) -> None:
        """Erases the line."""
        if self._shown:
            self._print("")
            print("\r", end="", flush=True)

    def _print(self, text: str) -> None:
        print(f"\r{text.ljust(len(self._shown))}", end="", flush=True)
        self._shown = text


def counted(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, of which a `Progress` shows how many are done. `total` is needed where the items have no length."""
    if total is None:
        assert isinstance(items, Sized)
        total = len(items)
    progress = Progress(what, total)
    try:
        for done, item in enumerate(items):
            progress.show(done)
            yield item
    finally:
        progress.close()
