"""How the labs' figures look: readable from the last row, and without telling red from green."""

from typing import NamedTuple

import matplotlib.pyplot as plt

COLOURS = {  # Okabe and Ito 2008, "Color Universal Design"
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "yellow": "#F0E442",
    "black": "#000000",
}


class Look(NamedTuple):
    """How one of several curves is drawn: never by its colour alone."""

    colour: str
    marker: str
    linestyle: str


_MARKERS = "osD^vPX*"
_LINESTYLES = ("-", "--", "-.", ":")


def use() -> None:
    """Sets matplotlib's defaults for a lecture: figures of 10 x 6 inches at 80 dots an inch, text of 15 points."""
    plt.rcParams.update(
        {
            "figure.figsize": (10, 6),
            "figure.dpi": 80,
            "figure.constrained_layout.use": True,
            "font.size": 15,
            "axes.grid": True,
            "axes.prop_cycle": plt.cycler(color=list(COLOURS.values())),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "grid.alpha": 0.3,
            "image.cmap": "viridis",
            "legend.framealpha": 0.9,
            "lines.linewidth": 2,
        }
    )


def of_rank(rank: int) -> Look:
    """The look of a rank's curve; colours and markers repeat after eight ranks, line styles after four."""
    colours = list(COLOURS.values())
    return Look(colours[rank % len(colours)], _MARKERS[rank % len(_MARKERS)], _LINESTYLES[rank % len(_LINESTYLES)])
