"""hvdtrain's loop with checkpoints every few steps, and without, interleaved in blocks of steps in the same processes.

A third block copies the state where the second one writes a checkpoint, into memory that is there: the least that a
training can be held up by. A block begins half an interval before its first checkpoint, so that each is written within
its block; what is not is waited for, and counts.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import overhead_loops

from hvdtrain.core import network as networks
from hvdtrain.core import plan as plans
from hvdtrain.core import recipe as recipes
from hvdtrain.core.settings import OwnIntervals
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import World
from hvdtrain.record import folder as folders
from hvdtrain.record.writer import Checkpointing
from hvdtrain.run.loop import Loop, Trainer
from hvdtrain.run.main import keep_memory, load_dataset
from hvdtrain.run.run import Run
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.tools.rank_status import Show


class Blocks(Loop[Trainer]):
    """hvdtrain's loop, in blocks of steps of one kind."""

    def __init__(self, run: Run, trainer: Trainer, every: int) -> None:
        super().__init__(replace(run, intervals=OwnIntervals(log_every_steps=5)), trainer)
        self.every, self.copies, self.write_seconds = every, False, 0.0
        self.held: dict[str, np.ndarray] = {}
        self.stalls: dict[str, list[float]] = {"copies": [], "checkpoints": []}
        self.of_kinds = {kind: self._checkpointing(kind) for kind in ("none", "checkpoints", "copies")}
        self.steps = overhead_loops.ours(self)

    def block(self, kind: str, steps: int) -> float:
        """Seconds of a step."""
        self.copies, self.checkpointing = kind == "copies", self.of_kinds[kind]
        self.progress.sample, self.progress.step = 0, self.every - self.every // 2
        began = time.perf_counter()
        for _ in range(steps):
            next(self.steps)
        self.checkpointing.wait()
        if self.checkpointing.writer and kind == "checkpoints":
            self.write_seconds = self.checkpointing.writer.seconds
        return (time.perf_counter() - began) / steps

    def _checkpointing(self, kind: str) -> Checkpointing:
        intervals = OwnIntervals(checkpoint_every_steps=None if kind == "none" else self.every)
        return Checkpointing(self.run.folder, intervals, 0, self.engine.sum)

    def write_checkpoint(self, valid_score: float | None) -> None:
        arrays = self.trainer.state.arrays() if self.copies else {}
        began = time.perf_counter()
        if self.copies:
            for name, array in arrays.items():
                np.copyto(self.held.setdefault(name, np.empty_like(array)), array)
        else:
            super().write_checkpoint(valid_score)
        self.stalls["copies" if self.copies else "checkpoints"].append(time.perf_counter() - began)


def main(framework: str, recipe_name: str, rounds: int, every: int, steps: int) -> None:
    """Measures on every rank; the first round is warm-up."""
    topology = discover(os.environ)
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant", "device": "cpu"})
    dataset = load_dataset(recipe, framework)
    plan = plans.make(recipe, topology.size, dataset, networks.of(recipe, framework, dataset))
    keep_memory(recipe.device)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # not /tmp, which may be memory
        of_run, identity = None, folders.identity_of(plan, framework, dataset.contents())
        if topology.is_rank_0:
            of_run, _ = folders.open_run(plan, topology, identity, Path(folder, "run"), "never")
        engine = "horovod" if topology.size > 1 else "local"
        run = Run(identity, recipe, engine, (), of_run, folders.ResumePoint(), World(topology), recipe, dataset, plan)
        with (
            ranks.showing(topology) as show,
            Path(folder, "log").open("w") as log,
            contextlib.redirect_stdout(log),
        ):
            found = _measure(run, framework, rounds, every, steps, show)
    if topology.is_rank_0:
        ranks.keep({"framework": framework, "recipe": recipe.name, "ranks": topology.size, "every": every, **found})


def _measure(run: Run, framework: str, rounds: int, every: int, steps: int, show: Show) -> dict[str, Any]:
    opening, trainer = (importlib.import_module(f"hvdtrain.{framework}.{name}") for name in ("opening", "trainer"))
    engine = opening.open_engine(run)
    loop = Blocks(run, trainer.Trainer(run, engine), every)
    loop.block("checkpoints", every)
    contenders = {kind: lambda kind=kind: loop.block(kind, steps) for kind in ("none", "checkpoints", "copies")}
    seconds = measure.interleaved(contenders, rounds, show=lambda title: show(f"{title}, {steps} steps"))
    of_ranks = {kind: (engine.sum(np.array(own)) / engine.size).tolist() for kind, own in seconds.items()}
    in_warm_up = 1 + steps // every, steps // every
    loop.close(None)
    engine.close()
    return {
        "step_seconds": of_ranks,
        "stalls": loop.stalls["checkpoints"][in_warm_up[0] :],
        "copies": loop.stalls["copies"][in_warm_up[1] :],
        "write_seconds": loop.write_seconds,
    }


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
