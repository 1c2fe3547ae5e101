"""`render(document)`: the report as one HTML file, with its pictures inside, without a script or an address."""

import base64
import functools
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from hvdtrain.tools.report import describe, pictures, svg, wording
from hvdtrain.tools.report.model import Comparison, Curve, Document, Event, HeatMap, RunReport, Waterfall
from hvdtrain.tools.report.wording import duration, short

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_POINTS, ALL_POINTS = 400, 10_000
"""Of a series, and of all pictures: the file stays small. The same below for events' lines and characters of text."""
MOST_EVENTS, ALL_EVENTS = 200, 500
MOST_TEXT, ALL_TEXT = 30_000, 40_000
MOST_WHOLE_RUNS = 8
"""Runs that are shown in full; of more, the comparison says most."""
NOTABLE_GROUP = 3
"""Checkpoints in a row that share one line of the list."""
WORDS = {"good": "Good", "attention": "Attention", "bad": "Problem", "open": "Open"}
ICONS = {"good": "✓", "attention": "!", "bad": "✕", "open": "…", "kept": "✓", "broken": "✕", "unknown": "?"}
UNITS = {"second": 1, "minute": 60, "hour": 3600}
MOST_ROWS, COLUMNS, LEVELS = 64, 240, 32
ROW_PIXELS, MOST_PIXELS, LABEL_PIXELS = 18, 400, 15
MOST_LETTERS = 28
COLOURS = "cividis"
LEAST_RANGE = 1.25
"""Of the largest to the smallest shown: what differs by less looks even."""
GAP = 3
"""Sampling intervals without a sample, after which the map is blank."""


@dataclass(frozen=True)
class Limits:
    """What each run may show, so that the file stays below a megabyte."""

    points: int
    """Of a series."""
    events: int
    text: int
    """Characters of a recipe, a job script, ..."""
    whole: bool
    """Whether each run has its own pictures, recipe and job script."""

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
    with svg.drawing():
        return _environment().get_template("page.html").render(document=document, limits=Limits.of(document))


def bars(waterfall: Waterfall) -> list[Bar]:
    """The parts as steps, each from where the one before it ended."""
    whole = max(waterfall.wall_seconds, sum(_seconds(part.seconds) for part in waterfall.parts), 1e-9)
    found, before = [], 0.0
    for part in waterfall.parts:
        seconds = _seconds(part.seconds)
        places = (100 * before / whole, 100 * seconds / whole)
        found.append(Bar(part.name, part.note, part.seconds, seconds / whole, *places, _kind(part.name)))
        before += seconds
    return found


def event_rows(events: Iterable[Event]) -> list[EventRow]:
    """The list of events, numbered as on the pictures; checkpoints have no number, many in a row one line."""
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


def marks(events: Sequence[Event], curve: Curve) -> list[pictures.Mark]:
    """Where the events stand on a curve's axis: by step or by time, whichever it has."""
    label = curve.x_label.lower().strip()
    unit = next((seconds for name, seconds in UNITS.items() if label.startswith(name)), None)
    numbers = count(1)
    found = []
    for event in events:
        number = None if event.kind == "checkpoint" else next(numbers)
        x = event.at / unit if unit else event.step if label.startswith("step") else None
        if x is not None:
            found.append(pictures.Mark(x, number))
    return found


def facts(run: RunReport) -> list[tuple[str, str]]:
    """What it was, in short: label and value."""
    origin = run.origin
    pairs = [
        ("Framework", origin.framework),
        ("Engine", origin.engine),
        ("Launcher", origin.launcher),
        ("Ranks", f"{origin.ranks:,}" if origin.ranks else ""),
        ("Job", origin.job_id),
        ("Git commit", origin.git_commit),
        ("Folder", run.folder),
    ]
    return [(label, value) for label, value in pairs if value]


