"""The main message of each picture in words, for those who do not see it."""

import numpy as np

from hvdtrain.tools.report.model import Curve, HeatMap, Scaling, Series
from hvdtrain.tools.report.wording import duration, number, percent, short, step_time

MOST_SERIES = 6


def curve(given: Curve) -> str:
    """Begin, end and extremes of each series."""
    texts = [_series(series, short(given.x_label, 20)) for series in given.series[:MOST_SERIES]]
    left = len(given.series) - MOST_SERIES
    return " ".join(texts) + (f" And {left} more." if left > 0 else "")


def speedup(scaling: Scaling) -> str:
    """Speed-up of each number of ranks."""
    return "; ".join(f"{row.ranks:,} ranks: {number(row.speedup)} times" for row in scaling.rows) + "."


def efficiency(scaling: Scaling) -> str:
    """Median and range of each number of ranks, and the farthest prediction."""
    rows = (
        f"{row.ranks:,} ranks: {percent(middle)} ({percent(low)} to {percent(high)})"
        for row in scaling.rows
        for middle, low, high in [row.efficiency]
    )
    text = "; ".join(rows) + "."
    if scaling.predicted:
        ranks, median, low, high = scaling.predicted[-1]
        text += f" Predicted for {ranks:,} ranks: {percent(median)} ({percent(low)} to {percent(high)})."
    return text


def communication(scaling: Scaling) -> str:
    """Both parts of the step for each number of ranks."""
    rows = (
        f"{ranks:,} ranks: {step_time(computing)} computing, {step_time(communicating)} communicating"
        for ranks, computing, communicating in scaling.communication
    )
    return "; ".join(rows) + "."


def heat(given: HeatMap) -> str:
    """The range of step times, and the slow rows."""
    finite = given.seconds[np.isfinite(given.seconds)]
    if not finite.size:
        return "No step time was recorded."
    text = (
        f"Steps take {duration(finite.min())} to {duration(finite.max())}, in the median {duration(np.median(finite))}."
    )
    slow = [short(given.rows[row], 40) for row in given.slow if 0 <= row < len(given.rows)]
    named = f" Slow: {', '.join(slow[:10])}." if slow else " No rank is slow."
    return text + named


def _series(series: Series, x_label: str) -> str:
    label = short(series.label, 40)
    x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
    count = min(len(x), len(y))
    finite = np.isfinite(x[:count]) & np.isfinite(y[:count])
    x, y = x[:count][finite], y[:count][finite]
    if not y.size:
        return f"{label}: no finite figure."
    low, high = y.argmin(), y.argmax()
    return (
        f"{label}: from {number(y[0])} to {number(y[-1])} at {x_label} {number(x[-1])};"
        f" lowest {number(y[low])} at {number(x[low])}, highest {number(y[high])} at {number(x[high])}."
    )
