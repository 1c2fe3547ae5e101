"""The report as one HTML file, with its charts inside, without a script or an address; and as short Markdown."""

import base64
import functools
import io
import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from hvdtrain.tools.report import charts, model
from hvdtrain.tools.report.model import Curve, Document, Event, HeatMap, Waterfall, duration, short

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_POINTS, ALL_POINTS = 400, 10_000
"""Points of a series, and of all charts, so that the file stays small; below the same of events and of characters."""
MOST_EVENTS, ALL_EVENTS = 200, 500
MOST_TEXT, ALL_TEXT = 30_000, 40_000
MOST_WHOLE_RUNS = 8
"""Runs that are shown in full; of more, the comparison says most."""
NOTABLE_GROUP = 3
"""Checkpoints in a row that share one line of the list."""
WORDS = {"good": "Good", "attention": "Attention", "bad": "Problem", "open": "Open"}
ICONS = {"good": "✓", "attention": "!", "bad": "✕", "open": "…", "kept": "✓", "broken": "✕", "unknown": "?"}
UNITS = {"second": 1, "minute": 60, "hour": 3600}
KINDS = {"training": "useful", "lost": "lost", "idle": "lost", "queue": "waiting"}
"""Which colour a part of the wall time has, by a word of its name; others are "other"."""
BLANKS = {"\n", "\t"}
MOST_CELL = 60
"""Characters of a cell of a Markdown table."""
MOST_ROWS, COLUMNS, LEVELS = 64, 240, 32
ROW_PIXELS, MOST_PIXELS, LABEL_PIXELS = 18, 400, 15
MOST_LETTERS = 28
COLOURS = "cividis"
LEAST_RANGE = 1.25
"""Ratio of the slowest to the quickest colour: what differs by less looks even."""
GAP = 3
"""Sampling intervals without a sample, after which the map is blank."""


