"""The engine of a run: what it is opened with, and the check of its world."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from hvdtrain.engines.horovod_settings import has_timeline
from hvdtrain.engines.registry import ENGINES, Setup
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.run import guard
from hvdtrain.run.run import Run
from hvdtrain.run.screen import SCREEN
from hvdtrain.run.world import World


class Opened(Protocol):
    """What every framework's engine has."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is gone."""

    def close(self) -> None:
        """Ends the collective library."""


AnEngine = TypeVar("AnEngine", bound=Opened)


def setup_of(run: Run) -> Setup:
    """What the run's engine is opened with."""
    SCREEN.waiting(f"starting {ENGINES[run.engine].title} with {run.topology.size} ranks")
    timeline = run.folder.path / "timeline.json" if run.folder and has_timeline(run.recipe) else None
    return Setup(run.recipe, run.topology, run.devices, endpoints(run.world), timeline)


def endpoints(world: World) -> Sequence[Endpoint]:
    """Where each rank can be reached, by rank, once all are ready."""
    return world.endpoints or [rendezvous.endpoint_alone(world.topology)]


@contextlib.contextmanager
def joined(world: World, name: str, engine: AnEngine, rank: int, size: int) -> Iterator[AnEngine]:
    """The open engine of that name, which sees `rank` of `size`, until the block ends. Raises HvdtrainError: where the
    launcher promised another world, and where the block finds another rank gone."""
    try:
        guard.check_world(world.topology, rank, size, ENGINES[name].title)
        world.exchange(engine.sum)
        world.launch.enter("model")
        SCREEN.waiting("building the model")
        yield engine
    except Exception as error:
        if not engine.is_lost(error):
            raise
        raise world.aborted() from None
    finally:
        engine.close()
