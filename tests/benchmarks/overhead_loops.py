"""What overhead.py's ranks of both adapters share: loops interleaved step by step, and their results.

A machine's speed drifts by more than what is to be measured, over seconds as over minutes: so the loops are
interleaved step by step, and a round, an epoch of each, gives one ratio.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core import network as networks
from hvdtrain.core import plan as plans
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Framework
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import World
from hvdtrain.record import folder as folders
from hvdtrain.run.loop import Loop, Trainer
from hvdtrain.run.main import keep_memory, load_dataset, record_launch
from hvdtrain.run.run import Run
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.tools.rank_status import Show

Steps = Iterator[None]
"""A loop that trains without end, and yields after every step."""
StepOthers = Callable[[], None]
"""One step of each of the other loops."""
Driver = Callable[[int, int, StepOthers], list[float]]
"""A loop that runs by itself only: trains so many epochs of so many steps, the other loops before each step; its own
seconds."""


@dataclass(frozen=True)
class Loops:
    """Loops over the same ranks: hvdtrain's, the hand-written one, and Lightning's, which drives them where there is
    one; how to add over the ranks, and to end."""

    ours: Steps
    hand_written: Steps
    sum: Callable[[np.ndarray], np.ndarray]
    close: Callable[[], None]
    lightning: Driver | None = None


def ours(loop: Loop[Trainer]) -> Steps:
    """hvdtrain's loop, with its log, metrics and guard."""
    while True:
        loop.progress.sample = 0
        yield from loop.epoch()


def main(framework: Framework, loops: Callable[[Run], Loops], argv: Sequence[str]) -> None:
    """Measures on every rank; the first round is warm-up. `argv`: recipe, rounds and engine."""
    recipe_name, rounds, engine = argv
    topology = discover(os.environ)
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant", "device": "cpu"})
    dataset = load_dataset(recipe, framework)
    plan = plans.make(recipe, topology.size, dataset, networks.of(recipe, framework, dataset))
    keep_memory(recipe.device)
    with tempfile.TemporaryDirectory() as folder:
        of_run, resume, world = None, folders.ResumePoint(), World(topology)
        identity = folders.identity_of(plan, framework, dataset.contents())
        if topology.is_rank_0:
            of_run, _ = folders.open_run(plan, topology, identity, Path(folder, "run"), "never")
            record_launch(world, of_run, framework, engine, resume)
        run = Run(identity, recipe, engine, (), of_run, resume, world, recipe, dataset, plan)
        with (
            ranks.showing(topology) as show,
            Path(folder, "log").open("w") as log,
            contextlib.redirect_stdout(log),
        ):
            seconds = _measure(loops(run), topology.size, int(rounds), plan.steps_per_epoch, show)
        world.launch.close()
    if topology.is_rank_0:
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
        "framework": run.framework,
        "engine": run.engine,
        "recipe": run.recipe.name,
        "ranks": run.topology.size,
        "ratio": {name: statistics.median(of_rounds) for name, of_rounds in ratios.items()},
        "ratios": ratios,
        "step_seconds": seconds,
    }
