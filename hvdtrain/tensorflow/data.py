"""Batches read ahead by tf.data during the previous step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.progress import Request
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset, Split
from hvdtrain.datasets.base import is_read_at_once
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.tensorflow.examples import Arrays, Examples

mark_module(READERS, __name__)

AHEAD = 2


class Loader:
    """Reads requests of a split into batches on the device: pairs (x, y) as the data set has them; of the user's data
    set whatever a sample is made of, floating-point numbers in the recipe's precision."""

    def __init__(self, recipe: Recipe, dataset: Dataset, device: str) -> None:
        self._in_loop = not recipe.workers
        self._readers, self._device = max(1, recipe.workers), device
        self._real = np.float64 if recipe.precision == "float64" else np.float32
        x, y = (np.float32, np.float32) if dataset.classes is None else (np.uint8, np.int64)
        self._pair = np.zeros(0, x), np.zeros(0, y)
        self._pipelines: dict[int, tuple[Any, _Pipeline]] = {}

    def batches(self, split: Split, requests: list[Request]) -> Iterator[Any]:
        """One batch a request, in order. An error of the reader is raised here."""
        if self._in_loop and requests and _is_read_at_once(split, len(requests[0][0])):
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
        """The structure of the split's batches, and what reads their arrays."""
        structure: Any = self._pair
        readers = self._readers
        if isinstance(split, Examples):
            split.check_repeatable(*request)
            structure = split.read(request[0][:1], None)
            readers = 1  # the random numbers of a sample come from generators that the process has but once

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


def _is_read_at_once(split: Split, batch: int) -> bool:
    """Whether so many examples of the split are read sooner than a thread is woken to read them ahead."""
    return split.is_read_at_once(batch) if isinstance(split, Arrays) else is_read_at_once(split, batch)


class _Pipeline:
    """One split's tf.data pipeline: made once, as making it takes longer than a short epoch."""

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
    """Requests of several replicas, those of one step side by side, and for every step the weight of each.

    A replica with fewer requests than another reads what the other reads, with weight 0.
    """
    steps = list(itertools.zip_longest(*requests))
    read = [one or next(filter(None, step)) for step in steps for one in step]
    return read, [[float(one is not None) for one in step] for step in steps]
