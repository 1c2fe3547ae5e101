"""A run folder -> the values of its report."""

import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdtrain.tools.report import folder as folders
from hvdtrain.tools.report import lines, origin, ranks, state, waterfall
from hvdtrain.tools.report.folder import Folder
from hvdtrain.tools.report.launches import Launch
from hvdtrain.tools.report.metrics import Column, Metrics
from hvdtrain.tools.report.model import Curve, Energy, EnergyRow, Event, RunReport, Series, Waterfall
from hvdtrain.tools.report.verdict import verdict, words
from hvdtrain.tools.report.waterfall import Axis
from hvdtrain.tools.report.wording import duration, number, percent
from hvdtrain.untrusted import printable

MOST_EVENTS = 400
MOST_OF_A_KIND = 60
TITLES = {"acc1": "Accuracy", "lr": "Learning rate", "gradient_norm": "Gradient norm", "loss": "Loss"}
STEP_CURVES = {
    "lr": ("Learning rate", "LR"),
    "examples_per_second": ("Throughput", "examples/s"),
    "gradient_norm": ("Gradient norm", "norm"),
}
"""Of a step's record: name and label of the picture."""
SPLITS = ("train", "valid")
NOT_CURVES = {"loss", "seconds", "examples"}
"""Of an epoch's record; the loss has a picture of its own."""
MOST_CURVES = 12
JOULES = 3.6e6
"""Of a kWh."""
SECONDS = 8.0
"""For sacct, of all jobs together."""
JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,8})?")
MOST_JOBS = 100
FIELDS = ("JobIDRaw", "Start", "ElapsedRaw", "NNodes", "ConsumedEnergyRaw")
LONG_JOB = 1.25
"""A job that took so many times the run's own time did something else, too."""
SLURM = "SLURM ConsumedEnergy"
NOT_MEASURED = 2**63
"""From here on, what SLURM prints for a figure that it does not have (2^64 - 2)."""
SOURCES = {
    "pm_counters": ("Cray pm_counters", "whole nodes"),
    "nvml": ("NVML", "GPUs of the job only"),
    "amdsmi": ("amdsmi", "GPUs of the job only"),
    "rapl": ("RAPL", "processors and memory of the nodes, whoever used them"),
}
"""By the key in the run's records: name and scope. In the order in which the run's figure is chosen."""
DEVICES = ("nvml", "amdsmi")


def run_report(path: Path, co2_g_per_kwh: float | None = None) -> RunReport:
    """Never raises for what the folder holds."""
    folder, now = folders.read(path), time.time()
    axis = waterfall.axis_of(folder.launches)
    parts = waterfall.waterfall(folder.launches, axis)
    run_state, described = state.state_of(folder, now), origin.origin(folder)
    used = energy(folder.launches, state.epochs_made(folder), co2_g_per_kwh)
    results = _results(folder.metrics, parts, used)
    return RunReport(
        name=name_of(path),
        folder=printable(str(path), 400),
        state=run_state,
        began=axis.began,
        verdict=verdict(folder, run_state, parts, now),
        numbers=_numbers(folder, results),
        results=results,
        waterfall=parts,
        curves=_curves(folder.metrics, origin.lr_derivation(described.plan), state.steps_per_epoch(folder)),
        heat=ranks.heat_map(folder.launches, axis),
        events=events(folder.launches, axis),
        energy=used,
        origin=described,
        settings=origin.settings(folder),
        missing=tuple(folder.missing),
    )


def name_of(path: Path) -> str:
    """The last part of the path."""
    return printable(path.absolute().name or str(path.absolute()), 80)


