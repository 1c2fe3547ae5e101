"""Data sets as NumPy arrays, for every framework.

A sample's augmentation is a pure function of the sample and of the uniform numbers drawn for it. Whoever
draws them for a whole epoch, seeded by (seed, epoch), trains alike whatever the number of ranks and readers.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.datasets.base import DRAWS, Dataset, Split
from hvdtrain.errors import DataError

__all__ = ["DATASETS", "DRAWS", "Dataset", "Decoder", "Row", "Split", "keys_of", "load", "takers_of"]

Decoder = Literal["pillow", "dali"]


@dataclass(frozen=True)
class Row:
    """A data set that a recipe names."""

    loader: str
    """MODULE:FUNCTION, which takes `keys` by name, all with defaults, and returns a Dataset."""
    keys: tuple[str, ...] = ()
    """The recipe's keys that it reads."""
    is_in_memory: bool = True
    """Whether its samples fit into the memory of a device."""
    published: tuple[int, int, int] | None = None
    """Training examples, validation examples and classes of a set of files, where they are always the same."""
    downloaded_to: str = ""
    """The folder within HVDTRAIN_DATA that holds it where no data_dir is given; "" where one must be."""
    side: str | int = 0
    """Pixels of a training image's side, or the recipe's key that sets them."""


DATASETS = {
    "linear": Row("hvdtrain.datasets.small:linear", ("seed",)),
    "digits": Row("hvdtrain.datasets.small:digits", side=8),
    "cifar100": Row(
        "hvdtrain.datasets.cifar100:load",
        ("data_dir",),
        published=(50_000, 10_000, 100),
        downloaded_to="cifar-100-python",
        side=32,
    ),
    "imagenet": Row(
        "hvdtrain.datasets.imagenet:load",
        ("data_dir", "cache_dir", "shuffle", "decoder", "train_crop", "valid_resize", "valid_crop"),
        is_in_memory=False,
        published=(1_281_167, 50_000, 1000),  # ILSVRC 2012: Russakovsky et al. 2015, arXiv:1409.0575, table 2
        side="train_crop",
    ),
    "synthetic": Row(
        "hvdtrain.datasets.small:synthetic", ("seed", "image_size", "classes", "examples"), side="image_size"
    ),
}


def keys_of(name: str) -> tuple[str, ...]:
    """The recipe's keys that the data set reads; () for one of the user's."""
    return DATASETS[name].keys if name in DATASETS else ()


def takers_of(key: str) -> list[str]:
    """The data sets that read a key of the recipe."""
    return [name for name, row in DATASETS.items() if key in row.keys]


def load(name: str, **keys: Any) -> Dataset:
    """The data set of that name, its files looked for but not all read.

    `keys` are those of a recipe: what the data set does not read is left out, what is not given has its loader's
    default. Raises DataError where files are missing, damaged or of the wrong shape, EngineUnavailable for a missing
    decoder.
    """
    if name not in DATASETS:
        raise DataError(f"There is no data set {name!r}: choose one of {', '.join(DATASETS)}.")
    row = DATASETS[name]
    module, _, function = row.loader.partition(":")
    read = {key: value for key, value in keys.items() if key in row.keys}
    return getattr(importlib.import_module(module), function)(**read)  # type: ignore[no-any-return]
