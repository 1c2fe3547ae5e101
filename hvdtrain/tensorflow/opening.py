"""Which engine a run has, joined with the other ranks and bound to its devices."""

from contextlib import AbstractContextManager

from hvdtrain.engines import registry
from hvdtrain.errors import RecipeError
from hvdtrain.run import engine as engines
from hvdtrain.run.run import Run
from hvdtrain.tensorflow import devices
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.replication import replication_of


def engine_of(run: Run) -> AbstractContextManager[Engine]:
    """The run's engine, of the world that the launcher promised, until the end of the block. Raises HvdtrainError, also
    where another rank is lost within the block."""
    engine = open_engine(run)
    return engines.joined(run.world, run.engine, engine, *replication_of(engine).world, run.given())


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    devices.take_threads(run.topology)
    try:
        engine: Engine = registry.load(run.engine, "tensorflow").open(engines.setup_of(run))
    except RuntimeError as error:
        if "after being initialized" not in str(error):
            raise
        raise RecipeError(
            f"TensorFlow computed before it was given its devices ({error}); make no tensors in the data set's or the "
            "model's module and callable, take NumPy there."
        ) from error
    return engine
