"""What benchmarks share: rounds, medians, and an answer as table, sentence, JSON and page."""

import contextlib
import dataclasses
import json
import platform
import signal
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import pydantic
from pydantic import Field

from hvdtrain import files, processors
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import duration
from hvdtrain.errors import EngineUnavailable, OutputError, RecipeError
from hvdtrain.installed import version_of
from hvdtrain.terminal import INTERRUPTED, STOP_SIGNALS, Show, Status, hidden
from hvdtrain.untrusted import quoted

MOST_RANKS = 16_384
MOST_REPEATS = 20
WIDTH = 80
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""A number of rounds, steps or images."""
RankCount = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Number = TypeVar("Number", int, float)
LIBRARIES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "lightning", "mpi4py", "numpy")


@pydantic.dataclasses.dataclass(frozen=True)
class Kept:
    """The flags of a benchmark that keep its figures in files."""

    output: Annotated[Path | None, Flag("folder for the figures as JSON and as a page with a chart (HTML)")] = None
    json: Annotated[Path | None, Flag("file for the figures; -: print them alone", metavar="FILE")] = None


def growing(kind: type[Number], text: str, most: int, rule: str) -> list[Number]:
    """The numbers of a flag, as 1,2,4. Raises RecipeError, with the rule, where they do not grow or one is too high."""
    try:
        found = [kind(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or found != sorted(set(found)) or not all(0 < number <= most for number in found):
        raise RecipeError(f"{rule}; got {quoted(text)}.")
    return found


class Spread(NamedTuple):
    """The median of some figures, and the lowest and highest of them."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of one figure or more."""
    return Spread(statistics.median(values), min(values), max(values))


def summary(values: Sequence[float], scale: float = 1.0, digits: int | None = None) -> str:
    """The spread times `scale`, as `12.30 (12.01 to 13.40)`; by default in four digits."""
    found = [scale * value for value in spread(values)]
    if digits is None:
        digits = 3 if found[0] < 1 else 2 if found[0] < 100 else 1 if found[0] < 1000 else 0
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({low} to {high})"


def rate(per_second: float) -> str:
    """A rate as `812.3` or `12,345`."""
    return f"{per_second:,.{1 if per_second < 1000 else 0}f}"


def times(ratio: float) -> str:
    """A ratio as `1.8 times as fast as`, or `as fast as` where it is about 1."""
    return f"{ratio:.1f} times as fast as" if ratio >= 1.05 else "as fast as"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, with words aligned to the left and figures to the right."""
    columns = list(zip(header, *rows, strict=True))
    padded = []
    for title, *cells in columns:
        width = max(map(len, (title, *cells)))
        is_words = not any(cell[:1].isdigit() for cell in cells)
        padded.append([cell.ljust(width) if is_words else cell.rjust(width) for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


Known = Callable[[Any], object]
"""Takes the figures that are known so far, in place of those before."""


def interleaved(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    warm_up: int = 1,
    show: Show = hidden,
    known: Known = hidden,
    text: Callable[[float], str] = duration,
) -> dict[str, list[float]]:
    """Measures every contender once a round, every other round in reverse order; the figures after
    the warm-up.

    `show` shows the title of each measurement as it begins, with its figure so far, as a `text`, and the
    time left. `known` gets the figures of the whole rounds after each measurement, or of the first one's part.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names, left = list(contenders), Left((warm_up + rounds) * len(contenders))
    for number in range(warm_up + rounds):
        for name in names if number % 2 == 0 else reversed(names):
            show(left.beside(titled(name, number + 1 - warm_up, rounds), found[name], text))
            value = contenders[name]()
            left.made += 1
            if number >= warm_up:
                found[name].append(value)
                whole = max(1, min(map(len, found.values())))
                known({each: values[:whole] for each, values in found.items() if values})
    return found


