"""`bench checkpoint`: what checkpoints beside training cost it, and how long one holds a step up."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import tyro
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.errors import RecipeError
from hvdtrain.tools.bench import measure, ranks


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures steps with a checkpoint every few of them over steps without, and how long each holds training up."""

    framework: Annotated[Literal["torch", "tensorflow"], tyro.conf.arg(help="whose loop")] = "torch"
    recipe: Annotated[str, tyro.conf.arg(help="recipe to train on the CPU")] = "digits"
    ranks: Annotated[measure.RankCount, tyro.conf.arg(help="ranks on this machine")] = 2
    rounds: Annotated[measure.Count, tyro.conf.arg(help="interleaved blocks of each kind, after one of warm-up")] = 8
    every: Annotated[measure.Count, Field(ge=2), tyro.conf.arg(help="steps between two checkpoints")] = 10
    steps: Annotated[measure.Count, tyro.conf.arg(help="of a block; a multiple of --every")] = 30


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain bench checkpoint", argv)
    if options.steps % options.every:
        raise RecipeError(f"--steps must be a multiple of --every {options.every}, got {options.steps}.")
    numbers = map(str, (options.rounds, options.every, options.steps))
    program = ["hvdtrain.tools.bench.workers.checkpoint", options.framework, options.recipe, *numbers]
    results = ranks.launch(program, "horovod", options.ranks)
    results |= figures(results)
    for kind, seconds in results["step_seconds"].items():
        print(f"{kind:12}{measure.summary(seconds, 1e3)} ms a step")
    print(f"with checkpoints / without: {measure.summary(results['ratios'], 1, 4)}, {options.rounds} rounds")
    print(f"a copy of the state: {measure.summary(results['copies'], 1e3)} ms")
    print(
        f"a checkpoint holds training up for {measure.summary(results['stalls'], 1e3)} ms; the 95th percentile of "
        f"{len(results['stalls'])} is {results['stall_over_copy']:.2f} copies"
    )
    shown = {"a copy": results["copies"], "held up": results["stalls"]}
    measure.conclude("checkpoint", results, lambda axes: measure.bars(axes, shown, "ms", 1e3), options.output)
    return 0


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """The ratio of each round, and the 95th percentile of the stalls over the middle copy."""
    without, with_them = (results["step_seconds"][kind] for kind in ("none", "checkpoints"))
    return {
        "ratios": [own / other for own, other in zip(with_them, without, strict=True)],
        "stall_over_copy": float(np.quantile(results["stalls"], 0.95) / np.median(results["copies"])),
    }
