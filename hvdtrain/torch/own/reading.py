"""What a program's run reads: its training set's global batches, and every example of another once."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import OwnSampling, Progress
from hvdtrain.core.settings import OwnReadSettings
from hvdtrain.datasets import Dataset
from hvdtrain.errors import LoopError
from hvdtrain.run.own import take_data
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.examples import Examples
from hvdtrain.torch.own.program import Program

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""
MOST_KEPT = 8
"""Data sets whose readers wait for the next epoch."""


class Reading:
    """A rank's readers of a program's data sets, which are kept from epoch to epoch."""

    def __init__(self, engine: Engine) -> None:
        self._size, self._device = engine.size, engine.device
        self._kept: list[tuple[tuple[Any, ...], Examples, Loader]] = []
        """Of each what it was made of, the one that was used last at the end."""

    def of(self, dataset: Any, collate: Collate, workers: int) -> tuple[Examples, Loader]:
        """The data set as a split, and what reads its requests. Raises DataError."""
        # A program may give new tuples of the same tensors each time.
        key = (*(dataset if isinstance(dataset, tuple) else (dataset,)), collate, workers)
        found = next((kept for kept in self._kept if _is_same(kept[0], key)), None)
        if found:
            self._kept.remove(found)
        else:
            examples = Examples(dataset, "the data set", collate)
            own = Dataset("own", examples, examples, None, (), (), (), draws=DRAWS)
            found = key, examples, Loader(OwnReadSettings(workers), own, self._device)
        self._kept = [*self._kept, found][-MOST_KEPT:]
        return found[1:]

    def training(
        self, extent: OwnSampling, progress: Progress, program: Program, examples: Examples, batch_size: int
    ) -> tuple[OwnSampling, str]:
        """The extent of a run that trains on these examples in such global batches, and a line for the log where they
        are not those of its checkpoint: an epoch that they had begun begins anew. Raises LoopError, CheckpointError."""
        if batch_size < 1 or batch_size % self._size:
            rule = f"it must be a multiple of the {self._size} ranks" if self._size > 1 else "it must be at least 1"
            raise LoopError(f"batch_size counts the examples of all ranks: {rule}, got {batch_size}.")
        if batch_size > len(examples):
            raise LoopError(f"batch_size must be at most the {len(examples)} training examples, got {batch_size}.")
        now, before = {"batch_size": batch_size, **examples.contents()}, program.data
        news = take_data(before, now, progress)
        program.data = now
        return replace(extent, global_batch=batch_size, train_examples=len(examples)), news


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
