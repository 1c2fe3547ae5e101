"""`bench train`: the numbers that show what limits a training: a step's pieces, interleaved in one run."""

import functools
import os
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import tyro

from hvdtrain.core import flags
from hvdtrain.launch.topology import discover
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure, ranks

FULL, SYNTHETIC, IO_ONLY = "full", "synthetic", "io-only"
ALONE, ONE, ALLREDUCE = "no-communication", "one-rank", "communication"
MEANS = {
    FULL: "the run as it is",
    SYNTHETIC: "nothing is read",
    IO_ONLY: "nothing is computed",
    ALONE: "each rank by itself",
    ONE: "one rank, the others rest",
    ALLREDUCE: "the gradients' allreduce",
}
PROG = "python -m hvdtrain bench train"
RUN = ("digits",)


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures what limits a training: `bench train [flags] -- RECIPE [flags of a run]`; digits where none is given.

    Under srun, mpirun or torchrun each rank calls it; alone, it starts ranks on this machine.
    """

    framework: Annotated[Literal["torch", "tensorflow"], tyro.conf.arg(help="whose loop")] = "torch"
    ranks: Annotated[measure.RankCount, tyro.conf.arg(help="ranks on this machine, where no launcher started it")] = 2
    rounds: Annotated[
        measure.Count, tyro.conf.arg(help="measurements of each, interleaved, besides one to warm up")
    ] = 5
    steps: Annotated[measure.Count, tyro.conf.arg(help="steps of a measurement")] = 10


def main(argv: Sequence[str]) -> int:
    """Measures; the exit code. Raises HvdtrainError."""
    options, of_run = parse(argv)
    program = [f"hvdtrain.tools.bench.workers.{options.framework}_limits", *argv]
    if discover(os.environ).size > 1:
        ranks.become(program)
    engine = "ddp" if "ddp" in " ".join(of_run).replace("=", " ").split() else "horovod"
    with Status("bench train") as status:
        results = ranks.launch(["-m", *program], engine, options.ranks, show=status.update)
    answer(results).conclude(options)
    return 0


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The flags, and those of the run. Raises RecipeError."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    options: Options = flags.parse(Options, PROG, argv[:end])
    return options, list(argv[end + 1 :]) or list(RUN)


def answer(results: dict[str, Any]) -> measure.Answer:
    """The figures with their meanings, and what limits the step."""
    times: dict[str, list[float]] = results["step_seconds"]
    batch = results["global_batch"]
    rows = []
    for name, meaning in MEANS.items():
        if name in times:
            examples = {ALLREDUCE: 0, ONE: batch // results["ranks"]}.get(name, batch)
            rate = measure.rate(examples / statistics.median(times[name])) if examples else ""
            rows.append((name, measure.summary(times[name], 1e3), rate, meaning))
    where = f"{results['ranks']} ranks" if results["ranks"] > 1 else "1 rank"
    title = f"{results['recipe']}, {where}, {results['engine']} ({results['framework']}), batch {batch}"
    sentence, ratio = limit(times)
    results = {**results, "of_the_slowest_part": ratio}
    if ONE in times:
        results["efficiency"] = ratios = efficiency(times)
        together, by_itself = (f"{statistics.median(ratios[name]):.0%}" for name in (FULL, ALONE))
        sentence += f"; among the others a rank is {together} as fast as alone, {by_itself} where none communicates"
    table = measure.table(("case", "ms a step", "examples/s", "what it is"), rows)
    draw = functools.partial(measure.bars, found=times, unit="ms a step", scale=1e3)
    return measure.Answer("train", [*measure.folded(title), *table], f"{sentence}.", results, draw)


def limit(times: dict[str, list[float]]) -> tuple[str, float]:
    """What limits the step, as a sentence, and how many times its slowest part it takes: 1 where all overlaps."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    # What a rank alone needs without reading; of one rank that is the synthetic step.
    computing = middle[SYNTHETIC] if ALONE not in middle else min(middle[ALONE], middle[SYNTHETIC])
    pieces = {"reading": middle[IO_ONLY], "computing": computing, "communication": middle.get(ALLREDUCE, 0.0)}
    slowest = max(pieces, key=pieces.__getitem__)
    ratio = middle[FULL] / pieces[slowest]
    return f"{slowest} limits: a step takes {ratio:.2f} times what that alone takes", ratio


def efficiency(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """By round, the speed of a rank among the others as a part of what it is while they rest: as it is, and without
    communication, where only what the ranks share of a machine, such as its memory, can hold it up."""
    return {name: [one / among for one, among in zip(times[ONE], times[name], strict=True)] for name in (FULL, ALONE)}
