"""The report's pictures, as inline SVG: curves with events, speed-up, efficiency, communication.

Matplotlib draws lines and figures alone. Words from files (names, labels, units) stand in the HTML around the picture,
where nothing interprets them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from hvdtrain.tools.report import describe, svg
from hvdtrain.tools.report.model import Curve, Scaling, Series
from hvdtrain.tools.report.wording import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, BOTTOM, TOP = 54, 14, 24, 18
DASHES = ((), (5, 2), (1.5, 1.5), (6, 1.5, 1.5, 1.5))
LINE = 1.6
SPARSE = 40
"""Points that a line may have to show each of them."""
HUGE = 1e30
"""What no axis can show."""
LOG_RANGE = 20
"""A logarithmic axis is of use where the largest is so many times the smallest."""
NEAR = 0.045
"""Of the axis: event numbers nearer than this share a label."""


@dataclass(frozen=True)
class Key:
    """One entry of a picture's legend."""

    label: str
    colour: int
    dashes: str
    """As SVG's stroke-dasharray."""
    kind: str = "line"
    """Or band, bar, rule."""
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """What a figure of the page holds."""

    svg: Markup
    keys: tuple[Key, ...]
    log: bool = False
    """Whether its y axis is logarithmic."""


@dataclass(frozen=True)
class Mark:
    """An event on a picture's axis; `number` is its own in the list of events, None for a checkpoint."""

    x: float
    number: int | None


def span(curves: Sequence[Curve], x_label: str) -> tuple[float, float] | None:
    """The lowest and highest x of all curves over the same; None where there is no finite point."""
    every = [series for curve in curves if curve.x_label == x_label for series in curve.series]
    x = np.concatenate([_finite(series.x, series.y)[0] for each in every for series in [_plain(each)]] or [np.empty(0)])
    return (float(x.min()), float(x.max())) if x.size else None


def curve(
    given: Curve, marks: Sequence[Mark], key: str, title: str, most: int, over: tuple[float, float] | None
) -> Picture | None:
    """One curve's picture over a span of x, each series of at most so many points; None without a finite point."""
    drawn = [_plain(series, most) for series in given.series]
    values = np.concatenate([_finite(series.x, series.y)[1] for series in drawn] or [np.empty(0)])
    if not values.size or not over:
        return None
    log = given.log and values.min() > 0 and values.max() / values.min() > LOG_RANGE
    figure, axes = _axes()
    for index, series in enumerate(drawn):
        _line(axes, series, index)
    axes.set_xlim(*_range(*over, 0.01))
    _y_axis(axes, drawn, values, log)
    _few_ticks(axes.xaxis)
    _mark(axes, marks)
    pairs = zip(given.series, drawn, strict=True)
    keys = tuple(_key(series, index, plain) for index, (series, plain) in enumerate(pairs))
    return Picture(svg.inline(figure, key, title, describe.curve(given)), keys, bool(log))


def speedup(scaling: Scaling, key: str) -> Picture:
    """Speed-up over ranks, with the ideal line."""
    figure, axes = _axes()
    first = scaling.rows[0]
    ranks = [row.ranks for row in scaling.rows]
    axes.plot(ranks, [row.speedup for row in scaling.rows], color=svg.SERIES[0], marker="o", markersize=5)
    axes.plot(ranks, [first.speedup * n / first.ranks for n in ranks], color=svg.SOFT, dashes=DASHES[2], linewidth=1.2)
    _rank_axis(axes, ranks)
    _log_axis(axes.yaxis, axes.set_yscale, base=2)
    keys = (Key("measured", 0, ""), Key("ideal", -1, _dasharray(2)))
    return Picture(
        svg.inline(figure, key, f"Speed-up, {scaling.mode} scaling", describe.speedup(scaling)), keys, log=True
    )


