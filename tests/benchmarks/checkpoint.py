"""`python tests/benchmarks/checkpoint.py`: what checkpoints cost a training, and each of them.

A rank trains hvdtrain's loop with checkpoints every few steps, and without, interleaved in blocks of
steps in the same processes. A third block copies the state where the second one writes a checkpoint,
into memory that is there: the least that a training can be held up by. A block begins half an interval
before its first checkpoint, so that each is written within its block; what is not is waited for, and counts.
"""

import functools
import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import benchmark
import numpy as np
import pydantic
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.recipe import of_program
from hvdtrain.core.wording import counted
from hvdtrain.errors import RecipeError
from hvdtrain.record.writer import Checkpointing
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.run.trainer import Trainer
from hvdtrain.terminal import Show
from hvdtrain.tools.bench import measure, ranks

KINDS = {
    "none": "a step, no checkpoints",
    "checkpoints": "a step, with checkpoints",
    "copies": "a step, with copies in their place",
}


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures steps with a checkpoint every few of them over steps without, and how long each holds training up."""

    framework: Annotated[Literal["torch", "tensorflow"], Flag("whose loop")] = "torch"
    recipe: Annotated[str, Flag("recipe to train on the CPU")] = "digits"
    ranks: Annotated[measure.RankCount, Flag("ranks on this machine")] = 2
    rounds: Annotated[measure.Count, Flag("interleaved blocks of each kind, after one of warm-up")] = 8
    every: Annotated[measure.Count, Field(ge=2), Flag("steps between two checkpoints")] = 10
    steps: Annotated[measure.Count, Flag("of a block; a multiple of --every")] = 30


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python tests/benchmarks/checkpoint.py", argv)
    if options.steps % options.every:
        raise RecipeError(f"--steps must be a multiple of --every {options.every}, got {options.steps}.")
    numbers = map(str, (options.ranks, options.rounds, options.every, options.steps))
    program = [__file__, benchmark.RANK, options.framework, options.recipe, *numbers]
    measuring = functools.partial(ranks.launch, program, "horovod", options.ranks)
    return measure.run("checkpoint", measuring, answer, options)


def answer(results: dict[str, Any]) -> measure.Answer:
    """The steps of each kind, a copy of the state, and how long a checkpoint holds training up."""
    results = results | figures(results)
    rows = [(KINDS[kind], measure.summary(seconds, 1e3)) for kind, seconds in results["step_seconds"].items()]
    rows += [("a copy of the state", measure.summary(results["copies"], 1e3))]
    rows += [("training held up by a checkpoint", measure.summary(results["stalls"], 1e3))]
    ratio = measure.spread(results["ratios"])
    rounds = counted(len(results["ratios"]), "round")
    sentence = (
        f"With a checkpoint every {results['every']} steps a step takes {ratio.median:.3f} times as long "
        f"({ratio.low:.3f} to {ratio.high:.3f} in {rounds}); 95 of 100 checkpoints hold "
        f"training up for at most {results['stall_over_copy']:.2f} times what a copy of the state takes."
    )
    shown = {"a copy": results["copies"], "held up": results["stalls"]}
    figure = measure.over_rounds(shown, "ms", 1e3)
    return measure.Answer("checkpoint", measure.table(("", "ms"), rows), sentence, results, figure)


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """The ratio of each round, and the 95th percentile of the stalls over the middle copy."""
    without, with_them = (results["step_seconds"][kind] for kind in ("none", "checkpoints"))
    return {
        "ratios": [own / other for own, other in zip(with_them, without, strict=True)],
        "stall_over_copy": float(np.quantile(results["stalls"], 0.95) / np.median(results["copies"])),
    }


class Blocks(Loop[Trainer]):
    """hvdtrain's loop, in blocks of steps of one kind."""

    def __init__(self, run: Run, trainer: Trainer, every: int) -> None:
        super().__init__(replace(run, recipe=run.recipe.model_copy(update={"log_every_steps": 5})), trainer)
        self.every, self.copies, self.write_seconds = every, False, 0.0
        self.held: dict[str, np.ndarray] = {}
        self.stalls: dict[str, list[float]] = {"copies": [], "checkpoints": []}
        self.of_kinds = {kind: self._checkpointing(kind) for kind in ("none", "checkpoints", "copies")}
        self.steps = benchmark.ours(self)

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
        intervals = of_program(checkpoint_every_steps=None if kind == "none" else self.every)
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


def rank(framework: Literal["torch", "tensorflow"], recipe_name: str, *numbers: str) -> None:
    """Measures on every rank. `numbers` are those of ranks, rounds, steps a checkpoint, and steps."""
    size, rounds, every, steps = map(int, numbers)
    with benchmark.training(framework, recipe_name, "horovod" if size > 1 else "local") as (run, show):
        _measure(run, framework, rounds, every, steps, show)


def _measure(run: Run, framework: str, rounds: int, every: int, steps: int, show: Show) -> None:
    """Measures, and keeps the figures on rank 0 after each round."""
    trainer = importlib.import_module(f"hvdtrain.{framework}.trainer")
    engine = trainer.open_engine(run)
    loop = Blocks(run, trainer.Trainer(run, engine), every)
    loop.block("checkpoints", every)
    contenders = {kind: lambda kind=kind: loop.block(kind, steps) for kind in ("none", "checkpoints", "copies")}
    about = {"framework": framework, "recipe": run.recipe.name, "ranks": engine.size, "every": every}
    in_warm_up = 1 + steps // every, steps // every

    def keep(seconds: dict[str, list[float]]) -> None:
        of_ranks = {kind: (engine.sum(np.array(own)) / engine.size).tolist() for kind, own in seconds.items()}
        figures = {
            "step_seconds": of_ranks,
            "stalls": loop.stalls["checkpoints"][in_warm_up[0] :],
            "copies": loop.stalls["copies"][in_warm_up[1] :],
            "write_seconds": loop.write_seconds,
        }
        if run.topology.is_rank_0 and len(seconds) == len(contenders):
            ranks.keep({**about, **figures})

    measure.interleaved(contenders, rounds, show=lambda title: show(f"{title}, {steps} steps"), known=keep)
    loop.close(None)
    engine.close()


if __name__ == "__main__":
    benchmark.start("checkpoint", rank)
