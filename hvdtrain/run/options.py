"""The command line of a run: `RECIPE [flags]` -> a recipe and the options around it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines import registry
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("auto", *registry.ENGINES)]


TrackerName = Literal["tensorboard", "wandb", "mlflow", "none"]


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """How a run is started; no part of what is trained."""

    output: Path | None = Field(None, description="run folder; left out: runs/RECIPE/JOB, or the unfinished run")
    resume: Literal["auto", "never"] = Field("auto", description="auto continues from the newest whole checkpoint")
    engine: EngineName = Field(
        "auto", description="the library that joins the ranks; auto: local for one process, else horovod"
    )
    devices: str | None = Field(
        None, description="of an engine of one process, as cuda:0,cuda:1 or cpu,cpu; left out: all visible GPUs"
    )
    tracker: Annotated[tuple[TrackerName, ...], Field(min_length=1, max_length=4)] = Field(
        ("tensorboard",), description="where rank 0 reports beside metrics.jsonl, several at once; none: nowhere"
    )
    insecure_rendezvous: bool = Field(
        False, description="ranks need not prove that they belong together; where no key can be shared"
    )


def parse_run(prog: str, argv: Sequence[str]) -> tuple[Recipe, Options]:
    """RECIPE and flags (dash or underscore) -> the validated recipe and the options.

    Prints the help and exits on -h. Raises RecipeError, in one line, for anything that breaks a rule.
    """
    if not argv or argv[0] in {"-h", "--help"}:
        print(usage(prog))
        raise SystemExit(0 if argv else 2)
    flags.check_arguments(argv)
    if argv[0].startswith("-"):
        first = printable(argv[0])
        raise RecipeError(f"the recipe comes first, got {first!r}; as in: {prog} {recipes.known()[0]} {first}")
    name, *rest = argv
    base = recipes.load(name)
    of_recipe = {key: field for key, field in Recipe.model_fields.items() if key != "name"}
    defaults = {key: getattr(base, key) for key in of_recipe}
    of_options = flags.fields_of(Options)
    given = flags.given({**of_options, **of_recipe}, f"{prog} {name}", rest, defaults)
    options = Options(**{key: given.pop(key) for key in of_options if key in given})
    if "none" in options.tracker and len(options.tracker) > 1:
        raise RecipeError(f"--tracker none stands alone, got {' '.join(options.tracker)}; drop none or the others.")
    return recipes.load(name, given), options


def usage(prog: str) -> str:
    """The help of a run without a recipe."""
    return (
        f"usage: {prog} RECIPE [flags]\n\n"
        f"recipes: {', '.join(recipes.known())}; an entry of one, as cifar100:bs256; or a file ending in .yaml\n"
        f"flags:   {prog} RECIPE --help lists them, with the recipe's values"
    )
