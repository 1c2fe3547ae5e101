"""What every kind of run sets up: the data set, the connections between its ranks, the record of its launch."""

import functools
import os
import threading

from hvdtrain import datasets
from hvdtrain.core.compatibility import EngineSpec, Framework
from hvdtrain.core.recipe import Recipe, located
from hvdtrain.core.user_code import is_path
from hvdtrain.core.wording import counted
from hvdtrain.engines import registry
from hvdtrain.launch import devices, rendezvous
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.world import World
from hvdtrain.record import handover
from hvdtrain.record.folder import ResumePoint, RunFolder
from hvdtrain.record.journal import launch_record, record_job
from hvdtrain.run.process import RankProcess


def load_dataset(recipe: Recipe, framework: Framework = "torch") -> datasets.Dataset:
    """The recipe's data set. Only a data set of the user's imports the framework. Raises DataError and RecipeError."""
    if is_path(recipe.dataset):
        return registry.module(framework, "data").load(recipe)  # type: ignore[no-any-return]
    recipe = located(recipe)
    return datasets.load(recipe.dataset, **{key: getattr(recipe, key) for key in datasets.keys_of(recipe.dataset)})


def with_readers(recipe: Recipe, topology: Topology, framework: Framework) -> tuple[Recipe, list[str]]:
    """The recipe with a number in place of `workers: auto`, and lines that say which.

    A set in memory needs no reader. Where a GPU computes, all cores of the rank but one read; elsewhere one reader
    does, beside the computing.
    """
    if recipe.workers != "auto":
        return recipe, []
    cpus, environ = len(os.sched_getaffinity(0)), dict(os.environ)
    environ.pop("OMP_NUM_THREADS", None)  # it is of computing, not of reading
    cores = devices.threads(cpus, os.cpu_count() or 1, topology, environ) or cpus
    on_gpu = recipe.device != "cpu" and devices.visible_gpus(os.environ) > 0
    most = max(1, cores - 1) if on_gpu else 1
    if is_path(recipe.dataset):
        workers = 1 if framework == "tensorflow" else most
    else:
        workers = 0 if datasets.DATASETS[recipe.dataset].is_in_memory else most
    line = f"readers     {workers} a rank, which has {counted(cores, 'core')} (workers auto)"
    return recipe.model_copy(update={"workers": workers}), [line]


def connect(world: World, engine: EngineSpec) -> None:
    """Connects the ranks before an engine that needs rank 0's address, where the launcher has named no host."""
    if engine.needs_address and world.topology.size > 1 and not world.rendezvous:
        world.connect_at(rendezvous.from_host_or_mpi(world.topology, os.environ))


def record_launch(
    process: RankProcess,
    folder: RunFolder,
    framework: Framework,
    engine: str,
    resume: ResumePoint,
    valid_examples: int | None = None,
    classes: int | None = None,
    **more: object,
) -> None:
    """Records this launch in the run folder, on rank 0, and from now on the loss of a rank too. `more`: what a
    supervisor learns beside the folder."""
    process.listener.folder, journal, ranks = folder, process.journal, process.topology.size
    about = functools.partial(launch_record, process.topology, framework, engine, resume.step, valid_examples, classes)
    journal.open(folder.path, about)
    threading.Thread(target=record_job, args=(folder.path, journal.record), name="job", daemon=True).start()
    if resume.checkpoint:
        journal.event("resume", f"resumes from the checkpoint of step {resume.step}", step=resume.step)
    handover.write(os.environ, "run", run=str(folder.path.absolute()), step=resume.step, ranks=ranks, **more)


def keep_memory(device: str) -> None:
    """Lets a rank that trains on the CPU keep the memory that it frees."""
    if device == "cpu" or not devices.visible_gpus(os.environ):
        devices.keep_memory(os.environ)
