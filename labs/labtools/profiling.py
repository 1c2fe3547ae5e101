"""Where the time of a step goes: the loop's own stamps, Horovod's timeline, and figures of both."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.errors import LabError
from labtools.style import COLOURS

Numbers = NDArray[np.float64]

PARTS = ("data", "forward", "backward", "allreduce", "update")
"""The parts of a step, in their order; allreduce is what is waited for once backward has ended."""
_LOOKS = {
    "data": ("yellow", ".."),
    "forward": ("sky", ""),
    "backward": ("blue", ""),
    "allreduce": ("vermillion", "//"),
    "update": ("green", ""),
}
_PHASES = {
    "NEGOTIATE": ("sky", "not all ranks have it yet"),
    "QUEUE": ("yellow", "all have it, others go first"),
    "MEMCPY_IN": ("green", "copied into the fusion buffer"),
    "ALLREDUCE": ("vermillion", "added over the ranks"),
    "MEMCPY_OUT": ("black", "copied out again"),
}

Span = tuple[float, float]
"""Begin and end, seconds since 1970."""


@dataclass(frozen=True)
class Group:
    """Tensors of one step that were communicated together, fused into one buffer."""

    tensors: tuple[str, ...]
    nbytes: int
    phases: dict[str, Span]
    """NEGOTIATE, QUEUE, MEMCPY_IN, ALLREDUCE, MEMCPY_OUT: those that there were."""

    @property
    def label(self) -> str:
        first = self.tensors[0].removesuffix(".weight").removesuffix(".bias")
        others = f" + {len(self.tensors) - 1}" if len(self.tensors) > 1 else ""
        return f"{first}{others}: {self.nbytes / 1e6:.1f} MB"


def typical_step(stamps: NDArray) -> Numbers:
    """Seconds of each part of a typical step [parts], from stamps [ranks, steps + 1, parts + 1] around the parts.

    The first step is warm-up. Of the others, the half whose duration is nearest the middle is averaged, over the ranks
    too: a hiccup of the machine does not count.
    """
    seconds = np.diff(stamps, axis=2)[:, 1:].mean(axis=0)
    steps = len(seconds)
    order = np.argsort(seconds.sum(axis=1))
    return np.asarray(seconds[order[steps // 4 : steps - steps // 4]].mean(axis=0))


def read_timeline(path: Path) -> list[Group]:
    """The allreduces in a Horovod timeline, in the order of their start.

    The file is a Chrome trace; one whose run was cut off lacks its end. Raises LabError for one that cannot be read.
    """
    try:
        events = _events(files.read(path, 1 << 28))
        start = events[0]["args"]["start_time_since_epoch_in_micros"]
        tensors = sorted(_tensors(events, start), key=lambda tensor: tensor.phases["ALLREDUCE"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(
            f"There is no timeline of Horovod's in {path} ({error!r}).\n"
            "HOROVOD_TIMELINE has to be in the environment when hvd.init() runs; only rank 0 writes."
        ) from None
    groups: list[list[Group]] = []
    for tensor in tensors:
        if groups and tensor.phases["ALLREDUCE"][0] < groups[-1][0].phases["ALLREDUCE"][1]:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [_fused(group) for group in groups]


def _events(text: str) -> list[dict[str, Any]]:
    try:
        return list(json.loads(text))
    except ValueError:
        return list(json.loads(text[: text.rindex("},") + 1] + "]"))


def _tensors(events: list[dict[str, Any]], start: int) -> Iterator[Group]:
    """The phases of every tensor in one allreduce. Phases come as begin (B) and end (E), nested, a row a tensor."""
    names = {e["pid"]: str(e["args"].get("name")) for e in events if e.get("name") == "process_name"}
    rows: dict[int, list[tuple[str, float]]] = {}
    phases: dict[int, dict[str, Span]] = {}
    for event in events:
        if event["ph"] == "B":
            rows.setdefault(event["pid"], []).append((event["name"], event["ts"]))
        elif event["ph"] == "E" and rows.get(event["pid"]):
            row = event["pid"]
            name, begin = rows[row].pop()
            phases.setdefault(row, {})[name] = ((start + begin) / 1e6, (start + event["ts"]) / 1e6)
            if name == "ALLREDUCE":
                name = names[row].removeprefix("allreduce.")
                yield Group((name,), _nbytes(**event["args"]), _phases(phases.pop(row)))


def _phases(found: dict[str, Span]) -> dict[str, Span]:
    """A tensor's phases by our names; the time between the ranks' agreement and the start is QUEUE."""
    ours = {
        "NEGOTIATE": found.get("NEGOTIATE_ALLREDUCE"),
        "MEMCPY_IN": found.get("MEMCPY_IN_FUSION_BUFFER"),
        "ALLREDUCE": next((found[name] for name in found if name.endswith("_ALLREDUCE") and "NEG" not in name), None),
        "MEMCPY_OUT": found.get("MEMCPY_OUT_FUSION_BUFFER"),
    }
    phases = {name: span for name, span in ours.items() if span}
    phases.setdefault("ALLREDUCE", found["ALLREDUCE"])
    if "NEGOTIATE" in phases:
        phases["QUEUE"] = phases["NEGOTIATE"][1], found["ALLREDUCE"][0]
    return phases


def _nbytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+$", dtype)
    return math.prod(json.loads(shape)) * (int(bits.group()) // 8 if bits else 1)


def _fused(tensors: list[Group]) -> Group:
    largest_first = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    phases = {}
    for name in _PHASES:
        spans = [tensor.phases[name] for tensor in tensors if name in tensor.phases]
        if spans:
            phases[name] = min(begin for begin, _ in spans), max(end for _, end in spans)
    if "QUEUE" in phases:  # it is ready when the last of them is
        phases["QUEUE"] = phases["NEGOTIATE"][1], phases["QUEUE"][1]
    names = tuple(name for tensor in largest_first for name in tensor.tensors)
    return Group(names, sum(tensor.nbytes for tensor in tensors), phases)


def draw_throughput(ranks: Sequence[int], images_per_second: Sequence[float], cores: int) -> Figure:
    """Images a second and efficiency over the number of ranks, with N times one rank and what the cores allow."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 6))
    number, speed = np.array(ranks, float), np.array(images_per_second)
    line = np.linspace(1, number[-1], 101)
    ideal, allowed = ("--", COLOURS["black"], "N times one rank"), ("-.", COLOURS["green"], f"as {cores} cores allow")
    for axes, measured, curves in (
        (left, speed, (speed[0] * line, speed[0] * np.minimum(line, cores))),
        (right, 100 * speed / speed[0] / number, (np.full_like(line, 100), 100 * np.minimum(1, cores / line))),
    ):
        for curve, (dashes, colour, label) in zip(curves, (ideal, allowed), strict=True):
            axes.plot(line, curve, dashes, color=colour, label=label)
        axes.plot(number, measured, "o-", color=COLOURS["vermillion"], markersize=10, label="measured")
        axes.set(xlabel="Number of ranks", xticks=ranks, ylim=(0, None))
    left.set_ylabel("Throughput / (images/s)")
    right.set_ylabel("Efficiency / %")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def draw_parts(axes: Axes, seconds: Mapping[Any, Numbers]) -> None:
    """Stacked bars of a step's parts, for each number of ranks, or each named run: `seconds[ranks]` is [parts]."""
    bottom = np.zeros(len(seconds))
    positions = np.arange(len(seconds))
    for part, heights in zip(PARTS, 1e3 * np.array(list(seconds.values())).T, strict=True):
        colour, hatch = _LOOKS[part]
        axes.bar(
            positions,
            heights,
            0.6,
            bottom,
            color=COLOURS[colour],
            hatch=hatch,
            edgecolor="white",
            linewidth=1,
            label=part,
        )
        bottom += heights
    for position, height in zip(positions, bottom, strict=True):
        axes.annotate(f"{height:.0f} ms", (position, height), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(positions, [n if isinstance(n, str) else f"{n} rank{'s' * (n > 1)}" for n in seconds])
    axes.set_xlim(-0.5, len(seconds) + 0.5)  # a free column for the legend
    axes.set_ylabel("Time of a step / ms")
    axes.grid(axis="x", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center right")


def draw_heat(runs: Mapping[str, NDArray]) -> Figure:
    """A heat map for each run: ms [ranks, steps], a row a rank, all with one scale."""
    figure, panels = plt.subplots(1, len(runs), figsize=(12, 3.6), sharey=True, squeeze=False)
    most = max(float(np.max(ms)) for ms in runs.values())
    for axes, (title, ms) in zip(panels[0], runs.items(), strict=True):
        image = axes.imshow(ms, aspect="auto", cmap="cividis", vmin=0, vmax=most)
        for (rank, step), value in np.ndenumerate(ms):
            ink = "black" if value > 0.55 * most else "white"
            axes.text(step, rank, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=13)
        axes.set(title=title, xlabel="Step", xticks=range(ms.shape[1]), yticks=range(ms.shape[0]))
        axes.grid(visible=False)
    panels[0][0].set_ylabel("Rank")
    figure.colorbar(image, ax=panels, label="ms until backward\nhas ended")
    return figure


def draw_timeline(groups: Sequence[Group], stamps: NDArray, rows: int = 10) -> Figure:
    """One step of rank 0: its parts from stamps [parts + 1], and the `rows` largest groups of tensors.

    Raises LabError where the timeline has nothing of this step.
    """
    begin, end = stamps[0], stamps[-1]
    here = [group for group in groups if begin <= group.phases["ALLREDUCE"][0] < end]
    if not here:
        raise LabError("No allreduce of the timeline lies in this step: are both of the same run?")
    smallest = sorted(group.nbytes for group in here)[-rows:][0]
    shown = [group for group in here if group.nbytes >= smallest]
    figure, axes = plt.subplots(figsize=(12, 7.5))
    _draw_step(axes, 1e3 * (stamps - begin))
    for row, group in enumerate(shown, 1):
        for phase, (left, right) in group.phases.items():
            axes.barh(row, 1e3 * (right - left), 0.8, 1e3 * (left - begin), color=COLOURS[_PHASES[phase][0]])
    axes.set_yticks(range(len(shown) + 1), ["rank 0", *(group.label for group in shown)])
    axes.invert_yaxis()
    axes.set(xlabel="Time since the step began / ms", xlim=(0, 1e3 * (end - begin)))
    axes.grid(axis="y", visible=False)
    looks = [Patch(color=COLOURS[colour], label=f"{name}: {what}") for name, (colour, what) in _PHASES.items()]
    figure.legend(handles=looks, loc="outside lower center", ncols=2)
    return figure


def _draw_step(axes: Axes, stamps: Numbers) -> None:
    """The parts of a step in the top row, named where the name fits, and a line where backward ends."""
    for number, part in enumerate(PARTS):
        left, right = stamps[number : number + 2]
        axes.barh(0, right - left, 0.8, left, color=("0.8", "0.65")[number % 2])
        if right - left > 0.012 * len(part) * stamps[-1]:
            axes.text((left + right) / 2, 0, part, ha="center", va="center")
    axes.axvline(stamps[PARTS.index("backward") + 1], color="black", linestyle="--")
