"""`bench train`: the parts of a step, measured interleaved in one run, and which of them limits the
training.

`python -m hvdtrain.tools.bench.train`, with the same flags, is one rank.
"""

import contextlib
import functools
import io
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import pydantic

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.progress import Progress
from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.core.wording import counted
from hvdtrain.engines.registry import ENGINES
from hvdtrain.launch.topology import discover
from hvdtrain.run import main as runs
from hvdtrain.run.process import end
from hvdtrain.run.run import Run
from hvdtrain.terminal import Show
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
"""What is measured, by its name."""
MODULE = "hvdtrain.tools.bench.train"


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures what limits a training: `bench train [flags] -- RECIPE [flags of a run]`; digits
    where none is given.

    Under srun, mpirun or torchrun each rank calls it; alone, it starts ranks on this machine.
    """

    framework: Annotated[Literal["torch", "tensorflow"], Flag("whose loop")] = "torch"
    ranks: Annotated[measure.RankCount, Flag("ranks on this machine, where no launcher started it")] = 2
    rounds: Annotated[measure.Count, Flag("measurements of each, interleaved, besides one to warm up")] = 5
    steps: Annotated[measure.Count, Flag("steps of a measurement")] = 10


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; the exit code. Raises HvdtrainError."""
    options, of_run = parse(argv)
    if discover(os.environ).size > 1:
        ranks.become(MODULE, argv)
    measuring = functools.partial(ranks.launch, ["-m", MODULE, *argv], engine_in(of_run), options.ranks)
    return measure.run("bench train", measuring, answer, options)


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The benchmark's flags, and the run's command line. Raises RecipeError."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    options: Options = flags.parse(Options, "python -m hvdtrain bench train", argv[:end])
    return options, list(argv[end + 1 :]) or ["digits"]


def engine_in(of_run: Sequence[str]) -> str:
    """The engine that a run's command line names, or else Horovod."""
    words = " ".join(of_run).replace("=", " ").split()
    return next((name for flag, name in itertools.pairwise(words) if flag == "--engine" and name in ENGINES), "horovod")


