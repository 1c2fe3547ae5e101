"""The user's data sets, for both frameworks: samples are read by index, in one order for every number of ranks.

A data set must draw its random numbers in `__getitem__`, from `random`, `numpy.random` or PyTorch: these generators are
seeded for each sample by (seed, epoch, index), so that 1 rank and N ranks draw the same numbers.
"""

import collections
import contextlib
import inspect
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.run.samples import LOOKED_AT, Found, marks_of, shape_text
from hvdtrain.untrusted import one_line

DRAWS = 3
"""How many uniform numbers make the seed of a sample, with 24 bits of each."""
LISTS = {"targets", "labels", "indices"}
"""Attributes of a data set that hold a number for each example."""
MOST_ROWS = 64
"""The most rows of an array that a digest reads."""
OTHER_DRAWS = np.full((1, DRAWS), 0.5, np.float32)
"""Other draws, for the third reading of an example in `look`: where it then differs, samples are random."""


def load(recipe: Recipe, kinds: str, split: Callable[[Any, str], Any]) -> Dataset:
    """Calls the recipe's data set. `split` makes a split of each object that it returns and of its name in messages;
    `kinds` says in messages what it should return. Raises RecipeError and DataError where it cannot be read."""
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


class Generators:
    """The generators of the process from which samples draw their random numbers."""

    names = "random or numpy.random"
    """In messages."""
    lock = threading.RLock()
    """Held by the thread that seeds and uses them."""

    def seed(self, seed: int) -> None:
        """Seeds all of them."""
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def states(self) -> tuple[Any, ...]:
        """Their states, which can be compared."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)

    def restore(self, states: tuple[Any, ...]) -> None:
        """Restores what `states` has returned."""
        of_python, (kind, keys, *rest) = states
        random.setstate(of_python)
        np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lets only this thread use them in the block; then restores them."""
        with self.lock:
            before = self.states()
            try:
                yield
            finally:
                self.restore(before)


