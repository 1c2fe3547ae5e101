"""Data sets of the user's: map-style PyTorch data sets, read in the one global order that every number of ranks shares.

A Dataset must draw its random numbers inside `__getitem__`, from `random`, `numpy.random` or `torch`: these are seeded
for each sample by (seed, epoch, index), so that 1 rank and N ranks draw alike.
"""

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from hvdtrain.core import imports
from hvdtrain.datasets import Dataset
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import one_line

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

DRAWS = 3
"""Uniform numbers that a sample's seed is made of: 24 bits of each."""
CHECKED = 2
"""Samples that are read twice, to see that they come out alike."""


def load(recipe: "Recipe") -> Dataset:
    """The recipe's own data set. Raises RecipeError and DataError, in one line, for what it cannot be read as.

    Examples:
        >>> from hvdtrain.core import recipe
        >>> load(recipe.load("unet.yaml")).train  # which names cells.data:Cells  # doctest: +SKIP
    """
    path = recipe.dataset
    make = imports.load(path, "dataset")
    arguments = imports.expanded(recipe.dataset_args, "dataset_args")
    imports.check_arguments(make, path, "dataset", **arguments)
    collate = imports.load(recipe.collate, "collate") if recipe.collate else default_collate
    try:
        made = make(**arguments)
    except Exception as error:
        raise DataError(f"dataset {path}: {imports.reason(error)}") from error
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise RecipeError(
            f"dataset {path} must return (train, valid), two map-style data sets, or an hvdtrain Dataset, got a "
            f"{type(made).__name__}."
        )
    train, valid = (
        Examples(split, f"dataset {path}, {name}", collate)
        for split, name in zip(made, ("training set", "validation set"), strict=True)
    )
    return Dataset(path, train, valid, None, (), (), (), draws=DRAWS)


class Examples:
    """A map-style data set as a split of `hvdtrain.datasets`, whose batches are what `collate` makes.

    Examples:
        >>> squares = TensorDataset(torch.arange(4), torch.arange(4) ** 2)
        >>> Examples(squares).read(np.array([3, 1]), None)
        [tensor([3, 1]), tensor([9, 1])]
    """

    def __init__(
        self, dataset: Any, name: str = "the data set", collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        """`name` stands in messages. Raises DataError where it is empty or cannot be read by index."""
        if isinstance(dataset, tuple | list) and all(hasattr(array, "shape") for array in dataset):
            dataset = TensorDataset(*map(torch.as_tensor, dataset))
        self.dataset, self.name, self.collate = dataset, name, collate
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise DataError(
                f"{name} ({type(dataset).__name__}) has no samples by index, so no order of them could be the same for "
                "every number of ranks; give it __len__ and __getitem__ (a map-style data set)."
            )
        if not len(dataset):
            raise DataError(f"{name} ({type(dataset).__name__}{_file(dataset)}) has no samples: its length is 0.")

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch of the samples at these n indices, on the host; `draws` [n, DRAWS] seed their random numbers, None
        seeds by the index alone. Raises DataError."""
        seeds = [int(index) for index in indices] if draws is None else _seeds(draws)
        with _kept_generators():
            samples = [self._sample(int(index), seed) for index, seed in zip(indices, seeds, strict=True)]
        try:
            return self.collate(samples)
        except Exception as error:
            raise DataError(self._unequal(indices, samples) or f"{self.name}: {imports.reason(error)}") from error

    def check_repeatable(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> None:
        """Reads the first samples twice. Raises DataError where one comes out otherwise the second time."""
        for which in range(min(CHECKED, len(indices))):
            one = slice(which, which + 1)
            first, second = (self.read(indices[one], None if draws is None else draws[one]) for _ in range(2))
            if not _same(first, second):
                raise DataError(
                    f"{self.name}: sample {indices[which]} differs when it is read again{_file(self.dataset)}; draw "
                    "its random numbers in __getitem__ from random, numpy.random or torch, not from a generator or "
                    "state of its own."
                )

    def _sample(self, index: int, seed: int) -> Any:
        if type(self.dataset) is not TensorDataset:  # which draws nothing, and seeding takes 10 microseconds
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            raise DataError(f"{self.name}, sample {index}: {imports.reason(error)}") from error

    def _unequal(self, indices: NDArray[np.int64], samples: list[Any]) -> str:
        """Which sample differs from the first; "" where none does."""
        shapes = [_shape(sample) for sample in samples]
        other = next((which for which, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is None:
            return ""
        return (
            f"{self.name}: sample {indices[other]} is {one_line(shapes[other], 200)}, sample {indices[0]} is "
            f"{one_line(shapes[0], 200)}{_file(self.dataset)}; make them alike, or give a collate."
        )


def _seeds(draws: NDArray[np.float32]) -> list[int]:
    """One of 63 bits for each sample."""
    parts = (draws[:, :DRAWS].astype(np.float64) * 2**24).astype(np.uint64)
    mixed = parts[:, 0] << np.uint64(39) ^ parts[:, 1] << np.uint64(15) ^ parts[:, 2] >> np.uint64(9)
    return [int(seed) for seed in mixed & np.uint64(2**63 - 1)]


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """Gives the process's generators back as they were."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=one.is_floating_point())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one).__eq__ is object.__eq__ or bool(one == other)


def _shape(sample: Any) -> str:
    """Types and shapes, as in (float32 [3, 32, 32], int)."""
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(map(_shape, sample)) + ")"
    return type(sample).__name__


def _file(dataset: Any) -> str:
    with contextlib.suppress(TypeError, OSError):
        return f" in {inspect.getfile(type(dataset))}"
    return ""
