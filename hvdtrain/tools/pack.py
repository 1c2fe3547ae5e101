"""`python -m hvdtrain pack SOURCE DEST`: packs images from a folder, an index file or archives into a few large shards.

On a parallel file system, a million small files are opened a million times in an epoch; a shard is opened once.
"""

import contextlib
import glob
import io
import itertools
import os
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import google_crc32c
import numpy as np
import pydantic
import xxhash
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from hvdtrain import datasets, files, processors
from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.recipe import expanding
from hvdtrain.datasets import archives
from hvdtrain.datasets import packed as shards
from hvdtrain.datasets.base import Reduced, read_ahead
from hvdtrain.datasets.images import ORIENTATION, Encoded, opened, orientation, rgb, together
from hvdtrain.errors import DataError, OutputError
from hvdtrain.terminal import Status, hidden
from hvdtrain.untrusted import printable

THREADS = 16  # at least so many, also for few processors, as most of them wait for the file system
INTERVAL = 0.25  # seconds between two counts on the screen
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}
MOST_NAMED = 20  # images that one message names
Name = Literal["webdataset", "tfrecord"]
MASK_DELTA = 0xA282EAD8


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Packs an ImageNet-style folder, the images that index files name, or those of archives into shards."""

    source: Annotated[Path, expanding("SOURCE"), Flag(help="a data_dir of imagenet, or archives", is_positional=True)]
    dest: Annotated[Path, expanding("DEST"), Flag(help="new folder of the shards: a data_dir too", is_positional=True)]
    format: Annotated[Name, Flag("tar shards as webdataset's, or TFRecord files")] = "webdataset"
    shard_mb: Annotated[int, Field(ge=1), Flag("MiB a shard is filled to")] = 512
    shards: Annotated[int | None, Field(ge=1), Flag("instead of shard-mb: number of training shards")] = None
    shorter_side: Annotated[
        int, Field(ge=0), Flag("to reduce larger images to, pixels; 0: images stay as they are")
    ] = 0
    quality: Annotated[int, Field(ge=1, le=95), Flag("of the JPEGs of reduced images, 1 to 95")] = 90
    val_labels: Annotated[Path | None, expanding("--val-labels"), Flag("list of labels for ILSVRC2012_img_val.tar")] = (
        None
    )
    seed: Annotated[int, Field(ge=0), Flag("of the order in which the images are packed")] = 0


class Sample(NamedTuple):
    """One sample of a split: its index in the split, its class, its encoded image and the image's suffix."""

    sample: int
    label: int
    encoded: bytes
    suffix: str


def main(argv: Sequence[str]) -> int:
    """Packs both splits. Raises RecipeError, OutputError, and DataError for damaged images."""
    options = flags.parse(Options, "python -m hvdtrain pack", argv)
    with Status(f"finding the images of {printable(str(options.source))}") as status:
        written = pack(options, status.update)
    print(f"{options.dest}: {written}")
    return 0


def pack(options: Options, show: Callable[[str], None] = hidden) -> str:
    """Packs both splits, and returns what was written, as text for the user.

    The set is written beside DEST and then renamed, so that a folder DEST is always complete. Shards that a killed call
    has filled with the same images and options are kept. `show` gets the number of images that are packed so far.
    """
    dataset = archives.load(options.source, options.val_labels) or datasets.load(
        "imagenet", data_dir=options.source, valid_resize=1, valid_crop=1
    )
    print(*dataset.notes, sep="\n", end="\n" * bool(dataset.notes))
    with filled(options.dest, f"{options.source.absolute()} {options} {dataset.contents()}") as folder:
        return _write(folder, dataset, options, show)


@contextlib.contextmanager
def filled(to: Path, about: str) -> Iterator[Path]:
    """The folder to fill, which becomes `to` where the block raises nothing.

    Where this process is killed, the next one with the same text `about` what is packed, and how, continues with that
    folder. Raises OutputError where `to` is there already, and in place of an OSError of the block.
    """
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise OutputError(f"{to} is there already: remove it, or name a new folder.")
        files.make_folder(to.parent)
        with _unfinished(to.absolute(), about) as folder:
            yield folder
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{to} cannot be written ({reason}): free space, or name another folder.") from None


@contextlib.contextmanager
def _unfinished(dest: Path, about: str) -> Iterator[Path]:
    """The folder that `filled` gives. Those that killed processes with other texts left beside `dest` are removed."""
    folder = files.temporary(dest, f"0-{xxhash.xxh3_64(os.fsencode(about)).hexdigest()}")
    folder.mkdir(0o700, exist_ok=True)
    with _held(folder, dest):
        for left in dest.parent.glob(f".{glob.escape(dest.name)}.*.tmp"):
            if left != folder and files.TEMPORARY.fullmatch(left.name):
                with contextlib.suppress(OSError, OutputError), _held(left, dest):
                    files.remove(left)
        try:
            yield folder
            for record in folder.glob(".*"):
                record.unlink()
            files.sync(*folder.iterdir(), folder)
            umask = os.umask(0)
            os.umask(umask)
            folder.chmod(0o777 & ~umask)
            files.move(folder, dest)
        finally:
            files.remove(folder)


