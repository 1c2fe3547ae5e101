"""What both adapters' `bench overhead` share: two loops timed in turn, and what they come to."""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import output
from hvdtrain import plan as plans
from hvdtrain import recipe as recipes
from hvdtrain.bench import ranks
from hvdtrain.lifeline import Lifeline
from hvdtrain.run import Framework, Run, load_dataset
from hvdtrain.topology import discover

Epoch = Callable[[], float]
"""Trains one epoch; the seconds of one step."""
Turn = Callable[[int], None]
"""What the other loops do in the round of that number."""
Driver = Callable[[int, Turn], list[float]]
"""A loop that cannot be called an epoch at a time: trains so many, calling before each; the seconds of its steps."""


@dataclass(frozen=True)
class Loops:
    """Loops over the same ranks: hvdtrain's, the hand-written one, and Lightning's, which drives them where there is
    one; how to add over the ranks, and to end."""

    ours: Epoch
    hand_written: Epoch
    sum: Callable[[np.ndarray], np.ndarray]
    close: Callable[[], None]
    lightning: Driver | None = None


def ours(training: Any) -> Epoch:
    """hvdtrain's loop, with its log, metrics and guard; `training` is either adapter's Training."""

    def epoch() -> float:
        training.progress.sample = 0
        before, began = training.progress.step, time.perf_counter()
        training.train_epoch()
        return (time.perf_counter() - began) / (training.progress.step - before)

    return epoch


def main(framework: Framework, loops: Callable[[Run], Loops], argv: Sequence[str]) -> None:
    """Measures on every rank; the first round is warm-up. `argv`: recipe, rounds and engine."""
    recipe_name, rounds, engine = argv
    topology = discover(os.environ)
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant", "device": "cpu"})
    dataset = load_dataset(recipe)
    plan = plans.make(recipe, topology, dataset)
    with tempfile.TemporaryDirectory() as folder:
        start = output.start(plan, topology, framework, Path(folder, "run"), "never") if topology.is_chief else None
        run = Run(framework, recipe, engine, (), topology, dataset, plan, start, Lifeline(topology))
        with Path(folder, "log").open("w") as log, contextlib.redirect_stdout(log):
            seconds = _measure(loops(run), topology.size, int(rounds))
    if topology.is_chief:
        ranks.keep(_facts(run, {name: times[1:] for name, times in seconds.items()}))


def _measure(loops: Loops, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, averaged over the ranks, in each round of each loop."""
    pair = {"hvdtrain": loops.ours, "hand-written": loops.hand_written}
    seconds: dict[str, list[float]] = {name: [] for name in pair}

    def mean(own: float) -> float:
        return float(loops.sum(np.array([own]))[0]) / size

    def turn(number: int) -> None:
        for name, epoch in sorted(pair.items(), reverse=bool(number % 2)):
            seconds[name].append(mean(epoch()))

    if loops.lightning:
        seconds["Lightning"] = [mean(own) for own in loops.lightning(rounds, turn)]
    else:
        for number in range(rounds):
            turn(number)
    loops.close()
    return seconds


def _facts(run: Run, seconds: dict[str, list[float]]) -> dict[str, Any]:
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
