"""Makes the values of a report from a run folder."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np

from hvdtrain.core.recipe.noise import NAMES
from hvdtrain.core.wording import counted, duration
from hvdtrain.ranks.slow import FIGURES
from hvdtrain.record import reader
from hvdtrain.record.history import Column, Event, Launch, Metrics
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.report import costs, origin
from hvdtrain.tools.report.costs import Axis
from hvdtrain.tools.report.model import Curve, Energy, RunReport, Samples, Series, Waterfall, kwh, number, percent
from hvdtrain.tools.report.results import BEST, best, chosen, diverged, lacks, words
from hvdtrain.tools.report.verdict import verdict
from hvdtrain.untrusted import items, printable, whole

MOST_EVENTS = 400
MOST_OF_A_KIND = 60
TITLES = {
    "acc1": "Accuracy",
    "bits_per_byte": "Bits per byte",
    "lr": "Learning rate",
    "gradient_norm": "Gradient norm",
    "loss": "Loss",
}
STEP_CURVES = {
    "lr": ("Learning rate", "LR"),
    "examples_per_second": ("Throughput", "examples/s"),
    "tokens_per_second": ("Throughput in tokens", "tokens/s"),
    "flops_use": ("Model FLOPs use", "part of the highest rate"),
    "gradient_norm": ("Gradient norm", "norm"),
    "noise_scale": ("Gradient noise scale", "examples"),
}
"""The title and the y label of the chart of a value of a step's record, by its name."""
RESULTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "examples_per_second": ("examples/s, median", number),
    "tokens_per_second": ("tokens/s, median", number),
    "flops_use": ("model FLOPs use, median", percent),
    "tokens": ("tokens seen", number),
    "wall_seconds": ("wall time", duration),
    "goodput": ("goodput", percent),
    "kwh": ("energy", kwh),
}
"""The label of a result that is no metric, and the function that writes it, by its name."""
NOT_CURVES = {"loss", "seconds", "examples", "tokens", "perplexity"}
"""Names in an epoch's record of which `_curves` draws no chart of their own."""
COUNTS = {"seconds", "train_examples", "valid_examples", "train_tokens", "valid_tokens"}
"""Names in an epoch's record that are no metrics."""
MOST_CURVES = 12


def run_report(path: Path, co2_g_per_kwh: float | None = None) -> RunReport:
    """The values of the folder's report. Raises nothing, whatever the folder holds."""
    run, now = reader.read(path), time.time()
    axis = costs.axis_of(run.launches)
    parts = costs.waterfall(run.launches, axis)
    if parts and diverged(run):
        parts = replace(parts, caution="the run diverged: its steps led to no result")
    run_state, described = reader.state_of(run, now), origin.origin(run)
    used = costs.energy(run.launches, run.epochs_made, co2_g_per_kwh)
    results = _results(run, parts, used)
    return RunReport(
        name=name_of(path),
        best=chosen(run),
        is_busy=costs.is_busy(run),
        folder=printable(str(path), 400),
        state=run_state,
        began=axis.began,
        verdict=verdict(run, run_state, parts, now),
        numbers=_numbers(run, results, parts),
        results=results,
        waterfall=parts,
        curves=_curves(run.metrics, described.plan, run.steps_per_epoch, chosen(run)),
        heat=costs.heat_map(run.launches, axis),
        events=events(run.launches, axis),
        energy=used,
        origin=described,
        settings=origin.settings(run),
        samples=_samples(run.samples),
        missing=tuple(gap.line for gap in run.gaps),
    )


def _samples(found: Mapping[str, object]) -> Samples | None:
    texts = [one for one in (found.get("prompt"), *items(found.get("texts"), 3)) if isinstance(one, str)]
    return Samples(f"step {whole(found.get('step')) or 0:,}", texts[0], tuple(texts[1:])) if texts[1:] else None


def name_of(path: Path) -> str:
    """The last part of the path, for a title."""
    return printable(path.absolute().name or str(path.absolute()), 80)


def events(launches: Sequence[Launch], axis: Axis) -> tuple[Event, ...]:
    """The events of all launches on the report's axis of time; of very many of a kind some, evenly chosen."""
    found = []
    for count, (launch, begins) in enumerate(zip(launches, axis.launches, strict=True), 1):
        on = f" on {counted(launch.ranks, 'rank')}" if launch.ranks else ""
        job = f", job {launch.job_id}" if launch.job_id else ""
        found.append(Event(begins, "launch", f"launch {count}{on}{job}", launch.first_step or None))
        found += [replace(each, at=begins + each.at, text=each.text or each.kind) for each in launch.events]
        reasons = [each.text for each in launch.events if each.kind == "lost"]
        is_said = any(each in (launch.end.text if launch.end else each) for each in reasons)
        if (launch.end or count < len(launches)) and not is_said:
            recorded = [launch.end.state, launch.end.text] if launch.end else ["no record of its end", "killed"]
            text = ": ".join(filter(None, recorded))
            found.append(Event(begins + launch.clock, "end", text, launch.last_step or None))
    found.sort(key=attrgetter("at"))
    kept: list[Event] = []
    for kind in dict.fromkeys(event.kind for event in found):
        of_kind = [event for event in found if event.kind == kind]
        kept += of_kind[:: math.ceil(len(of_kind) / MOST_OF_A_KIND)]
    return tuple(sorted(kept, key=attrgetter("at"))[:MOST_EVENTS])


