"""What a report says, as values, which are rendered as HTML, Markdown or JSON; and how a figure is written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hvdtrain.untrusted import printable

MINUTE, HOUR, DAY = 60, 3600, 86400

Level = Literal["good", "attention", "bad", "open"]
"""Of a verdict: trained to its end and all kept; something to look at; failed or a promise broken; still running."""
Kept = Literal["kept", "broken", "unknown"]


@dataclass(frozen=True)
class Check:
    """A promise, and what the run's own records say of it."""

    name: str
    state: Kept
    detail: str


@dataclass(frozen=True)
class Verdict:
    """The first thing a reader sees."""

    level: Level
    headline: str
    """One short sentence: trained to the end or not, and why."""
    details: tuple[str, ...]
    """Sentences: accuracy beside the expected one, slow ranks by name, ..."""
    checks: tuple[Check, ...]
    limit: str
    """What limited the step, a sentence; "" where nobody measured it."""
    advice: str
    """The one thing to do next, a sentence; "" where there is none."""


@dataclass(frozen=True)
class Part:
    """One part of the wall time; a waterfall's are in the order in which they first occur."""

    name: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Waterfall:
    """Where the wall time went, from submit to end; the parts add up to it."""

    wall_seconds: float
    parts: tuple[Part, ...]
    goodput: float | None
    """Useful step time over wall time; None where the run recorded no phases."""


@dataclass(frozen=True)
class Event:
    """Something that happened once; `at` is in seconds since the report's beginning (submit, else first launch)."""

    at: float
    kind: str
    """launch, resume, checkpoint, slow, lost, signal, requeue, end, ..."""
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Series:
    """A curve's points, already thinned to what a chart can show."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    """The lowest and highest of the points that each stands for, where it stands for several."""
    high: np.ndarray | None = None


@dataclass(frozen=True)
class Curve:
    """One chart: loss, accuracy, LR, images/s, gradient norm."""

    name: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    """A sentence under the chart, as the LR's derivation."""
    log: bool = False


@dataclass(frozen=True)
class HeatMap:
    """Step time per rank over time."""

    at: np.ndarray
    """[m] seconds since the report's beginning."""
    rows: tuple[str, ...]
    """[n] what each row is, as "rank 3 on node2"."""
    seconds: np.ndarray
    """[n, m] of a step, without waiting for other ranks; NaN where nothing was recorded."""
    slow: Mapping[int, str]
    """Row -> why it is named: slow in computing, reading, network."""


@dataclass(frozen=True)
class EnergyRow:
    """What one source has measured."""

    source: str
    """As "Cray pm_counters", "SLURM ConsumedEnergy"."""
    kwh: float
    nodes: int | None
    scope: str
    """What it covers, as "whole nodes", "GPUs only"."""


@dataclass(frozen=True)
class Energy:
    """Energy of the run; `rows` empty means: not measured, and `note` says why."""

    rows: tuple[EnergyRow, ...]
    """The first one is the run's figure."""
    mean_watts: float | None
    kwh_per_epoch: float | None
    co2_grams: float | None
    """Only with a factor that the user gave."""
    note: str


@dataclass(frozen=True)
class Origin:
    """What it was, and how to repeat it."""

    recipe: str
    """Resolved, YAML."""
    is_shipped: bool
    """Whether hvdtrain brings a recipe of that name."""
    differences: tuple[tuple[str, str, str], ...]
    """Key, shipped value, this run's value."""
    plan: tuple[str, ...]
    """Lines."""
    versions: Mapping[str, str]
    hosts: tuple[str, ...]
    launcher: str
    engine: str
    framework: str
    ranks: int | None
    git_commit: str
    job_id: str
    command: str


@dataclass(frozen=True)
class RunReport:
    """One run."""

    name: str
    folder: str
    state: str
    """finished, failed, stopped, running, killed (no record of its end), unknown."""
    began: float | None
    """Seconds since 1970: submit, else the first launch."""
    verdict: Verdict
    numbers: tuple[tuple[str, str], ...]
    """Label, value: accuracy, epochs, steps, images/s, wall time, goodput, kWh."""
    results: Mapping[str, float]
    """Final metrics by name, for comparisons: valid_acc1, valid_loss, examples_per_second, wall_seconds, kwh, ..."""
    waterfall: Waterfall | None
    curves: tuple[Curve, ...]
    heat: HeatMap | None
    events: tuple[Event, ...]
    energy: Energy
    origin: Origin
    settings: Mapping[str, object] = field(default_factory=dict)
    """The resolved recipe as a flat mapping, for comparisons."""
    missing: tuple[str, ...] = ()
    """A line on each thing that could not be read."""


@dataclass(frozen=True)
class ScalingRow:
    """One number of ranks."""

    ranks: int
    step_seconds: tuple[float, ...]
    """One figure a round."""
    examples_per_second: float
    speedup: float
    efficiency: tuple[float, float, float]
    """Median, lowest, highest over the rounds."""


@dataclass(frozen=True)
class Scaling:
    """A sweep over numbers of ranks; one of these a mode (weak, strong)."""

    mode: str
    rows: tuple[ScalingRow, ...]
    predicted: tuple[tuple[int, float, float, float], ...]
    """Ranks, efficiency: median, lowest, highest; () where the sweep has too few points."""
    published: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    """Name, (GPUs, efficiency) of published runs."""
    communication: tuple[tuple[int, float, float], ...]
    """Ranks, seconds of a step computing, seconds communicating; () where nobody measured it."""
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    columns: tuple[str, ...]
    """The runs' short names."""
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Group (recipe, software, launch, result), key, a value a run: only what differs, and all results."""
    curves: tuple[Curve, ...]
    seeds: tuple[str, ...]
    """Sentences: final accuracy with its spread over the runs that differ in their seed alone."""


@dataclass(frozen=True)
class Document:
    """All that one file shows."""

    title: str
    made: float
    """Seconds since 1970."""
    version: str
    runs: tuple[RunReport, ...]
    comparison: Comparison | None = None
    scaling: tuple[Scaling, ...] = ()
    missing: tuple[str, ...] = ()


def duration(seconds: float) -> str:
    """As `85 ms`, `12.3 s`, `4 min 5 s`, `1 h 23 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    return f"-{_duration(-seconds)}" if seconds < 0 else _duration(seconds)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < MINUTE - 0.05:
        return f"{seconds:.1f} s"
    if round(seconds) < HOUR:
        return "{} min {} s".format(*divmod(round(seconds), MINUTE))
    if round(seconds / MINUTE) < 2 * DAY / MINUTE:
        return "{} h {} min".format(*divmod(round(seconds / MINUTE), 60))
    return "{} d {} h".format(*divmod(round(seconds / HOUR), 24))


def step_time(seconds: float) -> str:
    """Four digits of it, as `1.043 s`, `318.2 ms`: steps differ by little."""
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


def number(value: float) -> str:
    """Four digits of it, as `0.9778`, `1e-05`, `12,346`."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def percent(share: float) -> str:
    """As `71 %`; a tenth where it is small."""
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.1%}".replace("%", " %") if abs(share) < 0.1 else f"{share:.0%}".replace("%", " %")


def short(text: str, most: int = 60) -> str:
    """One line of at most `most` characters; its middle is left out where it is longer."""
    return printable(" ".join(text.split()), most)


def kwh(value: float) -> str:
    """As `1.24 kWh`, `3.1 Wh`."""
    return f"{number(value)} kWh" if value >= 0.1 or not value else f"{number(1000 * value)} Wh"
