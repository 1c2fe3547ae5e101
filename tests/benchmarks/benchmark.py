"""What the benchmarks of hvdtrain itself share: how one starts, and a run for its ranks to train."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain import cli, terminal
from hvdtrain.core import plan as plans
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Framework
from hvdtrain.engines import frameworks
from hvdtrain.launch.topology import discover
from hvdtrain.record import folder as folders
from hvdtrain.run.loop import Loop
from hvdtrain.run.process import RankProcess
from hvdtrain.run.run import Run
from hvdtrain.run.setup import keep_memory, load_dataset, record_launch
from hvdtrain.run.trainer import Trainer
from hvdtrain.terminal import Show
from hvdtrain.tools.bench import ranks

RANK = "rank"
Steps = Iterator[None]
"""A loop that trains without end, and yields after every step."""


def start(name: str, rank: Callable[..., None] | None = None) -> None:
    """Runs the command of this program, or `rank` with the arguments behind the word "rank"."""
    if rank and sys.argv[1:2] == [RANK]:
        rank(*sys.argv[2:])
        return
    terminal.listen()
    cli.COMMANDS[name] = ("__main__", "")  # errors and Ctrl-C are one line, as of every command
    sys.exit(cli.main([name, *sys.argv[1:]]))


@contextlib.contextmanager
def training(framework: Framework, recipe_name: str, engine: str) -> Iterator[tuple[Run, Show]]:
    """This rank's run of a recipe on the CPU, without an end, and what shows what is measured now.

    What the run prints goes into a file of its folder, which is gone afterwards.
    """
    topology = discover(os.environ)
    recipe = recipes.load(recipe_name, {"epochs": 10_000, "lr_schedule": "constant", "device": "cpu"})
    dataset = load_dataset(recipe, framework)
    plan = plans.make(recipe, topology.size, dataset, frameworks.network_of(recipe, framework, dataset))
    keep_memory(recipe.device)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # not /tmp, which may be memory
        of_run, resume, process = None, folders.ResumePoint(), RankProcess(topology)
        identity = folders.identity_of(plan, framework, dataset.contents())
        if topology.is_rank_0:
            of_run, _ = folders.open_run(plan, topology, identity, Path(folder, "run"), "never")
            record_launch(process, of_run, framework, engine, resume)
        run = Run(identity, recipe, engine, (), of_run, resume, process.world, process.journal, dataset, plan)
        with (
            ranks.showing(topology) as show,
            Path(folder, "log").open("w") as log,
            contextlib.redirect_stdout(log),
        ):
            yield run, show
        process.journal.close()


def ours(loop: Loop[Trainer]) -> Steps:
    """hvdtrain's loop, with its log, metrics and guard."""
    while True:
        loop.progress.sample = 0
        yield from loop.epoch()
