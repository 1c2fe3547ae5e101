"""Batches on the device: read ahead during the previous step, or gathered from a data set that the device holds; and
map-style PyTorch data sets of users, read in one global order, the same for every number of ranks.

A Dataset must draw its random numbers inside `__getitem__`, from `random`, `numpy.random` or `torch`: these are seeded
for each sample by (seed, epoch, index), so that 1 rank and N ranks draw the same; for `collate`, by those of its first
sample.
"""

import contextlib
import functools
import math
import multiprocessing
import pickle
import warnings
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from hvdtrain.core import user_code
from hvdtrain.core.progress import Request
from hvdtrain.core.recipe import Recipe, augmentation, fixed_workers, of_program
from hvdtrain.datasets import Dataset, Split
from hvdtrain.datasets.augment import Augmenter
from hvdtrain.datasets.base import AHEAD, is_read_at_once, read_ahead
from hvdtrain.datasets.images import Encoded
from hvdtrain.errors import DataError
from hvdtrain.launch.ancestors import end_children_with_this
from hvdtrain.ranks.stacks import READERS, Workers, mark_module
from hvdtrain.run import examples
from hvdtrain.run.examples import DRAWS, rows_text
from hvdtrain.run.samples import Samples
from hvdtrain.torch.data.held import Pair, Pixels, Rows, augmented, hold
from hvdtrain.torch.objective import Batch
from hvdtrain.untrusted import one_line

mark_module(READERS, __name__)

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


def load(recipe: Recipe) -> Dataset:
    """The user's data set that the recipe names. Raises RecipeError and DataError where it cannot be read."""
    torch.default_generator.manual_seed(recipe.seed)  # a module may make its model as it is imported
    collate = user_code.load(recipe.collate, "collate") if recipe.collate else default_collate
    user_code.check_arguments(collate, recipe.collate or "default_collate", "collate", [])
    return examples.load(recipe, "map-style data sets", lambda split, name: Examples(split, name, collate))


class Generators(examples.Generators):
    """Those of Python, NumPy and PyTorch."""

    names = "random, numpy.random or torch"

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.default_generator.manual_seed(seed)

    def states(self) -> tuple[Any, ...]:
        return super().states(), torch.get_rng_state().numpy().tobytes()

    def restore(self, states: tuple[Any, ...]) -> None:
        of_others, of_torch = states
        super().restore(of_others)
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


class Examples(examples.Examples):
    """A map-style data set as a split of `hvdtrain.datasets`. `collate` makes its batches."""

    iterable = IterableDataset
    generators = Generators()
    remedy = "give it __len__ and __getitem__ (a map-style data set)"
    alike = "make them alike, or give a collate"

    def __init__(self, dataset: Any, name: str = "the data set", collate: Collate = default_collate) -> None:
        """Messages use `name`. Raises DataError where the data set is empty or cannot be read by index."""
        if isinstance(dataset, tuple | list) and dataset and all(hasattr(array, "shape") for array in dataset):
            dataset = TensorDataset(*map(torch.as_tensor, dataset))
        super().__init__(dataset, name, collate)
        if collate is not default_collate:
            self.drawing = "__getitem__ or collate"


