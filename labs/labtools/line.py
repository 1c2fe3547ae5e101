"""The line y = mx + n fitted by SGD: its points, its loss, and figures of a path over the loss surface.

A path is an array [steps + 1, 2]: slope m and intercept n before the first update and after each.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import patheffects
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from hvdtrain import datasets
from labtools.scale import Progress
from labtools.style import COLOURS, Look, of_rank

SLOPES = (0.0, 4.0)
"""The part of the loss surface that is drawn: slopes from, to."""
INTERCEPTS = (-0.5, 0.5)
"""Intercepts from, to."""
# Above the lowest loss. Closer together near the minimum, where a loss that is even everywhere would show nothing.
_LEVELS = np.array([0.001, 0.004, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.22, 0.3, 0.4, 0.5, 0.6])
_HALO = [patheffects.withStroke(linewidth=4, foreground="white")]


def points() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The recipe `linear`'s 1,000 training points: x [1000, 1] and y = 2x + noise [1000, 1]."""
    train = datasets.load("linear").train
    return train.read(np.arange(len(train)), None)


def loss(x: NDArray, y: NDArray, m: ArrayLike, n: ArrayLike) -> NDArray[np.float64]:
    """The mean squared error of y = mx + n over all points, for every m and n: of the shape they broadcast to."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    m, n = np.asarray(m, np.float64), np.asarray(n, np.float64)
    squares = np.mean(y * y) + m * m * np.mean(x * x) + n * n
    products = m * n * np.mean(x) - m * np.mean(x * y) - n * np.mean(y)
    return squares + 2 * products


def least_squares(x: NDArray, y: NDArray) -> tuple[float, float]:
    """Slope and intercept of the line with the lowest loss."""
    m, n = np.polynomial.Polynomial.fit(x.ravel(), y.ravel(), 1, domain=[-1, 1]).coef[::-1]
    return float(m), float(n)


def surface(axes: Axes, x: NDArray, y: NDArray) -> QuadContourSet:
    """Draws contours of the loss over slope and intercept, and marks the minimum with its value.

    Returns the filled contours, from which a colour bar is made.
    """
    m, n = np.meshgrid(np.linspace(*SLOPES, 161), np.linspace(*INTERCEPTS, 121))
    best = least_squares(x, y)
    lowest = float(loss(x, y, *best))
    losses = loss(x, y, m, n)
    filled = axes.contourf(m, n, losses, lowest + np.array([0, *_LEVELS, 0.75]), cmap="viridis", alpha=0.45)
    axes.contour(m, n, losses, lowest + _LEVELS, colors="0.35", linewidths=0.6)
    axes.plot(*best, "*", color="white", markeredgecolor="black", markersize=18, zorder=5)
    axes.annotate(
        f"minimum {lowest:.4f}",
        best,
        xytext=(0.98, 0.04),
        textcoords="axes fraction",
        ha="right",
        arrowprops={"arrowstyle": "-", "color": "black", "shrinkB": 9},
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )
    axes.set(xlim=SLOPES, ylim=INTERCEPTS, xlabel="Slope m", ylabel="Intercept n")
    axes.grid(visible=False)
    return filled


def path(axes: Axes, parameters: NDArray, label: str = "", look: Look | None = None) -> Line2D:
    """Draws a path [steps + 1, 2] over the surface; a later `set_data(*parameters.T)` of what it returns moves it.

    Long paths have few markers. `look` is `style.of_rank(0)` where left out.
    """
    colour, marker, linestyle = look or of_rank(0)
    (line,) = axes.plot(
        *np.asarray(parameters).T,
        color=colour,
        marker=marker,
        linestyle=linestyle,
        linewidth=1.5,
        markersize=5,
        markevery=max(1, len(parameters) // 60),
        label=label or None,
        path_effects=_HALO,
    )
    return line


def animation(x: NDArray, y: NDArray, parameters: NDArray) -> str:
    """A player, as HTML: a path [steps + 1, 2] growing over the surface, beside its line among the points."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), dpi=60, width_ratios=(3, 2))
    surface(left, x, y)
    drawn = path(left, parameters[:1])
    right.plot(x, y, ".", color=COLOURS["sky"])
    (fitted,) = right.plot([], [], color=COLOURS["vermillion"], linewidth=3)
    right.set(xlabel="x", ylabel="y")
    ends = np.array([x.min(), x.max()])

    progress = Progress("images of the animation", len(parameters))

    def show(step: int) -> tuple[Line2D, ...]:
        progress.show(step)
        slope, intercept = parameters[step]
        drawn.set_data(*parameters[: step + 1].T)
        fitted.set_data(ends, slope * ends + intercept)
        left.set_title(f"m = {slope:.2f}, n = {intercept:.2f}")
        right.set_title(f"Loss {loss(x, y, slope, intercept):.4f}")
        return drawn, fitted

    player = FuncAnimation(figure, show, len(parameters), interval=150)
    with plt.rc_context({"animation.frame_format": "jpeg"}):  # a fifth of the bytes of PNG
        html = player.to_jshtml(default_mode="once")
    progress.close()
    plt.close(figure)
    return str(html)
