"""Data for Lightning: the same samples in the same step whatever the number of ranks, none validated twice."""

from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DistributedSampler

from hvdtrain.core import recipe as recipes
from hvdtrain.core.progress import Request, train_requests, valid_requests
from hvdtrain.core.sharding import Epoch, shard
from hvdtrain.datasets import DRAWS, Dataset, Split
from hvdtrain.errors import DataError, PlanError
from hvdtrain.lightning.module import RecipeModule
from hvdtrain.run.main import load_dataset
from hvdtrain.torch.data import Loader, Pair


class UnpaddedSampler(DistributedSampler):
    """Every example once over all ranks, in order: what validation needs to be exact.

    PyTorch's own repeats some where the ranks do not divide the examples. Lightning leaves this one as it is.

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
    """A loader whose batches are `requests()` of a split, called each time it is iterated."""

    def __init__(
        self,
        loader: Loader,
        split: Split,
        requests: Callable[[], list[Request]],
        read: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        """`read` goes around the batches: the clock of a run."""
        self._loader, self._split, self._requests, self._read = loader, split, requests, read

    def __len__(self) -> int:
        return len(self._requests())

    def __iter__(self) -> Iterator[Pair]:
        yield from self._read(self._loader.batches(self._split, self._requests()))


class RecipeDataModule(LightningDataModule):
    """The data of a recipe's run, from its module's `progress` on, one epoch at a time.

    Examples:
        >>> import hvdtrain.lightning as hl  # `module` is a RecipeModule, `dataset` its data set
        >>> data = hl.RecipeDataModule(module, dataset, rank=0, device=torch.device("cpu"))  # doctest: +SKIP
        >>> trainer.fit(module, data)  # doctest: +SKIP
    """

    def __init__(self, module: RecipeModule, dataset: Dataset, rank: int, device: torch.device) -> None:
        super().__init__()
        self._module, self._dataset, self._rank = module, dataset, rank
        self._loader = Loader(module.plan.recipe, dataset, device)
        self.read: Callable[[Iterator[Any]], Iterator[Any]] = iter
        """Goes around the training batches: the clock of a run."""
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> Batches:
        plan, progress = self._module.plan, self._module.progress
        _, requests = train_requests(plan, progress, self._rank)
        limit = plan.recipe.max_steps
        left = requests if limit is None else requests[: (limit - progress.step) * plan.recipe.accumulation_steps]
        return Batches(self._loader, self._dataset.train, lambda: left, self.read)

    def val_dataloader(self) -> Batches:
        requests = valid_requests(self._module.plan, self._rank)
        return Batches(self._loader, self._dataset.valid, lambda: requests)


class ImageNetDataModule(LightningDataModule):
    """ImageNet for any module: a packed set, index files train_data.pkl and val_data.pkl, or folders train/<class> and
    val/<class>.

    Batches are (images [n, 3, crop, crop], labels [n]), normalised; the images a crop of their own in each epoch.
    One global batch holds the same images whatever the number of ranks, and each is validated by one rank alone.

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
        """`batch_size` is the global one: all ranks' images in one step. Raises DataError and RecipeError."""
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
        """Refuses a batch or a validation set that the ranks cannot divide. Raises PlanError."""
        size, images = self._ranks()[1], len(self.dataset.train)
        if self.batch_size % size or self.batch_size > images:
            raise PlanError(
                f"batch_size must be a multiple of {size} ranks and at most the {images} training images, got "
                f"{self.batch_size}."
            )
        if len(self.dataset.valid) < size:
            raise PlanError(f"validation needs an image a rank, got {len(self.dataset.valid)} for {size} ranks.")

    def train_dataloader(self) -> Batches:
        return Batches(self._loader, self.dataset.train, self._train_requests)

    def val_dataloader(self) -> Batches:
        rank, size = self._ranks()
        mine = shard(len(self.dataset.valid), rank, size)
        batch = self.batch_size // size
        requests: list[Request] = [(mine[begin : begin + batch], None) for begin in range(0, len(mine), batch)]
        return Batches(self._loader, self.dataset.valid, lambda: requests)

    def _train_requests(self) -> list[Request]:
        rank, size = self._ranks()
        images = len(self.dataset.train)
        epoch = Epoch.of(images, self.recipe.seed, self.trainer.current_epoch if self.trainer else 0, DRAWS)
        begins = range(0, images - self.batch_size + 1, self.batch_size)
        local_batches = (epoch.local_batch(begin, self.batch_size, rank, size) for begin in begins)
        return [(indices, epoch.draws[indices]) for indices in local_batches]

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
