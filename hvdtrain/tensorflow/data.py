"""The user's data sets for TensorFlow, read in a global order that is the same for every number of ranks.

The loader reads batches, of any data set, while the step before is computed.

A data set's callable returns (train, valid); each is one of

- a tuple or dict of NumPy arrays of one length, as (x, y), whose values may be dicts and tuples of arrays themselves;
- a random-access source with `__len__` and `__getitem__`: a list, a grain.MapDataset, array_record's data sources
  decoded. A sample is (x, y), of numbers and arrays in dicts and tuples;
- a `keras.utils.PyDataset`, whose items are batches. The global order permutes items and keeps an item's rows together,
  so that only a few ranks compute each item. All items but the last must have the same number of rows. Its own hooks
  are called on each rank once an epoch, and draw by its number; a resumed run calls those of the epochs before first.

Random numbers must be drawn inside `__getitem__`, from `random` or `numpy.random`: these are seeded for each sample,
or item of a PyDataset, by (seed, epoch, index), so that every number of ranks draws the same numbers.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core.progress import Request
from hvdtrain.core.recipe import Recipe, fixed_workers
from hvdtrain.datasets import Dataset, Split
from hvdtrain.datasets.augment import Augmenter
from hvdtrain.datasets.base import is_read_at_once, read_ahead
from hvdtrain.errors import DataError
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.run import examples
from hvdtrain.run.examples import seeds_of
from hvdtrain.run.samples import Samples, shape_text
from hvdtrain.tensorflow import without_banner
from hvdtrain.untrusted import one_line

mark_module(READERS, __name__)

with without_banner():  # nobody may have imported TensorFlow before
    import keras
    import tensorflow as tf

HOOKS = "on_epoch_begin", "on_epoch_end"
KINDS = "of arrays (x, y), a keras.utils.PyDataset or a source with __len__ and __getitem__"


def load(recipe: Recipe) -> Dataset:
    """The user's data set, which the recipe names. Raises RecipeError and DataError where it cannot be read."""
    return examples.load(recipe, KINDS, split)


def split(dataset: Any, name: str) -> "Examples":
    """One of the two values that a data set's callable returns, as a split. Raises DataError."""
    if isinstance(dataset, keras.utils.PyDataset):
        return Items(dataset, name)
    if not isinstance(dataset, tuple | dict):
        return Examples(dataset, name)
    if others := [type(each).__name__ for each in keras.tree.flatten(dataset) if not hasattr(each, "shape")]:
        raise DataError(
            f"{name}: a tuple or dictionary must hold arrays, got a {others[0]} in it; take numpy.array of lists."
        )
    return Arrays(dataset, name)


class Examples(examples.Examples):
    """Samples by index as a split of `hvdtrain.datasets`, whose batches are stacked arrays."""

    remedy = "give arrays, a keras.utils.PyDataset, or a source with __len__ and __getitem__ (as grain.MapDataset)"

    def __init__(self, dataset: Any, name: str = "the data set") -> None:
        super().__init__(dataset, name, functools.partial(joined, join=np.stack))

    def enter(self, epoch: int, *, ended: bool = False) -> None:
        """Called where an epoch of training begins, or with `ended` where it ends, for sets that have
        on_epoch_begin and on_epoch_end. Does nothing here."""


