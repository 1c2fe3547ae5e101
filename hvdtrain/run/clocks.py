"""What the seconds of a step go to: reading, waiting for other ranks, and the rest, in every loop."""

import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

from hvdtrain.run.slow import SlowWatch

T = TypeVar("T")


class Waiting(Protocol):
    """An engine's clock."""

    @property
    def waited(self) -> float | None:
        """For how many seconds this rank has waited for the others' gradients so far; None of an engine of one process,
        and where the engine cannot tell."""


class Clocks:
    """A step's clocks on one rank, for the watch over slow ranks."""

    def __init__(self, engine: Waiting, watch: SlowWatch) -> None:
        self._engine, self._watch = engine, watch
        self._reading: float | None = None
        """In this step; None while no batches come through `read`."""
        self._waited = 0.0

    def read(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches; how long this rank waits for each counts as reading."""
        began = time.monotonic()
        for batch in batches:
            self._reading = (self._reading or 0.0) + time.monotonic() - began
            yield batch
            began = time.monotonic()

    def begin_step(self) -> None:
        """This rank begins to read the next step's batch, or another loop than ours does."""
        if self._reading is not None:
            self._reading = 0.0
        self._watch.step_begins()
        if self._watch.is_measuring:
            self._waited = self._engine.waited or 0.0

    def end_step(self) -> None:
        """An update is made."""
        self._watch.made += 1
        if self._watch.is_measuring:
            waited = self._engine.waited
            self._watch.step_ended(self._reading, None if waited is None else waited - self._waited)
