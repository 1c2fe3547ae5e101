"""What every benchmark shares: interleaved rounds, the median and the spread, JSON and a plot."""

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pydantic
import tyro
from pydantic import Field

from hvdtrain import files
from hvdtrain.errors import EngineUnavailable, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 16_384
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""Of rounds, steps, images."""
RankCount = Annotated[int, Field(ge=1, le=MOST_RANKS)]
LIBRARIES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "lightning", "mpi4py", "numpy")


@pydantic.dataclasses.dataclass(frozen=True)
class Kept:
    """The flags by which a benchmark keeps what it found."""

    output: Annotated[Path | None, tyro.conf.arg(help="folder for the figures as JSON and as a plot (PNG)")] = None


class Spread(NamedTuple):
    """The middle of some figures, and the lowest and highest of them."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of one figure or more."""
    return Spread(statistics.median(values), min(values), max(values))


def summary(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """`12.30 (12.01 to 13.40)`: the spread of the values times `scale`."""
    middle, low, high = (f"{scale * value:.{digits}f}" for value in spread(values))
    return f"{middle} ({low} to {high})"


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """What each gives, once a round, interleaved, every other round backwards; rounds of warm-up are not kept."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(warm_up + rounds):
        for name in names if number % 2 == 0 else reversed(names):
            value = contenders[name]()
            if number >= warm_up:
                found[name].append(value)
    return found


def bars(axes: "Axes", found: Mapping[str, Sequence[float]], unit: str, scale: float = 1.0) -> None:
    """A bar for the median of each, with its spread."""
    rows = {name: Spread(*(scale * value for value in spread(values))) for name, values in found.items()}
    reach = [[row.median - row.low for row in rows.values()], [row.high - row.median for row in rows.values()]]
    drawn = axes.barh(list(rows), [row.median for row in rows.values()], xerr=reach, color="#56B4E9", capsize=4)
    axes.bar_label(drawn, [f" {row.median:.4g}" for row in rows.values()], label_type="edge", padding=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(unit)


def conclude(what: str, results: Mapping[str, Any], draw: Callable[["Axes"], None], output: Path | None) -> None:
    """Prints the results as one line of JSON, this machine's beside them; in the folder `output`, where one is given,
    leaves them as WHAT.json and what `draw` draws as WHAT.png. Raises OutputError, EngineUnavailable."""
    line = json.dumps({"bench": what, **results, "machine": machine()})
    print(line)
    if output is None:
        return
    save(output / f"{what}.json", line + "\n")
    plot(draw, output / f"{what}.png")
    print(f"{output / what}.json, {output / what}.png")


def save(path: Path, text: str) -> None:
    """Writes a file of figures, and its folder where there is none. Raises OutputError."""
    try:
        files.make_folder(path.parent)
        files.write(path, text)
    except OSError as error:
        raise OutputError(f"{path.parent}: {error.strerror}; give --output a folder that can be written.") from None


def plot(draw: Callable[["Axes"], None], path: Path) -> None:
    """Draws one plot into a PNG file. Raises OutputError, EngineUnavailable where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EngineUnavailable(f"a plot needs matplotlib ({error}); install it: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an ending that names no format
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{path}: {reason}; name a file that can be written, as x.png.") from None


def machine() -> dict[str, Any]:
    """What the figures hold for: the processor, and the versions of the libraries that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
