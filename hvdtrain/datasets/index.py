"""ImageNet by index files: train_data.pkl and val_data.pkl, each a pickled {path of an image: class}.

Paths are absolute, or relative to the folder of the files. Classes are numbers from 0, or names, which are numbered
in alphabetical order. A pickle may have Python run anything: only what an index is made of is let through.
"""

import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain import files
from hvdtrain.datasets import pickles
from hvdtrain.datasets.base import SHOWN, Dataset
from hvdtrain.datasets.imagenet import MOST_CLASSES, Images, Names, check_sides, dataset, resize_beside
from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line, quoted

TRAIN, VALID = "train_data.pkl", "val_data.pkl"
PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath"}
LONGEST = 4096
"""Bytes of a path: longer ones cannot be opened."""
MOST_AT_ONCE = 1 << 20
"""Bytes of one value; Python writes frames of 64 KiB."""
REMEDY = "an index file is a pickled dict {path: class}; write it again."
NUMBERED = "must all be names or all numbers from 0"


@dataclass(frozen=True, eq=False)
class Listed(Images):
    """Images whose whole paths an index file gives."""

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])


def is_in(data_dir: Path | None) -> bool:
    """Whether the folder holds an index file, and no folder of training images that would go before it."""
    return data_dir is not None and (data_dir / TRAIN).is_file() and not (data_dir / "train").is_dir()


def load(data_dir: Path | None, train_crop: int, valid_resize: int, valid_crop: int) -> Dataset:
    """The images that data_dir/train_data.pkl and data_dir/val_data.pkl name, in the order of the files.

    Raises DataError where a file is missing, damaged or empty, or a class of the second is not in the first.
    """
    check_sides(train_crop, valid_resize, valid_crop)
    if data_dir is None:
        raise DataError(f"imagenet by index needs a data_dir with the files {TRAIN} and {VALID}.")
    train, valid = read(data_dir / TRAIN), read(data_dir / VALID)
    numbers = _numbers(data_dir / TRAIN, train.values())
    train_resize = resize_beside(train_crop, valid_resize, valid_crop)
    classes = tuple(str(name) for name in numbers)
    return dataset(
        _listed(data_dir / TRAIN, train, numbers, classes, train_resize, train_crop),
        _listed(data_dir / VALID, valid, numbers, classes, valid_resize, valid_crop),
        max(numbers.values()) + 1,
    )


def read(path: Path) -> dict[bytes, int | str]:
    """The index in that file. Raises DataError, and runs nothing, for all that is none."""
    with pickles.as_data_error(path, REMEDY), files.opened(path) as file:
        index = _IndexUnpickler(file, MOST_AT_ONCE, encoding="utf-8", errors="surrogateescape").load()
        if not isinstance(index, dict) or not index:
            held = "an empty index" if index == {} else f"an object of type {type(index).__name__}"
            raise DataError(f"{path} holds {held}: {REMEDY}")
        return dict(_checked(path, index))


def _checked(path: Path, index: Mapping[Any, Any]) -> Iterator[tuple[bytes, int | str]]:
    for image, label in index.items():
        if type(image) not in {str, bytes} or type(label) not in {int, str}:
            held = f"{quoted(image)} with class {quoted(label)}"
            raise DataError(f"{path} must map paths to classes, got {held}: {REMEDY}")
        if isinstance(label, int) and not 0 <= label < MOST_CLASSES:
            rule = f"must be below {MOST_CLASSES:,}" if label > 0 else NUMBERED
            raise DataError(f"{path}: classes {rule}, got {quoted(label)}: {REMEDY}")
        if len(encoded := os.fsencode(image)) > LONGEST:
            raise DataError(f"{path} must hold paths of at most {LONGEST} bytes, got {quoted(image)}: {REMEDY}")
        yield encoded, label


class _IndexUnpickler(pickles.DataUnpickler):
    kind = "index file"

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name in PATHS:
            return self._path
        return super().find_class(module, name)

    def _path(self, *parts: str) -> str:
        """Stands for pathlib's classes; text, which no opcode can write to."""
        if len(parts) > LONGEST or sum(map(len, parts)) > LONGEST:
            raise pickle.UnpicklingError(f"a path of more than {LONGEST} characters")
        return self.made(str(PurePosixPath(*parts)))


def _numbers(path: Path, labels: Collection[int | str]) -> dict[int | str, int]:
    """Class -> number."""
    found = set(labels)
    if all(isinstance(label, str) for label in found):
        return {label: number for number, label in enumerate(sorted(found, key=str))}
    if names := [label for label in found if isinstance(label, str)]:
        raise DataError(f"{path}: classes {NUMBERED}, got {quoted(names[0])}: {REMEDY}")
    return {label: int(label) for label in sorted(found)}


def _listed(
    path: Path,
    index: Mapping[bytes, int | str],
    numbers: Mapping[int | str, int],
    classes: tuple[str, ...],
    resize: int,
    crop: int,
) -> Listed:
    if unknown := sorted({str(label) for label in index.values() if label not in numbers}):
        some = one_line(", ".join(unknown[:3]), SHOWN)
        raise DataError(f"{path} holds {len(unknown)} classes that {TRAIN} lacks ({some}): both must hold the same.")
    labels = np.array([numbers[label] for label in index.values()], np.int64)
    return Listed(labels, resize, crop, classes, path.parent, Names(tuple(index)))