def efficiency(scaling: Scaling, key: str) -> Picture:
    """Efficiency over ranks: the range of rounds, the prediction and published runs."""
    figure, axes = _axes()
    keys = [*_measured(axes, scaling), *_predicted(axes, scaling), *_published(axes, scaling)]
    every = [row.ranks for row in scaling.rows] + [row[0] for row in scaling.predicted]
    every += [gpus for _, points in scaling.published for gpus, _ in points]
    axes.axhline(1, color=svg.SOFT, dashes=DASHES[2], linewidth=1.2)
    _rank_axis(axes, every)
    axes.set_ylim(0, max(1.08, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    keys.append(Key("ideal", -1, _dasharray(2)))
    text = describe.efficiency(scaling)
    return Picture(svg.inline(figure, key, f"Efficiency, {scaling.mode} scaling", text), tuple(keys))


def communication(scaling: Scaling, key: str) -> Picture:
    """Seconds of a step spent computing and communicating, a bar for each number of ranks."""
    figure, axes = _axes()
    ranks, computing, communicating = zip(*scaling.communication, strict=True)
    places = range(len(ranks))
    axes.bar(places, computing, 0.6, color=svg.SERIES[0])
    axes.bar(places, communicating, 0.6, bottom=computing, color=svg.SERIES[4])
    axes.set_xticks(places, [f"{count:,}" for count in ranks])
    axes.grid(False, axis="x")
    _few_ticks(axes.yaxis)
    keys = (Key("computing", 0, "", "bar"), Key("communicating", 4, "", "bar"))
    text = describe.communication(scaling)
    return Picture(svg.inline(figure, key, f"Time of a step, {scaling.mode} scaling", text), keys)


def _axes() -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
    box = (LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT)
    return figure, figure.add_axes(box)


def _plain(series: Series, most: int | None = None) -> Series:
    """Float arrays of at most `most` points, NaN where an axis cannot show one."""
    count = min(len(series.x), len(series.y))
    chosen = np.unique(np.linspace(0, count - 1, min(count, most or count)).round().astype(int)) if count else slice(0)
    bounds = [None if bound is None else _shown(bound[:count])[chosen] for bound in (series.low, series.high)]
    return Series(series.label, _shown(series.x)[chosen], _shown(series.y)[chosen], *bounds)


def _shown(values: np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(numbers) < HUGE, numbers, np.nan)


def _finite(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    both = np.isfinite(x) & np.isfinite(y)
    return x[both], y[both]


def _line(axes: "Axes", series: Series, index: int) -> None:
    colour = svg.SERIES[index % len(svg.SERIES)]
    points = np.isfinite(series.y).sum()
    marker, size = "o" if points <= SPARSE else None, 3.5 if points > 1 else 6
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.2, linewidth=0)
    dashes = DASHES[index % len(DASHES)]
    options: Any = {"dashes": dashes} if dashes else {}
    axes.plot(series.x, series.y, color=colour, linewidth=LINE, marker=marker, markersize=size, **options)


def _y_axis(axes: "Axes", drawn: Sequence[Series], values: np.ndarray, log: bool) -> None:
    """Sets the range, which holds a constant and a single point too, and few, short marks."""
    bounds = [bound[np.isfinite(bound)] for series in drawn for bound in (series.low, series.high) if bound is not None]
    values = np.concatenate([values, *bounds])
    if log:
        values = values[values > 0]
        axes.set_ylim(values.min() / 1.2, values.max() * 1.2)
        _log_axis(axes.yaxis, axes.set_yscale, base=10)
    else:
        axes.set_ylim(*_range(values.min(), values.max(), 0.06))
        _few_ticks(axes.yaxis)


def _range(low: float, high: float, margin: float) -> tuple[float, float]:
    """At least a thousandth of what is shown, so that the marks differ in five digits."""
    least = max(abs(low), abs(high)) * 1e-3 or 1.0
    if high - low < least:
        return low - least, high + least
    return low - margin * (high - low), high + margin * (high - low)


def _few_ticks(axis: "Axis") -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(lambda value, _: tick(value))


def _log_axis(axis: "Axis", set_scale: Callable[..., None], base: int) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    set_scale("log", base=base)
    axis.set_major_locator(LogLocator(base, numticks=11))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: tick(value))


def _rank_axis(axes: "Axes", ranks: Sequence[int]) -> None:
    _log_axis(axes.xaxis, axes.set_xscale, base=2)
    axes.set_xlim(min(ranks) / 1.15, max(ranks) * 1.15)


def _mark(axes: "Axes", marks: Sequence[Mark]) -> None:
    """Draws checkpoints as short marks at the bottom, other events as numbered lines."""
    low, high = axes.get_xlim()
    places = [(round((mark.x - low) / (high - low), 3), mark.number) for mark in marks if low <= mark.x <= high]
    ticks = sorted({place for place, number in places if number is None})
    axes.plot(ticks, [0.02] * len(ticks), "|", color=svg.SOFT, markersize=6, transform=axes.transAxes)
    numbered = [(place, number) for place, number in places if number]
    lines = sorted({place for place, _ in numbered})
    x, y = np.repeat(lines, 3), np.tile((0, 1, np.nan), len(lines))  # one path for all
    axes.plot(x, y, color=svg.EVENT, linewidth=1, dashes=(3, 2), zorder=1.5, transform=axes.transAxes)
    for place, label in _labels(numbered):
        axes.text(place, 1.02, label, transform=axes.transAxes, ha="center", va="bottom", fontsize=11)


def _labels(marks: Sequence[tuple[float, int]]) -> Iterator[tuple[float, str]]:
    """Where each label stands, and its text; lines that are close together share the first one's: `3-5`."""
    groups: list[list[tuple[float, int]]] = []
    for mark in sorted(marks):
        if groups and mark[0] - groups[-1][0][0] < NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        numbers = sorted(number for _, number in group)
        yield group[0][0], str(numbers[0]) if len(group) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _key(series: Series, index: int, drawn: Series) -> Key:
    with np.errstate(invalid="ignore"):
        missing = int((~np.isfinite(np.asarray(series.y, dtype=float))).sum())
    note = f"{missing:,} of {len(series.y):,} points are not finite" if missing else ""
    return Key(series.label, index % len(svg.SERIES), _dasharray(index), "line" if len(drawn.x) > 1 else "point", note)


def _dasharray(index: int) -> str:
    return " ".join(f"{length * LINE:g}" for length in DASHES[index % len(DASHES)])


def _measured(axes: "Axes", scaling: Scaling) -> Iterator[Key]:
    median, low, high = np.array([row.efficiency for row in scaling.rows], dtype=float).T
    reach = np.clip([median - low, high - median], 0, None)
    ranks = [row.ranks for row in scaling.rows]
    axes.errorbar(ranks, median, reach, color=svg.SERIES[0], marker="o", markersize=5, capsize=4, linewidth=LINE)
    yield Key("measured: median and range of the rounds", 0, "")


def _predicted(axes: "Axes", scaling: Scaling) -> Iterator[Key]:
    if scaling.predicted:
        ranks, median, low, high = np.array(scaling.predicted, dtype=float).T
        axes.fill_between(ranks, low, high, color=svg.SERIES[1], alpha=0.2, linewidth=0)
        axes.plot(ranks, median, color=svg.SERIES[1], dashes=DASHES[1], linewidth=LINE)
        yield Key("predicted: median and range", 1, _dasharray(1), "band")


def _published(axes: "Axes", scaling: Scaling) -> Iterator[Key]:
    for index, (name, points) in enumerate(scaling.published, start=2):
        if points:
            gpus, shares = zip(*points, strict=True)
            place = index % len(svg.SERIES)
            style: Any = {"marker": "^", "markersize": 4, "linewidth": 1.2, "dashes": DASHES[3]}
            axes.plot(gpus, shares, color=svg.SERIES[place], **style)
            yield Key(name, place, _dasharray(3))
