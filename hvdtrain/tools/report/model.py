"""The values of a report, which are rendered as HTML, Markdown or JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hvdtrain.record.history import Event

Level = Literal["good", "attention", "bad", "open", "unjudged"]
"""Of a verdict. good: trained to its end, with the result that was expected; unjudged: the same,
but no result was expected, or its end is not known; attention: something to look at; bad: failed, or a promise was
broken; open: still running."""
Outcome = Literal["as expected", "not as expected", "nothing to compare with"]
Kept = Literal["kept", "broken", "unknown", "not applicable"]


@dataclass(frozen=True)
class Check:
    """A promise of README.md, and what the run's records say of it."""

    name: str
    state: Kept
    detail: str


@dataclass(frozen=True)
class Verdict:
    """How the run ended, how good its result is and what to do next."""

    level: Level
    outcome: Outcome
    """Of the final metrics."""
    headline: str
    """A short sentence: whether the run trained to its end, and if not, why."""
    details: tuple[str, ...]
    """Sentences on the result beside the expected one, on slow ranks, ..."""
    doubts: tuple[str, ...]
    """Sentences on what casts doubt on a verdict in which nothing is wrong."""
    checks: tuple[Check, ...]
    limit: str
    """A sentence on what took most of a step; "" where it was not measured."""
    advice: str
    """A sentence on what to do next; "" where there is nothing."""

    @property
    def label(self) -> str:
        """The level in a word or two."""
        if self.level in {"good", "unjudged"} or (self.level == "attention" and self.outcome == "not as expected"):
            return self.outcome.capitalize()
        return {"attention": "Attention", "bad": "Problem", "open": "Open"}[self.level]


@dataclass(frozen=True)
class Part:
    """One part of the wall time, as the queue or the training."""

    name: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Waterfall:
    """Where the wall time went, from submit to end, in parts that add up to it."""

    wall_seconds: float
    parts: tuple[Part, ...]
    """In the order in which they first occurred."""
    goodput: float | None
    """The share of the wall time in useful steps; None where the run recorded no phases."""
    caution: str = ""
    """What goodput includes, as waiting for other ranks; "" where that is not known."""


@dataclass(frozen=True)
class Series:
    """The points of one line of a chart, thinned to as many as a chart can show."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    """The lowest and highest of the values that each point stands for, if these are several."""
    high: np.ndarray | None = None
    note: str = ""
    """What the line lacks, as values that are not finite."""


@dataclass(frozen=True)
class Curve:
    """One chart, as of the loss or the learning rate."""

    name: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    """A sentence below the chart, as how the LR was derived."""
    log: bool = False
    """Whether the y axis may be logarithmic."""
    base: int = 0
    """The base of a logarithmic x axis; 0 for a linear one."""


@dataclass(frozen=True)
class HeatMap:
    """The step time of each rank, over time."""

    at: np.ndarray
    """[m] seconds since the report's beginning."""
    rows: tuple[str, ...]
    """[n] the name of each row, as "rank 3 on node2"."""
    seconds: np.ndarray
    """[n, m] seconds of a step without waiting for other ranks; NaN where nothing was recorded."""
    slow: Mapping[int, str]
    """Why the run named a row as slow, by row: "slow in computing: ..."."""


@dataclass(frozen=True)
class EnergyRow:
    """The energy that one source measured."""

    source: str
    """As "Cray pm_counters", "SLURM ConsumedEnergy"."""
    kwh: float
    nodes: int | None
    scope: str
    """What it covers, as "whole nodes"."""
    seconds: float
    """In which it was measured."""


@dataclass(frozen=True)
class Energy:
    """The energy of the run. Where no source measured it, `rows` is empty, and `note` says why."""

    rows: tuple[EnergyRow, ...]
    """One a source; the first is taken as the run's energy."""
    mean_watts: float | None
    kwh_per_epoch: float | None
    co2_grams: float | None
    """None where the user gave no factor."""
    note: str


