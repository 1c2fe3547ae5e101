"""Renders a report as one HTML file without scripts or addresses, and as short Markdown."""

import base64
import functools
import io
import re
import statistics
import time
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import count, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

import hvdtrain
from hvdtrain.core.wording import duration
from hvdtrain.tools.report import charts, model
from hvdtrain.tools.report.model import Curve, Document, Event, HeatMap
from hvdtrain.untrusted import one_line

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_POINTS, ALL_POINTS = 400, 10_000
"""The points of a series, and of all charts, so that the page stays small."""
MOST_EVENTS, ALL_EVENTS = 200, 500
"""The rows of a run's list of events, and of all lists."""
MOST_TEXT, ALL_TEXT = 30_000, 40_000
"""The characters of a run's recipe, plan or hosts, and of those of all runs."""
MOST_WHOLE_RUNS = 8
"""Up to so many runs are shown in full; of more, the page shows the comparison, and little of each."""
SHARED_ROW = 3
"""So many checkpoints in a row share a row of the list of events."""
ICONS = {"good": "✓", "attention": "!", "bad": "✕", "open": "…", "unjudged": "○"}
ICONS |= {"kept": "✓", "broken": "✕", "unknown": "?", "not applicable": "○"}
BLANKS = {"\n", "\t"}
ACTIVE = re.compile(r"""[\\`*<\[\]|$~&#]|:(?=//)|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])""", re.IGNORECASE)
"""What begins anything in Markdown, as GitHub and GitLab read it; each may have a backslash before it."""
MOST_CELL = 60
"""Characters of a cell of a Markdown table."""
MOST_ROWS, COLUMNS, LEVELS = 64, 240, 32
ROW_PIXELS, MOST_PIXELS, LABEL_PIXELS = 18, 400, 15
MOST_LETTERS = 28
COLOURS = "cividis"
LEAST_RANGE = 1.25
"""The least ratio of the slowest to the quickest colour, so that small differences look even."""
GAP = 3
"""After so many intervals without a sample the map is blank."""


