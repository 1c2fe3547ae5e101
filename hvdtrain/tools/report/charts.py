"""The report's charts as values, which the template figures.html draws as inline SVG.

Matplotlib places the marks of an axis. The template escapes texts of files, as names, labels and
units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.tools.report.model import Curve, Scaling, Series

X, Y = (54.0, 406.0), (186.0, 18.0)
"""Where the axes begin and end, in pixels of the chart, which has 420 x 210."""
DASHES = ("", "8 3.2", "2.4 2.4", "9.6 2.4 2.4 2.4")
"""The dash patterns of a chart's lines, as SVG has them."""
COLOURS = ("s0", "s1", "s2", "s3", "s4", "s5")
"""The colours of a chart's lines, by their names in style.css."""
GREY = "soft"
"""The colour of lines that were not measured."""
SPARSE = 40
"""A line of at most so many points shows each of them as a dot."""
HUGE = 1e30
"""Numbers of this size are left out: no axis can show them."""
LOG_RANGE = 100
"""An axis is logarithmic only where the largest value is more than so many times the smallest."""
NEAR = 0.045
"""Events that are nearer to each other than this part of the axis share a label."""
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend."""

    label: str
    colour: str
    dashes: str = ""
    kind: str = "line"
    """What is drawn before the label: line, point, band or bar."""
    note: str = ""


Mark = tuple[float, int | None]
"""The place of an event on the x axis, and its number in the list of events; a checkpoint has none."""


@dataclass(frozen=True)
class Shape:
    """A path of a chart, drawn as a line of that width, or filled where the width is 0."""

    path: str
    colour: str
    width: float = 0.0
    dashes: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Axis:
    """An axis, which places values in pixels."""

    low: float
    high: float
    pixels: tuple[float, float]
    base: int = 0
    """The base of a logarithmic axis; 0 for a linear one."""

    def at(self, values: Any) -> np.ndarray:
        """The places of the values, in pixels."""
        begin, end = self.pixels
        if self.base:
            with np.errstate(invalid="ignore", divide="ignore"):
                share = np.log(np.asarray(values) / self.low) / np.log(self.high / self.low)
            share = np.where(np.isfinite(share), share, np.nan)
        else:
            share = (np.asarray(values) - self.low) / (self.high - self.low)
        return begin + share * (end - begin)

    def ticks(self) -> list[float]:
        """The values of the axis's marks, which are few and round."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.base:
            is_short = self.base == 10 and self.high < 1000 * self.low  # powers of ten alone may be two
            places = LogLocator(self.base, (1, 2, 5) if is_short else (1,), numticks=11).tick_values(
                self.low, self.high
            )
        else:
            places = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
            if sum(self.low <= place <= self.high for place in places) < 3:
                places = MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(self.low, self.high)
        return [float(place) for place in places if self.low <= place <= self.high]


