"""Data sets as NumPy arrays, for both frameworks.

How a sample is augmented depends only on the sample and on uniform numbers that are drawn for it. They are drawn for a
whole epoch, seeded by (seed, epoch), so that training is the same for any number of ranks and readers.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.datasets.base import DRAWS, Dataset, Split, TextData

__all__ = ["DATASETS", "DRAWS", "Dataset", "Decoder", "Exif", "Row", "Split", "TextData", "keys_of", "load"]

Decoder = Literal["turbo", "pillow"]
Exif = Literal["ignore", "apply"]


@dataclass(frozen=True)
class Row:
    """A data set that a recipe can name."""

    loader: str
    """MODULE:FUNCTION. The function takes `keys` by name, all with defaults, and returns a Dataset."""
    keys: tuple[str, ...] = ()
    """The keys of a recipe that the loader takes."""
    is_in_memory: bool = True
    """Whether the samples fit into the memory of a device."""
    published: tuple[int, int, int] | None = None
    """The numbers of training examples, validation examples and classes, where they are always the same."""
    downloaded_to: str = ""
    """The folder in HVDTRAIN_DATA that is read where no data_dir is given; "" where one must be given."""
    side: str | int = 0
    """The side of a training image in pixels, or the key of a recipe that sets it."""


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
        ("data_dir", "cache_dir", "shuffle", "decoder", "exif", "train_crop", "valid_resize", "valid_crop"),
        is_in_memory=False,
        published=(1_281_167, 50_000, 1000),  # ILSVRC 2012: Russakovsky et al. 2015, arXiv:1409.0575, table 2
        side="train_crop",
    ),
    "synthetic": Row(
        "hvdtrain.datasets.small:synthetic", ("seed", "image_size", "classes", "examples"), side="image_size"
    ),
    "tokens": Row(
        "hvdtrain.datasets.tokens:load",
        ("data_dir", "sequence_length", "sequences", "token_dtype"),
        is_in_memory=False,
    ),
}


def keys_of(name: str) -> tuple[str, ...]:
    """The keys of a recipe that the data set reads; () for a user's data set."""
    return DATASETS[name].keys if name in DATASETS else ()


def load(name: str, **keys: Any) -> Dataset:
    """The data set of that name, one of DATASETS. Its files are looked for, but not all of them are read.

    `keys` are those of a recipe, which has checked them; the data set takes those that it needs, or else its defaults.
    Raises DataError where files are missing, damaged or have a wrong shape, EngineUnavailable for a missing decoder.
    """
    row = DATASETS[name]
    module, _, function = row.loader.partition(":")
    read = {key: value for key, value in keys.items() if key in row.keys}
    return getattr(importlib.import_module(module), function)(**read)  # type: ignore[no-any-return]
