"""The command line of a run: `RECIPE [flags]` -> a recipe and the options around it."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Adapter
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines import registry
from hvdtrain.errors import RecipeError
from hvdtrain.run import layout
from hvdtrain.untrusted import printable

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("auto", *registry.ENGINES)]


TrackerName = Literal["tensorboard", "wandb", "mlflow", "none"]


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """How a run is started; no part of what is trained."""

    output: Annotated[Path, recipes.expanding("--output")] | None = Field(
        None, description="run folder; left out: runs/RECIPE/JOB, or the unfinished run"
    )
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


OPTIONS = flags.fields_of(Options)


def parse_run(prog: str, argv: Sequence[str], adapter: Adapter | None = None) -> tuple[Recipe, Options]:
    """RECIPE and flags (dash or underscore) -> the validated recipe and the options.

    The help, which exits on -h, leaves out what the recipe and the adapter cannot use. Raises RecipeError, in one line,
    for anything that breaks a rule.
    """
    name, given = parse_flags(prog, argv, OPTIONS, adapter)
    options = Options(**{key: given.pop(key) for key in OPTIONS if key in given})
    if "none" in options.tracker and len(options.tracker) > 1:
        raise RecipeError(f"--tracker none stands alone, got {' '.join(options.tracker)}; drop none or the others.")
    return recipes.load(name, given), options


def parse_flags(
    prog: str,
    argv: Sequence[str],
    own: Mapping[str, FieldInfo],
    adapter: Adapter | None = None,
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> tuple[str, dict[str, Any]]:
    """RECIPE and flags -> the recipe's name, and the values of the flags: those of the recipe's keys, and `own`.

    The help has the `groups` first, and none that is `hidden`. Raises RecipeError.
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
    of_recipe = {key: field for key, field in Recipe.model_fields.items() if key not in {"name", *own}}
    defaults = {key: getattr(base, key) for key in of_recipe}
    shown = layout.of(base, adapter, groups, hidden)
    return name, flags.given({**own, **of_recipe}, f"{prog} {name}", rest, defaults, layout.description(shown), shown)


def usage(prog: str) -> str:
    """The help of a run without a recipe."""
    return (
        f"usage: {prog} RECIPE [flags]\n\n"
        f"recipes: {', '.join(recipes.known())};\n"
        "         an entry of one, as cifar100:bs256; or a file ending in .yaml\n"
        f"flags:   {prog} RECIPE --help\n"
        "         lists those that the recipe can use, with its values"
    )
