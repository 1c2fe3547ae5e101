"""The heat map, step time per rank over time: a small PNG for the page, and the words around it."""

import base64
import io
from dataclasses import dataclass

import numpy as np

from hvdtrain.tools.report.model import HeatMap
from hvdtrain.tools.report.wording import duration, short

MOST_ROWS, COLUMNS, LEVELS = 64, 240, 32
ROW_PIXELS, MOST_PIXELS, LABEL_PIXELS = 18, 400, 15
MOST_LETTERS = 28
COLOURS = "cividis"
LEAST_RANGE = 1.25
"""Of the largest to the smallest shown: what differs by less looks even."""
GAP = 3
"""Sampling intervals without a sample, after which the map is blank."""


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
        colours=tuple(_hex(colour) for colour in _palette(8)),
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


def _hex(colour: np.ndarray) -> str:
    return "#" + bytes(colour.astype(np.uint8)).hex()


def _rows(given: HeatMap, chosen: np.ndarray, pixels: int) -> list[Row]:
    """The names that have room beside the map; those of slow ranks come first."""
    step = pixels / len(chosen)
    taken: list[Row] = []
    for place, row in sorted(enumerate(chosen.tolist()), key=lambda pair: (pair[1] not in given.slow, pair[0])):
        middle = (place + 0.5) * step
        if all(abs(middle - other.top * pixels / 100) >= LABEL_PIXELS for other in taken):
            taken.append(Row(short(given.rows[row], MOST_LETTERS), 100 * middle / pixels, row in given.slow))
    return sorted(taken, key=lambda row: row.top)
