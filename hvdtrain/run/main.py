"""From the command line to the first framework import, and from an error to an exit code: what all adapters share."""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence

from hvdtrain import datasets
from hvdtrain.core import compatibility
from hvdtrain.core import network as networks
from hvdtrain.core import plan as plans
from hvdtrain.core.compatibility import Adapter, Choice, EngineSpec, Framework, framework_of
from hvdtrain.core.plan import Plan
from hvdtrain.core.recipe import Recipe, located
from hvdtrain.core.user_code import is_path
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import devices, keys, rendezvous
from hvdtrain.ranks.world import World, joined
from hvdtrain.record import folder as folders
from hvdtrain.record import handover, trackers
from hvdtrain.record.folder import Identity, ResumePoint, RunFolder
from hvdtrain.record.journal import launch_record, record_job
from hvdtrain.run.ending import Ending, begin
from hvdtrain.run.options import Options, parse_run
from hvdtrain.run.run import Run
from hvdtrain.terminal import SCREEN


def prepare(adapter: Adapter, argv: Sequence[str], ending: Ending) -> Run:
    """Reads recipe, data and output folder. Raises HvdtrainError; loads no framework, starts no collective."""
    world, topology, framework = ending.world, ending.topology, framework_of(adapter)
    recipe, options = parse_run(f"python -m hvdtrain.{adapter}", argv, adapter)
    if topology.is_rank_0:
        trackers.check(options.tracker)
    engine = registry.choose(options.engine, topology.launcher)
    visible = devices.visible_gpus(os.environ) if engine.devices else 0
    own_devices = registry.devices_of(engine, options.devices, visible, recipe.device)
    choice = Choice(recipe, adapter, engine, topology, own_devices, options.devices, ENGINES.values())
    compatibility.check(choice, os.environ)
    for library in dict.fromkeys((framework, adapter)):
        networks.require(library, f"hvdtrain.{adapter}")
    if recipe.cache_dir and topology.is_rank_0:
        print(f"copying {recipe.data_dir} to {recipe.cache_dir} on each node that has no copy", flush=True)
    SCREEN.waiting(f"preparing the data set {recipe.dataset}")
    world.busy(f"prepares the data set {recipe.dataset}")
    with ending.journal.within("data"):
        dataset = load_dataset(recipe, framework)
    world.busy("")
    replicas = len(own_devices) if engine.replicas else 1
    local_batches = 1 if engine.asynchronous else topology.size * replicas
    plan = plans.make(recipe, local_batches, dataset, networks.of(recipe, framework, dataset))
    connect(world, engine)
    identity = folders.identity_of(plan, framework, dataset.contents())
    folder, resume = _open_folder(plan, identity, engine.name, options, ending)
    return Run(
        identity,
        recipe,
        engine.name,
        own_devices,
        folder,
        resume,
        world,
        ending.journal,
        recipe,
        dataset,
        plan,
        trackers=options.tracker,
    )


def _open_folder(
    plan: Plan, identity: Identity, engine: str, options: Options, ending: Ending
) -> tuple[RunFolder | None, ResumePoint]:
    """On rank 0, the run folder and what the run resumes from; on another rank neither."""
    if not ending.topology.is_rank_0:
        return None, ResumePoint()
    folder, resume = folders.open_run(plan, ending.topology, identity, options.output, options.resume)
    record_launch(ending, folder, identity.framework, engine, resume, plan.valid_examples)
    ranks = ending.topology.size
    fewer = [size for size in range(1, ranks) if plan.size == ranks and plan.may_have(size)]
    handover.write(os.environ, "run", run=str(folder.path.absolute()), step=resume.step, ranks=ranks, fewer=fewer)
    return folder, resume


def record_launch(
    ending: Ending,
    folder: RunFolder,
    framework: Framework,
    engine: str,
    resume: ResumePoint,
    valid_examples: int | None = None,
) -> None:
    """On rank 0: from now on the folder has the launch's records, and its status where a rank is lost."""
    ending.folder, journal = folder, ending.journal
    about = functools.partial(launch_record, ending.topology, framework, engine, resume.step, valid_examples)
    journal.open(folder.path, about)
    threading.Thread(target=record_job, args=(folder.path, journal.record), name="job", daemon=True).start()
    if resume.checkpoint:
        journal.event("resume", f"resumes from the checkpoint of step {resume.step}", step=resume.step)


def load_dataset(recipe: Recipe, framework: Framework = "torch") -> datasets.Dataset:
    """The recipe's data set. The framework is loaded only for a data set of the user's. Raises DataError,
    RecipeError."""
    if is_path(recipe.dataset):
        of_framework = importlib.import_module(f"hvdtrain.{framework}.examples")
        return of_framework.load(recipe)  # type: ignore[no-any-return]
    recipe = located(recipe)
    return datasets.load(recipe.dataset, **{key: getattr(recipe, key) for key in datasets.keys_of(recipe.dataset)})


def main(adapter: Adapter, argv: Sequence[str], train: Callable[[Run], None]) -> int:
    """Prepares the run and trains it. Returns the exit code. An error that a user can meet is one line on stderr."""
    try:
        ending = begin(insecure=keys.INSECURE in {argument.replace("_", "-") for argument in argv})
    except HvdtrainError as error:
        SCREEN.close()
        return error.exit_code
    with contextlib.closing(SCREEN), ending:
        run = prepare(adapter, argv, ending)
        ending.began = True
        ending.journal.enter("rendezvous")
        with joined(ending.world, run.framework, run.engine, os.environ):
            keep_memory(run.recipe.device)
            train(run)
    return ending.code


def keep_memory(device: str) -> None:
    """Lets a rank that trains on the CPU keep what it frees."""
    if device == "cpu" or not devices.visible_gpus(os.environ):
        devices.keep_memory(os.environ)


def connect(world: World, engine: EngineSpec) -> None:
    """Connects the ranks before an engine that needs rank 0's address, where the launcher has named no host."""
    if engine.needs_address and world.topology.size > 1 and not world.rendezvous:
        world.connect_at(rendezvous.from_host_or_mpi(world.topology, os.environ))
