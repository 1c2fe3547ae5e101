"""`python tests/benchmarks/overhead.py`: hvdtrain's step beside that of a hand-written loop.

A machine's speed drifts by more than what is to be measured, over seconds as over minutes: so the loops are
interleaved step by step, and a round, an epoch of each, gives one ratio.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import benchmark
import numpy as np
import pydantic
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.errors import RecipeError
from hvdtrain.run.run import Run
from hvdtrain.terminal import Show
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

    framework: Annotated[Literal["torch", "tensorflow"], Flag("whose loop")] = "torch"
    engine: Annotated[Literal["horovod", "ddp"], Flag("what joins the ranks")] = "horovod"
    recipe: Annotated[str, Flag("recipe to take model, loss, optimiser and data from")] = "digits"
    ranks: Annotated[measure.RankCount, Flag("ranks on this machine")] = 2
    rounds: Annotated[
        measure.Count,
        Field(ge=2),
        Flag("epochs of each loop, interleaved step by step; the first warms up"),
    ] = 6


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python tests/benchmarks/overhead.py", argv)
    _check(options)
    rank = Path(__file__).with_name(f"overhead_{options.framework}.py")
    program = [str(rank), options.recipe, str(options.rounds), options.engine]
    measuring = functools.partial(ranks.launch, program, options.engine, options.ranks)
    return measure.run("overhead", measuring, answer, options)


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
        f" (ratio {ours.median:.3f}, {ours.low:.3f} to {ours.high:.3f} in {counted(len(ratios['hvdtrain']), 'round')})."
    )
    figure = measure.over_rounds(times, "ms a step", 1e3)
    return measure.Answer("overhead", measure.table(HEADER, rows), sentence, results, figure)


def _check(options: Options) -> None:
    if options.engine == "ddp" and options.framework == "tensorflow":
        raise RecipeError("--engine ddp is PyTorch's; drop --framework tensorflow.")
    recipe: Any = recipes.load(options.recipe)
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
    if recipe.dataset == "imagenet":
        raise RecipeError("--recipe must have a data set in memory or one of your own, got imagenet; take synthetic.")


StepOthers = Callable[[], None]
"""One step of each of the other loops."""
Driver = Callable[[int, int, StepOthers], list[float]]
"""A loop that runs by itself only: trains so many epochs of so many steps, the other loops before each step; its own
seconds."""


@dataclass(frozen=True)
class Loops:
    """Loops over the same ranks: hvdtrain's, the hand-written one, and Lightning's, which drives them where there is
    one; how to add over the ranks, and to end."""

    ours: benchmark.Steps
    hand_written: benchmark.Steps
    sum: Callable[[np.ndarray], np.ndarray]
    close: Callable[[], None]
    lightning: Driver | None = None


def rank(framework: Framework, loops: Callable[[Run], Loops], argv: Sequence[str]) -> None:
    """Measures on every rank; the first round is warm-up. `argv`: recipe, rounds and engine."""
    recipe_name, rounds, engine = argv
    with benchmark.training(framework, recipe_name, engine) as (run, show):
        seconds = _measure(loops(run), run.topology.size, int(rounds), run.plan.steps_per_epoch, show)
    if run.topology.is_rank_0:
        ranks.keep(_results(run, {name: times[1:] for name, times in seconds.items()}))


def _measure(loops: Loops, size: int, rounds: int, steps: int, show: Show) -> dict[str, list[float]]:
    """Seconds of a step, averaged over the ranks and over the steps of each round."""
    pair = {"hvdtrain": loops.ours, "hand-written": loops.hand_written}
    seconds: dict[str, list[float]] = {name: [] for name in pair}

    def step_both() -> None:
        done, step = divmod(len(seconds["hvdtrain"]), steps)
        if step == 0:
            show(measure.titled(f"{steps} steps of each loop", done, rounds - 1))
        for name in sorted(pair, reverse=bool(len(seconds["hvdtrain"]) % 2)):
            began = time.perf_counter()
            next(pair[name])
            seconds[name].append(time.perf_counter() - began)

    if loops.lightning:
        seconds["Lightning"] = loops.lightning(rounds, steps, step_both)
    else:
        for _ in range(rounds * steps):
            step_both()
    of_ranks = {name: loops.sum(np.array(own)) / size for name, own in seconds.items()}
    loops.close()
    return {name: own.reshape(rounds, steps).mean(axis=1).tolist() for name, own in of_ranks.items()}


def _results(run: Run, seconds: dict[str, list[float]]) -> dict[str, Any]:
    bare = seconds["hand-written"]
    ratios = {
        name: [own / other for own, other in zip(times, bare, strict=True)]
        for name, times in seconds.items()
        if name != "hand-written"
    }
    return {
        "framework": run.identity.framework,
        "engine": run.engine,
        "recipe": run.recipe.name,
        "ranks": run.topology.size,
        "ratio": {name: statistics.median(of_rounds) for name, of_rounds in ratios.items()},
        "ratios": ratios,
        "step_seconds": seconds,
    }


if __name__ == "__main__":
    benchmark.start("overhead")
