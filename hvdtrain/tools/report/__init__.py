"""`python -m hvdtrain report RUN [RUN ...]`: the result, time and energy of runs in one file."""

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import pydantic_core
from pydantic import Field

import hvdtrain
from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.errors import OutputError, RecipeError
from hvdtrain.record import reader
from hvdtrain.terminal import Status
from hvdtrain.tools.report import page
from hvdtrain.tools.report.assemble import RESULTS, chart_of, name_of, run_report
from hvdtrain.tools.report.model import Comparison, Curve, Document, RunReport, Scaling, Series, number
from hvdtrain.tools.report.origin import shown
from hvdtrain.tools.report.results import BEST, words
from hvdtrain.untrusted import printable

PROG = "python -m hvdtrain report"
NAME = "report.html"
MOST_RUNS, MOST_NAMED, MOST_ENTRIES = 64, 8, 10_000
Row = tuple[str, str, tuple[str, ...]]
NONE, BUSY = "-", "did other work: times say little"
SEED = "seed"
RESULTS_IN_ORDER = ("valid_acc1", "valid_loss", "train_loss", "examples_per_second", "wall_seconds", "goodput", "kwh")
TOGETHER = (("Loss", "validation"), ("Loss", "training, log lines"), ("Accuracy", "validation"), ("Throughput", ""))
"""The charts of a comparison, and the label of the series that they draw of each run."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Writes one HTML file about runs: verdict, where the time went, curves, energy, how to repeat
    them.

    Several runs are compared. The runs may be finished, stopped, failed or still going.
    """

    runs: Annotated[
        tuple[Path, ...],
        Field(max_length=MOST_RUNS),
        Flag(help="run folders, as runs/digits/2026-11-20_15-33-02", metavar="RUN", is_positional=True),
    ] = ()
    sweep: Annotated[
        Path | None,
        Flag("folder of bench scaling --output, or of runs on 1, 2, 4, ... ranks", metavar="FOLDER"),
    ] = None
    output: Annotated[
        Path | None,
        Flag(f"left out: {NAME} in the run's folder, of several or others' here; md, json: printed"),
    ] = None
    format: Annotated[Literal["html", "md", "json"], Flag("md: Markdown, short; json: all values")] = "html"
    json: Annotated[bool, Flag("the same as --format json")] = False
    co2_g_per_kwh: Annotated[
        Annotated[float, Field(ge=0, le=1e6)] | None,
        Flag("grams of CO2 that a kWh stands for; left out: CO2 is not shown", metavar="G"),
    ] = None


def main(argv: Sequence[str]) -> int:
    """Writes or prints the report. Raises RecipeError, OutputError."""
    options: Options = flags.parse(Options, PROG, argv)
    chosen = "json" if options.json else options.format
    if not options.runs and options.sweep is None:
        raise RecipeError(f"RUN or --sweep must be given, as in: {PROG} runs/digits/2026-11-20_15-33-02")
    with Status("reading the runs") as status:
        document = document_of(options, status)
        status.update("drawing")
        rendered = {"json": to_json, "md": page.markdown, "html": page.render}[chosen](document)
    if chosen != "html" and options.output is None:
        sys.stdout.write(rendered)
        return 0
    folders = [*options.runs, *([options.sweep] if options.sweep else [])]
    is_beside = len(folders) == 1 and files.is_own(folders[0].stat())  # never in another user's folder
    path = options.output or (folders[0] / NAME if is_beside else Path(NAME))
    try:
        files.write(path, rendered)
    except OSError as error:
        raise OutputError(
            f"cannot write {printable(str(path), 200)}: {error.strerror}; give --output a file that can be written."
        ) from None
    print(path)
    return 0


