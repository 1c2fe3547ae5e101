"""`python tests/benchmarks/overhead.py`: hvdtrain's step beside that of a hand-written loop, in the same processes."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tyro
from pydantic import Field

from hvdtrain import cli, terminal
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.errors import RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure, ranks

# What the hand-written loops do and leave out.
HAND_WRITTEN = {
    "precision": "float32", "accumulation_steps": 1, "clip_norm": None, "batch_norm": "local",
    "compression": "none", "reduction": "average", "channels_last": False, "xla": False, "max_steps": None,
    "checkpoint_every_steps": None, "ema_decay": None, "compile": False, "data_on_device": False, "profile": False,
}  # fmt: skip

HEADER = ("loop", "ms a step", "over the hand-written loop's")


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
    options = flags.parse(Options, "python tests/benchmarks/overhead.py", argv)
    _check(options)
    rank = Path(__file__).with_name(f"overhead_{options.framework}.py")
    program = [str(rank), options.recipe, str(options.rounds), options.engine]
    with Status("overhead") as status:
        results = ranks.launch(program, options.engine, options.ranks, show=status.update)
    answer(results).conclude(options)
    return 0


def answer(results: dict[str, Any]) -> measure.Answer:
    """The loops' steps and hvdtrain's over the hand-written one's."""
    times, ratios = results["step_seconds"], results["ratios"]
    rows = [
        (name, measure.summary(seconds, 1e3), measure.summary(ratios[name], digits=4) if name in ratios else "1")
        for name, seconds in times.items()
    ]
    ours = measure.spread(ratios["hvdtrain"])
    scatter = "as long as" if ours.low <= 1 <= ours.high else f"{ours.median:.3f} times as long as"
    sentence = f"A step of hvdtrain takes {scatter} the hand-written loop's"
    sentence += (
        f" (ratio {ours.median:.3f}, {ours.low:.3f} to {ours.high:.3f} in {measure.rounds(len(ratios['hvdtrain']))})."
    )
    draw = functools.partial(measure.bars, found=times, unit="ms a step", scale=1e3)
    return measure.Answer("overhead", measure.table(HEADER, rows), sentence, results, draw)


def _check(options: Options) -> None:
    if options.engine == "ddp" and options.framework == "tensorflow":
        raise RecipeError("--engine ddp is PyTorch's; drop --framework tensorflow.")
    recipe: Any = recipes.load(options.recipe)
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
    if recipe.dataset == "imagenet":
        raise RecipeError("--recipe must have a data set in memory or one of your own, got imagenet; take synthetic.")


if __name__ == "__main__":
    terminal.listen()
    cli.COMMANDS["overhead"] = ("__main__", "")  # errors and Ctrl-C are one line, as of every command
    sys.exit(cli.main(["overhead", *sys.argv[1:]]))
