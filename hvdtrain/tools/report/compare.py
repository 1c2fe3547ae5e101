"""Several runs side by side: what differs, what came out, and the spread over seeds."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hvdtrain.tools.report.model import Comparison, Curve, RunReport, Series
from hvdtrain.tools.report.origin import shown
from hvdtrain.tools.report.verdict import words
from hvdtrain.tools.report.wording import duration, number

Row = tuple[str, str, tuple[str, ...]]

NONE = "-"
SEED = "seed"
FIRST = ("valid_acc1", "valid_loss", "train_loss", "examples_per_second", "wall_seconds", "goodput", "kwh")
LABELS = {
    "examples_per_second": "examples/s",
    "wall_seconds": "wall time",
    "kwh": "kWh",
    "valid_acc1": "validation accuracy",
}
TOGETHER = (("Loss", "validation"), ("Loss", "training, log lines"), ("Accuracy", "validation"), ("Throughput", ""))
"""Pictures that have a line a run, and the series that is drawn of each."""


def comparison(runs: Sequence[RunReport]) -> Comparison:
    """Of two runs or more."""
    rows = [*_recipe(runs), *_software(runs), *_launch(runs), *_results(runs)]
    return Comparison(names(runs), tuple(rows), tuple(_curves(runs)), tuple(_seeds(runs)))


def names(runs: Sequence[RunReport]) -> tuple[str, ...]:
    """Short, and no two the same."""
    given = [run.name for run in runs]
    if len(set(given)) == len(given):
        return tuple(given)
    return tuple(f"{number}: {name}" for number, name in enumerate(given, 1))


def _recipe(runs: Sequence[RunReport]) -> list[Row]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return _differing("recipe", keys, lambda run, key: shown(run.settings[key]) if key in run.settings else NONE, runs)


def _software(runs: Sequence[RunReport]) -> list[Row]:
    keys = dict.fromkeys(key for run in runs for key in run.origin.versions)
    rows = _differing("software", keys, lambda run, key: run.origin.versions.get(key, NONE), runs)
    of_run: dict[str, Callable[[RunReport], str]] = {
        "framework": lambda run: run.origin.framework or NONE,
        "git commit": lambda run: run.origin.git_commit or NONE,
    }
    return _differing("software", of_run, lambda run, key: of_run[key](run), runs) + rows


def _launch(runs: Sequence[RunReport]) -> list[Row]:
    of_run: dict[str, Callable[[RunReport], str]] = {
        "ranks": lambda run: f"{run.origin.ranks:,}" if run.origin.ranks else NONE,
        "hosts": lambda run: _hosts(run.origin.hosts),
        "launcher": lambda run: run.origin.launcher or NONE,
        "engine": lambda run: run.origin.engine or NONE,
    }
    return _differing("launch", of_run, lambda run, key: of_run[key](run), runs)


def _differing(
    group: str, keys: Iterable[str], value: Callable[[RunReport, str], str], runs: Sequence[RunReport]
) -> list[Row]:
    """The rows in which not all runs are the same."""
    rows = [(group, key, tuple(value(run, key) for run in runs)) for key in keys]
    return [row for row in rows if len(set(row[2])) > 1]


def _results(runs: Sequence[RunReport]) -> list[Row]:
    """All of them, the most wanted first."""
    known = dict.fromkeys(key for run in runs for key in run.results)
    keys = [*(key for key in FIRST if key in known), *(key for key in known if key not in FIRST)]
    state: Row = ("result", "state", tuple(run.state for run in runs))
    return [state, *(("result", LABELS.get(key, words(key)), tuple(_result(run, key) for run in runs)) for key in keys)]


def _result(run: RunReport, key: str) -> str:
    value = run.results.get(key)
    if value is None:
        return NONE
    return duration(value) if key == "wall_seconds" else number(value)


def _hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts):,} hosts"


def _curves(runs: Sequence[RunReport]) -> list[Curve]:
    """One picture a metric, one line a run."""
    found = []
    for name, label in TOGETHER:
        series = []
        for run, short in zip(runs, names(runs), strict=True):
            series += [_named(each, short) for curve in run.curves if curve.name == name for each in _of(curve, label)]
        if len(series) > 1:
            of_run = next(curve for run in runs for curve in run.curves if curve.name == name)
            title = f"{name}, {label}" if label else name
            found.append(Curve(title, of_run.x_label, of_run.y_label, tuple(series), log=of_run.log))
    return found


def _of(curve: Curve, label: str) -> list[Series]:
    return [series for series in curve.series if not label or series.label == label][:1]


def _named(series: Series, name: str) -> Series:
    return Series(name, series.x, series.y)


def _seeds(runs: Sequence[RunReport]) -> list[str]:
    """Of each group of runs that differ in their seed alone."""
    groups: dict[str, list[RunReport]] = {}
    for run in runs:
        if SEED in run.settings and run.state == "finished":
            rest = {key: str(value) for key, value in run.settings.items() if key != SEED}
            key = json.dumps([sorted(rest.items()), run.origin.framework], default=str)
            groups.setdefault(key, []).append(run)
    return [text for group in groups.values() if (text := _spread(group))]


def _spread(group: Sequence[RunReport]) -> str:
    seeds = sorted({str(run.settings[SEED]) for run in group}, key=lambda seed: (len(seed), seed))
    values = [run.results["valid_acc1"] for run in group if "valid_acc1" in run.results]
    if len(seeds) < 2 or len(values) < 2:
        return ""
    of = f"{len(values)} runs with seeds {', '.join(seeds[:20])}"
    middle, deviation = float(np.mean(values)), statistics.stdev(values)
    reach = f"{min(values):.4f} to {max(values):.4f}"
    return f"Validation accuracy over {of}: {middle:.4f} ± {deviation:.4f} (standard deviation), {reach}."
