"""Parquet files of images, as the Hugging Face hub has them, of which `pack` makes a set.

A row has its image in a column of {bytes, path}, and its class in a column of whole numbers. Rows are compressed in
groups, so that an image is not some bytes of a file: a group is read whole.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from hvdtrain import files
from hvdtrain.datasets.base import SHOWN, Dataset, digest
from hvdtrain.datasets.images import MOST_BYTES, MOST_CLASSES, Encoded, Sides, dataset
from hvdtrain.datasets.packed import SPLITS
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

REMEDY = "fetch it again."
MIXED = 1 << 29
"""How many bytes of groups of rows have their images mixed with each other; twice as many are in memory."""
MOST_OF_GROUP = 1 << 31
PLACE = np.dtype([("file", "<u4"), ("group", "<u4"), ("row", "<u4"), ("bytes", "<u8")])
"""The place of an image: its file, its group, its row there; and the size of the images of the group."""


class Groups:
    """The images of groups of rows, of which those used last are kept."""

    def __init__(self, paths: tuple[Path, ...], column: str) -> None:
        self.paths, self._column, self._lock = paths, column, threading.Lock()
        self._held = OrderedDict[tuple[int, int], Any]()

    def read(self, file: int, group: int, row: int) -> bytes:
        """The bytes of an image. Raises DataError where there are none."""
        with self._lock, as_data_error(self.paths[file], REMEDY):
            if (file, group) not in self._held:
                with files.opened(self.paths[file]) as opened:
                    read = ParquetFile(opened).read_row_group(group, [f"{self._column}.bytes"], use_threads=False)
                self._held[file, group] = read.column(0).combine_chunks().flatten()[0]
                while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > 2 * MIXED:
                    self._held.popitem(last=False)
            self._held.move_to_end((file, group))
            image = self._held[file, group][row].as_buffer()
            if image is None or image.size > MOST_BYTES:
                raise ValueError(f"row {row} of group {group} has no image in it, or one of over {MOST_BYTES:,} bytes")
            return image.to_pybytes()  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Rows(Encoded):
    """The images of one split in its Parquet files."""

    groups: Groups
    places: NDArray[np.void]
    """The samples, [n] of type PLACE."""

    def encoded(self, index: int) -> bytes:
        return self.groups.read(*self.places[["file", "group", "row"]][index].tolist())

    def location(self, index: int) -> str:
        place = self.places[index]
        return f"{self.groups.paths[place['file']]} in row {place['row']} of group {place['group']}"

    def digest(self) -> str:
        sizes = [path.stat().st_size for path in self.groups.paths]
        return digest(self.labels, np.array(sizes), *(self.places[name] for name in PLACE.names or ()))

    def mixed(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """Groups in any order, and those of MIXED bytes together with their images in any order."""
        _, first, of_group = np.unique(self.places[["file", "group"]], return_index=True, return_inverse=True)
        order = draw.permutation(len(first))
        windows = np.empty(len(first), np.int64)
        windows[order] = np.cumsum(self.places["bytes"][first[order]]) // MIXED
        return np.lexsort((draw.permutation(len(self)), windows[of_group]))


def load(folder: Path) -> Dataset:
    """The images of the Parquet files in a folder.

    Raises DataError where a file is damaged, or has not one column of images and one of their classes.
    """
    found = {split: _Split(sorted(folder.glob(f"*{split}*.parquet"))) for split in SPLITS}
    if not len(found["val"].labels):
        raise DataError(f"{folder / '*val*.parquet'} is missing, or holds no image: {REMEDY}")
    names = found["train"].names or tuple(map(str, range(int(found["train"].labels.max(initial=0)) + 1)))
    for split in found.values():
        fits = split.names in {(), names} and len(names) <= MOST_CLASSES
        if not fits or split.labels.min(initial=0) < 0 or split.labels.max(initial=0) >= len(names):
            raise DataError(f"{split.paths[0]} must have labels of the {len(names):,} training classes: {REMEDY}")

    def rows(split: str, resize: int, crop: int) -> Rows:
        of = found[split]
        return Rows(of.labels, resize, crop, names, Groups(tuple(of.paths), of.column), of.places)

    return dataset(rows, len(names), Sides(1, 1, 1))


class _Split:
    """What the files of a split say: the column of images, the names of the classes, the labels and the places."""

    column = ""
    names: tuple[str, ...] = ()

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        labels, places = [np.zeros(0, np.int64)], [np.zeros(0, PLACE)]
        for number, path in enumerate(paths):
            with as_data_error(path, REMEDY), files.opened(path) as opened:
                file = ParquetFile(opened)
                self.column, label, self.names = _columns(file.schema_arrow)
                numbers = file.read([label], use_threads=False).column(0)
                if numbers.null_count:
                    raise ValueError(f"{numbers.null_count:,} rows have no {label}")
                labels.append(numbers.to_numpy().astype(np.int64))
                places += [
                    _places(number, group, file.metadata.row_group(group)) for group in range(file.num_row_groups)
                ]
        self.labels, self.places = np.concatenate(labels), np.concatenate(places)


def _columns(schema: pa.Schema) -> tuple[str, str, tuple[str, ...]]:
    """The names of the columns of images and of classes, and the classes' names where the file has them."""
    images = [each.name for each in schema if pa.types.is_struct(each.type) and each.type.get_field_index("bytes") >= 0]
    whole = [each.name for each in schema if pa.types.is_integer(each.type)]
    labels = [name for name in whole if name == "label"] or whole
    if len(images) != 1 or len(labels) != 1:
        raise ValueError(
            "it must have one column of images as {bytes, path}, and one of whole numbers or `label`; got "
            f"{one_line(', '.join(schema.names), SHOWN)}"
        )
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(labels[0], {}).get("names", ())
    return images[0], labels[0], tuple(map(str, names))


def _places(file: int, group: int, about: Any) -> NDArray[np.void]:
    columns = (about.column(number) for number in range(about.num_columns))
    size = max(column.total_uncompressed_size for column in columns)
    if size > MOST_OF_GROUP:
        raise ValueError(f"group {group} has {size:,} bytes; the most is {MOST_OF_GROUP:,}")
    places = np.zeros(about.num_rows, PLACE)
    places["file"], places["group"], places["row"], places["bytes"] = file, group, np.arange(about.num_rows), size
    return places