class Examples:
    """A split of a user's data set, whose samples are read by index and whose batches `collate` makes."""

    iterable: type | tuple[type, ...] = ()
    """Types that seem to have `__getitem__`, but cannot be read by index."""
    generators = Generators()
    drawing = "__getitem__"
    """What may draw random numbers, in messages; where it names collate, that is seeded."""
    most_looks: int | None = None
    """How often `Samples` looks at the set; None for no limit but the time."""
    remedy = "give it __len__ and __getitem__"
    alike = "make them alike"
    is_random = True
    """Whether samples may draw random numbers. If not, none is seeded, which takes 10 microseconds each; where a
    batch draws after all, it is read again."""
    listed = ""
    """The digest, once it is known."""

    def __init__(self, dataset: Any, name: str, collate: Callable[[list[Any]], Any]) -> None:
        """Messages use the `name`. Raises DataError where the data set is empty or cannot be read by index."""
        self.dataset, self.name, self.collate = dataset, name, collate
        if isinstance(dataset, self.iterable) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(
                f"{name} ({type(dataset).__name__}) has no samples by index, so no order of them could be the same for "
                f"every number of ranks; {self.remedy}."
            )
        if not len(dataset):
            raise DataError(f"{name} ({type(dataset).__name__}{_file(dataset)}) has no samples: its length is 0.")

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch of the samples at these n indices, on the host. `draws` [n, DRAWS] seed their random numbers; None
        seeds by the index alone. Raises DataError."""
        samples = self._samples(indices, draws)
        try:
            return self._collated(samples, indices, draws)
        except Exception as error:
            different = _different(self.dataset, indices, samples)
            held = one_line(shape_text(samples[0]), 200)
            objects = f" Sample {indices[0]} is {held}: give texts as str." if "object" in held else ""
            wrong = f"{different}; {self.alike}." if different else f"{user_code.reason(error)}{objects}"
            raise DataError(f"{self.name}: {wrong}") from error

    def _samples(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> list[Any]:
        if not self.is_random:
            with self.generators.lock:
                before = self.generators.states()
                with contextlib.suppress(DataError):  # which random numbers may cause
                    samples = [self.sample(int(index)) for index in indices]
                    if self.generators.states() == before:
                        return samples
                self.generators.restore(before)
            self.is_random = True
        seeds = seeds_of(indices, draws)
        with self.generators.alone():
            return [self.sample(int(index), seed) for index, seed in zip(indices, seeds, strict=True)]

    def _collated(self, samples: list[Any], indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch. Where `collate` may draw, as for MixUp, it does so by another seed than the first sample's."""
        if "collate" not in self.drawing:  # and the reader is a thread beside the step, which may draw too
            return self.collate(samples)
        with self.generators.alone():
            self.generators.seed(seeds_of(indices, draws)[0] ^ 2**31)
            return self.collate(samples)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, where the data set has them as those of torchvision do; else ()."""
        names = getattr(getattr(self.dataset, "dataset", self.dataset), "classes", ())
        return tuple(names) if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names) else ()

    @property
    def labels(self) -> Any:
        """The label of each example, where the data set says them as those of torchvision do; else ()."""
        return _labels(self.dataset)

    def digest(self) -> str:
        """A digest of what can be seen without reading samples: their number, lists of files and labels, and some rows
        of arrays. It does not depend on the folder in which the files are."""
        self.listed = digest_of(self.dataset, len(self.dataset))
        return self.listed

    def contents(self) -> dict[str, Any]:
        """What must be the same on all ranks, and when a run is resumed, as JSON values by name."""
        names = {"class names": list(self.names)} if self.names else {}
        return {"examples": len(self), **names, "list of examples": self.digest()}

    def look(self, seed: int, seconds: float, is_training: bool, number: int = 0) -> Found:
        """What is compared over ranks and runs: marks of some examples, drawn by seed, length and the look's `number`,
        each read by its own seed, until the seconds are over. What reading raises is left to training. Raises DataError
        where an example differs when it is read again."""
        until, random = time.monotonic() + seconds, np.random.default_rng([seed, len(self), number])
        indices = random.choice(len(self), min(len(self), len(LOOKED_AT[number > 0])), replace=False)
        draws = random.random((len(indices), DRAWS), np.float32)
        is_random, self.is_random, marks = self.is_random and number > 0, True, dict[str, Any]()
        with self.generators.alone():
            for at, times in enumerate(LOOKED_AT[number > 0][: len(indices)]):
                drawn = draws[at : at + 1] if is_training else None
                read = list(self._again(indices[at : at + 1], [drawn, drawn, OTHER_DRAWS][:times], until))
                if read[:1] != read[:2][-1:]:
                    alone = [marks_of(self._samples(indices[at : at + 1], drawn)) for _ in range(2)]
                    of_collate = alone[0] == alone[1] and "collate" in self.drawing
                    what, code = ("what collate makes of ", self.collate) if of_collate else ("", self.dataset)
                    raise DataError(
                        f"{self.name}: {what}sample {indices[at]} differs when it is read again{_file(code)}; draw its "
                        f"random numbers in {self.drawing} from {self.generators.names}, not from a generator or state "
                        "of its own."
                    )
                is_random |= read[:1] != read[-1:]
                marks |= {str(indices[at]): of for of in read[:1]}
        self.is_random = is_random
        found = {"name": self.name, "examples": len(self), "is_training": is_training, "again": number > 0}
        found["changes"] = getattr(self, "changes", False)
        return {**found, "marks": marks, "is_random": is_random, "seconds": seconds - until + time.monotonic()}

    def _again(self, index: NDArray[np.int64], drawn: list[Any], until: float) -> Iterator[Any]:
        """The marks of the example, read by each of these draws, until one raises an error or the time is over."""
        with contextlib.suppress(Exception):
            for draws in drawn:
                if time.monotonic() < until:
                    yield marks_of(self.read_alone(index, draws))

    def read_alone(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """The batch of one sample, or the sample where `collate` fails, as for None."""
        samples = self._samples(indices, draws)
        with contextlib.suppress(Exception):
            return self._collated(samples, indices, draws)
        return samples

    def sample(self, index: int, seed: int | None = None) -> Any:
        """The sample, read with the seed, if there is one. Raises DataError for any error of the data set."""
        if seed is not None:
            self.generators.seed(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            remedy = " Open it in __getitem__, in each thread." if "created in a thread" in str(error) else ""
            raise DataError(f"{self.name}, sample {index}: {user_code.reason(error)}{remedy}") from error


def _labels(dataset: Any) -> Any:
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
        return np.asarray(_labels(dataset.dataset))[np.asarray(dataset.indices)]
    tensors: Any = getattr(dataset, "tensors", ())
    if len(tensors) == 2:  # a TensorDataset
        return tensors[1]
    return next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), ())


def _different(dataset: Any, indices: NDArray[np.int64], samples: list[Any]) -> str:
    """Names the first sample, by index, whose shapes differ from those of most others; "" where all are alike."""
    shapes = {int(index): one_line(shape_text(sample), 200) for index, sample in zip(indices, samples, strict=True)}
    often = collections.Counter(shapes.values())
    usual = max(shapes, key=lambda index: (shapes[index] != "NoneType", often[shapes[index]], -index))
    unlike = [index for index in sorted(shapes) if shapes[index] != shapes[usual]]
    other = min(unlike, key=lambda index: shapes[index] == "NoneType", default=usual)
    if other == usual and shapes[usual] != "NoneType":
        return ""
    return ", ".join(f"sample {index} is {shapes[index]}" for index in dict.fromkeys((other, usual))) + _file(dataset)


def digest_of(dataset: Any, length: int) -> str:
    """The digest that `Examples.digest` describes, of an object's attributes or of arrays themselves."""
    digest, held = xxhash.xxh3_64(str(length).encode()), getattr(dataset, "__dict__", {"": dataset})
    for name in sorted(held):
        items = held[name] if isinstance(held[name], tuple | list) else (held[name],)
        first: Any = items[0] if items else None
        if hasattr(first, "shape"):
            digest.update("".join(map(rows_text, items)).encode())
        elif len(items) == length and (name in LISTS or isinstance(first, str | PathLike | tuple)):
            digest.update(_listed(items).encode(errors="surrogateescape"))
        elif hasattr(first, "__len__") and name == "dataset":  # as in a Subset
            digest.update(digest_of(first, len(first)).encode())
    return str(digest.hexdigest())


