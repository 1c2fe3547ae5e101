"""From the command line to a run that is ready to train, before any framework is imported."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain import files
from hvdtrain.core import compatibility
from hvdtrain.core import plan as plans
from hvdtrain.core.compatibility import Adapter, Choice, Framework, framework_of
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe import dump
from hvdtrain.core.recipe.stopping import best_of, rule_of
from hvdtrain.engines import frameworks, registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import CheckpointError, HvdtrainError, OutputError
from hvdtrain.launch import devices, keys
from hvdtrain.ranks.world import joined
from hvdtrain.record import checkpoint, reader, trackers
from hvdtrain.record import folder as folders
from hvdtrain.record.folder import ResumePoint, RunFolder
from hvdtrain.run import weights
from hvdtrain.run.loop import Loop
from hvdtrain.run.options import GROUPS, layout_of, parse_run
from hvdtrain.run.process import RankProcess, start
from hvdtrain.run.run import Run
from hvdtrain.run.setup import connect, keep_memory, load_dataset, record_launch, with_readers
from hvdtrain.terminal import SCREEN, postponed
from hvdtrain.untrusted import printable

DECIDING = [
    key
    for title in ("model", "fine tuning", "batch and epochs", "learning rate", "optimizer", "data")
    for key in GROUPS[title]
    if key not in {"data_dir", "cache_dir", "workers", "decoder", "sample_check", "epochs", "max_steps"}
    and not key.startswith("stop_")
]
"""The keys that decide on a run's results, apart from when it ends."""


