"""`bench train`: the numbers that show what limits a training: a step's pieces, interleaved in one run."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tyro

from hvdtrain.core import flags
from hvdtrain.launch.topology import discover
from hvdtrain.tools.bench import measure, ranks

FULL, SYNTHETIC, IO_ONLY = "full", "synthetic", "io-only"
ALONE, ONE, ALLREDUCE = "no-communication", "one-rank", "communication"
MEANS = {
    FULL: "read, compute, communicate: the run as it is",
    SYNTHETIC: "the same batch again and again, nothing read",
    IO_ONLY: "read and put on the device, nothing computed",
    ALONE: "read and compute, each rank by itself",
    ONE: "the same, one rank while the others rest",
    ALLREDUCE: "the allreduce of the gradients' bytes alone",
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
    report(ranks.launch(program, engine, options.ranks), options.output)
    return 0


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The flags, and those of the run. Raises RecipeError."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    options: Options = flags.parse(Options, PROG, argv[:end])
    return options, list(argv[end + 1 :]) or list(RUN)


def report(results: dict[str, Any], output: Path | None) -> None:
    """Prints the numbers with their meanings, and all of it as JSON."""
    times: dict[str, list[float]] = results["step_seconds"]
    batch = results["global_batch"]
    print(f"{results['recipe']}, {results['ranks']} ranks, {results['engine']} ({results['framework']}), batch {batch}")
    print(f"{'':18}{'ms a step':>34}{'examples/s':>12}")
    for name, meaning in MEANS.items():
        if name in times:
            examples = {ALLREDUCE: 0, ONE: batch // results["ranks"]}.get(name, batch)
            rate = f"{examples / statistics.median(times[name]):.1f}" if examples else ""
            print(f"{name:18}{measure.summary(times[name], 1e3):>34}{rate:>12}  {meaning}")
    sentence, ratio = limit(times)
    print(sentence)
    results = {**results, "of_the_slowest_part": ratio}
    if ONE in times:
        results["efficiency"] = ratios = efficiency(times)
        together, by_itself = (measure.summary(ratios[name]) for name in (FULL, ALONE))
        print(f"efficiency: a rank is {together} as fast as one rank alone, {by_itself} where none communicates")
    measure.conclude("train", results, lambda axes: measure.bars(axes, times, "ms a step", 1e3), output)


def limit(times: dict[str, list[float]]) -> tuple[str, float]:
    """What limits the step, as a sentence, and how many times its slowest part it takes: 1 where all overlaps."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    # What a rank alone needs without reading; of one rank that is the synthetic step.
    computing = middle[SYNTHETIC] if ALONE not in middle else min(middle[ALONE], middle[SYNTHETIC])
    pieces = {"reading": middle[IO_ONLY], "computing": computing, "communication": middle.get(ALLREDUCE, 0.0)}
    slowest = max(pieces, key=pieces.__getitem__)
    ratio = middle[FULL] / pieces[slowest]
    return f"{slowest} limits: a step takes {ratio:.2f} of what that alone takes", ratio


def efficiency(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """By round, the speed of a rank among the others as a part of what it is while they rest: as it is, and without
    communication, where only what the ranks share of a machine, such as its memory, can hold it up."""
    return {name: [one / among for one, among in zip(times[ONE], times[name], strict=True)] for name in (FULL, ALONE)}