class Loader:
    """Reads the requests of a split as pairs (x, y) on the device. Images are normalised, [n, 3, height, width]."""

    def __init__(self, recipe: Recipe, dataset: Dataset, device: torch.device) -> None:
        self.recipe, self.dataset, self.device = recipe, dataset, device
        self._workers = fixed_workers(recipe)
        self._real = {"float64": torch.float64, None: None}.get(recipe.precision, torch.float32)
        # Made once: made in each step, they would make it wait for a copy to the GPU.
        self._mean, self._std = (
            torch.tensor(of, dtype=self._real, device=device).view(-1, 1, 1) for of in (dataset.mean, dataset.std)
        )
        self._pools: dict[int, tuple[UserList[Any], DataLoader]] = {}
        self._slots: dict[int, _Slots] = {}
        self._augmenter = augmentation.augmenter(recipe, dataset)
        self._sent: dict[int, str] = {}  # the state of the user's set that its processes have
        self._held: dict[int, Rows | Pixels] = {}
        self.samples = Samples("off")
        """What looks at the examples of the user's data sets."""

    def batches(self, split: Split, requests: Sequence[Request]) -> Iterator[Any]:
        """One pair for each request, in order; of a user's data set a `Batch`. Raises the reader's error."""
        if isinstance(split, Examples):
            return self._of_user(split, requests)
        if self.recipe.data_on_device:
            if id(split) not in self._held:
                self._held[id(split)] = hold(split, self.device)
            held = self._held[id(split)]
            pairs = augmented(held.batches(requests), requests, self._augmenter, self.device, held.sides)
            return (self._normalised(x, y) for x, y in pairs)
        if self._workers and isinstance(split, Encoded):
            return self._on_device(self._in_slots(split, requests))
        if self._workers:
            return self._on_device(self._in_processes(split, requests))
        readers = int(self._augmenter is not None or not is_read_at_once(split, requests))
        return self._on_device(read_ahead(self._reading(split), requests, readers))

    def _reading(self, split: Split) -> Callable[[Any], Any]:
        return functools.partial(_read, split, augmenter=self._augmenter)

    def _of_user(self, split: Examples, requests: Sequence[Request]) -> Iterator[Batch]:
        here = functools.partial(map, self._reading(split))
        read = functools.partial(self._in_processes, split) if self._workers else here
        if id(split) in self._pools and _state(split) not in {"", self._sent.get(id(split))}:
            del self._pools[id(split)]  # it ends the processes, which have the set as it was
        self.samples.look(split, self.recipe.seed, requests, read)
        for (indices, _), data in zip(requests, read(requests), strict=True):
            yield Batch(self._moved(data), len(indices))

    def _moved(self, data: Any) -> Any:
        """The batch on the device, its floating-point numbers in the recipe's precision."""
        if isinstance(data, torch.Tensor):
            wanted = (self._real if data.is_floating_point() else None) or data.dtype
            if wanted.itemsize < data.dtype.itemsize:
                data = data.to(wanted)  # before the copy, which then has fewer bytes; a wider dtype after it
            return self._copied(data).to(wanted)
        if isinstance(data, Mapping):
            return {key: self._moved(value) for key, value in data.items()}
        if isinstance(data, tuple | list):
            moved = map(self._moved, data)
            return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
        return data

    def _in_slots(self, split: Encoded, requests: Sequence[Request]) -> Iterator[Pair]:
        most = max((len(indices) for indices, _ in requests), default=0)
        if id(split) not in self._slots or self._slots[id(split)].most < most:
            self._pools.pop(id(split), None)
            self._slots[id(split)] = _Slots(split, self._workers, most, self._augmenter)
        slots = self._slots[id(split)]
        return slots.pairs(requests, self._in_processes(split, slots.numbered(requests), slots.fill))

    def _in_processes(
        self, split: Split, requests: Sequence[Any], read: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Reads in processes that are started once for each split and wait between epochs."""
        if is_new := id(split) not in self._pools:
            end_children_with_this()  # this may be no rank, as in a bench
            multiprocessing.set_forkserver_preload(["torch", "hvdtrain.datasets"])  # imported once for all processes
            sampler: UserList[Any] = UserList()
            # Never fork: a forked copy of a process that talks MPI may corrupt its memory.
            context = multiprocessing.get_context("forkserver")
            pool = DataLoader(
                _Reader(read or self._reading(split)),
                sampler=sampler,
                batch_size=None,
                num_workers=self._workers,
                persistent_workers=True,
                prefetch_factor=AHEAD,
                pin_memory=self.device.type == "cuda",  # in a thread of the loader's
                multiprocessing_context=context,
                worker_init_fn=Workers(context, self._workers).write_here,
            )
            self._pools[id(split)] = sampler, pool
        sampler, pool = self._pools[id(split)]
        sampler.data = requests  # type: ignore[assignment]  # no list of them, which may be many
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")
            try:
                batches = _raising(iter(pool))
            except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
                if isinstance(error, RuntimeError) and "SemLock" not in str(error):
                    raise
                name = split.name if isinstance(split, Examples) else self.dataset.name
                raise DataError(
                    f"{name} cannot be sent to workers, as pickle: {str(error).partition('. ')[0]}; define what it "
                    "holds at the top of a module, open files in __getitem__, make locks and Values of "
                    'multiprocessing.get_context("forkserver"), or set workers to 0.'
                ) from None
        if is_new and isinstance(split, Examples):
            self._sent[id(split)] = _state(split)  # now that tensors lie in memory that the processes share
        return batches

    def _on_device(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        if self.device.type == "cpu":
            yield from (self._normalised(x, y) for x, y in pairs)
            return
        ahead: tuple[Pair, torch.cuda.Event] | None = None
        for x, y in pairs:
            ready = ahead
            with torch.cuda.stream(self._stream):
                ahead = (self._copied(x), self._copied(y)), self._stream.record_event()
            if ready:
                yield self._received(*ready)
        if ahead:
            yield self._received(*ahead)

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The one stream of all copies ahead: PyTorch keeps the memory of each stream for that stream."""
        return torch.cuda.Stream(self.device)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, where the current stream copies it."""
        tensor = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return tensor.to(self.device, non_blocking=True)

    def _received(self, pair: Pair, copied: torch.cuda.Event) -> Pair:
        current = torch.cuda.current_stream()
        current.wait_event(copied)  # not for the stream, which copies the next pair meanwhile
        for tensor in pair:
            tensor.record_stream(current)
        return self._normalised(*pair)

    def _normalised(self, x: torch.Tensor, y: torch.Tensor) -> Pair:
        if self.dataset.text or self.dataset.classes is None:
            return (x, y) if self.dataset.text else (x.to(self._real), y.to(self._real))
        # One new array: a processor needs more time to get memory for others than for the arithmetic.
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        x = x.permute(0, 3, 1, 2).to(self._real, memory_format=layout)
        return x.div_(255).sub_(self._mean).div_(self._std), y


def loader_of(examples: Examples, workers: int, device: torch.device, samples: Samples, seed: int = 0) -> Loader:
    """Reads the batches of a program's own data set, of which `samples` looks at some examples."""
    own = Dataset("own", examples, examples, None, (), (), (), draws=DRAWS)
    loader = Loader(of_program(workers=workers, precision=None, seed=seed), own, device)
    loader.samples = samples
    return loader


class _Reader(TorchDataset):
    """`read` as a PyTorch data set whose index is a whole request. An item is what it returns, or the reader's error:
    PyTorch would raise an error of another message."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._read(request)
        except Exception as error:
            return error


class _Slots:
    """Memory that is shared once, into which readers write batch after batch: fresh shared memory for each batch takes
    a quarter of the time in which it is read."""

    def __init__(self, split: Encoded, workers: int, most: int, augmenter: Augmenter | None) -> None:
        """For batches of at most so many images. Raises DataError where the memory has no room for them."""
        self._split, self.most, self._augmenter = split, most, augmenter
        # So many batches are read ahead while one is used.
        shape = AHEAD * workers + 1, most, split.crop, split.crop, 3
        try:
            self._slots = torch.empty(shape, dtype=torch.uint8).share_memory_()
        except RuntimeError as error:
            raise DataError(
                f"workers must have room for batches of {math.prod(shape) / 1e6:,.0f} MB in /dev/shm, got "
                f"{workers} workers ({one_line(error)}); lower workers, or give it more (--shm-size)."
            ) from None

    def numbered(self, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
        """The requests, each with the number of its slot."""
        return [(number % len(self._slots), *request) for number, request in enumerate(requests)]

    def fill(self, request: tuple[Any, ...]) -> None:
        """Called by a reader: reads a numbered request into its slot."""
        slot, indices, draws = request
        images = self._slots[slot, : len(indices)].numpy()
        if self._augmenter is None:
            self._split.read_into(images, indices, draws)
            return
        self._split.read_into(images, indices, self._augmenter.of_set(draws))
        self._augmenter.images(images, draws)

    def pairs(self, requests: Sequence[Request], filled: Iterator[None]) -> Iterator[Pair]:
        """The batches in the order in which they are `filled`; one is valid until the next is asked for."""
        side = self._split.crop
        for (slot, indices, draws), _ in zip(self.numbered(requests), filled, strict=True):
            labels = self._split.labels[indices]
            y = self._augmenter.targets(labels, draws, side, side) if self._augmenter else labels
            yield self._slots[slot, : len(indices)], torch.from_numpy(y)


def _read(split: Split, request: Any, augmenter: Augmenter | None = None) -> Any:
    if isinstance(split, Examples):
        return split.read(*request) if len(request) == 2 else split.look(*request)
    x, y = augmenter.read(split, *request) if augmenter else split.read(*request)
    return torch.from_numpy(x), torch.from_numpy(y)


def _state(split: Examples) -> str:
    """A digest of the data set and of what makes its batches, as pickle; empty where that cannot be pickled."""
    digest = xxhash.xxh3_64()
    with contextlib.suppress(Exception):
        _Digested(SimpleNamespace(write=digest.update), pickle.HIGHEST_PROTOCOL).dump((split.dataset, split.collate))
        return str(digest.hexdigest())
    return ""


class _Digested(pickle.Pickler):
    """Writes no content that processes share, and some rows of arrays above 1 MB."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_shared():
            return str, (f"{value.dtype} {value.shape} {value.stride()} {value.data_ptr()}",)
        if isinstance(value, np.ndarray | torch.Tensor) and value.nbytes > 2**20 and value.dtype != object:
            return str, (rows_text(value),)
        return (str, ()) if type(value).__module__.startswith("multiprocessing.") else NotImplemented


def _raising(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item
