"""Data for Lightning, the same samples in each step for any number of ranks; exact validation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import default_collate

from hvdtrain.core.progress import Progress, UserSampling, train_requests
from hvdtrain.errors import LoopError
from hvdtrain.run.examples import DRAWS
from hvdtrain.run.samples import Samples
from hvdtrain.torch.data import Collate, Examples, Loader, loader_of


class Batches:
    """A loader of the batches that are left of an epoch. Each iteration calls `batches`, which reads them."""

    def __init__(self, steps: int, batches: Callable[[], Iterator[Any]]) -> None:
        """`steps`: what Lightning counts, for a user's module those of the whole epoch."""
        self._steps, self._batches = steps, batches

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches()

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing. Its presence shows Lightning that the loader continues inside an epoch by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: see `state_dict`."""


class GlobalBatches(LightningDataModule):
    """Your own data for `Trainer.fit`: each update reads the same examples for any number of ranks.

    The data sets are map-style, or tuples of tensors. Random numbers that `__getitem__` draws in training are seeded by
    seed, epoch and index. In validation and test one rank reads each example, none is padded, and all ranks have the
    same number of batches. With FaultTolerance an interrupted epoch continues where it was.

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
        sample_check: Literal["on", "off"] = "on",
    ) -> None:
        """`batch_size` counts the examples of one update, over all ranks, and over all micro-batches where the Trainer
        accumulates; a callback that accumulates more takes several such batches. The examples that no batch of an epoch
        takes are others in each epoch. `workers`: processes that read; 0 reads between steps. `sample_check` off
        compares no examples over the ranks. Raises DataError."""
        super().__init__()
        self.samples = Samples(sample_check)
        self.batch_size, self.seed, self.workers = batch_size, seed, workers
        self.train = Examples(train, "the training set", collate)
        self.valid = Examples(valid, "the validation set", collate) if valid is not None else None
        self.test = Examples(test, "the test set", collate) if test is not None else None
        self.follow()
        self._accumulated: int | None = None
        """The number of micro-batches of an update, before callbacks accumulate more."""
        self._loader: Loader | None = None
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def follow(
        self, position: Callable[[], Progress] | None = None, read: Callable[[Iterator[Any]], Iterator[Any]] = iter
    ) -> None:
        """Makes each epoch continue at `position()`, and its training batches pass through `read`, a run's clock.
        Without arguments the epochs are Lightning's."""
        self._position, self._clocked = position or self._epoch, read

    def setup(self, stage: str) -> None:
        """Raises LoopError where the ranks cannot divide the batch or the validation set."""
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
    def sampling(self) -> UserSampling:
        """What each rank reads in each update."""
        size = self.trainer.world_size if self.trainer else 1
        accumulated = self._accumulated or (self.trainer.accumulate_grad_batches if self.trainer else 1)
        return UserSampling(
            self.batch_size, len(self.train), size, self.seed, accumulation_steps=accumulated, draws=DRAWS
        )

    def train_dataloader(self) -> Batches:
        steps = len(self.train) // self.batch_size * self.sampling.accumulation_steps
        return Batches(steps, self._train_batches)

    def val_dataloader(self) -> Batches | list[Any]:
        return self._each_once(self.valid) if self.valid else []

    def test_dataloader(self) -> Batches | list[Any]:
        return self._each_once(self.test) if self.test else []

    def _each_once(self, examples: Examples) -> Batches:
        """This rank's part of each global batch, so that the first N batches are the same for any number of ranks."""
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

    def _read(self, examples: Examples, requests: Sequence[Any]) -> Iterator[Any]:
        if not self._loader:
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            self._loader = loader_of(self.train, self.workers, device, self.samples, self.seed)
        self._loader.samples = self.samples
        return (batch.data for batch in self._loader.batches(examples, requests))