def answer(results: dict[str, Any]) -> measure.Answer:
    """The table with the meaning of each figure, and what limits the step."""
    times: dict[str, list[float]] = results["step_seconds"]
    batch = results["global_batch"]
    rows = []
    for name, meaning in MEANS.items():
        if name in times:
            examples = {ALLREDUCE: 0, ONE: batch // results["ranks"]}.get(name, batch)
            rate = measure.rate(examples / statistics.median(times[name])) if examples else ""
            rows.append((name, measure.summary(times[name], 1e3), rate, meaning))
    where = counted(results["ranks"], "rank")
    title = f"{results['recipe']}, {where}, {results['engine']} ({results['framework']}), batch {batch}"
    sentence, ratio = limit(times)
    results = {**results, "of_the_slowest_part": ratio}
    if ONE in times:
        results["efficiency"] = ratios = efficiency(times)
        together, by_itself = (f"{statistics.median(ratios[name]):.0%}" for name in (FULL, ALONE))
        sentence += f"; among the others a rank is {together} as fast as alone, {by_itself} where none communicates"
    table = measure.table(("case", "ms a step", "examples/s", "what it is"), rows)
    figure = measure.over_rounds(times, "ms a step", 1e3)
    return measure.Answer("train", [*measure.folded(title), *table], f"{sentence}.", results, figure)


def limit(times: dict[str, list[float]]) -> tuple[str, float]:
    """A sentence on what limits the step, and its time over that of its slowest part."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    computing = min(middle[name] for name in (ALONE, SYNTHETIC) if name in middle)
    pieces = {"reading": middle[IO_ONLY], "computing": computing, "communication": middle.get(ALLREDUCE, 0.0)}
    slowest = max(pieces, key=pieces.__getitem__)
    ratio = middle[FULL] / pieces[slowest]
    return f"{slowest} limits: a step takes {ratio:.2f} times what that alone takes", ratio


def efficiency(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """A rank's speed among the others, as a share of that while they rest, in each round. Without
    communication only what ranks share of a machine, such as memory, can slow it down."""
    return {name: [one / among for one, among in zip(times[ONE], times[name], strict=True)] for name in (FULL, ALONE)}


def rank(argv: Sequence[str]) -> NoReturn:
    """Measures on every rank; rank 0 prints the answer, or keeps the figures."""
    options, of_run = parse(argv)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as until_shown:
        show = until_shown.enter_context(ranks.showing(discover(os.environ)))

        def measure_and_report(run: Run) -> None:
            results = _measure(run, SIDES[options.framework], options, show)
            until_shown.close()
            if run.topology.is_rank_0 and not ranks.keep(results):
                answer(results).conclude(options)

        code = runs.main(options.framework, [*of_run, "--output", f"{folder}/run"], measure_and_report)
    end(code)


@dataclass(frozen=True)
class Sides:
    """The trainers to measure. `alone` and `communicate` are None in a run of one rank."""

    whole: Any
    """The run's own Trainer, with communication."""
    alone: Any | None
    """The same Trainer without communication between ranks."""
    wait: Callable[[Any], None]
    """Waits until the device of a Trainer has finished."""
    communicate: Callable[[], None] | None
    """An allreduce of as many bytes as the gradients have."""
    gradient_bytes: int


def _alone(run: Run, trainer: Any, local: Callable[[Any], Any]) -> Any | None:
    """The Trainer of this rank with the engine `local`; None where the run has one rank."""
    if trainer.engine.size == 1:
        return None
    engine = local(trainer.engine.device)
    engine.rank = trainer.engine.rank
    return type(trainer)(run, engine)


@contextlib.contextmanager
def _torch_sides(run: Run) -> Iterator[Sides]:
    import torch

    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.trainer import Trainer, engine_of

    sent = getattr(torch, COMPRESSIONS[run.recipe.compression].dtype or "float32")
    with engine_of(run) as engine:
        trainer = Trainer(run, engine)
        count = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        gradients = torch.zeros(count, dtype=sent, device=engine.device)
        alone = _alone(run, trainer, LocalEngine)
        communicate = functools.partial(engine.allreduce, gradients) if alone else None

        def wait(_: Trainer) -> None:
            if engine.device.type == "cuda":
                torch.cuda.synchronize()

        yield Sides(trainer, alone, wait, communicate, gradients.nbytes)


@contextlib.contextmanager
def _tensorflow_sides(run: Run) -> Iterator[Sides]:
    from hvdtrain.tensorflow import without_banner

    with without_banner():
        import tensorflow as tf

    from hvdtrain.tensorflow.engines import Engine, put
    from hvdtrain.tensorflow.trainer import Trainer, engine_of

    sent = getattr(tf, COMPRESSIONS[run.recipe.compression].dtype or "float32")
    with engine_of(run) as engine:
        trainer = Trainer(run, engine)
        count = sum(int(tf.size(weight)) for weight in trainer.weights)
        with tf.device(engine.device):
            gradients = tf.zeros(count, sent)
        alone = _alone(run, trainer, Engine)
        with engine.scope():
            first = tf.Variable(0.0, dtype=gradients.dtype, trainable=False)
        add = engine.replicate(lambda tensor: put(first, engine.sum_tensor(tensor)[0]))

        def communicate() -> None:
            with tf.device(engine.device):
                add([(gradients,)])
            engine.copies(first)[0].numpy()

        def wait(of: Trainer) -> None:
            if of.engine.replicas == 1:
                of.weights[-1].numpy()

        sent_bytes = count * gradients.dtype.size
        yield Sides(trainer, alone, wait, communicate if alone else None, sent_bytes)


SidesOf = Callable[[Run], AbstractContextManager[Sides]]
SIDES: dict[str, SidesOf] = {"torch": _torch_sides, "tensorflow": _tensorflow_sides}


def _measure(run: Run, sides_of: SidesOf, options: Options, show: Show) -> dict[str, Any]:
    """The figures of all contenders. Every rank calls it."""
    with contextlib.redirect_stdout(io.StringIO()), sides_of(run) as sides:
        timed = {
            name: _mean_of_ranks(time, sides)
            for name, time in _contenders(run, sides, min(options.steps, run.plan.steps_per_epoch)).items()
        }

        def keep(seconds: dict[str, list[float]]) -> None:
            if run.topology.is_rank_0 and len(seconds) == len(timed):
                ranks.keep({**about, "step_seconds": seconds})

        about = {
            "framework": run.identity.framework,
            "engine": run.engine,
            "recipe": run.recipe.name,
            "ranks": run.topology.size,
            "global_batch": run.plan.global_batch,
            "gradient_bytes": sides.gradient_bytes,
        }
        return {**about, "step_seconds": measure.interleaved(timed, options.rounds, show=show, known=keep)}


def _contenders(run: Run, sides: Sides, steps: int) -> dict[str, Callable[[], float | None]]:
    """What measures the seconds of a step, by name; None on a rank that rests."""
    everywhere, of_one = Progress(), Progress()

    def batches(progress: Progress = everywhere) -> Iterator[Any]:
        if progress.sample + steps * run.plan.global_batch > run.plan.train_examples:
            progress.sample, progress.epoch = 0, progress.epoch + 1
        for micro_batches in itertools.islice(sides.whole.batches(progress), steps):
            yield micro_batches
            progress.sample += run.plan.global_batch

    (repeated,) = itertools.islice(batches(), 1)

    def through(trainer: Any, source: Callable[[], Iterator[Any]], *, read_only: bool = False) -> float:
        sides.wait(trainer)
        began = perf_counter()
        with contextlib.closing(source()) as given:  # type: ignore[type-var]
            for batch in given:
                if not read_only:
                    trainer.update(batch, 0.0, 0)  # at that learning rate the weights stay: no step of many diverges
        sides.wait(trainer)
        return (perf_counter() - began) / steps

    def allreduce(communicate: Callable[[], None]) -> float:
        began = perf_counter()
        communicate()
        sides.wait(sides.whole)
        return perf_counter() - began

    found: dict[str, Callable[[], float | None]] = {
        FULL: lambda: through(sides.whole, batches),
        SYNTHETIC: lambda: through(sides.whole, lambda: (repeated for _ in range(steps))),
        IO_ONLY: lambda: through(sides.whole, batches, read_only=True),
    }
    if (alone := sides.alone) and (communicate := sides.communicate):
        found[ALONE] = lambda: through(alone, batches)
        found[ONE] = lambda: through(alone, lambda: batches(of_one)) if run.topology.is_rank_0 else None
        found[ALLREDUCE] = lambda: allreduce(communicate)
    return found


def _mean_of_ranks(time: Callable[[], float | None], sides: Sides) -> Callable[[], float]:
    """Measures the mean over the ranks that do not rest. All ranks begin together."""

    def mean() -> float:
        sides.whole.engine.sum(np.zeros(1))
        seconds = time()
        total, ranks = sides.whole.engine.sum(np.array([0.0, 0.0] if seconds is None else [seconds, 1.0]))
        return float(total / ranks)

    return mean


if __name__ == "__main__":
    rank(sys.argv[1:])
