"""Data sets as NumPy arrays, for every framework.

A sample's augmentation is a pure function of the sample and of the uniform numbers drawn for it. Whoever
draws them for a whole epoch, seeded by (seed, epoch), trains alike whatever the number of ranks and readers.
"""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from hvdtrain.datasets.base import DRAWS, Dataset, Split
from hvdtrain.errors import DataError

__all__ = ["DRAWS", "NAMES", "Dataset", "Decoder", "Name", "Split", "load"]

Decoder = Literal["pillow", "dali"]
Name = Literal["linear", "digits", "cifar100", "imagenet", "synthetic"]
NAMES: tuple[str, ...] = get_args(Name)


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    is_by_shard: bool = False,
    decoder: Decoder = "pillow",
    seed: int = 0,
    train_crop: int = 224,
    valid_resize: int = 256,
    valid_crop: int = 224,
    image_size: int = 32,
    classes: int = 100,
    examples: int = 50000,
) -> Dataset:
    """The data set of that name, its files looked for but not all read.

    data_dir is for cifar100 (by default downloaded and kept) and imagenet; seed for linear and synthetic; the
    crops and valid_resize, in pixels, for imagenet; the last three for synthetic. Of a packed imagenet, cache_dir
    keeps a copy on this node, and is_by_shard numbers the training samples shard after shard.
    Raises DataError where files are missing, damaged or of the wrong shape, EngineUnavailable for a missing decoder.
    """
    match name:
        case "linear":
            from hvdtrain.datasets import linear

            return linear.load(seed)
        case "digits":
            from hvdtrain.datasets import digits

            return digits.load()
        case "cifar100":
            from hvdtrain.datasets import cifar100

            return cifar100.load(data_dir)
        case "imagenet":
            whole = _imagenet(data_dir, cache_dir, is_by_shard, (train_crop, valid_resize, valid_crop))
            return _by_dali(whole) if decoder == "dali" else whole
        case "synthetic":
            from hvdtrain.datasets import synthetic

            return synthetic.load(seed, image_size, classes, examples)
    raise DataError(f"There is no data set {name!r}: choose one of {', '.join(NAMES)}.")


def _imagenet(data_dir: Path | None, cache_dir: Path | None, is_by_shard: bool, sides: tuple[int, int, int]) -> Dataset:
    from hvdtrain.datasets import imagenet, index
    from hvdtrain.datasets.packed import cache, shards

    if data_dir is not None and shards.is_in(data_dir):
        return shards.load(data_dir, *sides, is_by_shard, cache.on_node(data_dir, cache_dir) if cache_dir else None)
    if is_by_shard or cache_dir:
        key = "shuffle shards" if is_by_shard else "cache_dir"
        raise DataError(f"{key} needs a packed data_dir: python -m hvdtrain pack {data_dir or 'SOURCE'} DEST")
    return (index.load if index.is_in(data_dir) else imagenet.load)(data_dir, *sides)


def _by_dali(dataset: Dataset) -> Dataset:
    from hvdtrain.datasets import dali, imagenet

    dali.check()
    assert isinstance(dataset.train, imagenet.Encoded)
    return dataclasses.replace(dataset, train=dali.Dali(dataset.train))
