"""From the command line to a run that is ready to train, before any framework is imported."""

import contextlib
import functools
import importlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hvdtrain import datasets
from hvdtrain.core import compatibility
from hvdtrain.core import network as networks
from hvdtrain.core import plan as plans
from hvdtrain.core.compatibility import Adapter, Choice, EngineSpec, Framework, framework_of
from hvdtrain.core.recipe import Recipe, located
from hvdtrain.core.user_code import is_path
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.launch import devices, keys, rendezvous
from hvdtrain.ranks.world import World, joined
from hvdtrain.record import checkpoint, handover, trackers
from hvdtrain.record import folder as folders
from hvdtrain.record.folder import ResumePoint, RunFolder
from hvdtrain.record.journal import launch_record, record_job
from hvdtrain.run.ending import Ending, begin
from hvdtrain.run.loop import Loop
from hvdtrain.run.options import layout_of, parse_run
from hvdtrain.run.run import Run
from hvdtrain.terminal import SCREEN, postponed


def prepare(adapter: Adapter, argv: Sequence[str], ending: Ending) -> Run:
    """Reads the recipe, the data set and the run folder. It imports no framework and starts no collective library.
    Raises HvdtrainError."""
    world, topology, framework = ending.world, ending.topology, framework_of(adapter)
    recipe, options = parse_run(f"python -m hvdtrain.{adapter}", argv, adapter)
    if topology.is_rank_0:
        trackers.check(options.tracker)
    engine = registry.choose(options.engine, topology)
    visible = devices.visible_gpus(os.environ) if engine.devices else 0
    own_devices = registry.devices_of(engine, options.devices, visible, recipe.device)
    choice = Choice(recipe, adapter, engine, topology, own_devices, options.devices, ENGINES.values())
    compatibility.check(choice, os.environ)
    for library in dict.fromkeys((framework, adapter)):
        networks.require(library, f"hvdtrain.{adapter}")
    if recipe.cache_dir and topology.is_rank_0:
        print(f"copying {recipe.data_dir} to {recipe.cache_dir} on each node that has no copy", flush=True)
    SCREEN.waiting(f"preparing the data set {recipe.dataset}")
    world.readiness.busy(f"prepares the data set {recipe.dataset}")
    with ending.journal.within("data"):
        dataset = load_dataset(recipe, framework)
    world.readiness.busy("")
    replicas = len(own_devices) if engine.replicas else 1
    local_batches = 1 if engine.asynchronous else topology.size * replicas
    plan = plans.make(
        recipe, 1 if options.evaluate else local_batches, dataset, networks.of(recipe, framework, dataset)
    )
    if options.evaluate:  # also on a number of ranks that does not divide the batch
        batch = -(-recipe.batch_size // (local_batches * recipe.accumulation_steps)) if recipe.batch_size else 0
        plan = replace(plan, size=local_batches, micro_batch=batch or plan.micro_batch)
    connect(world, engine)
    identity = folders.identity_of(plan, framework, dataset.contents())
    folder: RunFolder | None = None
    resume = ResumePoint()
    if topology.is_rank_0 and options.evaluate:
        found, _ = checkpoint.chosen(run := options.evaluate, best=options.best)
        if (theirs := found.meta.get("framework")) != framework:
            raise CheckpointError(f"{run} is a run of {theirs}: python -m hvdtrain.{theirs} --evaluate {run}")
        resume = ResumePoint(found)
    elif topology.is_rank_0:
        folder, resume = folders.open_run(plan, topology, identity, options.output, options.resume)
        unused = {*layout_of(recipe, adapter).hidden, *([] if plan.has_batch_norm else ["batch_norm"])}
        given = ", ".join(key for key in recipe.model_dump(exclude_defaults=True) if key in unused)
        notes = [f"no effect   {given}: for other frameworks, data sets or models"] * bool(given)
        notes += devices.why_cpu(os.environ) if recipe.device == "auto" else ()
        resume = ResumePoint(resume.checkpoint, (*resume.notes, *notes))
        fewer = [size for size in range(1, topology.size) if plan.size == topology.size and plan.may_have(size)]
        record_launch(ending, folder, framework, engine.name, resume, plan.valid_examples, dataset.classes, fewer=fewer)
    return Run(
        identity,
        recipe,
        engine.name,
        own_devices,
        folder,
        resume,
        world,
        ending.journal,
        dataset,
        plan,
        trackers=options.tracker,
        evaluates="" if not options.evaluate else "json" if options.json else "line",
    )


def evaluate(loop: Loop) -> None:
    """Prints the metrics of the run's checkpoint. Every rank calls it. Raises HvdtrainError."""
    run, trainer = loop.run, loop.trainer
    run.journal.enter("validation")
    valid = trainer.validate().over_ranks(trainer.engine.sum)
    if not run.topology.is_rank_0:
        return
    at = {"step": loop.progress.step, "epoch": loop.progress.epoch, "valid_examples": round(valid.count)}
    means = {"valid_loss": valid.mean_loss, **{f"valid_{name}": mean for name, mean in valid.means.items()}}
    line = ", ".join(f"{name.replace('_', ' ', 1)}={mean:.6g}" for name, mean in means.items())
    if run.evaluates == "json":
        line = json.dumps(at | {name: mean if math.isfinite(mean) else None for name, mean in means.items()})
    else:
        line = f"INFO - step {at['step']}, epoch {at['epoch']}, {at['valid_examples']} examples: {line}"
    SCREEN.print(line)


def record_launch(
    ending: Ending,
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
    ending.listener.folder, journal, ranks = folder, ending.journal, ending.topology.size
    about = functools.partial(launch_record, ending.topology, framework, engine, resume.step, valid_examples, classes)
    journal.open(folder.path, about)
    threading.Thread(target=record_job, args=(folder.path, journal.record), name="job", daemon=True).start()
    if resume.checkpoint:
        journal.event("resume", f"resumes from the checkpoint of step {resume.step}", step=resume.step)
    handover.write(os.environ, "run", run=str(folder.path.absolute()), step=resume.step, ranks=ranks, **more)


def load_dataset(recipe: Recipe, framework: Framework = "torch") -> datasets.Dataset:
    """The recipe's data set. Only a data set of the user's imports the framework. Raises DataError and RecipeError."""
    if is_path(recipe.dataset):
        of_framework = importlib.import_module(f"hvdtrain.{framework}.examples")
        return of_framework.load(recipe)  # type: ignore[no-any-return]
    recipe = located(recipe)
    return datasets.load(recipe.dataset, **{key: getattr(recipe, key) for key in datasets.keys_of(recipe.dataset)})


def main(adapter: Adapter, argv: Sequence[str], train: Callable[[Run], None]) -> int:
    """Prepares the run and trains it. Returns the exit code. An error that a user can fix is one line on stderr."""
    try:
        ending = begin(insecure=keys.INSECURE in {argument.replace("_", "-") for argument in argv})
    except HvdtrainError as error:
        return error.exit_code
    with ending:
        run = prepare(adapter, argv, ending)
        ending.began = True
        ending.journal.enter("rendezvous")
        with joined(ending.world, run.framework, run.engine, os.environ):
            keep_memory(run.recipe.device)
            train(run)
    return ending.code


@contextlib.contextmanager
def importing(run: Run, title: str) -> Iterator[None]:
    """For the imports of a framework, which take seconds: only now that recipe, data and run folder are checked."""
    run.journal.enter("import")
    SCREEN.waiting(f"importing {title}")
    with postponed():
        yield
    run.journal.enter("rendezvous")


def keep_memory(device: str) -> None:
    """Lets a rank that trains on the CPU keep the memory that it frees."""
    if device == "cpu" or not devices.visible_gpus(os.environ):
        devices.keep_memory(os.environ)


def connect(world: World, engine: EngineSpec) -> None:
    """Connects the ranks before an engine that needs rank 0's address, where the launcher has named no host."""
    if engine.needs_address and world.topology.size > 1 and not world.rendezvous:
        world.connect_at(rendezvous.from_host_or_mpi(world.topology, os.environ))
