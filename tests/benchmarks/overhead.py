"""`python tests/benchmarks/overhead.py`: hvdtrain's step beside that of a hand-written loop.

A machine's speed drifts by more than what is to be measured, over seconds as over minutes: so the loops are
interleaved step by step, and a round, an epoch of each, gives one ratio.
"""

import functools
import math
import os
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

HEADER = ("loop", "ms a step", "over by hand", "processor time")
LIGHTNING, IN_LIGHTNING = "Lightning", "hvdtrain.lightning"
KINDS = "wall", "processor"
Times = list[tuple[float, float]]
"""The wall and the processor time in seconds of each step, of all threads of the process."""


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
    os.environ["MALLOC_ARENA_MAX"] = "1"  # else Lightning's loops, which have threads, would get slower memory
    _check(options)
    rank = Path(__file__).with_name(f"overhead_{options.framework}.py")
    program = [str(rank), options.recipe, str(options.rounds), options.engine]
    measuring = functools.partial(ranks.launch, program, options.engine, options.ranks)
    return measure.run("overhead", measuring, answer, options)


def answer(results: dict[str, Any]) -> measure.Answer:
    """The loops' steps and hvdtrain's over the hand-written one's."""
    times, ratios = results["step_seconds"], results["ratios"]
    rows = [
        (
            name,
            measure.summary(seconds, 1e3),
            *(_median(ratios[name][kind]) if name in ratios else "1" for kind in KINDS),
        )
        for name, seconds in times.items()
    ]
    walls = ratios["hvdtrain"]["wall"]
    sentence = f"A step of hvdtrain takes {_median(walls)} of the hand-written loop's (median of "
    sentence += f"{counted(len(walls), 'round')} and its standard error)."
    if IN_LIGHTNING in ratios:
        beside = [ours / own for ours, own in zip(times[IN_LIGHTNING], times[LIGHTNING], strict=True)]
        sentence += f" With hvdtrain's strategy a step of Lightning takes {_median(beside)} of that with DDPStrategy."
    figure = measure.over_rounds(times, "ms a step", 1e3)
    return measure.Answer("overhead", measure.table(HEADER, rows), sentence, results, figure)


def _median(ratios: Sequence[float]) -> str:
    """The median with its standard error, as that of figures which are distributed normally."""
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return f"{statistics.median(ratios):.3f} +- {math.sqrt(math.pi / 2 / len(ratios)) * spread:.3f}"


def _check(options: Options) -> None:
    if options.engine == "ddp" and options.framework == "tensorflow":
        raise RecipeError("--engine ddp is PyTorch's; drop --framework tensorflow.")
    recipe: Any = recipes.load(options.recipe)
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
    if recipe.dataset == "imagenet":
        raise RecipeError("--recipe must have a data set in memory or one of your own, got imagenet; take synthetic.")


@dataclass(frozen=True)
class Loops:
    """Loops over the same ranks: hvdtrain's, the hand-written one, and maybe Lightning's with its own strategy and with
    hvdtrain's; how to add over the ranks, and to end."""

    ours: benchmark.Steps
    hand_written: benchmark.Steps
    sum: Callable[[np.ndarray], np.ndarray]
    close: Callable[[], None]
    lightning: benchmark.Steps | None = None
    in_lightning: benchmark.Steps | None = None


def rank(framework: Framework, loops: Callable[[Run], Loops], argv: Sequence[str]) -> None:
    """Measures on every rank; the first round is warm-up. `argv`: recipe, rounds and engine."""
    recipe_name, rounds, engine = argv
    with benchmark.training(framework, recipe_name, engine) as (run, show):
        times = _measure(loops(run), run.topology.size, int(rounds), run.plan.steps_per_epoch, show)
    if run.topology.is_rank_0:
        ranks.keep(_results(run, {name: own[1:] for name, own in times.items()}))


def now() -> tuple[float, float]:
    """The wall and the processor time in seconds, since any begin."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """The wall and the processor time in seconds since `began`."""
    wall, processor = now()
    return wall - began[0], processor - began[1]


def _measure(loops: Loops, size: int, rounds: int, steps: int, show: Show) -> dict[str, np.ndarray]:
    """The times of a step, averaged over the ranks and over the steps of each round: [rounds, 2] of each loop."""
    found = {"hvdtrain": loops.ours, "hand-written": loops.hand_written}
    found |= {LIGHTNING: loops.lightning, IN_LIGHTNING: loops.in_lightning} if loops.lightning else {}
    times: dict[str, Times] = {name: [] for name in found}
    for step in range(rounds * steps):
        if step % steps == 0:
            show(measure.titled(f"{steps} steps of each loop", step // steps, rounds - 1))
        for name in sorted(found, reverse=bool(step % 2)):
            began = now()
            next(found[name])
            times[name].append(since(began))
    of_ranks = {name: loops.sum(np.array(own)) / size for name, own in times.items()}
    loops.close()
    return {name: own.reshape(rounds, steps, 2).mean(axis=1) for name, own in of_ranks.items()}


def _results(run: Run, times: dict[str, np.ndarray]) -> dict[str, Any]:
    bare = times["hand-written"]
    ratios = {
        name: dict(zip(KINDS, (own / bare).T.tolist(), strict=True))
        for name, own in times.items()
        if name != "hand-written"
    }
    return {
        "framework": run.identity.framework,
        "engine": run.engine,
        "recipe": run.recipe.name,
        "ranks": run.topology.size,
        "ratio": {name: statistics.median(of_rounds["wall"]) for name, of_rounds in ratios.items()},
        "ratios": ratios,
        "step_seconds": {name: own[:, 0].tolist() for name, own in times.items()},
    }


if __name__ == "__main__":
    benchmark.start("overhead")
