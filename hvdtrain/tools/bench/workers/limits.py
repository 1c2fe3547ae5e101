"""What both adapters' `bench train` share: the pieces of a step, timed in interleaved rounds."""

import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NoReturn

import numpy as np

from hvdtrain.core.progress import Progress
from hvdtrain.launch.topology import discover
from hvdtrain.run import main as runs
from hvdtrain.run.ending import end
from hvdtrain.run.run import Run
from hvdtrain.tools.bench import measure, ranks, train
from hvdtrain.tools.rank_status import Show

MicroBatches = list[Any]


@dataclass(frozen=True)
class Drive:
    """One framework's Trainer, driven step by step."""

    batches: Callable[[Progress], Iterator[MicroBatches]]
    """The rest of an epoch from there: this rank's micro-batches of each batch, on the device."""
    update: Callable[[MicroBatches], None]
    """One update from them, at a learning rate of 0: the weights stay, so no step of many diverges."""
    wait: Callable[[], None]
    """Until the device has finished."""


@dataclass(frozen=True)
class Sides:
    """The run as it is; the same on each rank without the others; and the allreduce of as many bytes as its gradients.
    The last two are None where one rank trains alone, or its engine has no allreduce of its own."""

    whole: Drive
    alone: Drive | None
    communicate: Callable[[], None] | None
    sum: Callable[[np.ndarray], np.ndarray]
    gradient_bytes: int


SidesOf = Callable[[Run], contextlib.AbstractContextManager[Sides]]


def main(adapter: Literal["torch", "tensorflow"], sides_of: SidesOf) -> NoReturn:
    """One rank of `bench train`, with its command line."""
    options, of_run = train.parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as until_shown:
        show = until_shown.enter_context(ranks.showing(discover(os.environ)))

        def measure_and_report(run: Run) -> None:
            results = _measure(run, sides_of, options, show)
            until_shown.close()
            if run.topology.is_rank_0 and not ranks.keep(results):
                train.answer(results).conclude(options)

        code = runs.main(adapter, [*of_run, "--output", f"{folder}/run"], measure_and_report)
    end(code)


def _measure(run: Run, sides_of: SidesOf, options: train.Options, show: Show) -> dict[str, Any]:
    """Measures on every rank; what was found."""
    with contextlib.redirect_stdout(io.StringIO()), sides_of(run) as sides:
        timed = {
            name: _mean_of_ranks(time, sides)
            for name, time in _contenders(run, sides, min(options.steps, run.plan.steps_per_epoch)).items()
        }
        seconds = measure.interleaved(timed, options.rounds, show=show)
    return {
        "framework": run.framework,
        "engine": run.engine,
        "recipe": run.recipe.name,
        "ranks": run.topology.size,
        "global_batch": run.plan.global_batch,
        "gradient_bytes": sides.gradient_bytes,
        "step_seconds": seconds,
    }


def _contenders(run: Run, sides: Sides, steps: int) -> dict[str, Callable[[], float | None]]:
    """By name, what gives the seconds of one step; None on a rank that rests."""
    everywhere, of_one = Progress(), Progress()

    def batches(progress: Progress = everywhere) -> Iterator[MicroBatches]:
        if progress.sample + steps * run.plan.global_batch > run.plan.train_examples:
            progress.sample, progress.epoch = 0, progress.epoch + 1
        for micro_batches in itertools.islice(sides.whole.batches(progress), steps):
            yield micro_batches
            progress.sample += run.plan.global_batch

    (still,) = itertools.islice(batches(), 1)

    def through(drive: Drive, source: Callable[[], Iterator[MicroBatches]], *, read_only: bool = False) -> float:
        drive.wait()
        began = perf_counter()
        with contextlib.closing(source()) as given:  # type: ignore[type-var]
            for one in given:
                if not read_only:
                    drive.update(one)
        drive.wait()
        return (perf_counter() - began) / steps

    def again() -> Iterator[MicroBatches]:
        yield from itertools.repeat(still, steps)

    def allreduce(communicate: Callable[[], None]) -> float:
        began = perf_counter()
        communicate()
        sides.whole.wait()
        return perf_counter() - began

    def one(drive: Drive) -> float | None:
        return through(drive, lambda: batches(of_one)) if run.topology.is_rank_0 else None

    found: dict[str, Callable[[], float | None]] = {
        train.FULL: lambda: through(sides.whole, batches),
        train.SYNTHETIC: lambda: through(sides.whole, again),
        train.IO_ONLY: lambda: through(sides.whole, batches, read_only=True),
    }
    if (alone := sides.alone) and (communicate := sides.communicate):
        found[train.ALONE] = lambda: through(alone, batches)
        found[train.ONE] = lambda: one(alone)
        found[train.ALLREDUCE] = lambda: allreduce(communicate)
    return found


def _mean_of_ranks(time: Callable[[], float | None], sides: Sides) -> Callable[[], float]:
    """The mean over the ranks that do not rest; all begin together."""

    def mean() -> float:
        sides.sum(np.zeros(1))
        seconds = time()
        total, ranks = sides.sum(np.array([0.0, 0.0] if seconds is None else [seconds, 1.0]))
        return float(total / ranks)

    return mean
