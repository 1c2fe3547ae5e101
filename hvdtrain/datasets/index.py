"""ImageNet listed by index files: train_data.pkl and val_data.pkl, each a pickled {path of an image: class}.

Paths are absolute, relative to the folder of the files, or begin with $NAME/ or ~/. Classes are the numbers 0 to n - 1,
or names, which are numbered in alphabetical order. A pickle may make Python run any code, so only the parts of an index
are unpickled.
"""

import os
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain import files
from hvdtrain.datasets import pickles
from hvdtrain.datasets.base import SHOWN, Dataset
from hvdtrain.datasets.images import MOST_CLASSES, Images, Names, Sides, dataset
from hvdtrain.errors import DataError
from hvdtrain.untrusted import LONGEST_MESSAGE, one_line, printable, quoted

FILES = {"train": "train_data.pkl", "val": "val_data.pkl"}
TRAIN = FILES["train"]
PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
DICTS = {"OrderedDict", "defaultdict"}
DEFAULTS = {"int", "long", "str"}
"""The types whose value a defaultdict may have by default."""
LONGEST = 4096
"""The most bytes of a path: a longer one cannot be opened."""
MOST_LOOKED_FOR = 1000
"""How many images of a file are looked for: on a parallel file system a million would take minutes."""
VARIABLE = re.compile(r"\A(\$\w+|\$\{\w+\}|~)(?=/)", re.ASCII)
NUMBER = re.compile("[0-9]{1,5}")
REMEDY = "an index file is a pickled dict {path: class}; write it again."
PLAIN = "write a dict {str(path): int(number)}, or with str(name) for the number."
NUMBERED = "must all be names or all numbers from 0"


@dataclass(frozen=True, eq=False)
class Listed(Images):
    """Images whose paths are listed in an index file."""

    def path(self, index: int) -> Path:
        name = os.fsdecode(self.names[index])
        return self.root / VARIABLE.sub(lambda found: files.expanded(found[0], "an index file"), name)


def is_in(data_dir: Path) -> bool:
    """Whether the folder holds an index file, but no folder of training images, which would be read instead."""
    return (data_dir / TRAIN).is_file() and not (data_dir / "train").is_dir()


def load(data_dir: Path, sides: Sides) -> Dataset:
    """The images that the index files in data_dir list, in the order of the files.

    Raises DataError where an index file is missing, damaged or empty, where images are missing, or where the classes
    have gaps or are not the same in both files. Raises RecipeError where a path needs a variable that is not set.
    """
    indexes = {split: read(data_dir / name) for split, name in FILES.items()}
    numbers = numbers_of(data_dir / TRAIN, indexes["train"].values())

    def listed(split: str, resize: int, crop: int) -> Listed:
        return _listed(data_dir / FILES[split], indexes[split], numbers, resize, crop)

    return dataset(listed, max(numbers.values()) + 1, sides)


def read(path: Path) -> dict[bytes, int | str]:
    """The index in the file: {path of an image: class}. Raises DataError where the file is anything else."""
    index: dict[bytes, int | str] = {}
    with pickles.as_data_error(path, REMEDY), files.opened(path) as file:
        held = _IndexUnpickler(path, file).load()
        pairs = list(held.items()) if isinstance(held, dict) else held
        if not isinstance(pairs, list) or not all(isinstance(each, tuple | list) and len(each) == 2 for each in pairs):
            raise DataError(f"{path} holds an object of type {type(held).__name__}: {PLAIN}")
        if not held:
            raise DataError(f"{path} holds an empty index: {REMEDY}")
        for image, label in _checked(path, pairs):
            if image in index:
                raise DataError(f"{path} names {quoted(os.fsdecode(image))} twice: name each image once.")
            index[image] = label
    return index


def _checked(path: Path, pairs: Iterable[Any]) -> Iterator[tuple[bytes, int | str]]:
    is_windows = None
    for image, held in pairs:
        label = held.number() if isinstance(held, pickles.Array) else held
        if type(image) not in {str, bytes} or type(label) not in {int, str}:
            raise DataError(
                f"{path} must map paths to classes, got {quoted(image)} with class {quoted(label)} of type "
                f"{type(label).__name__}: {PLAIN}"
            )
        if isinstance(label, int) and not 0 <= label < MOST_CLASSES:
            rule = f"must be below {MOST_CLASSES:,}" if label > 0 else NUMBERED
            raise DataError(f"{path}: classes {rule}, got {quoted(label)}: {PLAIN}")
        if len(encoded := os.fsencode(image)) > LONGEST:
            raise DataError(f"{path} must hold paths of at most {LONGEST} bytes, got {quoted(image)}: {REMEDY}")
        if b"\\" in encoded:
            if is_windows is None:  # on Linux a file's name may hold a backslash
                is_windows = not _is_file(path.parent / os.fsdecode(encoded))
            encoded = encoded.replace(b"\\", b"/") if is_windows else encoded
        yield encoded, label


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long


