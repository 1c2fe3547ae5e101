"""`python -m hvdtrain report RUN [RUN ...]`: one file that says what a run was worth; also of a sweep over ranks."""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
from hvdtrain.errors import OutputError, RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools.report.assemble import name_of, run_report
from hvdtrain.tools.report.model import Comparison, Curve, Document, RunReport, Scaling, Series, duration, number
from hvdtrain.tools.report.origin import shown
from hvdtrain.tools.report.verdict import words
from hvdtrain.untrusted import printable

PROG = "python -m hvdtrain report"
NAME = "report.html"
MOST_RUNS = 64
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
"""Charts that have a line a run, and the series that is drawn of each."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Writes one HTML file about runs: verdict, where the time went, curves, energy, how to repeat them.

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
        rendered = _rendered(document, chosen)
    if chosen != "html" and options.output is None:
        sys.stdout.write(rendered)
        return 0
    path = options.output or _beside(options)
    _write(path, rendered)
    print(path)
    return 0


def document_of(options: Options, status: Status) -> Document:
    """The values of the report. Raises RecipeError where a folder is none, or no sweep."""
    for path in options.runs:
        if not path.is_dir():
            what = "is a file" if path.exists() else "is not there"
            raise RecipeError(
                f"RUN must be a run folder, {printable(str(path), 200)} {what}; train writes them to runs/."
            )
    runs = []
    for path in options.runs:
        status.update(f"reading {name_of(path)}")
        runs.append(run_report(path, options.co2_g_per_kwh))
    scaling, missing = _scaling(options.sweep, status) if options.sweep else ((), ())
    names = [run.name for run in runs] + ([name_of(options.sweep)] if options.sweep else [])
    return Document(
        title=f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}",
        made=time.time(),
        version=hvdtrain.__version__,
        runs=tuple(runs),
        comparison=comparison(runs) if len(runs) > 1 else None,
        scaling=scaling,
        missing=missing,
    )


def _scaling(sweep: Path, status: Status) -> tuple[tuple[Scaling, ...], tuple[str, ...]]:
    from hvdtrain.tools.report.scaling import scalings

    status.update(f"reading {name_of(sweep)}")
    return scalings(sweep)


def _rendered(document: Document, chosen: str) -> str:
    if chosen == "json":
        return to_json(document)
    from hvdtrain.tools.report import page

    return page.markdown(document) if chosen == "md" else page.render(document)


def to_json(document: Document) -> str:
    """All values; arrays are lists, what is not finite is null."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    values = pydantic_core.to_jsonable_python(document, inf_nan_mode="null", fallback=plain)
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _beside(options: Options) -> Path:
    """Where the page goes if nobody says so; never into another user's folder."""
    folders = [*options.runs, *([options.sweep] if options.sweep else [])][:2]
    return folders[0] / NAME if len(folders) == 1 and files.is_own(folders[0].stat()) else Path(NAME)


def _write(path: Path, rendered: str) -> None:
    """Raises OutputError."""
    try:
        files.write(path, rendered)
    except OSError as error:
        raise OutputError(
            f"cannot write {printable(str(path), 200)}: {error.strerror}; give --output a file that can be written."
        ) from None


def comparison(runs: Sequence[RunReport]) -> Comparison:
    """Of two runs or more."""
    rows = (*_differing(runs), *_results(runs))
    return Comparison(names(runs), rows, tuple(_curves(runs)), tuple(_seeds(runs)))


def names(runs: Sequence[RunReport]) -> tuple[str, ...]:
    """Short, and no two the same."""
    given = [run.name for run in runs]
    if len(set(given)) == len(given):
        return tuple(given)
    return tuple(f"{number}: {name}" for number, name in enumerate(given, 1))


def _differing(runs: Sequence[RunReport]) -> list[Row]:
    """The rows of recipe, software and launch in which not all runs are the same."""
    rows = list[Row]()
    for group, of_run in {"recipe": _recipe, "software": _software, "launch": _launch}.items():
        values = [of_run(run) for run in runs]
        keys = dict.fromkeys(key for each in values for key in each)
        rows += [(group, key, tuple(each.get(key, NONE) for each in values)) for key in keys]
    return [row for row in rows if len(set(row[2])) > 1]


def _recipe(run: RunReport) -> dict[str, str]:
    return {key: shown(value) for key, value in run.settings.items()}


def _software(run: RunReport) -> dict[str, str]:
    origin = run.origin
    return {"framework": origin.framework or NONE, "git commit": origin.git_commit or NONE, **origin.versions}


def _launch(run: RunReport) -> dict[str, str]:
    origin = run.origin
    ranks = f"{origin.ranks:,}" if origin.ranks else NONE
    hosts = ", ".join(origin.hosts) if len(origin.hosts) <= 4 else f"{len(origin.hosts):,} hosts"
    return {"ranks": ranks, "hosts": hosts, "launcher": origin.launcher or NONE, "engine": origin.engine or NONE}


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


def _curves(runs: Sequence[RunReport]) -> list[Curve]:
    """One chart a metric, one line a run."""
    found = []
    for name, label in TOGETHER:
        title = f"{name}, {label}" if label else name
        curves = [(short, curve) for run, short in zip(runs, names(runs), strict=True) for curve in run.curves]
        of_name = [(short, curve) for short, curve in curves if curve.name == name]
        lines = [(short, [each for each in curve.series if label in ("", each.label)][:1]) for short, curve in of_name]
        series = tuple(Series(short, each.x, each.y) for short, known in lines for each in known)
        if len(series) > 1:
            found.append(replace(of_name[0][1], name=title, series=series, note=""))
    return found


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