@dataclass(frozen=True)
class Origin:
    """What was trained, with what software and where, and how to repeat it."""

    recipe: str
    """The resolved recipe as YAML."""
    is_shipped: bool
    """Whether hvdtrain brings a recipe of that name."""
    differences: tuple[tuple[str, str, str], ...]
    """Keys that differ from the shipped recipe: key, shipped value, this run's value."""
    plan: tuple[str, ...]
    """The lines that the run printed of its plan."""
    versions: Mapping[str, str]
    hosts: tuple[str, ...]
    launcher: str
    engine: str
    framework: str
    ranks: int | None
    git_commit: str
    job_id: str
    words: tuple[str, ...]
    """The words of rank 0's command."""
    command: str
    """The command that repeats the run, with its launcher and in a new folder."""
    export: str
    """The command that writes the model of its best checkpoint as a file, or of the newest where none is marked."""


@dataclass(frozen=True)
class Samples:
    """How a language model continues a text."""

    of: str
    """As "step 1,200"."""
    prompt: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class RunReport:
    """All values of one run."""

    name: str
    folder: str
    state: str
    """finished, failed, stopped, running, killed (no record of its end), unknown."""
    began: float | None
    """When it was submitted, or else launched first, in seconds since 1970."""
    verdict: Verdict
    numbers: tuple[tuple[str, str], ...]
    """The key numbers as label and text: accuracy, epochs, steps, images/s, goodput, ..."""
    results: Mapping[str, float]
    """Final metrics by name, for comparisons: valid_acc1, wall_seconds, kwh, ..."""
    waterfall: Waterfall | None
    curves: tuple[Curve, ...]
    heat: HeatMap | None
    events: tuple[Event, ...]
    energy: Energy
    origin: Origin
    best: str = ""
    """The name of the metric that decides on the best checkpoint."""
    is_busy: bool = False
    """Whether its machine did other work, so that its times say little of the program."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The keys of the resolved recipe, for comparisons."""
    samples: Samples | None = None
    missing: tuple[str, ...] = ()
    """A line on each thing that could not be read of the run."""


@dataclass(frozen=True)
class ScalingRow:
    """What was measured on one number of ranks."""

    ranks: int
    step_seconds: tuple[float, ...]
    """The seconds of a step in each round."""
    examples_per_second: float
    speedup: float
    efficiency: tuple[float, float, float]
    """The median, the lowest and the highest over the rounds."""


@dataclass(frozen=True)
class Scaling:
    """A sweep over numbers of ranks in one mode, weak or strong."""

    mode: str
    rows: tuple[ScalingRow, ...]
    predicted: tuple[tuple[int, float, float, float], ...]
    """Ranks, and their middle, lowest and highest predicted efficiency; () where no model fits."""
    published: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    """Names of published runs, and the pairs of GPUs and efficiency of each."""
    communication: tuple[tuple[int, float, float], ...]
    """Ranks, and the seconds of a step that they compute and communicate, where measured."""
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """Several runs, side by side."""

    columns: tuple[str, ...]
    """The runs' short names."""
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Group, key, and a value of each run. Of the groups recipe, software and launch only keys
    that differ; of the group result all."""
    curves: tuple[Curve, ...]
    seeds: tuple[str, ...]
    """Sentences on the final metrics of runs that differ in their seed alone."""


@dataclass(frozen=True)
class Document:
    """All values that one report shows."""

    title: str
    made: float
    """When the report was made, in seconds since 1970."""
    version: str
    runs: tuple[RunReport, ...]
    comparison: Comparison | None = None
    scaling: tuple[Scaling, ...] = ()
    missing: tuple[str, ...] = ()
    """A line on each thing of the sweep that could not be read."""


def step_time(seconds: float) -> str:
    """Seconds in four digits, as `1.043 s` or `318.2 ms`: the steps of a sweep differ by little."""
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


def number(value: float) -> str:
    """A number in four digits, as `0.9778`, `1e-05` or `12,346`."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share as `71 %`, or as `1.2 %` where it is small."""
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.1%}".replace("%", " %") if abs(share) < 0.1 else f"{share:.0%}".replace("%", " %")


def kwh(value: float) -> str:
    """Energy as `1.24 kWh` or `3.1 Wh`."""
    return f"{number(value)} kWh" if value >= 0.1 or not value else f"{number(1000 * value)} Wh"