def document_of(options: Options, status: Status) -> Document:
    """The values of the report. Raises RecipeError where a run or a sweep is not there."""
    for path in options.runs:
        if reader.written(path) is None:
            raise RecipeError(f"RUN must be a run folder, {printable(str(path), 200)} {_not_a_run(path)}")
    runs = []
    for path in options.runs:
        status.update(f"reading {name_of(path)}")
        runs.append(run_report(path, options.co2_g_per_kwh))
    titles = [run.name for run in runs]
    sweep: tuple[tuple[Scaling, ...], tuple[str, ...]] = ((), ())
    if options.sweep:
        from hvdtrain.tools.report.scaling import scalings

        titles.append(name_of(options.sweep))
        status.update(f"reading {titles[-1]}")
        sweep = scalings(options.sweep)
    return Document(
        title=", ".join(titles[:3]) + (f" and {len(titles) - 3} more" if len(titles) > 3 else ""),
        made=time.time(),
        version=hvdtrain.__version__,
        runs=tuple(runs),
        comparison=comparison(runs) if len(runs) > 1 else None,
        scaling=sweep[0],
        missing=sweep[1],
    )


def _not_a_run(path: Path) -> str:
    """What a path without a run's files is, and what to give in its place."""
    runs = sorted(_runs_below(path), reverse=True)
    if not runs:
        what = "has none of a run's files" if path.is_dir() else "is a file" if path.exists() else "is not there"
        return f"{what}; train writes run folders to runs/."
    newest, *others = [printable(str(each), 200) for _, each in runs[: MOST_NAMED + 1]]
    more = f" and {len(runs) - 1 - MOST_NAMED:,} more" if len(runs) - 1 > MOST_NAMED else ""
    also = f"; the others: {', '.join(others)}{more}" if others else ""
    if others and all(each.parent == path for _, each in runs):
        also += f"; all in one page: {PROG} {printable(str(path), 200)}/*"
    return f"holds {counted(len(runs), 'run')}; give one, the newest with: {PROG} {newest}{also}"


def _runs_below(folder: Path) -> Iterator[tuple[float, Path]]:
    """When each run in a folder, or in a folder there, was written last, and its path. It follows no link, and looks at
    MOST_ENTRIES entries."""
    left, level = MOST_ENTRIES, [folder]
    for _ in range(2):
        folders = list[Path]()
        for parent in level:
            with contextlib.suppress(OSError), os.scandir(parent) as entries:
                some = list(islice(entries, left))
                left -= len(some)
                folders += [Path(entry.path) for entry in some if entry.is_dir(follow_symlinks=False)]
        times = {each: reader.written(each) for each in folders}
        yield from ((when, each) for each, when in times.items() if when is not None)
        level = [each for each, when in times.items() if when is None]