class _Joined(pickles.StandIn):
    """Replaces the classes of pathlib by text."""

    def __new__(cls, *parts: str) -> str:  # type: ignore[misc]
        return str(PurePosixPath(*parts))


class _Scalar(pickles.StandIn):
    """Replaces NumPy's numbers and texts by Python's."""

    def __new__(cls, kind: pickles.Kind, content: bytes) -> Any:
        value = np.frombuffer(content, kind.dtype, 1)[0].item()
        return os.fsdecode(value) if isinstance(value, str | bytes) else value


class _FromBuffer(pickles.StandIn):
    """Replaces the function with which NumPy makes arrays in pickle's protocol 5."""

    def __new__(cls, content: bytes, kind: pickles.Kind, shape: Any, order: str) -> pickles.Array:  # type: ignore[misc]
        array = pickles.Array()
        array.__setstate__((1, shape, kind, order == "F", content))
        return array


class _Dict(pickles.StandIn):
    """Replaces the dictionaries of collections by Python's."""

    def __new__(cls, *given: Any) -> Any:
        return next((each for each in given if isinstance(each, dict | list)), {})


class _IndexUnpickler(pickles.DataUnpickler):
    kind = "index file"

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        match module.partition(".")[0], name:
            case "pathlib", _ if name in PATHS:
                return _Joined
            case "numpy", "scalar":
                return _Scalar
            case "numpy", "_frombuffer":
                return _FromBuffer
            case "collections", _ if name in DICTS:
                return _Dict
            case "builtins" | "__builtin__", _ if name in DEFAULTS:
                return name
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:  # the file is not damaged, but holds something else
            series = ", of which dict(series) makes a dict" if name == "Series" else ""
            held = one_line(f"an object of {module}.{name}{series}", SHOWN)
            raise DataError(f"{self._path} holds {held}: {PLAIN}") from None


def numbers_of(path: Path, labels: Collection[int | str]) -> dict[int | str, int]:
    """The number of each class. Raises DataError where classes are mixed or numbered with gaps."""
    found = set(labels)
    names = [label for label in found if isinstance(label, str)]
    if names and len(names) < len(found):
        raise DataError(f"{path}: classes {NUMBERED}, got {quoted(names[0])}: {PLAIN}")
    if not all(isinstance(label, int) or NUMBER.fullmatch(label) for label in found):
        return {label: number for number, label in enumerate(sorted(found, key=str))}
    numbers = {label: int(label) for label in sorted(found, key=int)}
    used = set(numbers.values())
    if lacking := set(range(max(used))) - used:
        gap = f"class {min(lacking)} has no image; number them from 0 without gaps, or write names that are no numbers"
        wrong = "they count from 0; write each less 1" if lacking == {0} else gap
        raise DataError(f"{path}: classes {min(used)}..{max(used)} for {len(used)} classes: {wrong}.")
    return numbers


def _listed(
    path: Path,
    index: Mapping[bytes, int | str],
    numbers: Mapping[int | str, int],
    resize: int,
    crop: int,
) -> Listed:
    if unknown := sorted({str(label) for label in index.values() if label not in numbers}):
        some = one_line(", ".join(unknown[:3]), SHOWN)
        raise DataError(f"{path} holds {len(unknown)} classes that {TRAIN} lacks ({some}): both must hold the same.")
    for start in {os.fsdecode(name).partition("/")[0] for name in index if name[:1] == b"$"}:
        VARIABLE.sub(lambda found: files.expanded(found[0], str(path)), f"{start}/")
    labels = np.array([numbers[label] for label in index.values()], np.int64)
    listed = Listed(labels, resize, crop, tuple(map(str, numbers)), path.parent, Names(tuple(index)))
    looked_for = np.unique(np.linspace(0, len(listed) - 1, MOST_LOOKED_FOR).astype(int)).tolist()
    if missing := [number for number in looked_for if not _is_file(listed.path(number))]:
        first = printable(str(listed.path(missing[0])), LONGEST_MESSAGE)
        raise DataError(
            f"{path}: {len(missing)} of {len(looked_for)} images that were looked for are not there, the first "
            f"{first}: write paths that are absolute, relative to {path.parent}, or begin with $NAME/ or ~/."
        )
    return listed
