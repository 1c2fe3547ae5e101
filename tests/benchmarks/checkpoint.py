"""`python tests/benchmarks/checkpoint.py`: what checkpoints cost training, and how long one holds a step up."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import tyro
from pydantic import Field

from hvdtrain import cli, terminal
from hvdtrain.core import flags
from hvdtrain.errors import RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure, ranks

RANK = Path(__file__).with_name("checkpoint_rank.py")
KINDS = {
    "none": "a step, no checkpoints",
    "checkpoints": "a step, with checkpoints",
    "copies": "a step, with copies in their place",
}


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
    options = flags.parse(Options, "python tests/benchmarks/checkpoint.py", argv)
    if options.steps % options.every:
        raise RecipeError(f"--steps must be a multiple of --every {options.every}, got {options.steps}.")
    numbers = map(str, (options.rounds, options.every, options.steps))
    program = [str(RANK), options.framework, options.recipe, *numbers]
    with Status("checkpoint") as status:
        results = ranks.launch(program, "horovod", options.ranks, show=status.update)
    answer(results | figures(results)).conclude(options)
    return 0


def answer(results: dict[str, Any]) -> measure.Answer:
    """The steps of each kind, a copy of the state, and how long a checkpoint holds training up."""
    rows = [(KINDS[kind], measure.summary(seconds, 1e3)) for kind, seconds in results["step_seconds"].items()]
    rows += [("a copy of the state", measure.summary(results["copies"], 1e3))]
    rows += [("training held up by a checkpoint", measure.summary(results["stalls"], 1e3))]
    ratio = measure.spread(results["ratios"])
    rounds = measure.rounds(len(results["ratios"]))
    sentence = (
        f"With a checkpoint every {results['every']} steps a step takes {ratio.median:.3f} times as long "
        f"({ratio.low:.3f} to {ratio.high:.3f} in {rounds}); 95 of 100 checkpoints hold "
        f"training up for at most {results['stall_over_copy']:.2f} times what a copy of the state takes."
    )
    shown = {"a copy": results["copies"], "held up": results["stalls"]}
    draw = functools.partial(measure.bars, found=shown, unit="ms", scale=1e3)
    return measure.Answer("checkpoint", measure.table(("", "ms"), rows), sentence, results, draw)


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """The ratio of each round, and the 95th percentile of the stalls over the middle copy."""
    without, with_them = (results["step_seconds"][kind] for kind in ("none", "checkpoints"))
    return {
        "ratios": [own / other for own, other in zip(with_them, without, strict=True)],
        "stall_over_copy": float(np.quantile(results["stalls"], 0.95) / np.median(results["copies"])),
    }


if __name__ == "__main__":
    terminal.listen()
    cli.COMMANDS["checkpoint"] = ("__main__", "")  # errors and Ctrl-C are one line, as of every command
    sys.exit(cli.main(["checkpoint", *sys.argv[1:]]))
