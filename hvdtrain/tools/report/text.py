"""A report as Markdown, short, for a terminal or a merge request; and as JSON, for programs."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.tools.report.model import Comparison, Document, Energy, Event, RunReport, Scaling, Waterfall
from hvdtrain.tools.report.wording import duration, number, percent

MARKS = {"kept": "kept", "broken": "BROKEN", "unknown": "not known"}
NOTABLE = {"resume", "note", "slow", "stuck", "lost", "signal", "requeue"}
MOST_EVENTS = 12
MOST_CELL = 60


def markdown(document: Document) -> str:
    """Verdict, numbers, where the time went, energy, differences."""
    sections = [line for run in document.runs for line in _run(run)]
    if document.comparison:
        sections += _comparison(document.comparison)
    for scaling in document.scaling:
        sections += _scaling(scaling)
    sections += [_item(f"Not read: {line}") for line in document.missing]
    return "\n".join(sections).strip("\n") + "\n"


def to_json(document: Document) -> str:
    """All values; arrays are lists, what is not finite is null."""
    return json.dumps(_plain(document), indent=1, allow_nan=False) + "\n"


def _run(run: RunReport) -> Iterator[str]:
    verdict, origin = run.verdict, run.origin
    yield from ("", f"# {_safe(run.name)}", "", f"**{_safe(verdict.headline)}**", "")
    yield from (_item(text) for text in (*verdict.details, verdict.limit) if text)
    if verdict.advice:
        yield _item(f"Next: {verdict.advice}")
    yield from (_item(f"{check.name}: {MARKS[check.state]} - {check.detail}") for check in verdict.checks)
    yield from _table(("", ""), run.numbers)
    if run.waterfall:
        yield from _waterfall(run.waterfall)
    yield from _energy(run.energy)
    yield from _events(run.events)
    if origin.differences:
        yield from ("", "## Other than the shipped recipe")
        yield from _table(("key", "shipped", "this run"), origin.differences)
    if origin.command:
        yield from ("", f"Command: {_code(origin.command)}")
    if run.missing:
        yield ""
    yield from (_item(f"Not read: {line}") for line in run.missing)


def _waterfall(given: Waterfall) -> Iterator[str]:
    yield from ("", f"## {duration(given.wall_seconds)} of wall time")
    whole = given.wall_seconds or 1.0
    rows = [(part.name, duration(part.seconds), percent(part.seconds / whole)) for part in given.parts]
    yield from _table(("part", "time", "of the whole"), rows)


def _energy(given: Energy) -> Iterator[str]:
    yield from ("", "## Energy", "", _safe(given.note if given.rows else f"Not measured: {given.note}"))
    rows = [(row.source, f"{number(row.kwh)} kWh", row.scope) for row in given.rows]
    if rows:
        yield from _table(("source", "energy", "of"), rows)
        yield ""
    if given.mean_watts is not None:
        yield _item(f"mean power: {number(given.mean_watts)} W")
    if given.kwh_per_epoch is not None:
        yield _item(f"an epoch: {number(given.kwh_per_epoch)} kWh")
    if given.co2_grams is not None:
        yield _item(f"CO2, with the factor given: {number(given.co2_grams)} g")


def _events(events: Sequence[Event]) -> Iterator[str]:
    """Those that are worth a line."""
    known = [event for event in events if event.kind in NOTABLE]
    if known:
        yield from ("", "## Events", "")
    yield from (_item(f"{duration(event.at)}: {event.text}") for event in known[:MOST_EVENTS])
    if len(known) > MOST_EVENTS:
        yield _item(f"... {len(known) - MOST_EVENTS} more")


def _comparison(given: Comparison) -> Iterator[str]:
    yield from ("", "# Side by side")
    yield from _table(("", "", *given.columns), [(group, key, *values) for group, key, values in given.rows])
    yield from ("", *(_item(text) for text in given.seeds))


def _scaling(given: Scaling) -> Iterator[str]:
    yield from ("", f"# {given.mode.capitalize()} scaling", "", _safe(given.sentence))
    predicted = {ranks: f"{percent(low)} to {percent(high)}" for ranks, _, low, high in given.predicted}
    rows = []
    for row in given.rows:
        middle, low, high = row.efficiency
        reach = f"{percent(middle)} ({percent(low)} to {percent(high)})"
        rates = (number(row.examples_per_second), f"{row.speedup:.3g}", reach, predicted.get(row.ranks, ""))
        rows.append((f"{row.ranks:,}", *rates))
    yield from _table(("ranks", "examples/s", "speed-up", "efficiency", "predicted"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned, so that it reads in a terminal as well."""
    cells = [[_cell(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    padded = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    yield from ("", padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:])


def _item(text: str) -> str:
    return f"- {_safe(text)}"


def _cell(text: str) -> str:
    short = text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 3]}..."
    return _safe(short).replace("|", "\\|")


def _safe(text: str) -> str:
    """What Markdown takes as markup, as text: the texts are somebody else's."""
    for letter in ("\\", "`", "*", "<", "[", "]"):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")


def _code(text: str) -> str:
    return f"`` {text.replace('``', '` `')} ``" if "`" in text else f"`{text}`"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