def events(launches: Sequence[Launch], axis: Axis) -> tuple[Event, ...]:
    """On the report's axis of time; of many of one kind the first and the last ones."""
    found = []
    for count, (launch, begins) in enumerate(zip(launches, axis.launches, strict=True), 1):
        found.append(Event(begins, "launch", _begins(launch, count), launch.first_step or None))
        for event in launch.events:
            found.append(Event(begins + event.clock, event.kind, event.text or event.kind, event.step))
        if launch.end:
            text = f"{launch.end.state}: {launch.end.text}" if launch.end.text else launch.end.state
            found.append(Event(begins + launch.clock, "end", text, launch.last_step or None))
        elif count < len(launches):
            found.append(Event(begins + launch.clock, "end", "no record of its end: killed", launch.last_step or None))
    found.sort(key=lambda event: event.at)
    return tuple(_some(found))


def _begins(launch: Launch, count: int) -> str:
    """What a launch is, in a few words."""
    many = f" on {launch.ranks:,} rank{'s' if launch.ranks != 1 else ''}" if launch.ranks else ""
    job = f", job {launch.job_id}" if launch.job_id else ""
    return f"launch {count}{many}{job}"


def _some(found: Sequence[Event]) -> list[Event]:
    """At most so many, and so many of each kind, evenly chosen."""
    kept: list[Event] = []
    for kind in dict.fromkeys(event.kind for event in found):
        of_kind = [event for event in found if event.kind == kind]
        every = math.ceil(len(of_kind) / MOST_OF_A_KIND)
        kept += of_kind[:: max(1, every)]
    return sorted(kept, key=lambda event: event.at)[:MOST_EVENTS]


def _results(metrics: Metrics, parts: Waterfall | None, used: Energy) -> dict[str, float]:
    """Final metrics by name."""
    names = [name for name in metrics.epochs if name not in {"seconds", "train_examples", "valid_examples"}]
    found = {name: metrics.final(name) for name in names}
    if not names and "loss" in metrics.steps:
        found["loss"] = metrics.final("loss")
    if "examples_per_second" in metrics.steps:
        found["examples_per_second"] = metrics.steps["examples_per_second"].median()
    if parts:
        found |= {"wall_seconds": parts.wall_seconds, "goodput": parts.goodput}
    if used.rows:
        found["kwh"] = used.rows[0].kwh
    return {name: value for name, value in found.items() if value is not None}


def _numbers(folder: Folder, results: dict[str, float]) -> tuple[tuple[str, str], ...]:
    """What a reader wants to see first, as label and value."""
    step, total = state.step_of(folder), state.total_steps(folder)
    epochs, planned = state.epochs_made(folder), folder.recipe.get("epochs")
    found = []
    for name in ("valid_acc1", "valid_acc5", "valid_loss", "train_loss"):
        if name in results:
            found.append((words(name), f"{results[name]:.4f}"))
    if epochs:
        whole = f" of {planned:,}" if isinstance(planned, int) and 0 < planned < 10**9 else ""
        found.append(("epochs", f"{epochs:.4g}{whole}"))
    found.append(("steps", f"{step:,} of {total:,}" if total else f"{step:,}"))
    if "examples_per_second" in results:
        found.append(("examples/s, median", number(results["examples_per_second"])))
    if "wall_seconds" in results:
        found.append(("wall time", duration(results["wall_seconds"])))
    if "goodput" in results:
        found.append(("goodput", percent(results["goodput"])))
    if "kwh" in results:
        found.append(("energy", kwh(results["kwh"])))
    return tuple((label[:1].upper() + label[1:], value) for label, value in found)


def kwh(value: float) -> str:
    """As "1.24 kWh", "3.1 Wh"."""
    return f"{value:,.3g} kWh" if value >= 0.1 else f"{1000 * value:.3g} Wh"


