"""The global batches of any map-style data set, for any module: the same for every number of ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import default_collate

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import OwnSampling, Progress, train_requests
from hvdtrain.core.settings import OwnReadSettings
from hvdtrain.datasets import Dataset
from hvdtrain.errors import LoopError
from hvdtrain.torch.data import Loader
from hvdtrain.torch.examples import Examples

Collate = Callable[[list[Any]], Any]


class GlobalBatches(LightningDataModule):
    """Data of your own for `Trainer.fit`: each update reads the same examples whatever the number of ranks.

    The data sets are map-style, or tuples of tensors. Random numbers that a training example draws in `__getitem__` are
    seeded by seed, epoch and index. In validation and test each example is read by one rank, none padded, and all ranks
    have equal numbers of batches. With FaultTolerance an
    interrupted epoch continues where it was.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> x = torch.randn(64, 4)
        >>> data = hl.GlobalBatches((x, x.sum(1)), batch_size=16)
        >>> [tuple(batch[0].shape) for batch in data.train_dataloader()]  # with one process
        [(16, 4), (16, 4), (16, 4), (16, 4)]
    """

    def __init__(
        self,
        train: Any,
        valid: Any = None,
        test: Any = None,
        *,
        batch_size: int,
        seed: int = 0,
        workers: int = 0,
        collate: Collate = default_collate,
    ) -> None:
        """`batch_size` counts the examples of one update: those of all ranks, and of all micro-batches where the
        Trainer accumulates; a callback that accumulates more takes several. What is left over of an epoch are other
        examples each time. `workers`: processes that read; 0 reads between steps. Raises DataError."""
        super().__init__()
        self.batch_size, self.seed, self.workers = batch_size, seed, workers
        self.train = Examples(train, "the training set", collate)
        self.valid = Examples(valid, "the validation set", collate) if valid is not None else None
        self.test = Examples(test, "the test set", collate) if test is not None else None
        self.follow()
        self._accumulated: int | None = None
        """How many micro-batches an update has, before callbacks accumulate more."""
        self._loader: Loader | None = None
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def follow(
        self, position: Callable[[], Progress] | None = None, read: Callable[[Iterator[Any]], Iterator[Any]] = iter
    ) -> None:
        """Each epoch continues at `position()`, and `read` goes around its training batches: the clock of a run.
        Without arguments as Lightning counts epochs."""
        self._position, self._clocked = position or self._epoch, read

    def setup(self, stage: str) -> None:
        """Refuses a batch or a validation set that the ranks cannot divide. Raises LoopError."""
        self._accumulated = self.trainer.accumulate_grad_batches if self.trainer else 1
        parts = self.sampling.size * self.sampling.accumulation_steps
        if self.batch_size < 1 or self.batch_size % parts or self.batch_size > len(self.train):
            raise LoopError(
                f"batch_size counts the examples of one update: it must be a multiple of {parts} (ranks times "
                f"accumulate_grad_batches) and at most the {len(self.train)} training examples, got {self.batch_size}."
            )
        trainer: Any = self.trainer
        limit = trainer.limit_train_batches if trainer and not trainer.fast_dev_run else 1.0
        batches = limit if isinstance(limit, int) else int(limit * len(self.train_dataloader()))
        if batches % self._accumulated and self.sampling.size > 1:
            raise LoopError(
                f"limit_train_batches takes {batches} batches of an epoch, which must be a multiple of "
                f"accumulate_grad_batches={self._accumulated}: else other examples are read on other numbers of ranks."
            )
        for examples in (self.valid, self.test):
            if examples and len(examples) < self.sampling.size:
                raise LoopError(
                    f"{examples.name} needs an example a rank, got {len(examples)} for {self.sampling.size} ranks; "
                    "take fewer."
                )

    @property
    def sampling(self) -> OwnSampling:
        """What each rank reads in each update."""
        size = self.trainer.world_size if self.trainer else 1
        accumulated = self._accumulated or (self.trainer.accumulate_grad_batches if self.trainer else 1)
        return OwnSampling(
            self.batch_size, len(self.train), size, self.seed, accumulation_steps=accumulated, draws=DRAWS
        )

    def train_dataloader(self) -> "Batches":
        steps = len(self.train) // self.batch_size * self.sampling.accumulation_steps
        return Batches(steps, self._train_batches)

    def val_dataloader(self) -> "Batches | list[Any]":
        return self._each_once(self.valid) if self.valid else []

    def test_dataloader(self) -> "Batches | list[Any]":
        return self._each_once(self.test) if self.test else []

    def _each_once(self, examples: Examples) -> "Batches":
        """This rank's part of each batch of all ranks, so that the first N batches are the same for any number."""
        size, order = self.sampling.size, np.arange(len(examples))
        cuts = range(self.batch_size, len(examples) - size + 1, self.batch_size)  # each rank has a part of the last
        requests = [(np.array_split(batch, size)[self._rank], None) for batch in np.split(order, cuts)]
        return Batches(len(requests), lambda: self._read(examples, requests))

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _epoch(self) -> Progress:
        return Progress(epoch=self.trainer.current_epoch if self.trainer else 0)

    def _train_batches(self) -> Iterator[Any]:
        position = self._position()
        # Where a Trainer overfits, each epoch has the first one's batches.
        if self.trainer and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            position = replace(position, epoch=0)
        return self._clocked(self._read(self.train, train_requests(self.sampling, position, self._rank)[1]))

    def _read(self, examples: Examples, requests: list[Any]) -> Iterator[Any]:
        if not self._loader:
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            of = Dataset("own", self.train, self.valid or self.train, None, (), (), (), draws=DRAWS)
            self._loader = Loader(OwnReadSettings(self.workers), of, device)
        return (batch.data for batch in self._loader.batches(examples, requests))


class Batches:
    """A loader of an epoch's batches, of which those are read that are left."""

    def __init__(self, steps: int, batches: Callable[[], Iterator[Any]]) -> None:
        self._steps, self._batches = steps, batches

    def __len__(self) -> int:
        """Of the whole epoch, as Lightning counts."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches()

    def state_dict(self) -> dict[str, Any]:
        """Shows Lightning that the loader continues by itself: its position is the run's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see `state_dict`."""