@contextlib.contextmanager
def _held(folder: Path, dest: Path) -> Iterator[None]:
    """Locks a folder for this process. Raises OutputError where another one uses it, or other users may write to it."""
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:  # of a link it is 777
        raise OutputError(f"{folder} is not a folder of yours alone: have it removed, or name another DEST.")

    def refuse() -> None:
        raise OutputError(f"{dest} is being packed by another process: wait for it, or name another DEST.")

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(files.held(folder / ".lock", waiting=refuse))
        yield


def _write(folder: Path, dataset: datasets.Dataset, options: Options, show: Callable[[str], None]) -> str:
    """Writes both splits and their index into the folder; returns what was written, as text for the user."""
    splits, classes = dict[str, tuple[list[Path], NDArray[np.void]]](), tuple[str, ...]()
    container, bad, continued = CONTAINERS[options.format], list[DataError](), 0
    for name, split in (("train", dataset.train), ("val", dataset.valid)):
        assert isinstance(split, Encoded)
        classes = split.classes
        order = split.mixed(np.random.default_rng([options.seed, len(splits)]))
        kept = _kept(folder, name)
        continued += len(kept)
        left = order[len(kept) :]
        images = _counted(_images(split, left, options, bad), name, len(left), show)
        splits[name] = _write_split(folder, name, images, order, kept, options, bad)
    if bad:
        count = sum(len(entries) for _, entries in splits.values())
        raise together(bad, MOST_NAMED, f"of the {count:,} images of {options.source}", f"{options.source}/")
    named = dict[str, tuple[dict[str, int], NDArray[np.void]]]()
    for name, (written, entries) in splits.items():
        # The name of a TFRecord file holds the number of files, which is known only once all are written.
        paths = [path.rename(folder / container.shard(name, k, len(written))) for k, path in enumerate(written)]
        named[name] = {path.name: path.stat().st_size for path in paths}, entries
    reduced = Reduced(options.shorter_side, options.quality)
    if 0 in reduced or 0 < dataset.reduced.shorter_side <= reduced.shorter_side:
        reduced = dataset.reduced
    np.savez(folder / shards.INDEX, **shards.index_of(dataset.classes or 0, classes, named, reduced))
    counts = " and ".join(f"{len(entries):,} images in {len(lengths)} shards" for lengths, entries in named.values())
    size = sum(sum(lengths.values()) for lengths, _ in named.values())
    also = f"; {continued:,} of the images had been packed by a call that was killed" if continued else ""
    memory = processors.memory()
    fits = (
        f"{'fits into' if size <= memory / 2 else 'is more than'} half of this node's {memory / 1e9:,.1f} GB of memory"
    )
    return f"{counts} to train and to validate with, {size / 1e6:,.1f} MB, which {fits}{also}"


def _write_split(
    folder: Path,
    split: str,
    images: Iterator[Sample],
    order: NDArray[np.int64],
    kept: NDArray[np.void],
    options: Options,
    bad: list[DataError],
) -> tuple[list[Path], NDArray[np.void]]:
    """Writes a split's shards; returns their paths and the split's samples, as [n] of ENTRY.

    The samples in `kept` are the first in `order`, and are in shards already.
    """
    container, count = CONTAINERS[options.format], len(order)
    entries, written = np.zeros(count, shards.ENTRY), [folder / f"{split}-{k}" for k in np.unique(kept["shard"])]
    entries[order[: len(kept)]] = kept
    for _, group in itertools.groupby(_in_shards(images, count, options, len(kept)), lambda assigned: assigned[0]):
        written.append(folder / f"{split}-{len(written)}")
        packed = list[int]()
        with written[-1].open("wb") as file:
            for _, (sample, label, encoded, suffix) in group:
                head, tail = container.frame(f"{sample:08}", suffix, label, encoded)
                file.write(head)
                entries[sample] = len(written) - 1, file.tell(), len(encoded), label, zlib.crc32(encoded)
                file.write(encoded + tail)
                packed.append(sample)
            file.write(container.end)
        if not bad:  # else the shard lacks an image of its place in the order
            files.sync(written[-1])
            with files.replacing(folder / f".{written[-1].name}", binary=True) as record:
                np.save(record, entries[packed])
    return written, entries


def _kept(folder: Path, split: str) -> NDArray[np.void]:
    """The samples, as [n] of ENTRY, of the shards that a killed call has filled but not yet given their names."""
    kept = [np.zeros(0, shards.ENTRY)]
    while (shard := folder / f"{split}-{len(kept) - 1}").exists() and (record := folder / f".{shard.name}").exists():
        kept.append(np.load(record))
    return np.concatenate(kept)


