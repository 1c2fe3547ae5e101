"""Each rank's path over the loss surface, drawn while the ranks run, and paths beside one another at the end."""

import time
from collections.abc import Mapping
from types import TracebackType

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from labtools import line
from labtools.style import of_rank

_REDRAW = 0.2  # seconds, at least, between two drawings
_PAUSE = 2.0  # times as long as drawing took, so that drawing leaves the ranks their cores

Paths = Mapping[str, NDArray[np.float64]]


class LivePaths:
    """A figure that grows while ranks send their weights: `with LivePaths(x, y, 4, title) as live:
    ranks.run(train, watch=live.watch)`.

    One output of the notebook, updated in place: at most five times a second, and once at the end.
    """

    def __init__(self, x: NDArray, y: NDArray, ranks: int, title: str) -> None:
        self._figure, axes = plt.subplots()
        line.surface(axes, x, y)
        axes.set_title(title)
        self._points: list[list[NDArray[np.float64]]] = [[] for _ in range(ranks)]
        start = np.full((1, 2), np.nan)
        self._lines = [line.path(axes, start, f"rank {rank}", of_rank(rank)) for rank in range(ranks)]
        self._figure.legend(loc="outside lower center", ncols=ranks)
        self._next = 0.0

    def __enter__(self) -> "LivePaths":
        from IPython.display import display

        self._shown = display(self._figure, display_id=True)
        return self

    def watch(self, rank: int, point: NDArray[np.float64]) -> None:
        """Adds a rank's next slope and intercept [2]."""
        self._points[rank].append(point)
        if time.monotonic() >= self._next:
            begun = time.monotonic()
            self._draw()
            ended = time.monotonic()
            self._next = ended + max(_REDRAW, _PAUSE * (ended - begun))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        plt.close(self._figure)

    def _draw(self) -> None:
        for rank, (drawn, points) in enumerate(zip(self._lines, self._points, strict=True)):
            if points:
                drawn.set_data(*np.transpose(points))
                # Markers at other steps for each rank: all are seen where paths coincide.
                drawn.set_markevery((rank, len(self._lines)))
        self._shown.update(self._figure)


def beside(x: NDArray, y: NDArray, panels: Mapping[str, Paths]) -> None:
    """A panel for each title: the loss surface, and labelled paths [steps + 1, 2] on it, the first one underneath."""
    _, axes = plt.subplots(1, len(panels), figsize=(8 * len(panels), 7), sharey=True, squeeze=False)
    for panel, (title, paths) in zip(axes[0], panels.items(), strict=True):
        line.surface(panel, x, y)
        for rank, (label, path) in enumerate(paths.items()):
            drawn = line.path(panel, path, label, of_rank(rank))
            drawn.set(linewidth=6 - 3 * min(rank, 1), markersize=12 - 5 * min(rank, 1))
        panel.set_title(title)
        panel.legend(loc="upper right")
        panel.label_outer()


def progress(paths: Paths, epochs: int) -> None:
    """The slope of labelled paths [steps + 1, 2] over epochs, and over steps."""
    _, axes = plt.subplots(1, 2, figsize=(16, 6), sharey=True)
    for rank, (label, path) in enumerate(paths.items()):
        colour, marker, linestyle = of_rank(rank)
        steps = np.arange(len(path))
        for panel, at in zip(axes, (steps * epochs / steps[-1], steps), strict=True):
            panel.plot(at, path[:, 0], linestyle, color=colour, marker=marker, markevery=0.08, label=label)
    axes[0].set(xlabel="Epochs", ylabel="Slope m", title="The same examples seen")
    axes[1].set(xlabel="Steps", title="The same number of updates")
    axes[1].legend(loc="lower right")
