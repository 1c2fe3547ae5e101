"""`python -m hvdtrain plan RECIPE [--ranks N] [--framework F] [flags]`: the plan of a run, without running it."""

import os
import re
from collections.abc import Sequence

from hvdtrain.core import network, plan
from hvdtrain.core.compatibility import Framework
from hvdtrain.errors import HvdtrainError, RecipeError
from hvdtrain.run.main import load_dataset
from hvdtrain.run.options import parse_run
from hvdtrain.untrusted import one_line, quoted

FRAMEWORKS: dict[str, Framework] = {"torch": "torch", "tensorflow": "tensorflow"}
HELP = """--ranks N           the number of ranks to plan for (default: 1)
--framework F       torch or tensorflow (default: what the model is of, torch where both have it)
beside these, the flags of a run:
"""


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises HvdtrainError."""
    rest, count = _take("ranks", list(argv))
    if count is not None and not re.fullmatch("0*[1-9][0-9]{0,8}", count):
        raise RecipeError(f"--ranks must be a whole number of at least 1, got {quoted(count)}.")
    rest, name = _take("framework", rest)
    if name is not None and name not in FRAMEWORKS:
        raise RecipeError(f"--framework must be torch or tensorflow, got {quoted(name)}.")
    if {"-h", "--help"} & set(rest):
        print(HELP)
    recipe, _ = parse_run("python -m hvdtrain plan", rest)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # before the user's code imports Keras
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    framework = FRAMEWORKS[name] if name else network.framework_of(recipe)
    dataset = load_dataset(recipe, framework)
    size, of_recipe = int(count or 1), network.of(recipe, framework, dataset)
    made = plan.make(recipe, size, dataset, of_recipe)  # before what takes longer
    try:
        of_recipe = network.with_flops(of_recipe, recipe, framework, dataset)
    except HvdtrainError as error:
        print("\n".join([*made.lines(), f"FLOPs       not counted: {one_line(error)}"]))
        return 0
    print("\n".join(plan.make(recipe, size, dataset, of_recipe).lines()))
    return 0


def _take(flag: str, argv: list[str]) -> tuple[list[str], str | None]:
    """argv without `--flag VALUE` (or --flag=VALUE), and the value; None where it is left out."""
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == f"--{flag}":
            value = value if equals else (argv[index + 1] if index + 1 < len(argv) else "")
            return argv[:index] + argv[index + (1 if equals else 2) :], value
    return argv, None
