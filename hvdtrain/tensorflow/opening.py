"""Which engine a run has, joined with the other ranks and bound to its devices."""

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

from hvdtrain import guard, rendezvous
from hvdtrain.devices import gpu_index, threads
from hvdtrain.engines import ENGINES
from hvdtrain.run import Run
from hvdtrain.settings import has_timeline
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.local import LocalEngine


@contextlib.contextmanager
def engine_of(run: Run) -> Iterator[Engine]:
    """The run's engine, of the world that the launcher promised, until the end of the block. Raises HvdtrainError, also
    where the block finds another rank gone."""
    engine = open_engine(run)
    try:
        guard.check_world(run.topology, *engine.place, ENGINES[run.engine].title)
        run.world.exchange(engine.sum)
        yield engine
    except tf.errors.OpError as error:
        if not engine.is_lost(error):
            raise
        raise run.world.aborted() from None
    finally:
        engine.close()


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    _take_threads(run)
    endpoints = run.world.endpoints or [rendezvous.endpoint_alone(run.topology)]
    match run.engine:
        case "local":
            return LocalEngine(_device(run, gpu_operations=True))
        case "mirrored":
            from hvdtrain.tensorflow.engines.mirrored import MirroredEngine

            return MirroredEngine(run.recipe, run.devices)
        case "central":
            from hvdtrain.tensorflow.engines.central import CentralEngine

            return CentralEngine(run.recipe, run.devices)
        case "multiworker":
            from hvdtrain.tensorflow.engines.multiworker import MultiWorkerEngine

            return MultiWorkerEngine(run.recipe, run.topology, endpoints, _device(run, gpu_operations=True))
        case "parameter-server":
            from hvdtrain.tensorflow.engines.parameter_server import ParameterServerEngine

            return ParameterServerEngine(run.topology, endpoints, _device(run, gpu_operations=True))
    return _horovod(run)


def _horovod(run: Run) -> Engine:
    from hvdtrain.tensorflow.engines.horovod import HorovodEngine

    timeline = run.folder.path / "timeline.json" if run.folder and has_timeline(run.recipe) else None
    engine = HorovodEngine(run.recipe, timeline)
    engine.device = _device(run, engine.gpu_operations)
    return engine


def _take_threads(run: Run) -> None:
    count = threads(len(os.sched_getaffinity(0)), os.cpu_count() or 1, run.topology, os.environ)
    said = os.environ.get("OMP_NUM_THREADS", "")  # TensorFlow's own threads do not heed it
    if count or said.isdecimal():
        with contextlib.suppress(RuntimeError):  # in a notebook TensorFlow may have begun: it keeps its threads then
            tf.config.threading.set_intra_op_parallelism_threads(count or int(said))


def _device(run: Run, gpu_operations: bool) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_index(run.recipe.device, len(gpus), run.topology, gpu_operations)
    if index is None:
        tf.config.set_visible_devices([], "GPU")
        return "/CPU:0"
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"