def rows_text(array: Any) -> str:
    """The shape, the type and a digest of some rows of an array of any library."""
    about = f"{shape_text(array)} "
    with contextlib.suppress(Exception):  # it is on a GPU, or not an array
        rows = np.unique(np.linspace(0, len(array) - 1, MOST_ROWS).astype(np.int64))
        read = np.ascontiguousarray(array[rows])  # which holds the addresses of objects
        about += str(xxhash.xxh3_64_hexdigest(repr(read.tolist()).encode() if read.dtype == object else read.tobytes()))
    return about


def _listed(items: Sequence[Any]) -> str:
    """The entries of a list of examples: numbers, files or tuples of them. Texts lose the start that all share."""
    columns = [items] if not isinstance(items[0], tuple) else zip(*items, strict=False)
    texts = [[str(each) for each in column] for column in columns if isinstance(column[0], int | str | PathLike)]
    begins = [len(os.path.commonprefix([min(column), max(column)])) for column in texts]  # noqa: RUF071 - or none
    return "\n".join("\n".join(each[begin:] for each in column) for begin, column in zip(begins, texts, strict=True))


def seeds_of(indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> list[int]:
    """A seed of 63 bits for each sample, the index where there are no draws."""
    if draws is None:
        return [int(index) for index in indices]
    parts = (draws[:, :DRAWS].astype(np.float64) * 2**24).astype(np.uint64)
    mixed = parts[:, 0] << np.uint64(39) ^ parts[:, 1] << np.uint64(15) ^ parts[:, 2] >> np.uint64(9)
    return [int(seed) for seed in mixed & np.uint64(2**63 - 1)]


def _file(code: Any) -> str:
    with contextlib.suppress(TypeError, OSError):
        return f" in {inspect.getfile(code if inspect.isfunction(code) else type(code))}"
    return ""