def prepare(adapter: Adapter, argv: Sequence[str], process: RankProcess) -> Run:
    """Reads the recipe, the data set and the run folder. It imports no framework and starts no collective library.
    Raises HvdtrainError."""
    world, topology, framework = process.world, process.topology, framework_of(adapter)
    recipe, options = parse_run(f"python -m hvdtrain.{adapter}", argv, adapter)
    if options.evaluate:
        recipe = recipe.model_copy(update={"gradient_noise": False})  # which some numbers of ranks cannot measure
    if topology.is_rank_0:
        trackers.check_installed(options.tracker)
    engine = registry.choose(options.engine, topology)
    visible = devices.visible_gpus(os.environ) if engine.devices else 0
    own_devices = registry.devices_of(engine, options.devices, visible, recipe.device)
    choice = Choice(recipe, adapter, engine, topology, own_devices, options.devices, ENGINES.values())
    compatibility.check_choice(choice, os.environ)
    for library in dict.fromkeys((framework, adapter)):
        frameworks.require(library, f"hvdtrain.{adapter}")
    if recipe.cache_dir and topology.is_rank_0:
        print(f"copying {recipe.data_dir} to {recipe.cache_dir} on each node that has no copy", flush=True)
    SCREEN.waiting(f"preparing the data set {recipe.dataset}")
    world.readiness.busy(f"prepares the data set {recipe.dataset}")
    with process.journal.within("data"):
        dataset = load_dataset(recipe, framework)
    world.readiness.busy("")
    replicas = len(own_devices) if engine.replicas else 1
    local_batches = 1 if engine.asynchronous else topology.size * replicas
    world.readiness.busy("makes the network")
    network = frameworks.network_of(recipe, framework, dataset, keeps=True)
    world.readiness.busy("")
    plan = plans.make(recipe, 1 if options.evaluate else local_batches, dataset, network)
    if options.evaluate:  # also on a number of ranks that does not divide the batch
        batch = -(-recipe.batch_size // (local_batches * recipe.accumulation_steps)) if recipe.batch_size else 0
        plan = replace(plan, size=local_batches, micro_batch=batch or plan.micro_batch)
    connect(world, engine)
    identity = folders.identity_of(plan, framework, dataset.contents())
    recipe, chosen = with_readers(recipe, topology, framework)
    plan = replace(plan, recipe=recipe)
    folder: RunFolder | None = None
    resume = ResumePoint()
    if topology.is_rank_0 and options.evaluate:
        resume = _evaluated(options.evaluate, framework, best=options.best)
    elif topology.is_rank_0:
        _check_finished(options.output, plan)
        folder, resume = folders.open_run(plan, topology, identity, options.output, options.resume)
        unused = {*layout_of(recipe, adapter).hidden, *([] if plan.has_batch_norm else ["batch_norm"])}
        given = ", ".join(key for key in recipe.model_dump(exclude_defaults=True) if key in unused)
        notes = chosen + [f"no effect   {given}: for other frameworks, data sets or models"] * bool(given)
        notes += weights.checked(recipe, framework, resume)
        notes += devices.why_cpu(os.environ) if recipe.device == "auto" else ()
        resume = ResumePoint(resume.checkpoint, (*resume.notes, *notes))
        few = [size for size in range(1, topology.size) if plan.size == topology.size and plan.may_have(size)]
        record_launch(process, folder, framework, engine.name, resume, plan.valid_examples, dataset.classes, fewer=few)
    return Run(
        identity,
        recipe,
        engine.name,
        own_devices,
        folder,
        resume,
        world,
        process.journal,
        dataset,
        plan,
        trackers=options.tracker,
        best=str(best_of(recipe) or ""),
        evaluates="" if not options.evaluate else "json" if options.json else "line",
    )


def _evaluated(run: Path, framework: Framework, *, best: bool) -> ResumePoint:
    """The newest or the best checkpoint of a run. Raises CheckpointError, also where it is of the other framework."""
    found, _ = checkpoint.chosen(run, best=best)
    if (theirs := found.meta.get("framework")) != framework:
        raise CheckpointError(f"{run} is a run of {theirs}: python -m hvdtrain.{theirs} --evaluate {run}")
    return ResumePoint(found)


def _check_finished(output: Path | None, plan: plans.Plan) -> None:
    """Raises OutputError where a run with another seed has finished in the folder, or with another recipe and this one
    would train nothing: its results are not this one's."""
    if output is None or reader.recorded_state(output) != "finished":
        return
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = files.read(output / folders.RECIPE, follow=False)
    before, now = (dict(re.findall(r"^  (\w+): ?(.*)$", each, re.MULTILINE)) for each in (text, dump(plan.recipe)))
    for key in ("seed",) if _trains_on(output, plan) else DECIDING:
        old, new = (values.get(key) or "none" for values in (before, now))
        if key in before and old != new:
            what = f"a run with {key} {printable(old, 200)} has finished in {output}, got {key} {new}"
            raise OutputError(what, remedy=f"give another {{folder}}, or {key} {printable(old, 200)}")


def _trains_on(output: Path, plan: plans.Plan) -> bool:
    """Whether the run in the folder has steps left by this plan, as by more epochs, or whether that is not known."""
    with contextlib.suppress(CheckpointError, IndexError, KeyError, TypeError, ValueError):
        progress = Progress.from_metadata(checkpoint.metadata(checkpoint.committed(output / "checkpoints")[-1]))
        progress.judge_again(rule_of(plan.recipe))
        return not progress.is_over(plan)
    return True


def evaluate(loop: Loop) -> None:
    """Prints the metrics of the run's checkpoint. Every rank calls it. Raises HvdtrainError."""
    run, trainer = loop.run, loop.trainer
    run.journal.enter("validation")
    valid = trainer.validate().over_ranks(trainer.engine.sum)
    if not run.topology.is_rank_0:
        return
    at = {"step": loop.progress.step, "epoch": loop.progress.epoch, "valid_examples": round(valid.count)}
    means = {"valid_loss": valid.mean_loss, **{f"valid_{name}": mean for name, mean in valid.means.items()}}
    if text := run.text_units("cpu"):
        means |= text.of_loss(valid.mean_loss)
    line = ", ".join(f"{name.replace('_', ' ', 1)}={mean:.6g}" for name, mean in means.items())
    if run.evaluates == "json":
        line = json.dumps(at | {name: mean if math.isfinite(mean) else None for name, mean in means.items()})
    else:
        line = f"INFO - step {at['step']}, epoch {at['epoch']}, {at['valid_examples']} examples: {line}"
    SCREEN.print(line)


def main(adapter: Adapter, argv: Sequence[str], train: Callable[[Run], None]) -> int:
    """Prepares the run and trains it. Returns the exit code. An error that a user can fix is one line on stderr."""
    try:
        process = start(insecure=keys.INSECURE in {each.replace("_", "-") for each in argv}, is_program=False)
    except HvdtrainError as error:
        return error.exit_code
    with process:
        run = prepare(adapter, argv, process)
        process.began, process.generates = True, run.dataset.text is not None
        process.journal.enter("rendezvous")
        with joined(process.world, run.identity.framework, run.engine, os.environ):
            keep_memory(run.recipe.device)
            train(run)
    return process.code


@contextlib.contextmanager
def importing(run: Run, title: str) -> Iterator[None]:
    """For the imports of a framework, which take seconds: only now that recipe, data and run folder are checked."""
    run.journal.enter("import")
    SCREEN.waiting(f"importing {title}")
    with postponed():
        yield
    run.journal.enter("rendezvous")