def summary(run: RunReport) -> str:
    """The line under the title."""
    origin = run.origin
    ranks = f"{origin.ranks:,} rank{'s' if origin.ranks != 1 else ''}" if origin.ranks else ""
    names = list(dict.fromkeys(origin.hosts))
    hosts = f"{len(names):,} hosts" if len(names) > 1 else "".join(names)
    began = f"began {wording.date(run.began)}" if run.began is not None else ""
    software = " over ".join(wording.short(text, 40) for text in (origin.framework, origin.engine) if text)
    return ", ".join(text for text in (ranks, software, wording.short(hosts, 40), began) if text)


def groups(comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """The comparison's rows, group by group."""
    for name, rows in groupby(comparison.rows, key=lambda row: row[0]):
        yield name, [(key, values) for _, key, values in rows]


def energy(kwh: float) -> str:
    """As `1.24 kWh`, `3.1 Wh`."""
    return f"{wording.number(kwh)} kWh" if kwh >= 0.1 or not kwh else f"{wording.number(1000 * kwh)} Wh"


def differs(values: Sequence[str]) -> bool:
    """Whether not all are the same."""
    return len(set(values)) > 1


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("hvdtrain.tools.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {name: getattr(wording, name) for name in ("duration", "number", "percent", "date", "short")}
    environment.filters |= {"cut": wording.cut, "energy": energy, "step_time": wording.step_time}
    environment.globals |= {
        function.__name__: function for function in (bars, event_rows, marks, facts, summary, groups, differs, heat)
    }
    environment.globals |= {
        "pictures": pictures,
        "describe": describe,
        "median": statistics.median,
        "WORDS": WORDS,
        "ICONS": ICONS,
    }
    return environment


def _shown(value: Any) -> Any:
    return wording.shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _seconds(value: float) -> float:
    return value if 0 < value < float("inf") else 0.0


def _kind(name: str) -> str:
    """Which colour a part of the wall time has; its name says the same."""
    kinds = {"training": "useful", "lost": "lost", "idle": "lost", "queue": "waiting"}
    return next((kind for word, kind in kinds.items() if word in name.lower()), "other")


@dataclass(frozen=True)
class Row:
    """A named row of the map; `top` is its middle, in percent of the height."""

    text: str
    top: float
    slow: bool


@dataclass(frozen=True)
class Heat:
    """What the page shows of a heat map."""

    png: str
    """Base64."""
    pixels: int
    """Its height on the page."""
    rows: tuple[Row, ...]
    letters: int
    """Of the longest name, with some room."""
    times: tuple[str, ...]
    """At the left, in the middle, at the right."""
    low: str
    high: str
    colours: tuple[str, ...]
    """Of the scale, from low to high."""
    gaps: bool
    left_out: int
    """Rows, the quickest ones."""


def heat(given: HeatMap) -> Heat | None:
    """None where no step time was recorded."""
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
    picture = np.where(columns >= 0, seconds[chosen][:, columns], np.nan)
    rows = _rows(given, chosen, pixels)
    return Heat(
        png=_png(picture, low, high),
        pixels=pixels,
        rows=tuple(rows),
        letters=min(MOST_LETTERS, max(len(row.text) for row in rows)) + 3,
        times=tuple(duration(max(at[place], 0.0)) for place in (0, len(at) // 2, -1)),
        low=duration(low),
        high=duration(high),
        colours=tuple("#" + bytes(colour).hex() for colour in _palette(8)),
        gaps=not np.isfinite(picture).all(),
        left_out=len(seconds) - len(chosen),
    )


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


def _rows(given: HeatMap, chosen: np.ndarray, pixels: int) -> list[Row]:
    """The names that have room beside the map; those of slow ranks come first."""
    step = pixels / len(chosen)
    taken: list[Row] = []
    for place, row in sorted(enumerate(chosen.tolist()), key=lambda pair: (pair[1] not in given.slow, pair[0])):
        middle = (place + 0.5) * step
        if all(abs(middle - other.top * pixels / 100) >= LABEL_PIXELS for other in taken):
            taken.append(Row(short(given.rows[row], MOST_LETTERS), 100 * middle / pixels, row in given.slow))
    return sorted(taken, key=lambda row: row.top)
