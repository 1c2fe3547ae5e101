"""`bench engines`: the step time of every engine on this machine, in runs that are interleaved."""

import functools
import importlib.util
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from hvdtrain import processors
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Adapter
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import EngineUnavailable
from hvdtrain.files import read_bytes
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.record import reader
from hvdtrain.run.process import WITHOUT_REPORT
from hvdtrain.terminal import Show
from hvdtrain.tools.bench import measure, ranks

WARM_UP = 3  # steps
MOST_BYTES = 2**28  # of a run's file
BUSY = 0.1
"""The part of the machine that other programs may take without being mentioned; beyond, a round is repeated."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures every engine's step time, each in runs of its own."""

    framework: Annotated[
        Literal["torch", "tensorflow"] | None, Flag("whose engines; left out: all that are installed")
    ] = None
    recipe: Annotated[str, Flag("recipe to take the steps from")] = "digits"
    ranks: Annotated[measure.RankCount, Flag("ranks on this machine, or devices of one process")] = 2
    rounds: Annotated[measure.Count, Flag("runs of each engine, interleaved")] = 6
    steps: Annotated[measure.Count, Flag("steps of a run, besides its warm-up")] = 10


@dataclass(frozen=True)
class Contender:
    """An engine under an adapter, on so many ranks."""

    adapter: Adapter
    engine: str
    ranks: int

    @property
    def launcher(self) -> str:
        return ENGINES[self.engine].launcher or "python"

    def __str__(self) -> str:
        return f"{self.adapter} {self.engine}"

    def command(self, gpus: int, run_flags: Sequence[str]) -> list[str]:
        """The command as a user would type it. Raises EngineUnavailable."""
        engine = ENGINES[self.engine]
        command = [*ranks.launcher(engine.launcher, self.ranks), "-m", f"hvdtrain.{self.adapter}", *run_flags]
        command += ["--engine", self.engine]
        if engine.devices and not engine.gpus_only and not gpus:
            command += ["--devices", ",".join(["cpu"] * self.ranks)]
        return command


@dataclass(frozen=True)
class Measured:
    """The steps of an engine."""

    seconds: list[float]
    """The median step of each round, in seconds; none where a run failed."""
    batch: int = 0
    """The examples of one step."""
    reason: str = ""
    """Why a run failed."""
    waiting: float | None = None
    """The seconds of a step in which a rank waits for the others, the median over the ranks in the run's last record;
    None of a single rank."""
    others: list[float] = field(default_factory=list)
    """The part of the machine's processors that other programs took in each round."""


def contenders(frameworks: Sequence[str], ranks: int) -> list[Contender]:
    """Every engine of these frameworks, and of Lightning, where it is installed."""
    adapters: dict[Adapter, str] = {"torch": "torch", "lightning": "torch", "tensorflow": "tensorflow"}
    return [
        Contender(adapter, name, ranks)
        for adapter, framework in adapters.items()
        if framework in frameworks and importlib.util.find_spec(adapter)
        for name, engine in ENGINES.items()
        if adapter in engine.classes
    ]


