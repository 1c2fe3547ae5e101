"""`python -m hvdtrain report RUN [RUN ...]`: one file that says what a run was worth; also of a sweep over ranks."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import tyro
from pydantic import Field

import hvdtrain
from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.errors import OutputError, RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools.report import text
from hvdtrain.tools.report.assemble import name_of, run_report
from hvdtrain.tools.report.compare import comparison
from hvdtrain.tools.report.model import Document, Scaling
from hvdtrain.untrusted import printable

PROG = "python -m hvdtrain report"
NAME = "report.html"
MOST_RUNS = 64


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Writes one HTML file about runs: verdict, where the time went, curves, energy, how to repeat them.

    Several runs are compared. The runs may be finished, stopped, failed or still going.
    """

    runs: Annotated[
        tuple[Path, ...],
        Field(max_length=MOST_RUNS),
        tyro.conf.Positional,
        tyro.conf.arg(help="run folders, as runs/digits/2026-11-20_15-33-02", metavar="RUN ..."),
    ] = ()
    sweep: Annotated[
        Path | None,
        tyro.conf.arg(help="folder of bench scaling --output, or of runs on 1, 2, 4, ... ranks", metavar="FOLDER"),
    ] = None
    output: Annotated[
        Path | None,
        tyro.conf.arg(help=f"left out: {NAME} in the run's folder, of several or others' here; md, json: printed"),
    ] = None
    format: Annotated[Literal["html", "md", "json"], tyro.conf.arg(help="md: Markdown, short; json: all values")] = (
        "html"
    )
    json: Annotated[bool, tyro.conf.arg(help="the same as --format json")] = False
    co2_g_per_kwh: Annotated[
        Annotated[float, Field(ge=0, le=1e6)] | None,
        tyro.conf.arg(help="grams of CO2 that a kWh stands for; left out: CO2 is not shown", metavar="G"),
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
    if chosen == "md":
        return text.markdown(document)
    if chosen == "json":
        return text.to_json(document)
    from hvdtrain.tools.report import page

    return page.render(document)


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
