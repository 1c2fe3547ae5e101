"""Batches on the device: read ahead during the previous step, or gathered from a data set that the device holds."""

import contextlib
import multiprocessing
import pickle
import queue
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hvdtrain.datasets import Dataset, Split
from hvdtrain.datasets.base import Arrays, is_read_at_once
from hvdtrain.datasets.cifar100 import FIXED_BITS, PIXELS, SIDE, Cifar, placements
from hvdtrain.datasets.small import Synthetic
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.ranks.stacks import READERS, Workers, mark_module
from hvdtrain.torch.examples import Examples
from hvdtrain.torch.objective import Batch

mark_module(READERS, __name__)

if TYPE_CHECKING:
    from hvdtrain.core.progress import Request
    from hvdtrain.core.settings import ReadSettings

AHEAD = 2
Pair = tuple[torch.Tensor, torch.Tensor]


class Loader:
    """Reads requests of a split into pairs (x, y) on the device: images normalised, NCHW."""

    def __init__(self, recipe: "ReadSettings", dataset: Dataset, device: torch.device) -> None:
        self.recipe, self.dataset, self.device = recipe, dataset, device
        self._real = {"float64": torch.float64, None: None}.get(recipe.precision, torch.float32)
        # Made once: on a GPU each would wait for a copy in every step.
        self._mean, self._std = (
            torch.tensor(of, dtype=self._real, device=device).view(-1, 1, 1) for of in (dataset.mean, dataset.std)
        )
        self._pools: dict[int, tuple[list[Request], DataLoader]] = {}
        self._held: dict[int, _Rows | _Pixels] = {}
        self._checked: set[Examples] = set()

    def batches(self, split: Split, requests: list["Request"]) -> Iterator[Any]:
        """One pair a request, in order; of the user's data set a `Batch`. An error of the reader is raised here."""
        if isinstance(split, Examples):
            return self._own(split, requests)
        if self.recipe.data_on_device:
            if id(split) not in self._held:
                self._held[id(split)] = _hold(split, self.device)
            return (self._normalised(x, y) for x, y in self._held[id(split)].batches(requests))
        if self.recipe.workers:
            return self._on_device(_raising(self._in_processes(split, requests)))
        if requests and is_read_at_once(split, len(requests[0][0])):
            return self._on_device(_raising(_read(split, request) for request in requests))
        return self._on_device(_raising(_in_thread(split, requests)))

    def _own(self, split: "Examples", requests: list["Request"]) -> Iterator[Batch]:
        if requests and split not in self._checked:
            self._checked.add(split)
            split.check_repeatable(*requests[0])
        if self.recipe.workers:
            read = _raising(self._in_processes(split, requests))
        else:
            read = (split.read(*request) for request in requests)
        for (indices, _), data in zip(requests, read, strict=True):
            yield Batch(self._moved(data), len(indices))

    def _moved(self, data: Any) -> Any:
        """The batch on the device, its floating-point numbers in the precision that is asked for."""
        if isinstance(data, torch.Tensor):
            data = data.pin_memory() if self.device.type == "cuda" else data
            return data.to(self.device, self._real if data.is_floating_point() else None, non_blocking=True)
        if isinstance(data, Mapping):
            return {key: self._moved(value) for key, value in data.items()}
        if isinstance(data, tuple | list):
            return (
                type(data)(map(self._moved, data))
                if not hasattr(data, "_fields")
                else type(data)(*map(self._moved, data))
            )
        return data

    def _in_processes(self, split: Split, requests: list["Request"]) -> Iterator[Any]:
        """Reads in processes that are started once for each split and wait between epochs."""
        if id(split) not in self._pools:
            multiprocessing.set_forkserver_preload(["torch", "hvdtrain.datasets"])  # imported once, not by each
            sampler: list[Request] = []
            # Never fork: a forked copy of a process that talks MPI may corrupt its memory.
            context = multiprocessing.get_context("forkserver")
            pool = DataLoader(
                _Reader(split),
                sampler=sampler,
                batch_size=None,
                num_workers=self.recipe.workers,
                persistent_workers=True,
                prefetch_factor=AHEAD,
                multiprocessing_context=context,
                worker_init_fn=Workers(context, self.recipe.workers).write_here,
            )
            self._pools[id(split)] = sampler, pool
        sampler, pool = self._pools[id(split)]
        sampler[:] = requests
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")
            try:
                return iter(pool)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                name = split.name if isinstance(split, Examples) else self.dataset.name
                raise DataError(
                    f"{name} cannot be sent to workers, as pickle: {error}; define what it holds at the top of a "
                    "module, open files in __getitem__, or set workers to 0."
                ) from None

    def _on_device(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        if self.device.type == "cpu":
            yield from (self._normalised(x, y) for x, y in pairs)
            return
        stream = torch.cuda.Stream()
        ahead: Pair | None = None
        for pair in pairs:
            ready, ahead = ahead, self._copied(pair, stream)
            if ready:
                yield self._received(ready, stream)
        if ahead:
            yield self._received(ahead, stream)

    def _copied(self, pair: Pair, stream: torch.cuda.Stream) -> Pair:
        with torch.cuda.stream(stream):
            x, y = (tensor.pin_memory().to(self.device, non_blocking=True) for tensor in pair)
        return x, y

    def _received(self, pair: Pair, stream: torch.cuda.Stream) -> Pair:
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        for tensor in pair:
            tensor.record_stream(current)
        return self._normalised(*pair)

    def _normalised(self, x: torch.Tensor, y: torch.Tensor) -> Pair:
        if self.dataset.classes is None:
            return x.to(self._real), y.to(self._real)
        # One fresh array: a processor spends more time on getting memory for others than on the arithmetic.
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        x = x.permute(0, 3, 1, 2).to(self._real, memory_format=layout)
        return x.div_(255).sub_(self._mean).div_(self._std), y


class _Reader(TorchDataset):
    """A split as a PyTorch data set whose index is a whole request."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitem__(self, request: "Request") -> Any:
        return _read(self.split, request)


def _read(split: Split, request: "Request") -> Any:
    """The batch, or the reader's error, which only the loop's thread may raise."""
    try:
        if isinstance(split, Examples):
            return split.read(*request)
        x, y = split.read(*request)
    except Exception as error:
        return error
    return torch.from_numpy(x), torch.from_numpy(y)


def _raising(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def _in_thread(split: Split, requests: list["Request"]) -> Iterator[Pair | Exception]:
    """Reads up to AHEAD batches ahead in a thread, which ends with the iterator."""
    filled: queue.Queue[Pair | Exception] = queue.Queue(AHEAD)
    stop = threading.Event()

    def work() -> None:
        for request in requests:
            item = _read(split, request)
            while True:
                if stop.is_set():
                    return
                with contextlib.suppress(queue.Full):
                    filled.put(item, timeout=0.1)
                    break

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for _ in requests:
            yield filled.get()
    finally:
        stop.set()
        thread.join()


def _hold(split: Split, device: torch.device) -> "_Rows | _Pixels":
    """The split, copied onto the device. Raises RecipeError where it does not lie in memory.

    Its `batches` give for each request what `Split.read` gives for it, to the bit, as tensors on the device. All
    requests are copied there at once, before the first batch: no step waits for them.
    """
    match split:
        case Cifar():
            return _Pixels(split, device)
        case Synthetic():
            return _Rows(split.images, split.labels, device)
        case Arrays():
            return _Rows(split.x, split.y, device)
    raise RecipeError(f"{type(split).__name__} is read from files and cannot lie on the device; drop data_on_device.")


class _Rows:
    """Examples without augmentation: number i is row i, counted round."""

    def __init__(self, x: np.ndarray, y: np.ndarray, device: torch.device) -> None:
        self._x, self._y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        for indices in _copied([indices for indices, _ in requests], self._x.device):
            rows = indices % len(self._y)
            yield self._x[rows], self._y[rows]


class _Pixels:
    """CIFAR's images, cropped, flipped and rotated by one gather from all pixels."""

    def __init__(self, split: Cifar, device: torch.device) -> None:
        self._pixels, self._labels = (torch.from_numpy(array).to(device) for array in (split.pixels, split.labels))

    def batches(self, requests: list["Request"]) -> Iterator[Pair]:
        device = self._pixels.device
        batches = _copied([indices for indices, _ in requests], device)
        draws = [drawn for _, drawn in requests if drawn is not None]
        if not draws:
            images = self._pixels[:-1].view(-1, SIDE, SIDE, 3)
            yield from ((images[indices], self._labels[indices]) for indices in batches)
            return
        # Sine and cosine are the host's: the device's may differ in the last bit, and a pixel with it.
        placed = _copied([placements(drawn) for drawn in draws], device)
        for indices, placement in zip(batches, placed, strict=True):
            yield self._pixels[self._sources(indices, placement)], self._labels[indices]

    def _sources(self, indices: torch.Tensor, placement: torch.Tensor) -> torch.Tensor:
        """The pixels' indices in the table [n, 32, 32]; the last one is black."""
        pixel, inside = _source_pixels(placement)
        return torch.where(inside, pixel + indices[:, None, None] * PIXELS, len(self._pixels) - 1)


def _source_pixels(placement: torch.Tensor) -> Pair:
    """`hvdtrain.datasets.cifar100.source_pixels` from placements [n, 2, 4], in integers: exact on any device."""
    steps = torch.arange(SIDE, dtype=torch.int32, device=placement.device)
    start, per_row, per_column, offset = placement[..., None, None].unbind(2)
    cropped = (start + per_row * steps[:, None] + per_column * steps) >> FIXED_BITS
    inside = (cropped >= -offset) & (cropped >= 0) & (cropped < SIDE) & (cropped < SIDE - offset)
    row, column = (cropped + offset).unbind(1)
    return row * SIDE + column, inside.all(1)


def _copied(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, copied there as one."""
    if not arrays:
        return []
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(whole.split([len(array) for array in arrays]))
