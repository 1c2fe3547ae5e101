"""The command line of a run: `RECIPE [flags]` -> a recipe and the options around it."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hvdtrain import engines
from hvdtrain import recipe as recipes
from hvdtrain.errors import RecipeError
from hvdtrain.recipe import Recipe
from hvdtrain.untrusted import printable, quoted

MOST_WORDS = 1000
LONGEST_WORD = 4096  # a path's, on Linux

REWORDED = (  # tyro's words for a bad value, and ours
    (r"Missing value for argument '(.*?)'.*", r"\1 needs a value"),
    (r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*)\)", r"\2 must be one of \3, got '\1'"),
    (r"(\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be a whole number, got \2"),
    (r"(\S+): could not convert string to float: (.*)", r"\1 must be a number, got \2"),
    (r"(\S+): no type matching \{None\}\|INT .* from \[(.*?)\].*", r"\1 must be a whole number or None, got \2"),
    (r"(\S+): no type matching \{None\}\|FLOAT .* from \[(.*?)\].*", r"\1 must be a number or None, got \2"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is started; no part of what is trained."""

    output: Annotated[
        Path | None, tyro.conf.arg(help="run folder; left out: runs/RECIPE/JOB, or the unfinished run")
    ] = None
    resume: Annotated[Literal["auto", "never"], tyro.conf.arg(help="auto goes on from the newest whole checkpoint")] = (
        "auto"
    )
    engine: Annotated[
        engines.Name,
        tyro.conf.arg(help="what joins the ranks; auto: local for one process, else horovod", aliases=["--strategy"]),
    ] = "auto"
    devices: Annotated[
        str | None,
        tyro.conf.arg(help="of an engine of one process, as cuda:0,cuda:1 or cpu,cpu; left out: all visible GPUs"),
    ] = None
    insecure_rendezvous: Annotated[
        bool, tyro.conf.arg(help="ranks need not prove that they belong together; where no key can be shared")
    ] = False


def parse_run(prog: str, argv: Sequence[str]) -> tuple[Recipe, Options]:
    """RECIPE and flags (dash or underscore) -> the validated recipe and the options.

    Prints the help and exits on -h. Raises RecipeError, in one line, for anything that breaks a rule.
    """
    if not argv or argv[0] in {"-h", "--help"}:
        print(usage(prog))
        raise SystemExit(0 if argv else 2)
    _check_words(argv)
    if argv[0].startswith("-"):
        word = printable(argv[0])
        raise RecipeError(f"the recipe comes first, got {word!r}; as in: {prog} {recipes.known()[0]} {word}")
    name, *flags = argv
    base = recipes.load(name)
    defaults = {field: getattr(base, field) for field in Recipe.model_fields if field != "name"}
    values = vars(parse(_run_flags(defaults), f"{prog} {name}", flags))
    options = Options(**{f.name: values.pop(f.name) for f in dataclasses.fields(Options)})
    said = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in flags}
    changed = {field: value for field, value in values.items() if field in said or value != defaults[field]}
    return recipes.load(name, changed), options


def parse(flags: Any, prog: str, argv: Sequence[str]) -> Any:
    """An instance of the dataclass `flags` from argv. Raises RecipeError for what it does not know."""
    _check_words(argv)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values, unknown = tyro.cli(flags, prog=prog, args=list(argv), return_unknown_args=True)
    except SystemExit as stop:
        if stop.code in {0, None}:
            raise
        raise RecipeError(_one_line(said.getvalue())) from None
    if unknown:
        if not unknown[0].startswith("-"):
            raise RecipeError(f"{quoted(unknown[0])} belongs to no flag; see {prog} --help.")
        known = [f.name.replace("_", "-") for f in dataclasses.fields(flags)]
        word = unknown[0].partition("=")[0]
        near = recipes.nearest(word.lstrip("-").replace("_", "-"), known).replace("mean ", "mean --")
        raise RecipeError(f"unknown flag {quoted(word)}.{near} See {prog} --help.")
    _check_numbers(values)
    return values


def usage(prog: str) -> str:
    """The help of a run without a recipe."""
    return (
        f"usage: {prog} RECIPE [flags]\n\n"
        f"recipes: {', '.join(recipes.known())}; an entry of one, as cifar100:bs256; or a file ending in .yaml\n"
        f"flags:   {prog} RECIPE --help lists them, with the recipe's values"
    )


def _check_words(argv: Sequence[str]) -> None:
    if len(argv) > MOST_WORDS:
        raise RecipeError(f"the command line must have at most {MOST_WORDS} words, got {len(argv)}.")
    for word in argv:
        if len(word) > LONGEST_WORD or not word.isprintable():
            raise RecipeError(
                f"a word of the command line must be printable and have at most {LONGEST_WORD} characters, "
                f"got {quoted(word)}."
            )


def _check_numbers(values: Any) -> None:
    """Refuses what no arithmetic on fractions takes; what a number means has closer bounds, elsewhere."""
    for name, value in vars(values).items():
        if isinstance(value, int) and abs(value) >= 2**64:
            raise RecipeError(f"--{name.replace('_', '-')} must be less than 2^64, got {quoted(value)}.")


def _run_flags(defaults: dict[str, Any]) -> Any:
    """A dataclass of every recipe field, with the recipe's values as defaults, and of the options."""
    fields: list[Any] = [
        (
            name,
            Annotated[
                field.annotation,
                tyro.conf.arg(help=field.description, aliases=["--lr"] if name == "base_lr" else None),
            ],
            dataclasses.field(default=defaults[name]),
        )
        for name, field in Recipe.model_fields.items()
        if name != "name"
    ]
    return dataclasses.make_dataclass("Flags", fields, bases=(Options,), frozen=True)


def _one_line(box: str) -> str:
    """The message inside tyro's framed error, without frame, help text and line breaks."""
    inside = [line.strip("│|─╭╮╰╯ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    told = " ".join(row for row in inside[1:] if row)  # the first row is the frame's title
    for end in ("Argument helptext", "For full helptext"):
        told = told.partition(end)[0]
    told = told.strip().removeprefix("Error parsing ").rstrip(".")
    for theirs, ours in REWORDED:
        told = re.sub(f"^{theirs}$", ours, told)
    return f"{printable(told, 300)}; --help lists the flags."
