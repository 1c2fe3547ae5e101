"""Which engine a run has, joined with the other ranks and bound to its device."""

import contextlib
import os
from collections.abc import Iterator

import torch

from hvdtrain import guard
from hvdtrain.devices import gpu_index, threads
from hvdtrain.engines import ENGINES
from hvdtrain.recipe import Recipe
from hvdtrain.run import Run
from hvdtrain.settings import has_timeline
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.local import LocalEngine


@contextlib.contextmanager
def engine_of(run: Run, *, fuses: bool = False) -> Iterator[Engine]:
    """The run's engine, of the world that the launcher promised, until the block ends; `fuses`: see HorovodEngine.
    Raises HvdtrainError, also where the block finds another rank gone."""
    engine = open_engine(run, fuses=fuses)
    try:
        guard.check_world(run.topology, engine.rank, engine.size, ENGINES[run.engine].title)
        run.world.exchange(engine.sum)
        yield engine
    except RuntimeError as error:
        if not engine.is_lost(error):
            raise
        raise run.world.aborted() from None
    finally:
        engine.close()


def open_engine(run: Run, *, fuses: bool = False) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device; `fuses`: see HorovodEngine."""
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, run.topology, os.environ)
    if count:
        torch.set_num_threads(count)
    match run.engine:
        case "local":
            return LocalEngine(_device(run, gpu_operations=True))
        case "ddp":
            from hvdtrain.torch.engines.ddp import DdpEngine

            return DdpEngine(run.recipe, run.topology, _device(run, gpu_operations=True))
        case "dataparallel":
            from hvdtrain.torch.engines.dataparallel import DataParallelEngine

            return DataParallelEngine(run.devices)
        case "modelparallel":
            from hvdtrain.torch.engines.modelparallel import ModelParallelEngine

            return ModelParallelEngine(run.devices)
    return _horovod(run, fuses)


def _horovod(run: Run, fuses: bool) -> Engine:
    from hvdtrain.torch.engines.horovod import HorovodEngine

    timeline = run.folder.path / "timeline.json" if run.folder and has_timeline(run.recipe) else None
    engine = HorovodEngine(run.recipe, timeline, fuses=fuses)
    engine.device = _device(run, engine.gpu_operations)
    return engine


def _device(run: Run, gpu_operations: bool) -> torch.device:
    index = gpu_index(run.recipe.device, torch.cuda.device_count(), run.topology, gpu_operations)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def is_one_graph(recipe: Recipe, engine: str, device: torch.device) -> bool:
    """Whether the whole update is one CUDA graph: not with a loss scale, nor with phases to be told apart."""
    whole = engine == "local" and device.type == "cuda" and recipe.compile
    return whole and recipe.precision != "float16" and not recipe.profile
