"""From the command line to the first framework import, and from an error to an exit code: what all adapters share."""

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from hvdtrain import datasets, untrusted
from hvdtrain.core import compatibility
from hvdtrain.core import network as networks
from hvdtrain.core import plan as plans
from hvdtrain.core.compatibility import Adapter, Choice, Framework, framework_of
from hvdtrain.core.own_code import is_path
from hvdtrain.core.plan import Plan
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import HvdtrainError, OutputError, StoppedError
from hvdtrain.launch import devices, keys, rendezvous, slurm_job
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.run import folder as folders
from hvdtrain.run.folder import ResumePoint, RunFolder
from hvdtrain.run.liveness import print_error
from hvdtrain.run.options import Options, parse_run
from hvdtrain.run.run import Run
from hvdtrain.run.signals import TIME_LIMIT_SIGNALS
from hvdtrain.run.world import World, joined


def prepare(adapter: Adapter, argv: Sequence[str], world: World) -> Run:
    """Reads recipe, data and output folder. Raises HvdtrainError; loads no framework, starts no collective."""
    topology, framework = world.topology, framework_of(adapter)
    world.liveness.on_vanished = lambda: slurm_job.cancel_step(os.environ)
    recipe, options = parse_run(f"python -m hvdtrain.{adapter}", argv)
    engine = registry.choose(options.engine, topology.launcher)
    visible = devices.visible_gpus(os.environ) if engine.devices else 0
    own_devices = registry.devices_of(engine, options.devices, visible, recipe.device)
    choice = Choice(recipe, adapter, engine, topology, own_devices, options.devices, ENGINES.values())
    compatibility.check(choice, os.environ)
    if recipe.cache_dir and topology.is_rank_0:
        print(f"copying {recipe.data_dir} to {recipe.cache_dir} on each node that has no copy", flush=True)
    world.busy(f"prepares the data set {recipe.dataset}")
    dataset = load_dataset(recipe, framework)
    world.busy("")
    replicas = len(own_devices) if engine.replicas else 1
    local_batches = 1 if engine.asynchronous else topology.size * replicas
    plan = plans.make(recipe, local_batches, dataset, networks.of(recipe, framework, dataset))
    if engine.needs_address and topology.size > 1 and not world.rendezvous:
        world.connect_at(rendezvous.from_host_or_mpi(topology, os.environ))
    folder, resume = _open_folder(plan, framework, options, world)
    identity = folders.identity_of(plan, framework)
    return Run(identity, recipe, engine.name, own_devices, folder, resume, world, recipe, dataset, plan)


def _open_folder(
    plan: Plan, framework: Framework, options: Options, world: World
) -> tuple[RunFolder | None, ResumePoint]:
    """Rank 0's run folder and resume point; nothing elsewhere."""
    if not world.topology.is_rank_0:
        return None, ResumePoint()
    folder, resume = folders.open_run(plan, world.topology, framework, options.output, options.resume)
    world.liveness.on_lost = lambda reason: folder.write_status("failed", error=reason)
    return folder, resume


def load_dataset(recipe: Recipe, framework: Framework = "torch") -> datasets.Dataset:
    """The recipe's data set; the framework is loaded for one of the user's only. Raises DataError, RecipeError."""
    if is_path(recipe.dataset):
        of_framework = importlib.import_module(f"hvdtrain.{framework}.examples")
        return of_framework.load(recipe)  # type: ignore[no-any-return]
    return datasets.load(
        recipe.dataset,
        data_dir=recipe.data_dir,
        cache_dir=recipe.cache_dir,
        is_by_shard=recipe.shuffle == "shards",
        decoder=recipe.decoder,
        seed=recipe.seed,
        train_crop=recipe.train_crop,
        valid_resize=recipe.valid_resize,
        valid_crop=recipe.valid_crop,
        image_size=recipe.image_size,
        classes=recipe.classes,
        examples=recipe.examples,
    )


def main(adapter: Adapter, argv: Sequence[str], train: Callable[[Run], None]) -> int:
    """Prepares and trains; the exit code. An error a user can meet is one line on stderr."""
    topology, run = Topology.alone(), None
    try:
        topology = discover(os.environ)
        insecure = keys.INSECURE in {argument.replace("_", "-") for argument in argv}
        world = World(topology, rendezvous.from_launcher(topology, os.environ), insecure=insecure)
        world.start()
    except HvdtrainError as error:
        return _fail(error, topology, None)
    try:
        code = 0
        try:
            run = prepare(adapter, argv, world)
            with joined(world, run.framework, run.engine, os.environ):
                if run.recipe.device == "cpu" or not devices.visible_gpus(os.environ):
                    devices.keep_memory(os.environ)
                train(run)
        except (HvdtrainError, KeyboardInterrupt, OSError) as error:
            code = _exit_code(error, run, world)
    except BaseException as error:  # a fault of ours, or --help's exit
        world.leave(None if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")
        raise
    world.leave()
    return code


def end(code: int) -> NoReturn:
    """Ends the process with this exit code."""
    if code:  # srun --kill-on-bad-exit and mpirun end whoever has not ended yet, while the interpreter tears down
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def _exit_code(error: BaseException, run: Run | None, world: World) -> int:
    """What ended the run, reported; raises a fault of ours again."""
    if isinstance(error, HvdtrainError):
        return _fail(error, world.topology, run, world)
    if isinstance(error, OSError):
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise error
        full = OutputError(f"{error.filename or 'the run folder'}: {error.strerror}; free space, then start again.")
        return _fail(full, world.topology, run, world)
    if world.topology.is_rank_0:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
    world.leave("interrupted", 128 + signal.SIGINT)
    return 128 + signal.SIGINT


def _fail(error: HvdtrainError, topology: Topology, run: Run | None, world: World | None = None) -> int:
    if run and run.folder:
        state: folders.State = "stopped" if isinstance(error, StoppedError) else "failed"
        with contextlib.suppress(OSError):  # the disk may be what failed
            run.folder.write_status(state, error=str(error))
    # Before training, a host's first rank reports for the host; later, a damaged file may be one rank's alone.
    reports = topology.is_rank_0 or (not error.everywhere and (run is not None or topology.local_rank == 0))
    if reports and not error.reported:
        print_error(topology, type(error), untrusted.one_line(error))
    if world:
        if topology.is_rank_0 and isinstance(error, StoppedError):
            _requeue(world)  # before the farewell: srun ends rank 0 as soon as another rank has ended
        if not reports:
            world.wait_for_rank_0()
        world.leave(str(error), error.exit_code)
    return error.exit_code


def _requeue(world: World) -> None:
    """Queues the job again if a warning of its time limit stopped the run; a cancelled job stays cancelled."""
    job_id = world.topology.job_id
    if not job_id or world.stop.signal not in TIME_LIMIT_SIGNALS:
        return
    if world.stop.too_early:  # else it would be queued again for ever, one step a time
        message = f"job {job_id} is not queued again: the warning came before the first step; ask for more time."
    else:
        message = slurm_job.requeue(job_id)
    print(message, file=sys.stderr, flush=True)