class Arrays(Examples):
    """Arrays in memory, in a tuple or dict, of one length."""

    def __init__(self, arrays: Any, name: str) -> None:
        """Raises DataError."""
        self._arrays = keras.tree.map_structure(np.asarray, _tuples(arrays))
        lengths = {len(array) if array.ndim else 0 for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1 or any(map(no_text, keras.tree.flatten(self._arrays))):
            raise DataError(
                f"{name}: the arrays must have one length and hold numbers or texts, got "
                f"{one_line(shape_text(self._arrays), 200)}; make them alike."
            )
        super().__init__(range(*lengths), name)

    def digest(self) -> str:
        self.listed = examples.digest_of(keras.tree.flatten(self._arrays), len(self))
        return self.listed

    def bytes_of(self, rows: int) -> int:
        return sum(array[:rows].nbytes for array in keras.tree.flatten(self._arrays))

    @property
    def labels(self) -> Any:
        return self._arrays[1] if isinstance(self._arrays, tuple) and len(self._arrays) == 2 else ()

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        return keras.tree.map_structure(lambda array: array[indices], self._arrays)

    read_alone = read


def _tuples(arrays: Any) -> Any:
    """The same with tuples in place of lists, as Keras makes them."""
    if isinstance(arrays, dict):
        return {name: _tuples(each) for name, each in arrays.items()}
    return tuple(map(_tuples, arrays)) if isinstance(arrays, list | tuple) else arrays


class Items(Examples):
    """The rows of a PyDataset, whose items are batches; `items` has the number of rows in each item."""

    def __init__(self, dataset: Any, name: str) -> None:
        """Computes the first and the last item. Raises DataError where there is none."""
        super().__init__(dataset, name)
        self.changes = any(getattr(type(dataset), hook) is not getattr(keras.utils.PyDataset, hook) for hook in HOOKS)
        self._calls = 0  # of hooks, which may change the digest
        self.digest()
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
        seeds = seeds_of(which, draws)
        begins = [0, *(np.flatnonzero(np.diff(which)) + 1), len(indices)]
        parts = []
        for begin, end in itertools.pairwise(begins):
            index = int(which[begin])
            item, here = self._item(index, seeds[begin]), indices[begin:end] - self._firsts[index]
            if rows(item) != self.items[index]:
                raise DataError(f"{self.name}: {self._uneven(index, rows(item))}")
            parts.append(keras.tree.map_structure(lambda array, here=here: np.asarray(array)[here], item))
        return joined(parts, np.concatenate)

    def read_alone(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        self._kept = None
        return self.read(indices, draws)

    def digest(self) -> str:
        return self.listed if self.changes and self.listed else super().digest()

    def enter(self, epoch: int, *, ended: bool = False) -> None:
        """Calls the set's own hooks in order, as far as they were not called yet. Raises DataError."""
        calls = 2 * epoch + 1 + ended
        if calls < self._calls and self.changes:
            raise DataError(f"{self.name} changes by itself and cannot be in epoch {epoch} again; make one a fit.")
        for number in range(self._calls, calls):
            with self.generators.alone():
                self.generators.seed(number)
                getattr(self.dataset, HOOKS[number % 2])()
            self._kept, self._calls = None, number + 1

    def _item(self, index: int, seed: int) -> Any:
        """The item, which is kept until another one is computed, as several batches may read its rows."""
        with self.generators.alone():
            if not self._kept or self._kept[0] != (index, seed):
                self._kept = (index, seed), self.sample(index, seed)
            return self._kept[1]

    def _uneven(self, index: int, got: int) -> str:
        return (
            f"item {index} has {got} rows, the first one has {self.items[0]}; all items but the last, which may have "
            "fewer, must have as many."
        )


def rows(batch: Any) -> int:
    """The number of examples in a batch."""
    return int(np.shape(keras.tree.flatten(batch)[0])[0])


def joined(parts: list[Any], join: Callable[[list[Any]], np.ndarray]) -> Any:
    """One nested structure of several, in which the arrays at the same place are joined. Raises ValueError."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], join) for key in first}
    if isinstance(first, tuple | list):
        return tuple(joined(list(of_place), join) for of_place in zip(*parts, strict=True))
    array = join([np.asarray(part) for part in parts])
    if other := no_text(array):
        raise ValueError(f"a sample must hold numbers, texts and arrays, got a {other}")
    return array


def no_text(array: np.ndarray) -> str:
    """The type of an object in the array that TensorFlow has no type for; empty where there is none."""
    objects = array.flat if array.dtype == object else ()
    return next((type(each).__name__ for each in objects if not isinstance(each, str | bytes)), "")


class Loader:
    """Reads batches of a split and puts them on the device.

    Batches of hvdtrain's data sets are pairs (x, y). Those of the user's data set have the structure of its samples;
    their floating-point numbers are in the recipe's precision.
    """

    def __init__(self, recipe: Recipe, device: str, augmenter: Augmenter | None = None) -> None:
        self._augmenter = augmenter
        self._workers, self._seed, self._device = fixed_workers(recipe), recipe.seed, device
        self._real = np.float64 if recipe.precision == "float64" else np.float32
        self.samples = Samples("off")

    def batches(self, split: Split, requests: Sequence[Request]) -> Iterator[Any]:
        """One batch for each request, in order. Raises the reader's errors."""
        readers = self._workers or int(not is_read_at_once(split, requests))
        if isinstance(split, Examples):
            self.samples.look(split, self._seed, requests)
            readers = min(readers, 1)  # samples draw from the process's generators, which one reader at a time may seed
        elif self._augmenter is not None:
            read = functools.partial(self._augmenter.read, split)
            return read_ahead(lambda request: self._on_device(read(*request)), requests, max(readers, 1))
        return read_ahead(lambda request: self._on_device(split.read(*request)), requests, readers)

    def _on_device(self, batch: Any) -> Any:
        with tf.device(self._device):
            return keras.tree.map_structure(self._tensor, batch)

    def _tensor(self, value: Any) -> tf.Tensor:
        array = np.asarray(value)
        return tf.constant(array.astype(self._real, copy=False) if array.dtype.kind == "f" else array)


def evened(requests: Sequence[Sequence[Request]]) -> tuple[list[Request], list[list[float]]]:
    """The requests of several replicas, step by step, and for every step the weights of the replicas' batches.

    A replica that has fewer requests than another reads the other's batches, with weight 0.
    """
    steps = list(itertools.zip_longest(*requests))
    read = [one or next(filter(None, step)) for step in steps for one in step]
    return read, [[float(one is not None) for one in step] for step in steps]