def to_json(document: Document) -> str:
    """All values as JSON; arrays are lists, and null stands for what is not finite."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    values = pydantic_core.to_jsonable_python(document, inf_nan_mode="null", fallback=plain)
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def comparison(runs: Sequence[RunReport]) -> Comparison:
    """The runs side by side; numbered, where two have the same name."""
    columns = [run.name for run in runs]
    if len(set(columns)) < len(columns):
        columns = [f"{index}: {name}" for index, name in enumerate(columns, 1)]
    of_runs, rows = list[dict[str, dict[str, str]]](), list[Row]()
    for run in runs:
        origin = run.origin
        hosts = ", ".join(origin.hosts) if len(origin.hosts) <= 4 else f"{len(origin.hosts):,} hosts"
        ranks = f"{origin.ranks:,}" if origin.ranks else ""
        of_run = {
            "recipe": {key: shown(value) for key, value in run.settings.items()},
            "software": {"framework": origin.framework, "git commit": origin.git_commit, **origin.versions},
            "launch": {"ranks": ranks, "hosts": hosts, "launcher": origin.launcher, "engine": origin.engine},
        }
        if not run.settings:  # a program's flags, where a recipe has keys
            others = [_flags(other) for other in runs if other is not run]
            own = [words for words in _flags(run) if not all(words in other for other in others)]
            of_run["launch"]["command"] = " ".join(own)
        of_runs.append(of_run)
    for group in of_runs[0]:
        keys = dict.fromkeys(key for of_run in of_runs for key in of_run[group])
        rows += [(group, key, tuple(of_run[group].get(key) or NONE for of_run in of_runs)) for key in keys]
    differing = [row for row in rows if len(set(row[2])) > 1]
    return Comparison(tuple(columns), (*differing, *_results(runs)), tuple(_curves(runs, columns)), tuple(_seeds(runs)))


def _flags(run: RunReport) -> list[str]:
    """The words of its command, each flag together with its value."""
    found = list[str]()
    for word in run.origin.words:
        takes = found and found[-1].startswith("-") and " " not in found[-1] and not word.startswith("-")
        found[-1:] = [f"{found[-1]} {word}"] if takes else [*found[-1:], word]
    return found


def _results(runs: Sequence[RunReport]) -> list[Row]:
    """The rows of the group result, those of RESULTS_IN_ORDER first."""
    rows: list[Row] = [("result", "state", tuple(run.state for run in runs))]
    if any(run.is_busy for run in runs):
        rows.append(("result", "machine", tuple(BUSY if run.is_busy else NONE for run in runs)))
    known = dict.fromkeys(key for run in runs for key in run.results)
    chosen = [key for key in known if key.startswith(BEST)]
    for key in dict.fromkeys([*chosen, *(key for key in RESULTS_IN_ORDER if key in known), *known]):
        label, write = RESULTS.get(key, (words(key), number))
        rows.append(("result", label, tuple(write(run.results[key]) if key in run.results else NONE for run in runs)))
    return rows


def _curves(runs: Sequence[RunReport], columns: Sequence[str]) -> list[Curve]:
    """The charts of the metrics that decide on the best checkpoints, and of TOGETHER, with a line of each run."""
    found = []
    for name, label in dict.fromkeys([*(chart_of(run.best) for run in runs if run.best), *TOGETHER]):
        title = f"{name}, {label}" if label else name
        pairs = zip(columns, runs, strict=True)
        curves = [(column, curve) for column, run in pairs for curve in run.curves if curve.name == name]
        lines = [(column, line) for column, curve in curves for line in curve.series if label in ("", line.label)]
        if len(lines) > 1:
            series = tuple(Series(column, line.x, line.y) for column, line in lines)
            found.append(replace(curves[0][1], name=title, series=series, note=""))
    return found


def _seeds(runs: Sequence[RunReport]) -> list[str]:
    """Sentences on the final metrics of each group of runs that differ in their seed alone."""
    groups, found = dict[str, list[RunReport]](), []
    for run in runs:
        if SEED in run.settings and run.state == "finished":
            rest = {key: str(value) for key, value in run.settings.items() if key != SEED}
            key = json.dumps([sorted(rest.items()), run.origin.framework], default=str)
            groups.setdefault(key, []).append(run)
    for group in groups.values():
        seeds = sorted({str(run.settings[SEED]) for run in group}, key=lambda seed: (len(seed), seed))
        over = f"{len(group)} runs with seeds {', '.join(seeds[:20])}"
        names = dict.fromkeys(name for run in group for name in run.results if name not in RESULTS)
        for name in dict.fromkeys([*(name for name in RESULTS_IN_ORDER if name in names), *names]):
            values = [value for run in group if math.isfinite(value := run.results.get(name, math.nan))]
            if len(seeds) > 1 and len(values) > 1:
                write = "{:.4f}".format if name == "valid_acc1" else number
                spread = statistics.mean(values), statistics.stdev(values), min(values), max(values)
                mean, deviation, least, most = map(write, spread)
                label, lost = words(name), len(group) - len(values)
                without = f", {lost} without a number left out" if lost else ""
                found.append(
                    f"{label[:1].upper()}{label[1:]} over {over}: {mean} ± {deviation} (standard deviation), "
                    f"{least} to {most}{without}."
                )
                over = "these runs"
    return found