def _curves(metrics: Metrics, lr_derivation: str, steps_per_epoch: int | None) -> tuple[Curve, ...]:
    """In the order in which a reader wants them. Ends of epochs are placed by their step."""
    epochs = {name: _by_step(column.series(name), metrics, steps_per_epoch) for name, column in metrics.epochs.items()}
    found = [_loss(metrics.steps, epochs)]
    bases = [name.removeprefix("valid_").removeprefix("train_") for name in epochs]
    for base in dict.fromkeys(sorted(bases, key=lambda base: (base != "acc1", base))):
        if base not in NOT_CURVES:
            found.append(_of_epochs(base, metrics.steps, epochs))
    known = {*STEP_CURVES, "loss", *bases}
    for name, (title, label) in STEP_CURVES.items():
        if name in metrics.steps:
            note = lr_derivation if name == "lr" else ""
            found.append(Curve(title, "step", label, (metrics.steps[name].series(title),), note))
    others = [name for name in metrics.steps if name not in known]
    found += [Curve(name, "step", name, (metrics.steps[name].series("step"),)) for name in others]
    return tuple(curve for curve in found if curve.series)[:MOST_CURVES]


def _loss(steps: Mapping[str, Column], epochs: Mapping[str, Series]) -> Curve:
    series = [steps["loss"].series("training, log lines")] if "loss" in steps else []
    names = {"train_loss": "training, epochs", "valid_loss": "validation"}
    series += [replace(epochs[name], label=label) for name, label in names.items() if name in epochs]
    return Curve("Loss", "step", "loss", tuple(series), log=_spans_decades(series))


def _of_epochs(base: str, steps: Mapping[str, Column], epochs: Mapping[str, Series]) -> Curve:
    labels = {f"{split}_{base}": label for split, label in zip(SPLITS, ("training", "validation"), strict=True)}
    series = [steps[base].series("log lines")] if base in steps else []
    series += [
        replace(epochs[name], label=label) for name, label in {**labels, base: "epochs"}.items() if name in epochs
    ]
    title = TITLES.get(base, base)
    return Curve(title, "step", title.lower() if base in TITLES else base, tuple(series))


def _by_step(series: Series, metrics: Metrics, steps_per_epoch: int | None) -> Series:
    """Over steps in place of epochs, counted from 1."""
    each = steps_per_epoch or (metrics.last_step / metrics.last_epoch if metrics.last_epoch else 1.0)
    return replace(series, x=np.minimum(series.x * each, max(metrics.last_step, 1)))


def _spans_decades(series: Sequence[Series]) -> bool:
    """Whether a linear axis would hide most of it: all positive, and two decades from top to bottom."""
    values = np.concatenate([each.y for each in series]) if series else np.zeros(0)
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


@dataclass(frozen=True)
class Measured:
    """Joules in so many seconds; `nodes` None where nobody says."""

    joules: float
    seconds: float
    nodes: int | None = None


def energy(launches: Sequence[Launch], epochs: float, co2_g_per_kwh: float | None) -> Energy:
    """Each job and each counter once. `epochs`: that the run has made."""
    slurm, why = of_jobs(launches)
    counters = _named(of_counters(launches))
    rows = [*([_row(SLURM, slurm, "whole nodes of the job, from its start to its end")] if slurm else [])]
    rows += [_row(*named) for named in counters]
    if not rows:
        return Energy((), None, None, None, f"{why}; no counter of the nodes or GPUs could be read.")
    figure = slurm or counters[0][1]
    kwh = rows[0].kwh
    return Energy(
        rows=tuple(rows),
        mean_watts=figure.joules / figure.seconds if figure.seconds else None,
        kwh_per_epoch=kwh / epochs if epochs else None,
        co2_grams=None if co2_g_per_kwh is None else kwh * co2_g_per_kwh,
        note=_note(rows[0], slurm, launches),
    )


