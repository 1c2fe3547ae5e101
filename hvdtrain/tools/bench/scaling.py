"""`bench scaling`: the step time on 1, 2, 4, … ranks, in runs that are interleaved, and the
efficiency.

Weak: every rank keeps its batch. Strong: the ranks share the batch of one. On CPUs every rank
computes with one thread: a rank alone on all cores could not be compared with a rank among others.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from hvdtrain import processors
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import RecipeError, TrainingError
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.slurm import check_plugin, job_id
from hvdtrain.launch.topology import discover
from hvdtrain.terminal import Show, Status
from hvdtrain.tools import slurm
from hvdtrain.tools.bench import engines, measure
from hvdtrain.tools.bench.ranks import launcher
from hvdtrain.untrusted import whole_number

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(name for name, row in ENGINES.items() if row.launcher and not row.asynchronous)]

Mode = Literal["weak", "strong"]
Found = dict[str, dict[int, list[float]]]
"""The seconds of a step in each round, by mode and ranks."""

CPU_BATCH = 16


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures the step on growing numbers of ranks, interleaved, and prints the efficiency.

    On this machine it starts them with horovodrun or torchrun; inside a SLURM allocation with srun,
    growing step by step. --site prints the job script of such a sweep, --submit gives it to sbatch.
    """

    ranks: Annotated[str | None, Flag("as 1,2,4; left out: 1,2", metavar="N,N")] = None
    mode: Annotated[
        Literal["weak", "strong", "both"], Flag("weak: the batch is a rank's; strong: all ranks share it")
    ] = "weak"
    framework: Literal["torch", "tensorflow"] = "torch"
    engine: Annotated[EngineName, Flag("what joins the ranks")] = "horovod"
    recipe: Annotated[str, Flag("recipe to take the steps from")] = "synthetic"
    batch: Annotated[
        measure.Count | None, Flag(f"of one rank; left out: {CPU_BATCH} on CPUs, the recipe's on GPUs")
    ] = None
    rounds: Annotated[measure.Count, Flag("runs of each number of ranks, interleaved")] = 3
    steps: Annotated[measure.Count, Flag("steps of a run, besides its warm-up")] = 10
    mpi: Annotated[str | None, Flag("srun's plugin: pmix, pmi2, ...", metavar="PLUGIN")] = None
    site: Annotated[str | None, Flag("print the job script for it: slurm --list")] = None
    nodes: Annotated[str | None, Flag("as 1,2,4; with --site: in place of --ranks", metavar="N,N")] = None
    time: Annotated[str | None, Flag("of the job, HH:MM:SS", metavar="TIME")] = None
    account: Annotated[str | None, Flag("the project that pays", metavar="NAME")] = None
    submit: Annotated[bool, Flag("give the job script to sbatch")] = False