@dataclass(frozen=True)
class Limits:
    """What each run may show, so that the file stays below a megabyte."""

    points: int
    """Points of a series."""
    events: int
    text: int
    """Characters of a recipe, a job script, ..."""
    whole: bool
    """Whether each run has its own charts, recipe and job script."""

    @classmethod
    def of(cls, document: Document) -> "Limits":
        """From the number of runs and series."""
        runs = max(len(document.runs), 1)
        whole = runs <= MOST_WHOLE_RUNS
        curves = [curve for run in document.runs if whole for curve in run.curves]
        curves += document.comparison.curves if document.comparison else ()
        series = max(sum(len(curve.series) for curve in curves), 1)
        return cls(
            points=max(20, min(MOST_POINTS, ALL_POINTS // series)),
            events=max(10, min(MOST_EVENTS, ALL_EVENTS // runs)),
            text=max(500, min(MOST_TEXT, ALL_TEXT // runs)),
            whole=whole,
        )


@dataclass(frozen=True)
class Bar:
    """A row of the waterfall; `left` and `width` in percent of the wall time."""

    name: str
    note: str
    seconds: float
    share: float
    left: float
    width: float
    kind: str
    """useful, lost, waiting or other."""


@dataclass(frozen=True)
class EventRow:
    """A line of the list of events: one of them, or checkpoints in a row."""

    number: int | None
    first: Event
    last: Event
    count: int


def render(document: Document) -> str:
    """The whole page. What the document holds of texts is escaped."""
    return _environment().get_template("page.html").render(document=document, limits=Limits.of(document))


def markdown(document: Document) -> str:
    """Verdict, numbers, where the time went, energy, differences: for a terminal or a merge request."""
    lines = _environment().get_template("report.md").render(document=document).strip("\n").split("\n")
    shown: list[str] = []
    for is_table, some in groupby(lines, lambda line: line.startswith("|")):
        part = list(some)
        shown += _aligned(part) if is_table else part
    return "\n".join(shown) + "\n"


def bars(waterfall: Waterfall) -> list[Bar]:
    """The parts as steps, each from where the one before it ended."""
    parts = [(part, part.seconds if 0 < part.seconds < float("inf") else 0.0) for part in waterfall.parts]
    whole = max(waterfall.wall_seconds, sum(seconds for _, seconds in parts), 1e-9)
    found, before = [], 0.0
    for part, seconds in parts:
        kind = next((kind for word, kind in KINDS.items() if word in part.name.lower()), "other")
        places = (100 * before / whole, 100 * seconds / whole)
        found.append(Bar(part.name, part.note, part.seconds, seconds / whole, *places, kind))
        before += seconds
    return found


def event_rows(events: Iterable[Event]) -> list[EventRow]:
    """The list of events, numbered as on the charts; checkpoints have no number, many in a row one line."""
    rows: list[EventRow] = []
    number = 0
    for checkpoint, group in groupby(events, key=lambda event: event.kind == "checkpoint"):
        some = list(group)
        if checkpoint and len(some) >= NOTABLE_GROUP:
            rows.append(EventRow(None, some[0], some[-1], len(some)))
            continue
        for event in some:
            number += not checkpoint
            rows.append(EventRow(None if checkpoint else number, event, event, 1))
    return rows


def marks(events: Sequence[Event], curve: Curve) -> list[charts.Mark]:
    """Where the events stand on a curve's axis: by step or by time, whichever it has."""
    label = curve.x_label.lower().strip()
    unit = next((seconds for name, seconds in UNITS.items() if label.startswith(name)), None)
    numbers = count(1)
    found = []
    for event in events:
        number = None if event.kind == "checkpoint" else next(numbers)
        x = event.at / unit if unit else event.step if label.startswith("step") else None
        if x is not None:
            found.append(charts.Mark(x, number))
    return found


def date(seconds: float) -> str:
    """As `2026-11-25 14:05 UTC`; `unknown` where no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text that is too long to show."""
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]}\n... {left:,} characters left out ...\n{text[-most // 2 :]}"


def plain(text: str) -> str:
    """The text for Markdown, where nothing of it is markup: it is somebody else's."""
    for letter in ("\\", "`", "*", "<", "[", "]"):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")


def _aligned(lines: Sequence[str]) -> list[str]:
    """Rows of a Markdown table, a line below the first, in columns that read in a terminal as well."""
    cells = [line[2:-2].split(" | ") for line in lines]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    head, *rows = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *rows]


def cell(text: str) -> str:
    """The text for a cell of a Markdown table."""
    shown = text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 3]}..."
    return plain(shown).replace("|", "\\|")


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("hvdtrain.tools.report"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {name: getattr(model, name) for name in ("duration", "number", "percent", "short", "kwh")}
    environment.filters |= {"step_time": model.step_time, "date": date, "cut": cut, "plain": plain, "cell": cell}
    environment.globals |= {each.__name__: each for each in (bars, event_rows, marks, heat)}
    environment.globals |= {"charts": charts, "median": statistics.median, "WORDS": WORDS, "ICONS": ICONS}
    return environment


def _shown(value: Any) -> Any:
    """What a template prints: control and hidden characters as escapes; lines and blanks stay."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(
        each if each.isprintable() or each in BLANKS or unicodedata.category(each) == "Zs" else repr(each)[1:-1]
        for each in value.replace("\r\n", "\n")
    )


def heat(given: HeatMap) -> dict[str, Any] | None:
    """What the page shows of a heat map; None where no step time was recorded."""
    seconds = np.asarray(given.seconds, dtype=float)
    seconds = np.where(np.isfinite(seconds), seconds, np.nan)
    if not np.isfinite(seconds).any():
        return None
    chosen = _chosen(seconds, given.slow)
    at, columns = _columns(np.asarray(given.at, dtype=float))
    pixels = min(ROW_PIXELS * len(chosen), MOST_PIXELS)
    finite = seconds[np.isfinite(seconds)]
    low = float(np.percentile(finite, 1))
    high = max(float(np.percentile(finite, 99.5)), low * LEAST_RANGE)
    chart = np.where(columns >= 0, seconds[chosen][:, columns], np.nan)
    rows = _rows(given, chosen, pixels)
    return {
        "png": _png(chart, low, high),
        "pixels": pixels,
        "rows": rows,
        "letters": min(MOST_LETTERS, max(len(text) for text, _, _ in rows)) + 3,
        "times": [max(at[place], 0.0) for place in (0, len(at) // 2, -1)],
        "range": (low, high),
        "colours": ["#" + bytes(colour).hex() for colour in _palette(8)],
        "gaps": not np.isfinite(chart).all(),
        "left_out": len(seconds) - len(chosen),
        "text": _words(given, finite),
    }


def _words(given: HeatMap, seconds: np.ndarray) -> str:
    slow = [short(given.rows[row], 40) for row in given.slow if 0 <= row < len(given.rows)]
    named = f"Slow: {', '.join(slow[:10])}" if slow else "No rank is slow"
    reach = f"Steps take {duration(seconds.min())} to {duration(seconds.max())}, in the median"
    return f"{reach} {duration(np.median(seconds))}. {named}."


def _chosen(seconds: np.ndarray, slow: object) -> np.ndarray:
    """The rows to show, in their order: named ones first, then those with the longest step."""
    named = np.isin(np.arange(len(seconds)), list(slow))  # type: ignore[call-overload]
    peak = np.nanmean(np.where(np.isfinite(seconds), seconds, 0), axis=1)
    order = np.lexsort((-peak, ~named))
    return np.sort(order[:MOST_ROWS])


def _columns(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced times, and the sample nearest to each; -1 in a gap."""
    if len(at) < 2 or not np.isfinite(at).all() or at[-1] <= at[0]:
        return np.nan_to_num(at), np.arange(len(at))
    grid = np.linspace(at[0], at[-1], min(COLUMNS, 4 * len(at)))
    nearest = np.abs(at - grid[:, None]).argmin(axis=1)
    far = np.abs(at[nearest] - grid) > GAP / 2 * np.median(np.diff(at))
    return grid, np.where(far, -1, nearest)


def _png(seconds: np.ndarray, low: float, high: float) -> str:
    """In as few colours as one can tell apart, so that it stays small; what is not recorded is transparent."""
    from PIL import Image

    share = np.clip((seconds - low) / (high - low or 1), 0, 1)
    levels = np.where(np.isfinite(share), np.nan_to_num(share) * (LEVELS - 1) + 1.5, 0).astype(np.uint8)
    image = Image.fromarray(levels)
    image.putpalette([0, 0, 0, *_palette(LEVELS).ravel().tolist()])
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True, transparency=0)
    return base64.b64encode(file.getvalue()).decode()


def _palette(count: int) -> np.ndarray:
    """[count, 3] bytes of colour, from quick to slow."""
    import matplotlib

    return np.asarray(matplotlib.colormaps[COLOURS](np.linspace(0, 1, count), bytes=True))[:, :3]


def _rows(given: HeatMap, chosen: np.ndarray, pixels: int) -> list[tuple[str, float, bool]]:
    """The names that have room beside the map, where their middle is in percent, and whether they are slow; those of
    slow ranks come first."""
    step = pixels / len(chosen)
    taken: list[tuple[str, float, bool]] = []
    for place, row in sorted(enumerate(chosen.tolist()), key=lambda pair: (pair[1] not in given.slow, pair[0])):
        middle = (place + 0.5) * step
        if all(abs(middle - top * pixels / 100) >= LABEL_PIXELS for _, top, _ in taken):
            taken.append((short(given.rows[row], MOST_LETTERS), 100 * middle / pixels, row in given.slow))
    return sorted(taken, key=lambda row: row[1])
