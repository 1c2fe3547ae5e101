"""`bench engines`: every engine's step time on this machine, each in runs of its own, one engine after the other."""

import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import tyro

from hvdtrain import errors, processors
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Adapter
from hvdtrain.engines.registry import ENGINES
from hvdtrain.files import read_bytes
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.record import journal
from hvdtrain.run.ending import WITHOUT_REPORT
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure
from hvdtrain.tools.rank_status import Show
from hvdtrain.untrusted import printable

WARM_UP = 3  # steps
MOST_BYTES = 2**28  # of a run's metrics


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures every engine's step time, each in runs of its own."""

    framework: Annotated[
        Literal["torch", "tensorflow"] | None, tyro.conf.arg(help="whose engines; left out: all that are installed")
    ] = None
    recipe: Annotated[str, tyro.conf.arg(help="recipe to take the steps from")] = "digits"
    ranks: Annotated[measure.RankCount, tyro.conf.arg(help="ranks on this machine, or devices of one process")] = 2
    rounds: Annotated[measure.Count, tyro.conf.arg(help="runs of each engine, interleaved")] = 6
    steps: Annotated[measure.Count, tyro.conf.arg(help="steps of a run, besides its warm-up")] = 10


@dataclass(frozen=True)
class Contender:
    """One engine under one adapter, and the processes and devices it gets."""

    adapter: Adapter
    engine: str
    ranks: int

    @property
    def launcher(self) -> str:
        return ENGINES[self.engine].launcher or "python"

    def command(self, gpus: int, run_flags: Sequence[str]) -> list[str]:
        """What a user would type."""
        beside = Path(sys.executable).parent
        module = ["-m", f"hvdtrain.{self.adapter}", *run_flags, "--engine", self.engine]
        engine = ENGINES[self.engine]
        if engine.devices and not engine.gpus_only and not gpus:
            module += ["--devices", ",".join(["cpu"] * self.ranks)]
        match self.launcher:
            case "horovodrun":
                return [str(beside / "horovodrun"), "-np", str(self.ranks), sys.executable, *module]
            case "torchrun":
                return [str(beside / "torchrun"), "--standalone", "--nproc-per-node", str(self.ranks), *module]
        return [sys.executable, *module]


@dataclass(frozen=True)
class Measured:
    """The median step of each round in seconds, or the reason that there is none; the examples of one step."""

    seconds: list[float]
    batch: int = 0
    reason: str = ""
    waiting: float | None = None
    """Seconds of a step that a rank waits for the others; None where the run has not recorded it."""


def contenders(frameworks: Sequence[str], ranks: int) -> list[Contender]:
    """Every engine of these frameworks, and of Lightning where it is installed."""
    adapters: list[Adapter] = []
    for framework, adapter in (("torch", "torch"), ("torch", "lightning"), ("tensorflow", "tensorflow")):
        if framework in frameworks and importlib.util.find_spec(adapter):
            adapters.append(adapter)  # type: ignore[arg-type]
    return [
        Contender(adapter, name, ranks)
        for adapter in adapters
        for name, engine in ENGINES.items()
        if adapter in engine.classes
    ]


