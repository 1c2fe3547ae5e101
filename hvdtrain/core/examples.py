"""Data sets of the user's, whatever the framework: samples by index, in the one global order that every number of ranks
shares.

A data set must draw its random numbers inside `__getitem__`, from generators that are seeded for each sample by (seed,
epoch, index), so that 1 rank and N ranks draw alike: `random`, `numpy.random`, and PyTorch's.
"""

import collections
import contextlib
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import one_line

DRAWS = 3
"""Uniform numbers that a sample's seed is made of: 24 bits of each."""
LISTS = {"targets", "labels", "indices"}
"""Attributes of a data set whose numbers are of its examples."""
MOST_ROWS = 64
"""Of an array, that a digest is of."""
CHECKED = 2
"""Samples that are read twice, to see that they come out alike."""

_generators = threading.RLock()
"""Of the process's generators, which only one thread may seed at a time."""


def load(recipe: Recipe, kinds: str, split: Callable[[Any, str], Any]) -> Dataset:
    """The recipe's own data set; `split` makes one of what the callable returns and its name in messages, `kinds` says
    what that may be. Raises RecipeError and DataError, in one line, for what it cannot be read as."""
    path = recipe.dataset
    make = user_code.load(path, "dataset")
    arguments = user_code.expanded(recipe.dataset_args, "dataset_args")
    user_code.check_arguments(make, path, "dataset", **arguments)
    try:
        made = make(**arguments)
    except Exception as error:
        raise DataError(f"dataset {path}: {user_code.reason(error, make)}") from error
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise RecipeError(
            f"dataset {path} must return (train, valid), two {kinds}, or an hvdtrain Dataset, got a "
            f"{type(made).__name__}."
        )
    train, valid = (
        split(one, f"dataset {path}, {name}")
        for one, name in zip(made, ("training set", "validation set"), strict=True)
    )
    return Dataset(
        path, train, valid, None, (), (), (), draws=DRAWS, items=getattr(train, "items", ()), names=train.names
    )