def _in_shards(images: Iterator[Sample], count: int, options: Options, done: int = 0) -> Iterator[tuple[int, Sample]]:
    """Every image with the number of its shard, counted from 0; `done` images are in shards already."""
    shard = filled = 0
    for position, image in enumerate(images, done):
        if options.shards:
            shard = position * options.shards // count
        elif filled >= options.shard_mb << 20:
            shard, filled = shard + 1, 0
        filled += len(image.encoded)
        yield shard, image


def _images(split: Encoded, order: NDArray[np.int64], options: Options, bad: list[DataError]) -> Iterator[Sample]:
    """The split's images in that order. Each is decoded once as a check; the errors of those that fail go to `bad`."""

    def image(sample: int) -> Sample | DataError:
        try:
            with split.as_data_error(sample):
                encoded = split.encoded(sample)
                with opened(encoded) as decoded:
                    suffix = SUFFIXES.get(decoded.format or "", (decoded.format or "").lower())
                    if 0 < options.shorter_side < min(decoded.size):
                        encoded, suffix = _reduced(decoded, options.shorter_side, options.quality), "jpg"
                    else:
                        decoded.load()
        except DataError as error:
            return type(error)(*error.args)  # without a traceback, which would keep the image's bytes
        return Sample(sample, int(split.labels[sample]), encoded, suffix)

    for read in read_ahead(image, order.tolist(), max(THREADS, processors.count())):
        if isinstance(read, DataError):
            bad.append(read)
        else:
            yield read


def _reduced(image: Image.Image, side: int, quality: int) -> bytes:
    """The image as a JPEG whose shorter side has that many pixels; its EXIF keeps the orientation alone."""
    width, height = (round(side * length / min(image.size)) for length in image.size)
    written, resized = io.BytesIO(), rgb(image).resize((width, height), Image.Resampling.LANCZOS)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation(image)
    resized.save(written, "JPEG", quality=quality, exif=exif if exif[ORIENTATION] > 1 else b"")
    return written.getvalue()


def _counted(images: Iterator[Sample], split: str, count: int, show: Callable[[str], None]) -> Iterator[Sample]:
    """The images; `show` gets their number so far and the time left."""
    began = shown = time.monotonic()
    for number, image in enumerate(images, 1):
        yield image
        if (now := time.monotonic()) - shown > INTERVAL:
            shown = now
            show(progress(split, number, count, now - began))


def progress(split: str, number: int, count: int, seconds: float) -> str:
    """Text for the screen, as `train: 1,200 of 4,000 images, 300 a second, 0:00:09 left`."""
    rate = number / seconds
    left = timedelta(seconds=round((count - number) / rate))
    return f"{split}: {number:,} of {count:,} images, {rate:,.0f} a second, {left} left"


@dataclass(frozen=True)
class Container:
    """The format of a shard."""

    frame: Callable[[str, str, int, bytes], tuple[bytes, bytes]]
    """(key, suffix, label, encoded) -> the bytes before the encoded image, and those behind it."""
    end: bytes
    """The last bytes of a shard."""
    shard: Callable[[str, int, int], str]
    """(split, number, count of shards) -> file name."""


def tar_frame(key: str, suffix: str, label: int, encoded: bytes) -> tuple[bytes, bytes]:
    """The members KEY.cls, which holds the label in digits, and KEY.SUFFIX: one sample for webdataset."""

    def framed(name: str, content: bytes) -> tuple[bytes, bytes]:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        return member.tobuf(tarfile.USTAR_FORMAT), bytes(-len(content) % tarfile.BLOCKSIZE)

    digits = str(label).encode()
    (of_label, padding), (of_image, end) = framed(f"{key}.cls", digits), framed(f"{key}.{suffix}", encoded)
    return of_label + digits + padding + of_image, end


def tfrecord_frame(key: str, suffix: str, label: int, encoded: bytes) -> tuple[bytes, bytes]:
    """A tf.train.Example {image/class/label, image/encoded} between the length and the CRCs of a TFRecord.

    Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/{example,feature}.proto.
    """
    # Map entries may have any order: the last bytes of the record are those of the image.
    features = {
        b"image/class/label": _field(3, _field(1, _varint(label))),
        b"image/encoded": _field(1, _field(1, encoded)),
    }
    entries = (_field(1, _field(1, name) + _field(2, feature)) for name, feature in features.items())
    example = _field(1, b"".join(entries))
    length = struct.pack("<Q", len(example))
    return length + masked_crc(length) + example[: -len(encoded)], masked_crc(example)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def masked_crc(content: bytes) -> bytes:
    """The CRC-32C as TFRecord files hold it: rotated, and with an offset."""
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


CONTAINERS: dict[Name, Container] = {
    "webdataset": Container(
        tar_frame, bytes(2 * tarfile.BLOCKSIZE), lambda split, number, count: f"{split}-{number:06}.tar"
    ),
    "tfrecord": Container(
        tfrecord_frame, b"", lambda split, number, count: f"{split}-{number:05}-of-{count:05}.tfrecord"
    ),
}