def run(contender: Contender, recipe: str, steps: int) -> Measured:
    """One run of so many steps; the median of those after the warm-up."""
    gpus, cpus = visible_gpus(os.environ), processors.count()
    processes = contender.ranks if contender.launcher != "python" else 1
    with tempfile.TemporaryDirectory() as folder:
        flags = [recipe, "--max-steps", str(steps + WARM_UP), "--log-every-steps", "1", "--output", f"{folder}/run"]
        done = subprocess.run(
            contender.command(gpus, flags),
            env={"OMP_NUM_THREADS": str(max(1, cpus // processes)), **os.environ, **WITHOUT_REPORT},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            return Measured([], reason=reason(done.stdout + done.stderr))
        return read(Path(folder, "run"))


def read(folder: Path) -> Measured:
    """What a run's folder holds: the median of its steps after the warm-up, or that it cannot be read."""
    try:
        batch = int(json.loads(read_bytes(folder / "plan.json", MOST_BYTES))["global_batch"])
        lines = map(json.loads, read_bytes(folder / "metrics.jsonl", MOST_BYTES).splitlines())
        rates = [float(line["examples_per_second"]) for line in lines if line["kind"] == "step"]
        seconds = statistics.median(batch / rate for rate in rates[WARM_UP:])
        return Measured([seconds], batch, waiting=_waiting(folder / journal.NAME))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        return Measured([], reason=f"its run folder cannot be read ({type(error).__name__})")


def _waiting(path: Path) -> float | None:
    """The median of the ranks in the run's last record of their steps."""
    try:
        records = list(map(json.loads, read_bytes(path, MOST_BYTES).splitlines()))
        of_ranks = [record["waiting"] for record in records if record["kind"] == "ranks"]
        return statistics.median(float(seconds) for seconds in of_ranks[-1] if seconds is not None)
    except (OSError, ValueError, LookupError, TypeError):  # too few steps for a record; one rank waits for nobody
        return None


def reason(printed: str) -> str:
    """The line that names the reason, without the launcher's mark before it."""
    names = [name for name in vars(errors) if name.endswith(("Error", "Unavailable"))]
    for line in printed.splitlines():
        for name in names:
            if f"{name}: " in line or f"{name} (rank" in line:
                return printable(line[line.index(name) :].strip(), 500)
    return printable((printed.strip().splitlines() or ["it ended without output"])[-1], 500)


def measure_all(
    chosen: Sequence[Contender], recipe: str, rounds: int, steps: int, show: Show
) -> dict[Contender, Measured]:
    """Every contender once a round, interleaved; who fails once is left out of the rounds to come."""
    found = {contender: Measured([]) for contender in chosen}
    for number in range(rounds):
        for index, (contender, before) in enumerate(found.items(), 1):
            if before.reason:
                continue
            name = f"{contender.adapter} {contender.engine} ({index} of {len(found)})"
            show(measure.titled(name, number + 1, rounds))
            now = run(contender, recipe, steps)
            found[contender] = Measured(before.seconds + now.seconds, now.batch, now.reason)
    return found


def table(found: dict[Contender, Measured]) -> list[str]:
    """The figures, and below them why an engine has none, or what it is good for."""
    rows, reasons = [], []
    for contender, measured in found.items():
        step, rate = "-", "-"
        if measured.seconds:
            step = measure.summary(measured.seconds, 1e3)
            rate = measure.rate(measured.batch / statistics.median(measured.seconds))
        else:
            reasons += measure.folded(f"{contender.adapter} {contender.engine}: {measured.reason}")
        rows.append((contender.engine, contender.launcher, contender.adapter, step, rate))
    good_for = {contender.engine: ENGINES[contender.engine].good_for for contender, it in found.items() if it.seconds}
    figures = measure.table(("engine", "launch", "with", "step, ms", "examples/s"), rows)
    return [*figures, *reasons, "", *measure.table(("engine", "good for"), good_for.items())]


def fastest(found: dict[Contender, Measured]) -> str:
    """The engine of most examples a second, against the next and the last, as a sentence."""
    rates = {
        f"{contender.adapter} {contender.engine}": measured.batch / statistics.median(measured.seconds)
        for contender, measured in found.items()
        if measured.seconds
    }
    first, *others = sorted(rates, key=lambda name: -rates[name])
    sentence = f"{first} is fastest with {measure.rate(rates[first])} examples/s"
    for name in dict.fromkeys((others[0], others[-1]) if others else ()):
        sentence += f", {measure.times(rates[first] / rates[name])} {name}"
    return f"{sentence}."


def main(argv: Sequence[str]) -> int:
    """Prints the table, and all of it as JSON; 1 where nothing could be measured. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain bench engines", argv)
    recipes.load(options.recipe)
    installed = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
    chosen = contenders([options.framework] if options.framework else installed, options.ranks)
    with Status("bench engines") as status:
        found = measure_all(chosen, options.recipe, options.rounds, options.steps, status.update)
    results = [
        {"adapter": c.adapter, "engine": c.engine, "start": c.launcher, "step_seconds": m.seconds, "reason": m.reason}
        for c, m in found.items()
    ]
    times = {f"{c.adapter} {c.engine}": m.seconds for c, m in found.items() if m.seconds}
    if not times:
        print("\n".join(table(found)))
        return 1
    everything = {"recipe": options.recipe, "ranks": options.ranks, "engines": results}
    draw = functools.partial(measure.bars, found=times, unit="ms a step", scale=1e3)
    measure.Answer("engines", table(found), fastest(found), everything, draw).conclude(options)
    return 0