def render(document: Document) -> str:
    """The whole page, below a megabyte. Texts of files are escaped. `limits` is what it shows of each run; `whole`: all
    of it."""
    runs = max(len(document.runs), 1)
    whole = runs <= MOST_WHOLE_RUNS
    curves = [curve for run in document.runs if whole for curve in run.curves]
    curves += document.comparison.curves if document.comparison else ()
    series = max(sum(len(curve.series) for curve in curves), 1)
    limits = {
        "points": max(20, min(MOST_POINTS, ALL_POINTS // series)),
        "events": max(10, min(MOST_EVENTS, ALL_EVENTS // runs)),
        "text": max(500, min(MOST_TEXT, ALL_TEXT // runs)),
        "whole": whole,
    }
    return _environment().get_template("page.html").render(document=document, limits=limits)


def of_bench(title: str, sentence: str, curve: Curve, table: str) -> str:
    """The page of a benchmark's answer."""
    given = {"document": Document(title, time.time(), hvdtrain.__version__, ()), "limits": {"points": MOST_POINTS}}
    return _environment().get_template("bench.html").render(given, sentence=sentence, curve=curve, table=table)


def markdown(document: Document) -> str:
    """The report in short, for a terminal or a merge request."""
    lines = _environment().get_template("report.md").render(document=document).strip("\n").split("\n")
    shown: list[str] = []
    for is_table, group in groupby(lines, lambda line: line.startswith("|")):
        part = list(group)
        shown += _aligned(part) if is_table else part
    return "\n".join(shown) + "\n"


def event_rows(events: Iterable[Event]) -> list[tuple[int | None, list[Event]]]:
    """The rows of the list of events: number and events. Checkpoints have no number."""
    rows: list[tuple[int | None, list[Event]]] = []
    numbers = count(1)
    for is_checkpoint, group in groupby(events, key=lambda event: event.kind == "checkpoint"):
        alike = list(group)
        if is_checkpoint and len(alike) >= SHARED_ROW:
            rows.append((None, alike))
        else:
            rows += [(None if is_checkpoint else next(numbers), [event]) for event in alike]
    return rows


def marks(events: Iterable[Event]) -> list[charts.Mark]:
    """The steps of events, and their numbers in the list of events."""
    return [(each.step, number) for number, alike in event_rows(events) for each in alike if each.step is not None]


def date(seconds: float) -> str:
    """Seconds since 1970 as `2026-11-25 14:05 UTC`; `unknown` where no calendar has them."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def cut(text: str, most: int) -> str:
    """The text, its middle left out where it has more than `most` characters."""
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]}\n... {left:,} characters left out ...\n{text[-most // 2 :]}"


def plain(text: str) -> str:
    """A text of somebody else's for Markdown, in which nothing of it is markup, a link or the rule of a table."""
    return ACTIVE.sub(r"\\\g<0>", " ".join(text.splitlines()))


def code(text: str) -> str:
    """A text of somebody else's as a code span, which no row of backticks in it ends."""
    fence, line = "`" * (1 + max(map(len, re.findall("`+", text)), default=0)), " ".join(text.splitlines())
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def _aligned(lines: Sequence[str]) -> list[str]:
    """The rows of a Markdown table in aligned columns, with a line below the first row."""
    cells = [line[2:-2].split(" | ") for line in lines]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    head, *rows = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *rows]


def cell(text: str) -> str:
    """The text for a cell of a Markdown table."""
    shown = text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 3]}..."
    return plain(shown)


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
    filters = (duration, model.number, model.percent, model.kwh, model.step_time, date, cut, plain, code, cell)
    environment.filters |= {"short": one_line, **{each.__name__: each for each in filters}}
    environment.globals |= {each.__name__: each for each in (event_rows, marks, heat)}
    environment.globals |= {"charts": charts, "median": statistics.median, "ICONS": ICONS}
    return environment


def _shown(value: Any) -> Any:
    """The value as a template prints it, with control characters and hidden ones as escapes."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(
        each if each.isprintable() or each in BLANKS or unicodedata.category(each) == "Zs" else repr(each)[1:-1]
        for each in value.replace("\r\n", "\n")
    )


def heat(given: HeatMap) -> dict[str, Any] | None:
    """The values that the template shows of a heat map; None where no step time was recorded."""
    from matplotlib import colormaps, colors
    from PIL import Image

    seconds = np.asarray(given.seconds, dtype=float)
    seconds = np.where(np.isfinite(seconds), seconds, np.nan)
    if not np.isfinite(seconds).any():
        return None
    peak, is_quick = np.nan_to_num(seconds).mean(axis=1), ~np.isin(np.arange(len(seconds)), list(given.slow))
    chosen = np.sort(np.lexsort((-peak, is_quick))[:MOST_ROWS])  # of too many, the slow ones and the longest
    at, columns = _columns(np.asarray(given.at, dtype=float))
    pixels = min(ROW_PIXELS * len(chosen), MOST_PIXELS)
    finite = seconds[np.isfinite(seconds)]
    low = float(np.percentile(finite, 1))
    high = max(float(np.percentile(finite, 99.5)), low * LEAST_RANGE)
    chart = np.where(columns >= 0, seconds[chosen][:, columns], np.nan)
    file, colours = io.BytesIO(), colormaps[COLOURS].resampled(LEVELS)  # transparent where nothing was recorded
    Image.fromarray(colours((chart - low) / (high - low or 1), bytes=True)).save(file, format="PNG", optimize=True)
    step, taken = pixels / len(chosen), list[tuple[str, float, bool]]()
    # The names that have room beside the map: name, place in percent, whether it is slow.
    for place, row in sorted(enumerate(chosen.tolist()), key=lambda pair: (pair[1] not in given.slow, pair[0])):
        middle = (place + 0.5) * step
        if all(abs(middle - top * pixels / 100) >= LABEL_PIXELS for _, top, _ in taken):
            taken.append((one_line(given.rows[row], MOST_LETTERS), 100 * middle / pixels, row in given.slow))
    return {
        "png": base64.b64encode(file.getvalue()).decode(),
        "pixels": pixels,
        "rows": sorted(taken, key=itemgetter(1)),
        "letters": min(MOST_LETTERS, max(len(text) for text, _, _ in taken)) + 3,
        "times": [max(at[place], 0.0) for place in (0, len(at) // 2, -1)],
        "range": (low, high),
        "colours": [colors.to_hex(colour) for colour in colormaps[COLOURS](np.linspace(0, 1, 8))],
        "gaps": not np.isfinite(chart).all(),
        "left_out": len(seconds) - len(chosen),
        "least": finite.min(),
        "median": np.median(finite),
        "most": finite.max(),
    }


def _columns(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced times, and the index of the sample nearest to each, -1 in a gap."""
    if len(at) < 2 or not np.isfinite(at).all() or at[-1] <= at[0]:
        return np.nan_to_num(at), np.arange(len(at))
    grid = np.linspace(at[0], at[-1], min(COLUMNS, 4 * len(at)))
    nearest = np.abs(at - grid[:, None]).argmin(axis=1)
    far = np.abs(at[nearest] - grid) > GAP / 2 * np.median(np.diff(at))
    return grid, np.where(far, -1, nearest)