@dataclass(frozen=True)
class Allocation:
    """The tasks and GPUs that SLURM gave to this job on each node."""

    tasks: int
    gpus: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Allocation | None":
        """The allocation of the job whose shell this is; None outside of a job."""
        if not job_id(environ):
            return None
        gpus = whole_number(environ.get("SLURM_GPUS_ON_NODE", ""))
        tasks = whole_number(environ.get("SLURM_NTASKS_PER_NODE", ""))
        return cls(tasks or 1, gpus or 0)

    def srun(self, ranks: int, plugin: str | None) -> list[str]:
        """The words of srun that start so many ranks, on as few nodes as hold them."""
        here = min(ranks, self.tasks)
        command = ["srun", "--kill-on-bad-exit=1", f"--nodes={-(-ranks // self.tasks)}", f"--ntasks={ranks}"]
        command += [f"--ntasks-per-node={here}"]
        command += [f"--gres=gpu:{min(here, self.gpus)}"] if self.gpus else []
        return [*command, f"--mpi={plugin}"] if plugin else command


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark, or prints or submits its job; the exit code. Raises HvdtrainError."""
    options: Options = flags.parse(Options, "python -m hvdtrain bench scaling", argv)
    _check(options)
    if options.site:
        script = job(options, options.site)
        if options.submit:
            with Status("giving the job to SLURM (sbatch)"):
                script = slurm.submit(script) + "\n"
        print(script, end="")
        return 0
    if discover(os.environ).size > 1:
        raise RecipeError("bench scaling starts its ranks itself; call it once, without srun, mpirun or torchrun.")
    ranks, batch = numbers("ranks", options.ranks or "1,2"), _batch(options)
    modes: list[Mode] = ["weak", "strong"] if options.mode == "both" else [options.mode]
    if "strong" in modes and batch < ranks[-1]:
        raise RecipeError(f"--batch must be at least the {ranks[-1]} ranks that share it, got {batch}.")
    measuring = functools.partial(_measure, options, modes, ranks, batch)
    return measure.run("bench scaling", measuring, lambda found: answer(options, batch, *found), options)


def answer(options: Options, batch: int, found: Found, waiting: Found) -> measure.Answer:
    """The table, the efficiency on the most ranks, and all figures."""
    allocation, machine = Allocation.from_environ(os.environ), measure.machine()
    cores = None if allocation or visible_gpus(os.environ) else processors.count()
    model = recipes.load(options.recipe).model
    results = {
        "recipe": options.recipe,
        "model": model,
        "framework": options.framework,
        "engine": options.engine,
        "batch": batch,
        "global_batch": {mode: {n: of_all(mode, n, batch) for n in times} for mode, times in found.items()},
        "threads": None if allocation else 1,
        "cores": cores,
        "ranks_per_node": allocation.tasks if allocation else 1,
        **found,
        "waiting": waiting,
        "efficiency": {mode: efficiencies(mode, times) for mode, times in found.items()},
    }
    processor = f"{machine['processor']}, {counted(machine['cpus'], 'core')}"
    title = f"{options.recipe} ({model}), {options.framework}, {options.engine}, on {machine['host']} ({processor})"
    most = max(ranks for times in found.values() for ranks in times)
    lines = [*measure.folded(title), "", *table(found, batch)]
    both = " ".join(filter(None, (sentence(found), sharing(most, cores))))
    return measure.Answer("scaling", lines, both, results, figure(found))


def sharing(ranks: int, cores: float | None) -> str:
    """A sentence where the ranks share cores; "" where each has one, or the number of cores is not known."""
    if not cores or ranks <= cores:
        return ""
    return (
        f"{counted(ranks, 'rank')} share {counted(int(cores), 'core')}: each has less to compute with than on fewer "
        "ranks, whatever the network, so this says nothing of a cluster."
    )


def numbers(flag: str, text: str) -> list[int]:
    """The numbers of a flag, as 1,2,4. Raises RecipeError where they do not grow."""
    most = measure.MOST_RANKS
    return measure.growing(int, text, most, f"--{flag} must be growing whole numbers in [1, {most}], as in 1,2,4")


def of_all(mode: str, ranks: int, batch: int) -> int:
    """The global batch: in weak scaling `batch` is that of a rank."""
    return batch * ranks if mode == "weak" else batch


def efficiencies(mode: str, times: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """The speed of a rank in each round, by ranks, as a share of its speed on the fewest ranks."""
    fewest = min(times)
    return {
        ranks: [
            first / (now * (ranks / fewest if mode == "strong" else 1))
            for first, now in zip(times[fewest], seconds, strict=True)
        ]
        for ranks, seconds in times.items()
    }


def table(found: Found, batch: int) -> list[str]:
    """The lines of a table for each mode."""
    lines: list[str] = []
    for mode, times in found.items():
        ratios = efficiencies(mode, times)
        rows = []
        for ranks, seconds in times.items():
            rate = of_all(mode, ranks, batch) / measure.spread(seconds).median
            rows.append(
                (str(ranks), measure.summary(seconds, 1e3), measure.rate(rate), measure.summary(ratios[ranks], 1, 3))
            )
        lines += [""] * bool(lines)
        lines += [f"{mode} scaling, batch {batch} {'a rank' if mode == 'weak' else 'in all'}"]
        lines += measure.table(("ranks", "step, ms", "examples/s", "efficiency"), rows)
    return lines


def sentence(found: Found) -> str:
    """A sentence on the efficiency on the most ranks."""
    every = next(iter(found.values()))
    fewest, most = min(every), max(every)
    if most == fewest:
        return f"Only {counted(fewest, 'rank')} measured: give more --ranks to see how it scales."
    ratios = {mode: efficiencies(mode, times)[most] for mode, times in found.items() if most in times}
    rates = " and ".join(f"{measure.spread(of_mode).median:.0%} ({mode} scaling)" for mode, of_mode in ratios.items())
    return f"On {counted(most, 'rank')} each works at {rates} of a rank's speed on {counted(fewest, 'rank')}."


def figure(found: Found) -> measure.Figure:
    """The chart of efficiency over ranks, a line for each mode."""
    ratios = {mode: efficiencies(mode, times) for mode, times in found.items()}
    lines = {mode: {ranks: [100 * each for each in of] for ranks, of in by.items()} for mode, by in ratios.items()}
    fewest = min(ranks for times in found.values() for ranks in times)
    return measure.Figure(lines, "ranks", f"% of a rank's speed on {counted(fewest, 'rank')}", base=2)


def job(options: Options, site_name: str) -> str:
    """The script of a job that runs the sweep. Raises JobError, RecipeError."""
    site = slurm.site_named(site_name)
    nodes = numbers("nodes", options.nodes or "1,2")
    ranks = sorted({1, *(count * site.gpus for count in nodes)})
    command = ["python", "-m", "hvdtrain", "bench", "scaling", "--ranks", ",".join(map(str, ranks))]
    for name in ("mode", "framework", "engine", "recipe", "rounds", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--batch", str(options.batch)] if options.batch else []
    plugin = options.mpi or site.mpi
    command += ["--mpi", plugin] if plugin else []
    command += ["--output", str(options.output or "scaling-$SLURM_JOB_ID")]
    job_options = slurm.Options(
        site=site_name, nodes=nodes[-1], time=options.time, account=options.account, job_name="scaling"
    )
    return slurm.render(site, job_options, command, starts_steps=True)


def _check(options: Options) -> None:
    if options.framework not in ENGINES[options.engine].classes:
        raise RecipeError(f"--engine {options.engine} does not go with --framework {options.framework}; drop one.")
    check_plugin(options.mpi)
    if options.site and options.ranks:
        raise RecipeError("--ranks follow from --nodes at a site; drop --ranks, or --site.")
    for name in ("nodes", "submit", "time", "account"):
        if getattr(options, name) and not options.site:
            raise RecipeError(f"--{name} belongs to a job script; give --site, too.")
    recipes.load(options.recipe)


def _batch(options: Options) -> int:
    if options.batch:
        return options.batch
    if not visible_gpus(os.environ):
        return CPU_BATCH
    recipe = recipes.load(options.recipe)
    batch = recipe.batch_size_per_rank or recipe.batch_size
    assert batch is not None  # a recipe has one of them
    return batch


def _measure(
    options: Options, modes: Sequence[Mode], ranks: Sequence[int], batch: int, show: Show, known: measure.Known
) -> None:
    """Measures every number of ranks once a round. What is the same in both modes, as one rank
    alone, is measured once. `known` gets the seconds of a step, and those in which a rank waits for
    the others, where they are known."""
    waiting: dict[str, list[float]] = {}

    def named(mode: Mode, number: int) -> str:
        return f"{counted(number, 'rank')}, batch {of_all(mode, number, batch)}"

    def by_mode(of_name: Mapping[str, list[float]]) -> Found:
        found = {mode: {n: of_name[named(mode, n)] for n in ranks if named(mode, n) in of_name} for mode in modes}
        return {mode: times for mode, times in found.items() if times}

    contenders = {
        named(mode, n): functools.partial(_run, options, waiting, named(mode, n), n, of_all(mode, n, batch))
        for mode in modes
        for n in ranks
    }
    measure.interleaved(
        contenders,
        options.rounds,
        warm_up=0,
        show=show,
        known=lambda seconds: known((by_mode(seconds), by_mode(waiting))),
    )


def _run(options: Options, waiting: dict[str, list[float]], name: str, number: int, batch: int) -> float:
    """The median seconds of a step of one run. The seconds in which a rank waits for the others
    are added to `waiting`, where they are known. Raises TrainingError where the run fails, EngineUnavailable."""
    allocation = Allocation.from_environ(os.environ)
    environ = {**os.environ, **({} if allocation else {"OMP_NUM_THREADS": "1"})}
    if allocation:
        start = [*allocation.srun(number, options.mpi), sys.executable]
    else:
        start = launcher(ENGINES[options.engine].launcher if number > 1 else None, number)
    command = [*start, "-m", f"hvdtrain.{options.framework}", *run_flags(options, number, batch)]
    measured = engines.trained(command, environ, Path.cwd() if allocation else None)
    if not measured.seconds:
        raise TrainingError(f"the run with {name} failed: {measured.reason}")
    if measured.waiting is not None:
        waiting.setdefault(name, []).append(measured.waiting)
    return measured.seconds[0]


def run_flags(options: Options, number: int, batch: int) -> list[str]:
    """The command line of one run of the requested steps, all of which are logged."""
    steps = options.steps + engines.WARM_UP
    command = [options.recipe, "--batch-size", str(batch), "--max-steps", str(steps), "--epochs", str(steps)]
    command += ["--log-every-steps", "1", "--checkpoint-every-epochs", str(steps)]
    if recipes.load(options.recipe).dataset == "synthetic":
        command += ["--examples", str(steps * batch)]  # the validation at the end reads a tenth as many
    return [*command, "--engine", "local" if number == 1 else options.engine]
