"""The engine of a run: what it is opened with, and the check of its world."""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from hvdtrain.core.wording import counted
from hvdtrain.engines import Engine
from hvdtrain.engines.registry import ENGINES, Setup, has_timeline
from hvdtrain.errors import AgreementError, HvdtrainError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.ranks import agreement, stacks
from hvdtrain.ranks.world import World
from hvdtrain.record.journal import Journal
from hvdtrain.run.run import Run
from hvdtrain.terminal import SCREEN
from hvdtrain.untrusted import one_line

MISMATCH = "Mismatched"
"""How Horovod's messages begin where the ranks' tensors differ in shape, type or operation."""

AnEngine = TypeVar("AnEngine", bound=Engine)


def setup_of(run: Run) -> Setup:
    """The setup with which the run's engine is opened."""
    SCREEN.waiting(f"starting {ENGINES[run.engine].title} with {counted(run.topology.size, 'rank')}")
    timeline = run.folder.path / "timeline.json" if run.folder and has_timeline(run.recipe) else None
    return Setup(run.recipe, run.topology, run.devices, endpoints(run.world), timeline)


def endpoints(world: World) -> Sequence[Endpoint]:
    """The host and the port of each rank, by rank, once all are ready. Raises WorldError."""
    topology = world.topology
    return world.readiness.endpoints or [Endpoint(topology.host, 0, 0, "127.0.0.1", rendezvous.free_ports(topology))]


def explained(world: World, engine: Engine, error: Exception) -> HvdtrainError:
    """What an error of the collective library means: the ranks' tensors do not match, or a rank is lost."""
    if MISMATCH in str(error):  # every rank gets this error, and the library still works
        with contextlib.suppress(Exception):
            frames = traceback.extract_tb(error.__traceback__)
            line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if stacks.is_users(f.filename)), "a step")
            given = {"training: what they give to one collective": f"{one_line(error)}, called in {line}"}
            return AgreementError(
                agreement.differences(given, (engine.rank, engine.size), world.topology.host, engine.sum)
            )
    return world.aborted(error)


def of_run(run: Run, open_engine: Callable[[Run], AnEngine]) -> AbstractContextManager[AnEngine]:
    """The run's engine until the block ends; see `joined`."""
    return joined(run.world, run.journal, run.engine, open_engine(run), run.given())


@contextlib.contextmanager
def joined(world: World, journal: Journal, name: str, engine: AnEngine, values: agreement.Values) -> Iterator[AnEngine]:
    """The open engine of that name until the end of the block. Raises HvdtrainError where the launcher promised
    another world than its library reports, where the ranks differ in `values`, and where another rank is lost within
    the block."""
    try:
        agreement.check_world(world.topology, *engine.world, ENGINES[name].title)
        world.exchange(engine.sum)
        agreement.check_values(values, (engine.rank, engine.size), world.topology.host, engine.sum)
        journal.enter("model")
        SCREEN.waiting("building the model")
        yield engine
    except Exception as error:
        if not engine.is_lost(error):
            raise
        raise explained(world, engine, error) from None
    finally:
        engine.close()