def of_jobs(launches: Sequence[Launch]) -> tuple[Measured | None, str]:
    """SLURM's figure of the run's jobs, with all their starts; or None and why."""
    jobs = list(dict.fromkeys(launch.job_id for launch in launches if JOB_ID.fullmatch(launch.job_id)))
    if not jobs:
        return None, "the run was in no job of SLURM"
    sacct = shutil.which("sacct")
    if not sacct:
        return None, f"sacct, which knows job {jobs[0]}, is not installed here"
    command = [sacct, "-X", "-D", "-P", "-n", "-o", ",".join(FIELDS), "-j", ",".join(jobs[:MOST_JOBS])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"sacct did not answer within {SECONDS:g} s"
    except OSError as error:
        return None, f"sacct cannot be run ({error.strerror})"
    if done.returncode:
        return None, "sacct has failed (is there no accounting?)"
    measured = of_table(done.stdout)
    return measured, "" if measured else f"SLURM has no energy of job {', '.join(jobs[:3])}"


def of_table(printed: str) -> Measured | None:
    """The sum over sacct's lines, each start of each job once; None where one of them has no figure."""
    starts = {}
    for line in printed.splitlines():
        fields = line.strip().split("|")
        if len(fields) == len(FIELDS):
            starts[fields[0], fields[1]] = fields[2:]
    joules = seconds = 0.0
    nodes = 0
    for elapsed, count, consumed in starts.values():
        took, used = _number(elapsed), _number(consumed)
        if took and not 0 < used < NOT_MEASURED:
            return None
        joules, seconds, nodes = joules + used, seconds + took, max(nodes, int(_number(count)))
    return Measured(joules, seconds, nodes or None) if joules else None


def of_counters(launches: Iterable[Launch]) -> dict[str, Measured]:
    """By source, the sum over launches of what each had used at last."""
    found: dict[str, Measured] = {}
    for launch in launches:
        for name, joules in launch.joules.items():
            before = found.get(name, Measured(0.0, 0.0))
            nodes = max(before.nodes or 0, launch.nodes.get(name, 0)) or None
            found[name] = Measured(before.joules + joules, before.seconds + launch.joules_clock, nodes)
    return {name: measured for name, measured in found.items() if measured.joules > 0}


def _named(counters: Mapping[str, Measured]) -> list[tuple[str, Measured, str]]:
    """Source, figure and scope; the first is the run's, where SLURM has none."""
    known = [(*SOURCES[name], counters[name]) for name in SOURCES if name in counters]
    rows = [(source, measured, scope) for source, scope, measured in known]
    parts = [name for name in (*DEVICES, "rapl") if name in counters]
    if "pm_counters" not in counters and "rapl" in parts and len(parts) > 1:
        rows.insert(0, _together([counters[name] for name in parts], " + ".join(SOURCES[name][0] for name in parts)))
    return rows


def _together(measured: Sequence[Measured], source: str) -> tuple[str, Measured, str]:
    """GPUs and processors: they count different things, so their sum counts none twice."""
    nodes = max((each.nodes or 0 for each in measured), default=0) or None
    joules, seconds = sum(each.joules for each in measured), max(each.seconds for each in measured)
    return source, Measured(joules, seconds, nodes), "GPUs and processors; no power supplies, fans or network"


def _row(source: str, measured: Measured, scope: str) -> EnergyRow:
    return EnergyRow(source, measured.joules / JOULES, measured.nodes, scope)


def _note(figure: EnergyRow, slurm: Measured | None, launches: Sequence[Launch]) -> str:
    """What a reader must know of the figure."""
    said = f"Measured by {figure.source}: {figure.scope}."
    own = sum(launch.clock for launch in launches)
    if slurm and own and slurm.seconds > LONG_JOB * own:
        return f"{said} The job took {slurm.seconds:,.0f} s, this run {own:,.0f} s: the figure is the whole job's."
    behind = [launch for launch in launches if not launch.joules]
    if not slurm and behind:
        return f"{said} {len(behind)} of {len(launches)} launches are not in it: killed before they had read a counter."
    return said


def _number(text: str) -> float:
    """0 where it is none, or one that no counter has."""
    try:
        return lines.number(float(text), 0, 2.0**65) or 0.0
    except ValueError:
        return 0.0
