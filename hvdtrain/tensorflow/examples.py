"""Data sets of the user's for TensorFlow, read in the one global order that every number of ranks shares.

The callable returns (train, valid); each is one of

- a tuple or dict of NumPy arrays of one length, as (x, y), whose values may be dicts and tuples of arrays themselves;
- a random-access source with `__len__` and `__getitem__`: a list, a grain.MapDataset, array_record's data sources
  decoded. A sample is (x, y), of numbers and arrays in dicts and tuples;
- a `keras.utils.PyDataset`, whose items are batches. The global order permutes items and keeps an item's rows together,
  so that each is computed by few ranks. All items but the last must have the same number of rows; `on_epoch_end` is
  never called.

Random numbers must be drawn inside `__getitem__`, from `random` or `numpy.random`: these are seeded for each sample,
of a PyDataset for each item, by (seed, epoch, index), so that 1 rank and N ranks draw alike.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core import examples
from hvdtrain.core.examples import seeds_of, shape_text
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.datasets.base import SMALL
from hvdtrain.errors import DataError
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.tensorflow import without_banner
from hvdtrain.untrusted import one_line

mark_module(READERS, __name__)

with without_banner():  # it may be the first of TensorFlow
    import keras

KINDS = "of arrays (x, y), a keras.utils.PyDataset or a source with __len__ and __getitem__"


def load(recipe: Recipe) -> Dataset:
    """The recipe's own data set. Raises RecipeError and DataError, in one line, for what it cannot be read as."""
    return examples.load(recipe, KINDS, split)


def split(dataset: Any, name: str) -> "Examples":
    """What a data set's callable returns for training or validation, as a split. Raises DataError."""
    if isinstance(dataset, keras.utils.PyDataset):
        return Items(dataset, name)
    is_arrays = isinstance(dataset, tuple | dict) and all(
        hasattr(array, "shape") for array in keras.tree.flatten(dataset)
    )
    return (Arrays if is_arrays else Examples)(dataset, name)


class Examples(examples.Examples):
    """Samples by index as a split of `hvdtrain.datasets`, whose batches are stacked arrays."""

    remedy = "give arrays, a keras.utils.PyDataset, or a source with __len__ and __getitem__ (as grain.MapDataset)"

    def __init__(self, dataset: Any, name: str = "the data set") -> None:
        super().__init__(dataset, name, stacked)


class Arrays(Examples):
    """Arrays in memory, in a tuple or dict, of one length."""

    def __init__(self, arrays: Any, name: str) -> None:
        """Raises DataError."""
        self._arrays = keras.tree.map_structure(np.asarray, arrays)
        lengths = {len(array) if array.ndim else 0 for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1:
            raise DataError(
                f"{name}: the arrays must have one length, got {one_line(shape_text(self._arrays), 200)}; make them "
                "alike."
            )
        super().__init__(range(*lengths), name)

    def digest(self) -> str:
        return examples.digest_of(keras.tree.flatten(self._arrays), len(self))

    def is_read_at_once(self, batch: int) -> bool:
        """As base.is_read_at_once."""
        return sum(array[:batch].nbytes for array in keras.tree.flatten(self._arrays)) <= SMALL

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        return keras.tree.map_structure(lambda array: array[indices], self._arrays)

    def check_repeatable(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> None:
        """Arrays are."""


class Items(Examples):
    """A PyDataset, whose items are batches, as a split of rows; `items` holds the number of rows in each item."""

    def __init__(self, dataset: Any, name: str) -> None:
        """Computes the first and the last item. Raises DataError where there is none."""
        super().__init__(dataset, name)
        self._kept: tuple[tuple[int, int], Any] | None = None
        of_first, of_last = (rows(self._item(index, index)) for index in (0, len(dataset) - 1))
        self.items = (of_first,) * (len(dataset) - 1) + (of_last,)
        self._firsts = np.cumsum([0, *self.items])
        if of_last > of_first or not of_last:
            raise DataError(f"{name}: {self._uneven(len(dataset) - 1, of_last)}")

    def __len__(self) -> int:
        return sum(self.items)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        which = np.searchsorted(self._firsts, indices, side="right") - 1
        seeds = which.tolist() if draws is None else seeds_of(draws)
        begins = [0, *(np.flatnonzero(np.diff(which)) + 1), len(indices)]
        parts = []
        for begin, end in itertools.pairwise(begins):
            index = int(which[begin])
            item, here = self._item(index, seeds[begin]), indices[begin:end] - self._firsts[index]
            if rows(item) != self.items[index]:
                raise DataError(f"{self.name}: {self._uneven(index, rows(item))}")
            parts.append(keras.tree.map_structure(lambda array, here=here: np.asarray(array)[here], item))
        return joined(parts, np.concatenate)

    def check_repeatable(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> None:
        first = self.read(indices[:1], None if draws is None else draws[:1])
        self._kept = None
        if not examples.same(first, self.read(indices[:1], None if draws is None else draws[:1]), self.equal):
            raise self.unrepeatable(int(indices[0]))

    def _item(self, index: int, seed: int) -> Any:
        """The item, kept until another is computed: its rows are read one batch after the other."""
        with self.alone():
            if not self._kept or self._kept[0] != (index, seed):
                self._kept = (index, seed), self.sample(index, seed)
            return self._kept[1]

    def _uneven(self, index: int, got: int) -> str:
        return (
            f"item {index} has {got} rows, the first one has {self.items[0]}; all items but the last, which may have "
            "fewer, must have as many."
        )


def rows(batch: Any) -> int:
    """How many examples a batch has."""
    return int(np.shape(keras.tree.flatten(batch)[0])[0])


def stacked(samples: list[Any]) -> Any:
    """Samples of one structure and shape as a batch of that structure."""
    return joined(samples, np.stack)


def joined(parts: list[Any], join: Callable[[list[Any]], np.ndarray]) -> Any:
    """Nested structures of arrays as one, each array joined with those at its place. Raises ValueError."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], join) for key in first}
    if isinstance(first, tuple | list):
        return tuple(joined(list(of_place), join) for of_place in zip(*parts, strict=True))
    array = join([np.asarray(part) for part in parts])
    if array.dtype == object:
        raise ValueError(f"a sample must hold numbers and arrays, got a {type(first).__name__}")
    return array
