"""`bench overhead`: hvdtrain's step beside that of a hand-written loop, in the same processes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import tyro
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.errors import RecipeError
from hvdtrain.tools.bench import measure, ranks

# What the hand-written loops do and leave out.
HAND_WRITTEN = {
    "precision": "float32", "accumulation_steps": 1, "clip_norm": None, "batch_norm": "local",
    "compression": "none", "reduction": "average", "channels_last": False, "xla": False, "max_steps": None,
    "checkpoint_every_steps": None, "ema_decay": None, "compile": False, "data_on_device": False, "profile": False,
}  # fmt: skip


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures hvdtrain's step time over that of a hand-written loop."""

    framework: Annotated[Literal["torch", "tensorflow"], tyro.conf.arg(help="whose loop")] = "torch"
    engine: Annotated[Literal["horovod", "ddp"], tyro.conf.arg(help="what joins the ranks")] = "horovod"
    recipe: Annotated[str, tyro.conf.arg(help="recipe to take model, loss, optimiser and data from")] = "digits"
    ranks: Annotated[measure.RankCount, tyro.conf.arg(help="ranks on this machine")] = 2
    rounds: Annotated[
        measure.Count,
        Field(ge=2),
        tyro.conf.arg(help="epochs of each loop, interleaved step by step; the first warms up"),
    ] = 6


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain bench overhead", argv)
    _check(options)
    worker = f"hvdtrain.tools.bench.workers.{options.framework}_overhead"
    program = [worker, options.recipe, str(options.rounds), options.engine]
    results = ranks.launch(program, options.engine, options.ranks)
    _report(results["step_seconds"], results["ratios"])
    times = results["step_seconds"]
    measure.conclude("overhead", results, lambda axes: measure.bars(axes, times, "ms a step", 1e3), options.output)
    return 0


def _report(step_seconds: dict[str, list[float]], ratios: dict[str, list[float]]) -> None:
    for name, seconds in step_seconds.items():
        print(f"{name:13} {measure.summary(seconds, 1e3)} ms a step")
    for name, of_rounds in ratios.items():
        print(f"{name} / hand-written: {measure.summary(of_rounds, 1, 4)}, {len(of_rounds)} rounds")


def _check(options: Options) -> None:
    if options.engine == "ddp" and options.framework == "tensorflow":
        raise RecipeError("--engine ddp is PyTorch's; drop --framework tensorflow.")
    recipe: Any = recipes.load(options.recipe)
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
    if recipe.dataset == "imagenet":
        raise RecipeError("--recipe must have a data set in memory or one of your own, got imagenet; take synthetic.")
