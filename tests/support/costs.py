"""What work costs, without a clock, whose times a slower machine has not."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def peak_mib() -> float:
    """MiB that this process has had at most. getrusage's is that of the process it was forked from, too, where that had
    more."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


class Counted:
    lines = 0


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """`lines`: how many lines of Python run in functions that are called in the block, each as often as it runs."""
    found, before = Counted(), sys.gettrace()

    def traced(*_: Any) -> Any:
        found.lines += 1
        return traced

    sys.settrace(traced)
    try:
        yield found
    finally:
        sys.settrace(before)


def growth(work: Callable[[int], object], size: int) -> float:
    """How many times as many lines of Python `work(10 * size)` runs as `work(size)`."""
    with counted() as few:
        work(size)
    with counted() as many:
        work(10 * size)
    return many.lines / few.lines
