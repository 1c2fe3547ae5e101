"""The engine of a run: what it is opened with, and the check of its world."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

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
"""How Horovod's messages begin about tensors of the ranks that differ in shape, type or operation."""


class Opened(Protocol):
    """The part of an engine that every framework has."""

    rank: int
    size: int

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is gone."""

    def close(self) -> None:
        """Ends the collective library."""


AnEngine = TypeVar("AnEngine", bound=Opened)


def setup_of(run: Run) -> Setup:
    """The setup with which the run's engine is opened."""
    SCREEN.waiting(f"starting {ENGINES[run.engine].title} with {run.topology.size} ranks")
    timeline = run.folder.path / "timeline.json" if run.folder and has_timeline(run.recipe) else None
    return Setup(run.recipe, run.topology, run.devices, endpoints(run.world), timeline)


def endpoints(world: World) -> Sequence[Endpoint]:
    """Where each rank can be reached, by rank, once all are ready."""
    return world.endpoints or [rendezvous.endpoint_alone(world.topology)]


def explained(world: World, engine: Opened, error: Exception) -> HvdtrainError:
    """The error that a failure of the collective library means: ranks gave it tensors that do not match, or
    one is lost."""
    if MISMATCH in str(error):  # of which each rank gets the error, and the library works on
        with contextlib.suppress(Exception):
            frames = traceback.extract_tb(error.__traceback__)
            line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if stacks.is_users(f.filename)), "a step")
            given = {"training: what they give to one collective": f"{one_line(error)}, called in {line}"}
            return AgreementError(
                agreement.differences(given, (engine.rank, engine.size), world.topology.host, engine.sum)
            )
    return world.aborted(error)


@contextlib.contextmanager
def joined(
    world: World, journal: Journal, name: str, engine: AnEngine, rank: int, size: int, values: agreement.Values
) -> Iterator[AnEngine]:
    """The open engine of that name, which sees `rank` of `size`, until the block ends. Raises HvdtrainError: where the
    launcher promised another world, where the ranks have other `values`, and where the block finds another rank
    gone."""
    try:
        agreement.check_world(world.topology, rank, size, ENGINES[name].title)
        world.exchange(engine.sum)
        agreement.check(values, (engine.rank, engine.size), world.topology.host, engine.sum)
        journal.enter("model")
        SCREEN.waiting("building the model")
        yield engine
    except Exception as error:
        if not engine.is_lost(error):
            raise
        raise explained(world, engine, error) from None
    finally:
        engine.close()