@dataclass
class Chart:
    """What a figure of the page shows. Marks and events are places in pixels, with their labels."""

    title: str
    x: Axis
    y: Axis
    shapes: list[Shape] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    x_marks: list[tuple[float, str]] = field(default_factory=list)
    y_marks: list[tuple[float, str]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x_marks = self.x_marks or [(float(self.x.at(value)), tick(value)) for value in self.x.ticks()]
        self.y_marks = self.y_marks or [(float(self.y.at(value)), tick(value)) for value in self.y.ticks()]

    def line(
        self, x: Any, y: Any, colour: str, dashes: str = "", width: float = 1.6, mark: float = 0, shape: str = "h0"
    ) -> None:
        """Draws a line through the points, each with the shape, where `mark` is its size."""
        places = np.stack([self.x.at(x), self.y.at(y)], axis=1)
        self.shapes.append(Shape(_path(places), colour, width, dashes))
        known = places[np.isfinite(places).all(axis=1)]
        if mark:
            dots = "".join(f"M{left:.1f} {top:.1f}{shape}" for left, top in known)
            self.shapes.append(Shape(dots, colour, mark))

    def band(self, x: Any, low: Any, high: Any, colour: str) -> None:
        """Draws the area between two lines."""
        edges = [np.stack([self.x.at(x), self.y.at(bound)], axis=1) for bound in (low, high)]
        known = np.isfinite(edges[0]).all(axis=1) & np.isfinite(edges[1]).all(axis=1)
        around = np.concatenate([edges[0][known], edges[1][known][::-1]])
        if known.any():
            self.shapes.append(Shape(f"{_path(around)}z", colour, opacity=0.2))


def _path(places: np.ndarray) -> str:
    """The line through the points [n, 2], with a gap where one is not finite, as SVG writes it."""
    words, letter = [], "M"
    for x, y in places:
        if np.isfinite(x) and np.isfinite(y):
            words.append(f"{letter}{x:.1f} {y:.1f}")
            letter = "L"
        else:
            letter = "M"
    return "".join(words)


def tick(value: float) -> str:
    """The label of an axis's mark, in few characters: `0.05`, `25k`, `1e-5`."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    for unit, letter in UNITS:
        if size >= unit and size >= 1e4:
            return f"{value / unit:.5g}{letter}"
    return f"{value:.5g}"


def span(curves: Sequence[Curve], x_label: str) -> tuple[float, float] | None:
    """The lowest and highest x of all curves with that x axis; None without a finite point."""
    lines = [series for curve in curves if curve.x_label == x_label for series in curve.series]
    x = np.concatenate([np.empty(0), *(_plain(series).x for series in lines if known(series)[0].size)])
    x = x[np.isfinite(x)]
    return (float(x.min()), float(x.max())) if x.size else None


def curve(given: Curve, marks: Sequence[Mark], title: str, most: int, over: tuple[float, float] | None) -> Chart | None:
    """The chart of a curve, with so many points of a series; None without a finite point."""
    drawn = [_plain(series, most) for series in given.series]
    values = np.concatenate([known(series)[1] for series in drawn] or [np.empty(0)])
    if not values.size or not over:
        return None
    log = bool(given.log and values.min() > 0 and values.max() / values.min() > LOG_RANGE)
    bounds = [bound for series in drawn for bound in (series.low, series.high) if bound is not None]
    values = np.concatenate([values, *(bound[np.isfinite(bound)] for bound in bounds)])
    x = _log_axis(over, given.base) if given.base else Axis(*_range(*over, 0.01), X)
    found = Chart(title, x, _y_axis(values, log))
    for index, (series, plain) in enumerate(zip(given.series, drawn, strict=True)):
        colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        if plain.low is not None and plain.high is not None:
            found.band(plain.x, plain.low, plain.high, colour)
        count = len(known(plain)[0])
        found.line(plain.x, plain.y, colour, dashes, mark=0 if count > SPARSE else 4.5 if count > 1 else 7)
        if (lost := plain.x[np.isfinite(plain.x) & np.isnan(plain.y)]).size:
            found.shapes.append(Shape(f"M{float(found.x.at(lost[0])) - 4:.1f} 20l8 8m0 -8l-8 8", colour, 1.6))
        found.keys.append(Key(series.label, colour, dashes, "line" if len(plain.x) > 1 else "point", series.note))
    _mark(found, marks)
    return found


def speedup(scaling: Scaling) -> Chart:
    """The chart of the speed-up over ranks, with the ideal line."""
    ranks, measured = [row.ranks for row in scaling.rows], [row.speedup for row in scaling.rows]
    ideal = [measured[0] * count / ranks[0] for count in ranks]
    every = [*measured, *ideal]
    y = Axis(min(every) / 1.1, max(every) * 1.1, Y, base=2)
    found = Chart(f"Speed-up, {scaling.mode} scaling", _log_axis(ranks), y)
    found.line(ranks, measured, COLOURS[0], mark=6)
    found.line(ranks, ideal, GREY, DASHES[2], 1.2)
    found.keys += [Key("measured", COLOURS[0]), Key("ideal", GREY, DASHES[2])]
    return found


def efficiency(scaling: Scaling) -> Chart:
    """The chart of efficiency over ranks: the range of rounds, the prediction, published runs."""
    ranks = [row.ranks for row in scaling.rows]
    middle, low, high = np.array([row.efficiency for row in scaling.rows], dtype=float).T
    published = [(name, np.array(points, dtype=float).T) for name, points in scaling.published if points]
    every = [
        *ranks,
        *(row[0] for row in scaling.predicted),
        *(count for _, (counts, _) in published for count in counts),
    ]
    top = max([1.0, *high, *(row[3] for row in scaling.predicted), *(max(shares) for _, (_, shares) in published)])
    y = Axis(0.0, max(1.08, 1.05 * top), Y)
    marks = [(float(y.at(value)), f"{100 * value:.0f} %") for value in y.ticks()]
    found = Chart(f"Efficiency, {scaling.mode} scaling", _log_axis(every), y, y_marks=marks)
    found.line(ranks, middle, COLOURS[0], mark=6)
    reach = zip(found.x.at(ranks), y.at(np.minimum(low, middle)), y.at(np.maximum(high, middle)), strict=True)
    bars = "".join(f"M{x:.1f} {a:.1f}V{b:.1f}M{x - 4:.1f} {a:.1f}h8M{x - 4:.1f} {b:.1f}h8" for x, a, b in reach)
    found.shapes.append(Shape(bars, COLOURS[0], 1.6))
    found.keys.append(Key("measured: median and range of the rounds", COLOURS[0]))
    if scaling.predicted:
        of, predicted, lowest, highest = np.array(scaling.predicted, dtype=float).T
        found.band(of, lowest, highest, COLOURS[1])
        found.line(of, predicted, COLOURS[1], DASHES[1])
        found.keys.append(Key("predicted: median and range", COLOURS[1], DASHES[1], "band"))
    for index, (name, (counts, shares)) in enumerate(published, start=2):
        colour = COLOURS[index % len(COLOURS)]
        found.line(counts, shares, colour, DASHES[3], 1.2, mark=1.2, shape="m-1.4 1.2h2.8l-1.4 -2.4z")
        found.keys.append(Key(name, colour, DASHES[3]))
    found.line([found.x.low, found.x.high], [1, 1], GREY, DASHES[2], 1.2)
    found.keys.append(Key("ideal", GREY, DASHES[2]))
    return found


def communication(scaling: Scaling) -> Chart:
    """The chart of the seconds of a step spent computing and communicating, over ranks."""
    ranks, computing, communicating = zip(*scaling.communication, strict=True)
    together = np.add(computing, communicating)
    x, y = Axis(-0.6, len(ranks) - 0.4, X), Axis(0.0, 1.05 * float(together.max()) or 1.0, Y)
    marks = [(float(x.at(place)), f"{count:,}") for place, count in enumerate(ranks)]
    found = Chart(f"Time of a step, {scaling.mode} scaling", x, y, x_marks=marks)
    for name, colour, low, high in (
        ("computing", COLOURS[0], np.zeros(len(ranks)), computing),
        ("communicating", COLOURS[4], computing, together),
    ):
        begin, end = x.at(np.arange(len(ranks)) - 0.3), x.at(np.arange(len(ranks)) + 0.3)
        sides = zip(begin, end, y.at(low), y.at(high), strict=True)
        bars = "".join(
            f"M{left:.1f} {bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}z" for left, right, bottom, top in sides
        )
        found.shapes.append(Shape(bars, colour))
        found.keys.append(Key(name, colour, kind="bar"))
    return found


def _plain(series: Series, most: int | None = None) -> Series:
    """The series in at most `most` points, with NaN for numbers that an axis cannot show."""
    count = min(len(series.x), len(series.y))
    chosen = np.unique(np.linspace(0, count - 1, min(count, most or count)).round().astype(int)) if count else slice(0)
    low, high = (None if bound is None else _shown(bound[:count])[chosen] for bound in (series.low, series.high))
    return Series(series.label, _shown(series.x)[chosen], _shown(series.y)[chosen], low, high)


def _shown(values: np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(numbers) < HUGE, numbers, np.nan)


def known(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the points that an axis can show."""
    plain = _plain(series)
    both = np.isfinite(plain.x) & np.isfinite(plain.y)
    return plain.x[both], plain.y[both]


def _y_axis(values: np.ndarray, log: bool) -> Axis:
    """The axis of these values, which may be all the same."""
    values = values[values > 0] if log else values
    low, high = float(values.min()), float(values.max())
    return Axis(low / 1.2, high * 1.2, Y, base=10) if log else Axis(*_range(low, high, 0.06), Y)


def _range(low: float, high: float, margin: float) -> tuple[float, float]:
    """The range with a margin, wide enough that its marks differ in five digits."""
    size = max(abs(low), abs(high))
    least = size * (1e-3 if high > low else 0.5) if size > 1e-297 else 1.0
    if high - low < least:
        return low - least, high + least
    return low - margin * (high - low), high + margin * (high - low)


def _log_axis(x: Sequence[float], base: int = 2) -> Axis:
    return Axis(min(x) / 1.15, max(x) * 1.15, X, base)


def _mark(chart: Chart, marks: Sequence[Mark]) -> None:
    """Draws checkpoints as short marks at the bottom, other events as numbered lines."""
    axis = chart.x
    shown = [(float(axis.at(x)), number) for x, number in marks if axis.low <= x <= axis.high]
    saved = sorted({f"M{x:.1f} 185.6v-6" for x, number in shown if number is None})
    lines = sorted({f"M{x:.1f} {Y[0]}V{Y[1]}" for x, number in shown if number})
    chart.shapes.insert(0, Shape("".join(lines), "event", 1, "3 2"))
    chart.shapes.append(Shape("".join(saved), "soft", 1))
    groups: list[list[tuple[float, int]]] = []
    for mark in sorted((x, number) for x, number in shown if number):
        if groups and mark[0] - groups[-1][0][0] < NEAR * (X[1] - X[0]):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:  # close lines share a label at the first of them: 3-5
        first, *_, last = sorted(number for _, number in [*group, group[0]])
        chart.events.append((group[0][0], f"{first}" if first == last else f"{first}-{last}"))
