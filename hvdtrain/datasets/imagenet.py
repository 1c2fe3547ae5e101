"""ImageNet: packed, listed by index files, or a folder like ImageNet's, {train,val}/<class>/<image>."""

import dataclasses
from pathlib import Path

import numpy as np

from hvdtrain import datasets
from hvdtrain.datasets import folders, index, packed
from hvdtrain.datasets.base import Dataset
from hvdtrain.datasets.images import Encoded, Images, Names, Sides, dataset
from hvdtrain.errors import DataError, EngineUnavailable
from hvdtrain.untrusted import one_line


def load(
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    shuffle: str = "global",
    decoder: datasets.Decoder = "turbo",
    exif: datasets.Exif = "ignore",
    train_crop: int = 224,
    valid_resize: int = 256,
    valid_crop: int = 224,
) -> Dataset:
    """ImageNet as data_dir holds it: packed, listed by index files, or with a folder for each class.

    With a packed set, cache_dir keeps a copy on this node, and shuffle "shards" numbers the training samples shard
    after shard.
    """
    sides, is_by_shard = Sides(train_crop, valid_resize, valid_crop), shuffle == "shards"
    if data_dir and packed.is_in(data_dir):
        whole = packed.load(data_dir, sides, is_by_shard, cache_dir)
    elif is_by_shard or cache_dir:
        key = "shuffle shards" if is_by_shard else "cache_dir"
        raise DataError(f"{key} needs a packed data_dir: python -m hvdtrain pack {data_dir or 'SOURCE'} DEST")
    elif data_dir and index.is_in(data_dir):
        whole = index.load(data_dir, sides)
    else:
        whole = _load_folder(data_dir, sides)
    return _decoding(whole, decoder, exif)


def _load_folder(data_dir: Path | None, sides: Sides) -> Dataset:
    """The images in data_dir/train and data_dir/val (or valid), numbered by class, folder and file name.

    Raises DataError where a folder is missing or empty, or the two hold different classes.
    """
    if data_dir is None:
        raise DataError("imagenet needs a data_dir with the folders train/<class> and val/<class>.")
    train = folders.find(folders.split_folder(data_dir, "train"))
    valid = folders.find(folders.split_folder(data_dir, "val", "valid"))
    folders.require_same_classes(train, valid)

    def images(split: str, resize: int, crop: int) -> Images:
        found = train if split == "train" else valid
        labels = np.repeat(np.arange(len(found.classes)), found.counts)
        return Images(labels, resize, crop, found.classes, found.root, Names(found.names))

    notes = tuple(filter(None, [folders.left_out(train, valid)]))
    return dataclasses.replace(dataset(images, len(train.classes), sides), notes=notes)


def _decoding(dataset: Dataset, decoder: datasets.Decoder, exif: datasets.Exif) -> Dataset:
    """The data set, with that decoder for its training images. Raises EngineUnavailable where it is not installed."""
    if decoder == "turbo":
        try:
            from hvdtrain.datasets import jpeg  # noqa: F401
        except ImportError as error:
            raise EngineUnavailable(
                f"decoder turbo cannot be imported ({one_line(error)}); "
                "pip install simplejpeg opencv-python-headless, or take decoder pillow."
            ) from None
    assert isinstance(dataset.train, Encoded) and isinstance(dataset.valid, Encoded)
    train, valid = (
        dataclasses.replace(dataset.train, decoder=decoder, exif=exif),
        dataclasses.replace(dataset.valid, exif=exif),
    )
    notes = (*dataset.notes, *["images are turned upright by their EXIF orientation"] * (exif == "apply"))
    return dataclasses.replace(dataset, train=train, valid=valid, notes=notes)
