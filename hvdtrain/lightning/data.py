"""Data for Lightning, the same samples in each step for any number of ranks; exact validation and accuracy."""

from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DistributedSampler, default_collate
from torchmetrics import Metric

from hvdtrain.core import examples as users_examples
from hvdtrain.core import recipe as recipes
from hvdtrain.core.progress import Progress, UserSampling, each_once, shard, train_requests
from hvdtrain.core.samples import Samples
from hvdtrain.datasets import DRAWS
from hvdtrain.errors import DataError, LoopError, PlanError
from hvdtrain.run.main import load_dataset
from hvdtrain.torch.data import Loader, loader_of
from hvdtrain.torch.examples import Collate, Examples


class UnpaddedSampler(DistributedSampler):
    """Gives each example to one rank, in order, as exact validation needs.

    PyTorch's DistributedSampler repeats some examples where the ranks do not divide them. Lightning does not replace
    this one.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> examples = list("abcdefg")
        >>> [len(hl.UnpaddedSampler(examples, rank, size=2)) for rank in range(2)]
        [3, 4]
    """

    def __init__(self, dataset: Sized, rank: int, size: int) -> None:
        super().__init__(dataset, num_replicas=size, rank=rank, shuffle=False)
        self._mine = shard(len(dataset), rank, size)
        if len(dataset) < size:
            raise DataError(f"the examples must be at least the {size} ranks, got {len(dataset)}; take fewer ranks.")

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine.tolist())

    def __len__(self) -> int:
        return len(self._mine)


class Batches:
    """A loader of `steps` batches. Each iteration calls `batches`, which reads them."""

    def __init__(self, steps: int, batches: Callable[[], Iterator[Any]]) -> None:
        self._steps, self._batches = steps, batches

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches()


class ResumedBatches(Batches):
    """A loader of the batches that are left of an epoch. Its length is that of the whole epoch, as Lightning counts."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing. Its presence shows Lightning that the loader continues inside an epoch by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: see `state_dict`."""


class ImageNetDataModule(LightningDataModule):
    """ImageNet for any module: a packed set, index files train_data.pkl and val_data.pkl, or folders train/<class> and
    val/<class>.

    Batches are (images [n, 3, crop, crop], labels [n]), normalised; each epoch crops an image anew. A global batch
    holds the same images for any number of ranks, and each image is validated by one rank alone.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> data = hl.ImageNetDataModule("/data/imagenet", batch_size=256)  # doctest: +SKIP
        >>> trainer.fit(module, data)  # doctest: +SKIP
    """

    def __init__(
        self,
        data_dir: str | Path,
        batch_size: int,
        num_workers: int = 0,
        train_crop: int = 224,
        valid_resize: int = 256,
        valid_crop: int = 224,
        seed: int = 0,
    ) -> None:
        """`batch_size` counts the images of all ranks in one step. Raises DataError and RecipeError."""
        super().__init__()
        self.recipe = recipes.load(
            "imagenet",
            {
                "data_dir": Path(data_dir),
                "batch_size": batch_size,
                "workers": num_workers,
                "train_crop": train_crop,
                "valid_resize": valid_resize,
                "valid_crop": valid_crop,
                "seed": seed,
            },
        )
        self.batch_size = batch_size
        self.dataset = load_dataset(self.recipe)
        self._loader = Loader(self.recipe, self.dataset, torch.device("cpu"))

    def setup(self, stage: str) -> None:
        """Raises PlanError where the ranks cannot divide the batch or the validation set."""
        size, images = self._ranks()[1], len(self.dataset.train)
        if self.batch_size % size or self.batch_size > images:
            raise PlanError(
                f"batch_size must be a multiple of {size} ranks and at most the {images} training images, got "
                f"{self.batch_size}."
            )
        if len(self.dataset.valid) < size:
            raise PlanError(f"validation needs an image a rank, got {len(self.dataset.valid)} for {size} ranks.")

    def train_dataloader(self) -> Batches:
        rank, size = self._ranks()
        images, batch = len(self.dataset.train), self.batch_size

        def batches() -> Iterator[Any]:
            position = Progress(epoch=self.trainer.current_epoch if self.trainer else 0)
            sampling = UserSampling(batch, images, size, self.recipe.seed, draws=DRAWS)
            return self._loader.batches(self.dataset.train, train_requests(sampling, position, rank)[1])

        return Batches(images // batch, batches)

    def val_dataloader(self) -> Batches:
        rank, size = self._ranks()
        requests = each_once(len(self.dataset.valid), self.batch_size // size, rank, size)
        return Batches(len(requests), lambda: self._loader.batches(self.dataset.valid, requests))

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


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
        draws = users_examples.DRAWS
        return UserSampling(
            self.batch_size, len(self.train), size, self.seed, accumulation_steps=accumulated, draws=draws
        )

    def train_dataloader(self) -> ResumedBatches:
        steps = len(self.train) // self.batch_size * self.sampling.accumulation_steps
        return ResumedBatches(steps, self._train_batches)

    def val_dataloader(self) -> ResumedBatches | list[Any]:
        return self._each_once(self.valid) if self.valid else []

    def test_dataloader(self) -> ResumedBatches | list[Any]:
        return self._each_once(self.test) if self.test else []

    def _each_once(self, examples: Examples) -> ResumedBatches:
        """This rank's part of each global batch, so that the first N batches are the same for any number of ranks."""
        size, order = self.sampling.size, np.arange(len(examples))
        cuts = range(self.batch_size, len(examples) - size + 1, self.batch_size)  # each rank has a part of the last
        requests = [(np.array_split(batch, size)[self._rank], None) for batch in np.split(order, cuts)]
        return ResumedBatches(len(requests), lambda: self._read(examples, requests))

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
            self._loader = loader_of(self.train, self.workers, device, self.samples, self.seed)
        self._loader.samples = self.samples
        return (batch.data for batch in self._loader.batches(examples, requests))


class ExactAccuracy(Metric):
    """The fraction of examples whose highest logit is the right one (top-1), in whole numbers up to the division.

    Over the ranks of `strategy="horovod"` and of ddp alike; exact where no example is read twice, as UnpaddedSampler
    sees to.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> accuracy = hl.ExactAccuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> float(accuracy.compute())
        0.5
    """

    higher_is_better = True
    full_state_update = False
    correct: torch.Tensor
    count: torch.Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """A batch: logits [n, classes] and labels [n]."""
        self.correct += (logits.argmax(1) == labels).sum()
        self.count += len(labels)

    def compute(self) -> torch.Tensor:
        return self.correct.double() / self.count
