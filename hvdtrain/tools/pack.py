"""`python -m hvdtrain pack SOURCE DEST`: images from a folder or an index file into a few large shards.

Read on a parallel file system, a million small files cost a million openings an epoch; shards cost one a shard.
"""

import io
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pydantic
import tyro
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from hvdtrain import datasets, files
from hvdtrain.core import flags
from hvdtrain.datasets.imagenet import Encoded, opened, rgb
from hvdtrain.datasets.packed import shards
from hvdtrain.datasets.packed.containers import CONTAINERS, Name
from hvdtrain.errors import OutputError
from hvdtrain.terminal import Status
from hvdtrain.tools.rank_status import hidden
from hvdtrain.untrusted import printable

THREADS = 16  # more than processors: a parallel file system is waited for
CHUNK = 256
INTERVAL = 0.25  # seconds between two counts that are shown
SUFFIXES = {"JPEG": "jpg"}


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Packs an ImageNet-style folder, or the images that index files name, into shards to train from."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="a data_dir of the data set imagenet")]
    dest: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="new folder of the shards: a data_dir too")]
    format: Annotated[Name, tyro.conf.arg(help="tar shards as webdataset's, or TFRecord files")] = "webdataset"
    shard_mb: Annotated[int, Field(ge=1), tyro.conf.arg(help="MiB a shard is filled to")] = 512
    shards: Annotated[int | None, Field(ge=1), tyro.conf.arg(help="instead of shard-mb: number of training shards")] = (
        None
    )
    resize: Annotated[
        int | None, Field(ge=1), tyro.conf.arg(help="shorter side to shrink larger images to, pixels")
    ] = None
    quality: Annotated[int, Field(ge=1, le=95), tyro.conf.arg(help="of the JPEGs that resize makes, 1 to 95")] = 90
    seed: Annotated[int, Field(ge=0), tyro.conf.arg(help="of the order in which the images are packed")] = 0


class Sample(NamedTuple):
    """One sample of a split: its number there, its class, its image and the image's suffix."""

    sample: int
    label: int
    encoded: bytes
    suffix: str


def main(argv: Sequence[str]) -> int:
    """Packs both splits. Raises RecipeError, DataError for a damaged image, OutputError."""
    options = flags.parse(Options, "python -m hvdtrain pack", argv)
    with Status(f"finding the images of {printable(str(options.source))}") as status:
        written = pack(options, status.update)
    print(f"{options.dest}: {written}")
    return 0


def pack(options: Options, show: Callable[[str], None] = hidden) -> str:
    """Writes the whole set beside DEST, then renames it: a folder DEST is a whole set. What was written, for the user;
    `show` shows how many images are packed so far."""
    dataset = datasets.load("imagenet", data_dir=options.source)
    try:
        if options.dest.exists() and (not options.dest.is_dir() or any(options.dest.iterdir())):
            raise OutputError(f"{options.dest} is there already: remove it, or name a new folder.")
        files.make_folder(options.dest.parent)
        with files.new_folder(options.dest.absolute()) as folder:
            written = _write(folder, dataset, options, show)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{options.dest} cannot be written ({reason}): free space, or name another folder.") from None
    return written


def _write(folder: Path, dataset: datasets.Dataset, options: Options, show: Callable[[str], None]) -> str:
    """Both splits and their index into the folder; what was written, for the user."""
    splits, classes = dict[str, tuple[dict[str, int], NDArray[np.void]]](), tuple[str, ...]()
    for name, split in (("train", dataset.train), ("val", dataset.valid)):
        assert isinstance(split, Encoded)
        classes = split.classes
        order = np.random.default_rng([options.seed, len(splits)]).permutation(len(split))
        images = _counted(_images(split, order, options.resize, options.quality), name, len(split), show)
        splits[name] = _write_split(folder, name, images, len(split), options)
    np.savez(folder / shards.INDEX, **shards.index_of(dataset.classes or 0, classes, splits))
    counts = " and ".join(f"{len(entries):,} images in {len(lengths)} shards" for lengths, entries in splits.values())
    size = sum(sum(lengths.values()) for lengths, _ in splits.values())
    return f"{counts} to train and to validate with, {size / 1e6:,.1f} MB"


def _write_split(
    folder: Path, split: str, images: Iterator[Sample], count: int, options: Options
) -> tuple[dict[str, int], NDArray[np.void]]:
    """Its shards, as {name: bytes}, and its samples, as [n] of ENTRY."""
    container = CONTAINERS[options.format]
    entries, written = np.zeros(count, shards.ENTRY), list[Path]()
    for _, group in itertools.groupby(_in_shards(images, count, options), lambda assigned: assigned[0]):
        written.append(folder / f"{split}-{len(written)}")
        with written[-1].open("wb") as file:
            for _, (sample, label, encoded, suffix) in group:
                head, tail = container.frame(f"{sample:08}", suffix, label, encoded)
                file.write(head)
                entries[sample] = len(written) - 1, file.tell(), len(encoded), label, zlib.crc32(encoded)
                file.write(encoded + tail)
            file.write(container.end)
    # A TFRecord file's name has the number of files, which is known only at the last of them.
    named = [path.rename(folder / container.shard(split, k, len(written))) for k, path in enumerate(written)]
    return {path.name: path.stat().st_size for path in named}, entries


def _in_shards(images: Iterator[Sample], count: int, options: Options) -> Iterator[tuple[int, Sample]]:
    """Every image with a number that rises where a shard begins."""
    shard = filled = 0
    for position, image in enumerate(images):
        if options.shards:
            shard = position * options.shards // count
        elif filled >= options.shard_mb << 20:
            shard, filled = shard + 1, 0
        filled += len(image.encoded)
        yield shard, image


def _images(split: Encoded, order: NDArray[np.int64], resize: int | None, quality: int) -> Iterator[Sample]:
    """The split's images in that order, each decoded once to be sure that it can be."""

    def image(sample: int) -> Sample:
        with split.as_data_error(sample):
            encoded = split.encoded(sample)
            with opened(encoded) as decoded:
                suffix = SUFFIXES.get(decoded.format or "", (decoded.format or "").lower())
                if resize and min(decoded.size) > resize:
                    encoded, suffix = _shrunk(decoded, resize, quality), "jpg"
                else:
                    decoded.load()
        return Sample(sample, int(split.labels[sample]), encoded, suffix)

    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(order), CHUNK):
            yield from pool.map(image, order[start : start + CHUNK].tolist())


def _shrunk(image: Image.Image, side: int, quality: int) -> bytes:
    """As a JPEG with that shorter side."""
    width, height = (round(side * length / min(image.size)) for length in image.size)
    written = io.BytesIO()
    rgb(image).resize((width, height), Image.Resampling.LANCZOS).save(written, "JPEG", quality=quality)
    return written.getvalue()


def _counted(images: Iterator[Sample], split: str, count: int, show: Callable[[str], None]) -> Iterator[Sample]:
    """The images; `show` shows how many, and the time left."""
    began = shown = time.monotonic()
    for number, image in enumerate(images, 1):
        yield image
        if (now := time.monotonic()) - shown > INTERVAL:
            shown = now
            show(progress(split, number, count, now - began))


def progress(split: str, number: int, count: int, seconds: float) -> str:
    """`train: 1,200 of 4,000 images, 300 a second, 0:00:09 left`, after so many seconds."""
    rate = number / seconds
    left = timedelta(seconds=round((count - number) / rate))
    return f"{split}: {number:,} of {count:,} images, {rate:,.0f} a second, {left} left"