class Examples:
    """Samples by index as a split of `hvdtrain.datasets`, whose batches are what `collate` makes."""

    def __init__(self, dataset: Any, name: str, collate: Callable[[list[Any]], Any]) -> None:
        """`name` stands in messages. Raises DataError where the data set is empty or cannot be read by index."""
        self.dataset, self.name, self.collate = dataset, name, collate
        if isinstance(dataset, self.iterable) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(
                f"{name} ({type(dataset).__name__}) has no samples by index, so no order of them could be the same for "
                f"every number of ranks; {self.remedy}."
            )
        if not len(dataset):
            raise DataError(f"{name} ({type(dataset).__name__}{_file(dataset)}) has no samples: its length is 0.")

    iterable: type | tuple[type, ...] = ()
    """What has `__getitem__` by name only."""
    remedy = "give it __len__ and __getitem__"
    is_random = True
    """Whether samples draw random numbers, as far as is known. Where they do not, none is seeded, which takes 10
    microseconds each; a batch that draws none the less is read again."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch of the samples at these n indices, on the host; `draws` [n, DRAWS] seed their random numbers, None
        seeds by the index alone. Raises DataError."""
        samples = self._samples(indices, draws)
        try:
            return self.collate(samples)
        except Exception as error:
            raise DataError(self._unequal(indices, samples) or f"{self.name}: {user_code.reason(error)}") from error

    def _samples(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> list[Any]:
        samples = None if self.is_random else self._unseeded(indices)
        if samples is None:
            self.is_random = True
            seeds = [int(index) for index in indices] if draws is None else seeds_of(draws)
            with self.alone():
                samples = [self.sample(int(index), seed) for index, seed in zip(indices, seeds, strict=True)]
        return samples

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its classes, as torchvision's data sets have them; () where it has none."""
        names = getattr(getattr(self.dataset, "dataset", self.dataset), "classes", ())
        return tuple(names) if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names) else ()

    def digest(self) -> str:
        """Of what can be seen without computing samples: how many, its lists of files and labels, some rows of its
        arrays. Files are named without the folders above their own."""
        return digest_of(self.dataset, len(self.dataset))

    def contents(self) -> dict[str, Any]:
        """What must be the same on all ranks, and when a run is resumed; JSON values by name."""
        names = {"class names": list(self.names)} if self.names else {}
        return {"examples": len(self), **names, "list of examples": self.digest()}

    def check_repeatable(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> None:
        """Reads the first samples twice, then with another's seed. Raises DataError where one comes out otherwise the
        second time."""
        is_random = False
        for which in range(min(CHECKED, len(indices))):
            one = slice(which, which + 1)
            drawn = None if draws is None else draws[one]
            first, second = (self._alone(indices[one], drawn) for _ in range(2))
            if not same(first, second, self.equal):
                raise self.unrepeatable(int(indices[which]))
            others = np.full((1, DRAWS), 0.5, np.float32)
            is_random |= not same(first, self._alone(indices[one], others), self.equal)
        self.is_random = is_random

    def _alone(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch of one sample; the sample where `collate` makes none of it, as of None, which it may leave out."""
        samples = self._samples(indices, draws)
        with contextlib.suppress(Exception):
            return self.collate(samples)
        return samples

    def unrepeatable(self, index: int) -> DataError:
        """The error for a sample that came out otherwise the second time."""
        return DataError(
            f"{self.name}: sample {index} differs when it is read again{_file(self.dataset)}; draw its random numbers "
            f"in __getitem__ from {self.sources}, not from a generator or state of its own."
        )

    sources = "random or numpy.random"

    def seed(self, seed: int) -> None:
        """Seeds the generators of `sources`."""
        random.seed(seed)
        np.random.seed(seed % 2**32)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The process's generators are this thread's own within the block, and given back as they were."""
        with _generators:
            before = self.generators()
            try:
                yield
            finally:
                self.set_generators(before)

    def generators(self) -> tuple[Any, ...]:
        """The state of the generators of `sources`, which can be compared."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)

    def set_generators(self, states: tuple[Any, ...]) -> None:
        """Gives the generators a state of `generators`."""
        of_python, (kind, keys, *rest) = states
        random.setstate(of_python)
        np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two arrays are equal to the bit, whatever is no number the same."""
        a, b = np.asarray(one), np.asarray(other)
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")

    def sample(self, index: int, seed: int) -> Any:
        """The sample with this seed. Raises DataError for what the data set raises."""
        self.seed(seed)
        return self._sample(index)

    def _unseeded(self, indices: NDArray[np.int64]) -> list[Any] | None:
        """The samples; None where one has drawn random numbers, or raises an error, which may come of what it drew."""
        with _generators:
            before = self.generators()
            with contextlib.suppress(DataError):
                samples = [self._sample(int(index)) for index in indices]
                if self.generators() == before:
                    return samples
            self.set_generators(before)
            return None

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise DataError(f"{self.name}, sample {index}: {user_code.reason(error)}") from error

    def _unequal(self, indices: NDArray[np.int64], samples: list[Any]) -> str:
        """The first sample, by number, that is not as most of them, whatever their order; "" where all are alike."""
        shapes = {int(index): one_line(shape_text(sample), 200) for index, sample in zip(indices, samples, strict=True)}
        often = collections.Counter(shapes.values())
        usual = max(shapes, key=lambda index: (shapes[index] != "NoneType", often[shapes[index]], -index))
        unlike = [index for index in sorted(shapes) if shapes[index] != shapes[usual]]
        other = min(unlike, key=lambda index: shapes[index] == "NoneType", default=usual)
        if other == usual and shapes[usual] != "NoneType":
            return ""
        named = ", ".join(f"sample {index} is {shapes[index]}" for index in dict.fromkeys((other, usual)))
        return f"{self.name}: {named}{_file(self.dataset)}; {self.alike}."

    alike = "make them alike"


def digest_of(dataset: Any, length: int) -> str:
    """See `Examples.digest`: of what an object holds, or of arrays themselves."""
    digest, held = xxhash.xxh3_64(str(length).encode()), getattr(dataset, "__dict__", {"": dataset})
    for name in sorted(held):
        items = held[name] if isinstance(held[name], tuple | list) else (held[name],)
        first: Any = items[0] if items else None
        if hasattr(first, "shape"):
            digest.update("".join(map(_rows, items)).encode())
        elif len(items) == length and (name in LISTS or isinstance(first, str | PathLike | tuple)):
            digest.update(_listed(items).encode(errors="surrogateescape"))
        elif hasattr(first, "__len__") and name == "dataset":  # of a Subset and its like
            digest.update(digest_of(first, len(first)).encode())
    return str(digest.hexdigest())


def _rows(array: Any) -> str:
    """Shape, type and a digest of some rows of an array of any library's."""
    about = f"{shape_text(array)} "
    with contextlib.suppress(Exception):  # on a GPU, or what is no array
        rows = np.unique(np.linspace(0, len(array) - 1, MOST_ROWS).astype(np.int64))
        about += str(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array[rows]).tobytes()))
    return about


def _listed(items: Sequence[Any]) -> str:
    """The entries of a list of examples, each a number, a file, or a tuple of such; files from where they differ."""
    columns = [items] if not isinstance(items[0], tuple) else zip(*items, strict=False)
    texts = [[str(each) for each in column] for column in columns if isinstance(column[0], int | str | PathLike)]
    begins = [len(os.path.commonprefix([min(column), max(column)])) for column in texts]  # noqa: RUF071 - or none
    return "\n".join("\n".join(each[begin:] for each in column) for begin, column in zip(begins, texts, strict=True))


def seeds_of(draws: NDArray[np.float32]) -> list[int]:
    """One of 63 bits for each sample."""
    parts = (draws[:, :DRAWS].astype(np.float64) * 2**24).astype(np.uint64)
    mixed = parts[:, 0] << np.uint64(39) ^ parts[:, 1] << np.uint64(15) ^ parts[:, 2] >> np.uint64(9)
    return [int(seed) for seed in mixed & np.uint64(2**63 - 1)]


def same(one: Any, other: Any, equal: Callable[[Any, Any], bool]) -> bool:
    """Whether two nested structures hold the same; `equal` compares arrays."""
    if hasattr(one, "shape") and hasattr(other, "shape"):
        return equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], equal) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b, equal) for a, b in zip(one, other, strict=True))
    return type(one).__eq__ is object.__eq__ or bool(one == other)


def shape_text(sample: Any) -> str:
    """Types and shapes, as in (float32 [3, 32, 32], int)."""
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        return f"{getattr(sample.dtype, 'name', sample.dtype)} {list(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_text(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(map(shape_text, sample)) + ")"
    return type(sample).__name__


def _file(dataset: Any) -> str:
    with contextlib.suppress(TypeError, OSError):
        return f" in {inspect.getfile(type(dataset))}"
    return ""