def _results(run: RecordedRun, parts: Waterfall | None, used: Energy) -> dict[str, float]:
    """The run's results by name: final metrics, throughput, wall time, goodput, energy."""
    metrics, top = run.metrics, best(run)
    names = [name for name in metrics.epochs if name not in COUNTS]
    found: dict[str, float | None] = {f"{BEST}{top[0]}": top[1]} if top else {}
    found |= {name: metrics.final(name) for name in names}
    if not names and "loss" in metrics.steps:
        found["loss"] = metrics.final("loss")
    for name in ("examples_per_second", "tokens_per_second", "flops_use"):
        if name in metrics.steps:
            found[name] = metrics.steps[name].median()
    if "tokens" in metrics.steps:
        found["tokens"] = metrics.steps["tokens"].total()
    if parts:
        found |= {"wall_seconds": parts.wall_seconds, "goodput": parts.goodput}
    if used.rows:
        found["kwh"] = used.rows[0].kwh
    return {name: value for name, value in found.items() if value is not None}


def _numbers(run: RecordedRun, results: dict[str, float], parts: Waterfall | None) -> tuple[tuple[str, str], ...]:
    step, total = run.step, run.total_steps
    epochs, planned, top = run.epochs_made, run.epochs, best(run)
    shown = "valid_acc1", "valid_acc5", "valid_loss", "valid_perplexity", "valid_bits_per_byte", "train_loss"
    found = [(words(f"{BEST}{top[0]}"), f"{top[1]:.4f}, epoch {top[2]:,}")] if top else []
    metrics = [name for name in dict.fromkeys((chosen(run), *shown)) if name in results]
    found += [(words(name), f"{results[name]:.4f}".replace("nan", "NaN")) for name in metrics]
    if epochs:
        found.append(("epochs", f"{epochs:.4g}{f' of {planned:,}' if planned else ''}"))
    found.append(("steps", f"{step:,} of {total:,}" if total else f"{step:,}"))
    texts = {key: write(results[key]) for key, (_, write) in RESULTS.items() if key in results}
    if "goodput" in texts and parts and parts.caution:
        texts["goodput"] += f" ({parts.caution})"
    found += [(RESULTS[key][0], text) for key, text in texts.items()]
    for launch in [launch for launch in run.launches if launch.figures][-1:]:
        for name, (value, rank) in launch.figures.items():
            if name in FIGURES:
                found.append((FIGURES[name].label, f"{FIGURES[name].write(value)}, {launch.name_of(rank)}"))
    return tuple((label[:1].upper() + label[1:], value) for label, value in found)


def _curves(metrics: Metrics, plan: Sequence[str], steps_per_epoch: int | None, decides: str) -> tuple[Curve, ...]:
    """All charts, first that of the metric that decides on the best checkpoint, and of the loss. What was recorded of
    epochs is drawn over their last steps."""
    each = steps_per_epoch or (metrics.last_step / metrics.last_epoch if metrics.last_epoch else 1.0)
    epochs = {}
    for name, column in metrics.epochs.items():
        series = replace(_series(column, name), note=lacks(column, "epoch"))
        epochs[name] = replace(series, x=np.minimum(series.x * each, max(metrics.last_step, 1)))
    of_loss = {"train_loss": "training, epochs", "valid_loss": "validation"}
    found = [_curve("loss", "training, log lines", of_loss, metrics.steps, epochs)]
    bases = [name.removeprefix("valid_").removeprefix("train_") for name in epochs]
    first = decides.removeprefix("valid_").removeprefix("train_")
    for base in dict.fromkeys(sorted(bases, key=lambda base: (base != first, base != "acc1", base))):
        labels = {f"train_{base}": "training", f"valid_{base}": "validation", base: "epochs"}
        if base not in NOT_CURVES:
            found.append(_curve(base, "log lines", labels, metrics.steps, epochs))
    found[:2] = found[1::-1] if first in bases and first not in NOT_CURVES else found[:2]
    known = {*STEP_CURVES, *NAMES, "loss", *bases}
    peak = next((f"Peak {line.removeprefix('LR ').strip()}." for line in plan if line.startswith("LR ")), "")
    for name in [
        *(name for name in STEP_CURVES if name in metrics.steps),
        *(name for name in metrics.steps if name not in known),
    ]:
        title, label = STEP_CURVES.get(name, (name, name))
        series = _series(metrics.steps[name], title if name in STEP_CURVES else "step")
        found.append(Curve(title, "step", label, (series,), peak if name == "lr" else ""))
    return tuple(curve for curve in found if curve.series)[:MOST_CURVES]


def chart_of(name: str) -> tuple[str, str]:
    """The title of an epoch metric's chart, and the label of its line there."""
    base = name.removeprefix("valid_").removeprefix("train_")
    return TITLES.get(base, base), "validation" if name.startswith("valid_") else "epochs"


def _series(column: Column, label: str) -> Series:
    """The column's points, with a band where a point stands for several."""
    rows = column.thinned()
    low, high = (rows[:, 2], rows[:, 3]) if (rows[:, 4] > 1).any() else (None, None)
    return Series(label, rows[:, 0], rows[:, 1], low, high, lacks(column, "step"))


def _curve(
    base: str, label: str, labels: Mapping[str, str], steps: Mapping[str, Column], epochs: Mapping[str, Series]
) -> Curve:
    """The chart of a metric, from its log lines and its values over epochs."""
    series = [_series(steps[base], label)] if base in steps else []
    series += [replace(epochs[name], label=label) for name, label in labels.items() if name in epochs]
    title = TITLES.get(base, base)
    return Curve(title, "step", title.lower() if base in TITLES else base, tuple(series), log=base == "loss")
