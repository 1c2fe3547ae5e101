"""From the command line to the first framework import: the part of a run that all adapters share."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain import datasets, flags, guard, output
from hvdtrain import plan as plans
from hvdtrain.errors import HvdtrainError, OutputError
from hvdtrain.output import Start
from hvdtrain.plan import Plan
from hvdtrain.recipe import Recipe
from hvdtrain.topology import Topology, discover

# A launcher ends all ranks when the first one ends: a silent one that is quicker would cut the speaker off.
SECONDS_TO_SPEAK = 5


@dataclass(frozen=True)
class Run:
    """Everything an adapter needs; `start` is the chief's alone."""

    recipe: Recipe
    engine: str
    topology: Topology
    dataset: datasets.Dataset
    plan: Plan
    start: Start | None


def prepare(prog: str, argv: Sequence[str], topology: Topology) -> Run:
    """Reads recipe, data and output folder. Raises HvdtrainError; loads no framework, starts no collective."""
    recipe, options = flags.parse_run(prog, argv)
    engine = options.engine
    if engine == "auto":
        engine = "local" if topology.launcher == "alone" else "horovod"
    guard.check_launcher(topology, engine)
    dataset = load_dataset(recipe)
    plan = plans.make(recipe, topology, dataset)
    start = output.start(plan, topology, options.output, options.resume) if topology.is_chief else None
    return Run(recipe, engine, topology, dataset, plan, start)


def load_dataset(recipe: Recipe) -> datasets.Dataset:
    """The recipe's data set. Raises DataError."""
    return datasets.load(
        recipe.dataset,
        data_dir=recipe.data_dir,
        seed=recipe.seed,
        train_crop=recipe.train_crop,
        valid_resize=recipe.valid_resize,
        valid_crop=recipe.valid_crop,
        image_size=recipe.image_size,
        classes=recipe.classes,
        examples=recipe.examples,
    )


def main(prog: str, argv: Sequence[str], train: Callable[[Run], None]) -> int:
    """Prepares and trains; the exit code. An error a user can meet is one line on stderr."""
    topology = Topology.alone()
    run = None
    try:
        topology = discover(os.environ)
        run = prepare(prog, argv, topology)
        train(run)
    except HvdtrainError as error:
        return _fail(error, topology, run)
    except KeyboardInterrupt:
        if topology.is_chief:
            print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        full = OutputError(f"{error.filename or 'the run folder'}: {error.strerror}; free space, then start again.")
        return _fail(full, topology, run)
    return 0


def _fail(error: HvdtrainError, topology: Topology, run: Run | None) -> int:
    if run and run.start:
        with contextlib.suppress(OSError):  # the disk may be what failed
            run.start.folder.write_status("failed", error=str(error))
    # Before training a host's first rank speaks for the host; later, a damaged file may be one rank's alone.
    if topology.is_chief or (not error.everywhere and (run or topology.local_rank == 0)):
        print(one_line(error, topology), file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SPEAK)
    return error.exit_code


def one_line(error: HvdtrainError, topology: Topology) -> str:
    """`DataError: …`, with rank and host where there are several."""
    where = f" (rank {topology.rank} on {topology.host})" if topology.size > 1 else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"