def run(contender: Contender, recipe: str, steps: int) -> Measured:
    """Runs so many steps after a warm-up."""
    processes = contender.ranks if contender.launcher != "python" else 1
    environ = {"OMP_NUM_THREADS": str(max(1, processors.count() // processes)), **os.environ}
    flags = [recipe, "--max-steps", str(steps + WARM_UP), "--log-every-steps", "1"]
    try:
        return trained(contender.command(visible_gpus(os.environ), flags), environ)
    except EngineUnavailable as error:
        return Measured([], reason=f"EngineUnavailable: {error}")


def trained(command: Sequence[str], environ: Mapping[str, str], beside: Path | None = None) -> Measured:
    """The steps of a training command, whose temporary run folder is made in `beside`, if given."""
    with tempfile.TemporaryDirectory(dir=beside, prefix="bench-") as folder:
        before = _processors()
        code, printed = ranks.follow([*command, "--output", f"{folder}/run"], {**environ, **WITHOUT_REPORT})
        if code:
            return Measured([], reason=ranks.reason(printed))
        others, every = (after - earlier for earlier, after in zip(before, _processors(), strict=True))
        return replace(read(Path(folder, "run")), others=[max(0.0, others / every)])


def _processors() -> tuple[float, float]:
    """The seconds for which others have used this machine's processors since it started, and the seconds of all of
    its processors."""
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in Path("/proc/stat").read_text().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4] - own, sum(ticks)  # the fourth is idle, the fifth waits for disks


def read(folder: Path) -> Measured:
    """The median step after the warm-up in a run folder, or that it cannot be read."""
    try:
        batch = int(json.loads(read_bytes(folder / "plan.json", MOST_BYTES))["global_batch"])
        lines = map(json.loads, read_bytes(folder / "metrics.jsonl", MOST_BYTES).splitlines())
        rates = [float(line["examples_per_second"]) for line in lines if line["kind"] == "step"]
        seconds = statistics.median(batch / rate for rate in rates[WARM_UP:])
        launch = reader.read(folder, recent=True).launch
        waiting = [each for each in launch.times[-1].waiting if each >= 0] if launch and launch.times else []
        return Measured([seconds], batch, waiting=statistics.median(waiting) if waiting else None)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        return Measured([], reason=f"its run folder cannot be read ({type(error).__name__})")


def measure_all(chosen: Sequence[Contender], options: Options, show: Show, known: measure.Known) -> None:
    """Runs every contender once a round. One that fails is left out of later rounds."""
    found = {contender: Measured([]) for contender in chosen}
    left = measure.Left(options.rounds * len(chosen))
    for number in range(1, 2 * options.rounds + 1):  # the second half repeats the rounds that others have disturbed
        for index, (contender, before) in enumerate(found.items(), 1):
            again = number > options.rounds
            if before.reason or (again and max(before.others) <= BUSY):
                left.made += 1
                continue
            name = f"{contender} ({index} of {len(found)})"
            title = f"again, as others used the machine: {name}" if again else None
            show(left.beside(title or measure.titled(name, number, options.rounds), before.seconds))
            now = run(contender, options.recipe, options.steps)
            left.made += 1
            seconds, others = before.seconds + now.seconds, before.others + now.others
            if again and now.seconds:
                most = others.index(max(others))
                del seconds[most], others[most]
            reason = before.reason if again else now.reason
            found[contender] = Measured(seconds, now.batch or before.batch, reason, others=others)
            known(found)


def table(found: dict[Contender, Measured]) -> list[str]:
    """The lines of the table: the figures, why an engine has none, and what each is good for."""
    rows, reasons = [], []
    for contender, measured in found.items():
        step, rate = "-", "-"
        if measured.seconds:
            step = measure.summary(measured.seconds, 1e3)
            rate = measure.rate(measured.batch / statistics.median(measured.seconds))
        else:
            reasons += measure.folded(f"{contender}: {measured.reason or 'not measured'}")
        rows.append((contender.engine, contender.launcher, contender.adapter, step, rate))
    reasons += busy(found)
    good_for = {contender.engine: ENGINES[contender.engine].good_for for contender, it in found.items() if it.seconds}
    figures = measure.table(("engine", "launch", "with", "step, ms", "examples/s"), rows)
    return [*figures, *reasons, "", *measure.table(("engine", "good for"), good_for.items())]


def busy(found: dict[Contender, Measured]) -> list[str]:
    """Lines on the engines whose machine was busy with other work."""
    lines = []
    for contender, measured in found.items():
        if disturbed := [share for share in measured.others if share > BUSY]:
            rounds = f"in {len(disturbed)} of {counted(len(measured.others), 'round')}"
            lines += measure.folded(
                f"{contender}: {rounds} other programs took up to {max(disturbed):.0%} of this machine; "
                "compare it on a quiet one"
            )
    return lines


def fastest(found: dict[Contender, Measured]) -> str:
    """A sentence on the fastest engine beside the second and the slowest."""
    rates = {
        str(contender): measured.batch / statistics.median(measured.seconds)
        for contender, measured in found.items()
        if measured.seconds
    }
    first, *others = sorted(rates, key=lambda name: -rates[name])
    sentence = f"{first} is fastest with {measure.rate(rates[first])} examples/s"
    for name in dict.fromkeys((others[0], others[-1]) if others else ()):
        sentence += f", {measure.times(rates[first] / rates[name])} {name}"
    return f"{sentence}."


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; the exit code, 1 without a measurement. Raises HvdtrainError."""
    options: Options = flags.parse(Options, "python -m hvdtrain bench engines", argv)
    recipes.load(options.recipe)
    installed = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
    chosen = contenders([options.framework] if options.framework else installed, options.ranks)
    measuring = functools.partial(measure_all, chosen, options)
    return measure.run("bench engines", measuring, functools.partial(answer, options), options)


def answer(options: Options, found: dict[Contender, Measured]) -> measure.Answer | None:
    """The result; prints the reasons and returns None where no engine was measured."""
    results = [
        {
            "adapter": c.adapter,
            "engine": c.engine,
            "start": c.launcher,
            "step_seconds": m.seconds,
            "others": m.others,
            "reason": m.reason,
        }
        for c, m in found.items()
    ]
    times = {str(c): m.seconds for c, m in found.items() if m.seconds}
    if not times:
        print("\n".join(table(found)))
        return None
    everything = {"recipe": options.recipe, "ranks": options.ranks, "engines": results}
    figure = measure.over_rounds(times, "ms a step", 1e3)
    return measure.Answer("engines", table(found), fastest(found), everything, figure)
