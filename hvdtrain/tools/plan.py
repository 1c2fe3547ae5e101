"""`python -m hvdtrain plan RECIPE [--ranks N] [flags]`: the plan of a run, without running it."""

import re
from collections.abc import Sequence

from hvdtrain.core import network, plan
from hvdtrain.errors import RecipeError
from hvdtrain.run.main import load_dataset
from hvdtrain.run.options import parse_run
from hvdtrain.untrusted import quoted


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises HvdtrainError."""
    rest, ranks = _take_ranks(list(argv))
    if {"-h", "--help"} & set(rest):
        print("--ranks N   the number of ranks to plan for (default: 1); beside it, the flags of a run:\n")
    recipe, _ = parse_run("python -m hvdtrain plan", rest)
    dataset = load_dataset(recipe)
    print("\n".join(plan.make(recipe, ranks, dataset, network.of(recipe, "torch", dataset)).lines()))
    return 0


def _take_ranks(argv: list[str]) -> tuple[list[str], int]:
    """argv without `--ranks N` (or --ranks=N), and N; 1 where it is left out."""
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag == "--ranks":
            value = value if equals else (argv[index + 1] if index + 1 < len(argv) else "")
            if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
                raise RecipeError(f"--ranks must be a whole number of at least 1, got {quoted(value)}.")
            return argv[:index] + argv[index + (1 if equals else 2) :], int(value)
    return argv, 1