def of_one(reduce: Callable[[], Any], average: Callable[[float], float], seconds: float) -> float:
    """The seconds of one allreduce, whose tensor `reduce` returns: the average over repeats that take so many seconds
    together, and over the ranks."""

    def timed(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            tensor = reduce()
        float(tensor[0])  # reading the value waits for the GPU
        return average((time.perf_counter() - began) / repeats)

    # The ranks must repeat equally often, so they take the average of what each has measured.
    return timed(max(1, min(MOST_REPEATS, int(seconds / timed(1)))))


class Left:
    """How long the rest of so many measurements takes, by those that were made."""

    def __init__(self, total: int) -> None:
        self._total, self._began, self.made = total, time.monotonic(), 0

    def beside(self, title: str, values: Sequence[float] = (), text: Callable[[float], str] = duration) -> str:
        """The title with the median of the values, as a `text`, and the time left, as far as they are known."""
        if values:
            title += f"; so far {text(statistics.median(values))}"
        if self.made:
            seconds = (time.monotonic() - self._began) / self.made * max(0, self._total - self.made)
            title += f"; {duration(seconds, rough=True)} left"
        return title


def titled(name: str, number: int, rounds: int) -> str:
    """The title of a measurement, as `round 2 of 5: NAME`. In the warm-up the number is below 1."""
    if number < 1:
        return f"warm-up: {name}"
    return f"round {number} of {rounds}: {name}" if rounds > 1 else name


class Figure(NamedTuple):
    """The chart of an answer: lines over x, by their labels, with the figures at each point."""

    lines: Mapping[str, Mapping[Any, Sequence[float]]]
    x_label: str
    y_label: str
    base: int = 0
    """The base of a logarithmic x axis; 0 for a linear one."""


def over_rounds(found: Mapping[str, Sequence[float]], unit: str, scale: float = 1.0) -> Figure:
    """The chart of each contender's figures times `scale`, one after another."""
    lines = {name: {n: [scale * value] for n, value in enumerate(values, 1)} for name, values in found.items()}
    return Figure(lines, "measurement", unit)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a benchmark: a table, a sentence and a chart for people, the figures for programs."""

    what: str
    table: Sequence[str]
    sentence: str
    results: Mapping[str, Any]
    figure: Figure

    def conclude(self, kept: Kept) -> None:
        """Prints the table and the sentence, or with --json - the figures alone. Writes the
        figures, with this machine's versions, into the file of --json, and as WHAT.json and
        WHAT.html into the folder of --output. Raises OutputError, EngineUnavailable."""
        line = json.dumps({"bench": self.what, "machine": machine(), **self.results}) + "\n"
        to_stdout = str(kept.json) == "-"
        sentence = self.sentence[:1].upper() + self.sentence[1:]
        for_people = [*self.table, "", *folded(sentence), ""]
        print(line if to_stdout else "\n".join(for_people), end="", flush=True)
        if kept.json and not to_stdout:
            save(kept.json, line, "--json a file")
        if kept.output:
            save(kept.output / f"{self.what}.json", line)
            title = f"bench {self.what}"
            save(kept.output / f"{self.what}.html", page(title, sentence, self.figure, self.table))


def page(title: str, sentence: str, figure: Figure, table: Sequence[str]) -> str:
    """An answer as HTML. Raises EngineUnavailable."""
    try:
        from hvdtrain.tools.report.model import Curve, Series  # not above: a bare machine lacks their packages
        from hvdtrain.tools.report.page import of_bench

        series = [
            Series(label, np.array([*points], float), *np.array([*map(spread, points.values())]).T)
            for label, points in figure.lines.items()
        ]
        curve = Curve(figure.y_label, figure.x_label, figure.y_label, tuple(series), log=True, base=figure.base)
        return of_bench(f"{title}, {platform.node()}", sentence, curve, "\n".join(table))
    except ImportError as error:
        raise EngineUnavailable(f"a chart needs {error.name}; install it: pip install {error.name}") from None


def run(
    what: str, measuring: Callable[[Show, Known], object], answer: Callable[[Any], Answer | None], kept: Kept
) -> int:
    """Measures behind a status line and prints the answer by the figures that are known last; the exit code, 1 where
    there is no answer. After Ctrl-C, or a signal that ends a job, these are what was measured so far. Raises
    KeyboardInterrupt where that is nothing."""
    figures: list[Any] = []
    code = 0
    with _interruptible():
        try:
            with Status(what) as status:
                measuring(status.update, figures.append)
        except KeyboardInterrupt:
            if not figures:
                raise
            code = INTERRUPTED
            print("interrupted; this is what was measured so far:", file=sys.stderr, flush=True)
        found = answer(figures[-1]) if figures else None
        if found is None:
            return code or 1
        if code:
            found = dataclasses.replace(found, results={**found.results, "interrupted": True})
        found.conclude(kept)
    return code


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """In the block the first signal that ends a job does what Ctrl-C does; those after it are ignored."""

    def interrupt(*_: object) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            if before[number] is signal.SIG_DFL:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def folded(text: str) -> list[str]:
    """The text in lines of at most 80 characters, with its own line breaks."""
    return [line for part in text.split("\n") for line in textwrap.wrap(part, WIDTH, break_on_hyphens=False)]


def save(path: Path, text: str, remedy: str = "--output a folder") -> None:
    """Writes a file of figures, and makes its folder. Raises OutputError."""
    try:
        files.make_folder(path.parent)
        files.write(path, text)
    except OSError as error:
        raise OutputError(f"{path.parent}: {error.strerror}; give {remedy} that can be written.") from None


def machine() -> dict[str, Any]:
    """The machine that was measured: its processor, and the versions of its libraries."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "host": platform.node(),
        "processor": names[0] if names else platform.machine(),
        "cpus": processors.count(),
        "python": platform.python_version(),
        "versions": {name: version for name in LIBRARIES if (version := version_of(name))},
    }
