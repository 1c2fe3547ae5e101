"""The user's data sets for TensorFlow, read in a global order that is the same for every number of ranks.

The loader reads batches, of any data set, while the step before is computed.

A data set's callable returns (train, valid); each is one of

- a tuple or dict of NumPy arrays of one length, as (x, y), whose values may be dicts and tuples of arrays themselves;
- a random-access source with `__len__` and `__getitem__`: a list, a grain.MapDataset, array_record's data sources
  decoded. A sample is (x, y), of numbers and arrays in dicts and tuples;
- a `keras.utils.PyDataset`, whose items are batches. The global order permutes items and keeps an item's rows together,
  so that only a few ranks compute each item. All items but the last must have the same number of rows; `on_epoch_end`
  is never called.

Random numbers must be drawn inside `__getitem__`, from `random` or `numpy.random`: these are seeded for each sample,
or item of a PyDataset, by (seed, epoch, index), so that every number of ranks draws the same numbers.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core import examples
from hvdtrain.core.examples import seeds_of, shape_text
from hvdtrain.core.progress import Request
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset, Split
from hvdtrain.datasets.base import SMALL, is_read_at_once
from hvdtrain.errors import DataError
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.tensorflow import without_banner
from hvdtrain.untrusted import one_line

mark_module(READERS, __name__)

with without_banner():  # nobody may have imported TensorFlow before
    import keras
    import tensorflow as tf

AHEAD = 2
"""How many batches tf.data reads ahead."""
KINDS = "of arrays (x, y), a keras.utils.PyDataset or a source with __len__ and __getitem__"


def load(recipe: Recipe) -> Dataset:
    """The user's data set, which the recipe names. Raises RecipeError and DataError where it cannot be read."""
    return examples.load(recipe, KINDS, split)


def split(dataset: Any, name: str) -> "Examples":
    """One of the two values that a data set's callable returns, as a split. Raises DataError."""
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
        """Whether reading such a batch takes less time than waking a thread that reads it ahead."""
        return sum(array[:batch].nbytes for array in keras.tree.flatten(self._arrays)) <= SMALL

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        return keras.tree.map_structure(lambda array: array[indices], self._arrays)

    def check_repeatable(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> None:
        """Reads nothing: arrays are the same at each reading."""


class Items(Examples):
    """The rows of a PyDataset, whose items are batches; `items` has the number of rows in each item."""

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
        """The item, which is kept until another one is computed, as several batches may read its rows."""
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
    """The number of examples in a batch."""
    return int(np.shape(keras.tree.flatten(batch)[0])[0])


def stacked(samples: list[Any]) -> Any:
    """A batch of samples, which have one structure and shape."""
    return joined(samples, np.stack)


def joined(parts: list[Any], join: Callable[[list[Any]], np.ndarray]) -> Any:
    """One nested structure of several, in which the arrays at the same place are joined. Raises ValueError."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], join) for key in first}
    if isinstance(first, tuple | list):
        return tuple(joined(list(of_place), join) for of_place in zip(*parts, strict=True))
    array = join([np.asarray(part) for part in parts])
    if array.dtype == object:
        raise ValueError(f"a sample must hold numbers and arrays, got a {type(first).__name__}")
    return array


class Loader:
    """Reads batches of a split and puts them on the device.

    Batches of hvdtrain's data sets are pairs (x, y). Those of the user's data set have the structure of its samples;
    their floating-point numbers are in the recipe's precision.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, device: str) -> None:
        self._in_loop = not recipe.workers
        self._readers, self._device = max(1, recipe.workers), device
        self._real = np.float64 if recipe.precision == "float64" else np.float32
        x, y = (np.float32, np.float32) if dataset.classes is None else (np.uint8, np.int64)
        self._pair = np.zeros(0, x), np.zeros(0, y)
        self._pipelines: dict[int, tuple[Any, _Pipeline]] = {}

    def batches(self, split: Split, requests: list[Request]) -> Iterator[Any]:
        """Yields one batch for each request, in order. Raises the reader's errors."""
        batch = len(requests[0][0]) if requests else 0
        is_small = split.is_read_at_once(batch) if isinstance(split, Arrays) else is_read_at_once(split, batch)
        if self._in_loop and is_small:
            return (self._on_device(split.read(*request)) for request in requests)
        return self._read_ahead(split, requests)

    def _read_ahead(self, split: Split, requests: list[Request]) -> Iterator[Any]:
        if not requests:
            return
        if id(split) not in self._pipelines:
            self._pipelines[id(split)] = self._pipeline(split, requests[0])
        structure, pipeline = self._pipelines[id(split)]
        for leaves in pipeline.batches(requests):
            yield keras.tree.pack_sequence_as(structure, list(leaves))

    def _pipeline(self, split: Split, request: Request) -> tuple[Any, "_Pipeline"]:
        """The structure of the split's batches, and the pipeline that reads their arrays."""
        structure: Any = self._pair
        readers = self._readers
        if isinstance(split, Examples):
            split.check_repeatable(*request)
            structure = split.read(request[0][:1], None)
            readers = 1  # samples draw from the process's random generators, which one reader at a time may seed

        def read(*request: Any) -> list[np.ndarray]:
            return self._leaves(split.read(*request))

        types = [array.dtype for array in self._leaves(structure)]
        return structure, _Pipeline(read, types, readers, self._device)

    def _leaves(self, batch: Any) -> list[np.ndarray]:
        arrays = map(np.asarray, keras.tree.flatten(batch))
        return [array.astype(self._real, copy=False) if array.dtype.kind == "f" else array for array in arrays]

    def _on_device(self, batch: Any) -> Any:
        with tf.device(self._device):
            tensors = [tf.constant(array) for array in self._leaves(batch)]
        return keras.tree.pack_sequence_as(batch, tensors)


class _Pipeline:
    """The tf.data pipeline of one split, which is used for all epochs: to make it takes longer than a short epoch."""

    def __init__(
        self, read: Callable[..., Sequence[np.ndarray]], types: Sequence[tf.DType], readers: int, device: str
    ) -> None:
        self._reader, self._requests = read, list[Request]()
        self._error: Exception | None = None
        with tf.device("/CPU:0"):
            indices = tf.data.Dataset.from_generator(
                lambda: range(len(self._requests)), output_signature=tf.TensorSpec((), tf.int64)
            )
            pairs = indices.map(
                lambda index: tf.numpy_function(self._read, [index], types),
                num_parallel_calls=readers,
                deterministic=True,
            )
            options = tf.data.Options()
            options.autotune.enabled = False
            options.threading.private_threadpool_size = readers + 1
            self._pairs = pairs.prefetch(AHEAD).with_options(options)
        if "GPU" in device:  # this one must be the last
            self._pairs = self._pairs.apply(tf.data.experimental.prefetch_to_device(device, AHEAD))

    def batches(self, requests: list[Request]) -> Iterator[Any]:
        self._requests, self._error = requests, None
        try:
            yield from self._pairs
        except tf.errors.OpError as error:
            raise self._error or error from None

    def _read(self, index: np.int64) -> Sequence[np.ndarray]:
        try:
            return self._reader(*self._requests[index])
        except Exception as error:  # TensorFlow would make an OpError of it
            self._error = error
            raise


def evened(requests: list[list[Request]]) -> tuple[list[Request], list[list[float]]]:
    """The requests of several replicas, step by step, and for every step the weights of the replicas' batches.

    A replica that has fewer requests than another reads the other's batches, with weight 0.
    """
    steps = list(itertools.zip_longest(*requests))
    read = [one or next(filter(None, step)) for step in steps for one in step]
    return read, [[float(one is not None) for one in step] for step in steps]
