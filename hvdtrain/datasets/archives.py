"""Archives of encoded images, of which `pack` makes a set: ILSVRC2012's tars, webdataset's tars, TFRecord, Parquet.

Nothing is unpacked: an image is some bytes of an archive, and the name of a member is text, never a path.
"""

import dataclasses
import functools
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain import files
from hvdtrain.datasets import index, packed
from hvdtrain.datasets.base import SHOWN, Dataset
from hvdtrain.datasets.folders import SUFFIXES
from hvdtrain.datasets.images import MOST_BYTES, MOST_CLASSES, Sides, dataset
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.errors import DataError, EngineUnavailable
from hvdtrain.untrusted import one_line, quoted

BLOCK = tarfile.BLOCKSIZE
PAX = re.compile(r"^[0-9]+ (path|size|GNU\.sparse\.\w+)=(.*)$", re.MULTILINE)
"""What a pax header says of a member's name, or of where its bytes are, which is not read."""
FIRST_DOT = re.compile(r"\.(?=[^/]*\Z)")
LONGEST = 4096
"""The most bytes of a long name or of a label."""
MOST_OF_LIST = 1 << 24
"""The most bytes of a list of labels; ImageNet's have at most two million."""
LINES = "`NAME CLASS`, or of one CLASS for each image in the order of the names"
VARINT = rb"([\x80-\xff]{0,9}[\0-\x7f])"
LABEL = re.compile(rb"\x0a\x11image/class/label\x12%b\x1a%b(?:\x08|\x0a%b)%b" % ((VARINT,) * 4))
ENCODED = re.compile(rb"\x0a\x0dimage/encoded\x12%b\x0a%b\x0a%b" % ((VARINT,) * 3))
"""The bytes of a tf.train.Example up to the end of the label, and up to the begin of the image.

Source: tensorflow/core/example/{example,feature}.proto; protobuf writes the key of a map's entry before its value.
"""
Read = Callable[[int, int], bytes]
"""(offset, size) -> those bytes of an archive, fewer at its end."""
Found = tuple[str, int, int]
"""The name of a member, or the label of an image; its offset in the archive, and its size."""


class Archived(packed.Packed):
    """The images of one split in archives, which hold no CRC of them."""

    def encoded(self, index: int) -> bytes:
        shard, offset, size, *_ = self.entries[index].tolist()
        return self.files.read(shard, offset, size)


def load(source: Path, val_labels: Path | None) -> Dataset | None:
    """The images of the archives in a folder; None where it holds none, or another form of a data set.

    Classes are numbered as those of index files, from labels that may count from 1. Raises DataError where an archive
    is damaged or holds anything but plain files, or where labels are missing or those of the splits are not the same.
    """
    forms = (form for form in FORMS if next(source.glob(form.format("train")), None))
    if packed.is_in(source) or (source / "train").is_dir():
        return None
    if not (form := next(forms, "")):
        return _parquet(source)
    labels, entries, paths = dict[str, int](), dict[str, Any](), dict[str, list[Path]]()
    for split in packed.SPLITS:
        reader, known = FORMS[form], tuple(labels)
        if split == "val" and reader is _classes:
            reader = functools.partial(_listed, val_labels, known)
        paths[split] = sorted(source.glob(form.format(split)))
        rows = [np.fromiter(_rows(*each, reader, labels), packed.ENTRY) for each in enumerate(paths[split])]
        if not sum(map(len, rows)):
            raise DataError(f"{source / form.format(split)} is missing, or holds no image: fetch it again.")
        entries[split] = np.concatenate(rows)
    if unknown := tuple(labels)[len(known) :]:
        some = one_line(", ".join(unknown[:3]), SHOWN)
        raise DataError(f"{source} validates with classes of no training image ({some}): fetch all archives.")
    # 0 is the background in the records that TensorFlow's script makes of ImageNet.
    base = int(all(label.isdecimal() for label in labels) and min(map(int, labels)) == 1)
    texts = [str(int(label) - base) if label.isdecimal() else label for label in labels]
    numbers = index.numbers_of(source, texts)
    for each in entries.values():
        each["label"] = np.array([numbers[text] for text in texts])[each["label"]]

    def archived(split: str, resize: int, crop: int) -> Archived:
        shards, found = packed.Files(tuple(paths[split])), entries[split]
        return Archived(found["label"].astype(np.int64), resize, crop, tuple(map(str, numbers)), shards, found, False)

    notes = ("labels count from 1: each is taken less 1",) * base
    return dataclasses.replace(dataset(archived, len(numbers), Sides(1, 1, 1)), notes=notes)


def _parquet(source: Path) -> Dataset | None:
    found = (path for folder in (source, source / "data") for path in folder.glob("*train*.parquet"))
    if not (first := next(found, None)):
        return None
    try:
        from hvdtrain.datasets import parquet
    except ImportError as error:
        raise EngineUnavailable(
            f"{first} cannot be read without pyarrow ({one_line(error)}); pip install 'hvdtrain[parquet]'."
        ) from None
    return parquet.load(first.parent)


def _rows(number: int, path: Path, reader: "Reader", labels: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """The archive's images as rows of ENTRY, in which a label is its place in `labels`."""
    with as_data_error(path, "fetch it again."), files.opened(path) as file:
        end = os.fstat(file.fileno()).st_size
        for label, offset, size in reader(lambda at, most: os.pread(file.fileno(), most, at), end):
            is_wrong = not label or not label.isprintable() or (label.isdecimal() and int(label) > MOST_CLASSES)
            if is_wrong or size > MOST_BYTES:
                raise ValueError(f"an image of {size:,} bytes with the label {quoted(label)}")
            yield number, offset, size, labels.setdefault(label, len(labels)), 0


def _members(read: Read, at: int, end: int) -> Iterator[Found]:
    """The plain files of the tar between two places of an archive, with names as ustar, pax and GNU have them."""
    name = ""
    while any(block := read(at, max(0, min(BLOCK, end - at)))):
        member, at = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape"), at + BLOCK
        if not 0 <= member.size <= end - at:
            raise ValueError(f"{quoted(member.name)} of {member.size:,} bytes is not all there")
        if member.type in {tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE}:
            text = read(at, min(member.size, LONGEST)).decode("utf-8", "surrogateescape")
            said = dict(PAX.findall(text)) if member.type == tarfile.XHDTYPE else {"path": text.rstrip("\0")}
            name = said.pop("path", name)
            if said:
                raise ValueError(f"{quoted(name)} is a sparse file, or has 8 GB")
        elif member.type in {tarfile.REGTYPE, tarfile.AREGTYPE}:
            yield name or member.name, at, member.size
            name = ""
        elif member.type not in {tarfile.DIRTYPE, tarfile.XGLTYPE}:
            raise ValueError(f"{quoted(member.name)} is no plain file")
        at += -(-member.size // BLOCK) * BLOCK
    if not block:
        raise ValueError("its end is missing")


def _classes(read: Read, end: int) -> Iterator[Found]:
    """The images of a tar with a tar for each class, in the order of a folder of classes."""
    for name, at, size in sorted(_members(read, 0, end)):
        for _, offset, length in sorted(_members(read, at, at + size)):
            yield PurePosixPath(name).stem, offset, length


def _listed(labels: Path | None, classes: Sequence[str], read: Read, end: int) -> Iterator[Found]:
    """The images of a tar in the order of their names, with the labels of a list, which may hold a class's number."""
    images = [(PurePosixPath(name).stem, at, size) for name, at, size in sorted(_members(read, 0, end))]
    if labels is None:
        raise DataError(f"ILSVRC2012_img_val.tar needs --val-labels FILE, a text with lines of {LINES}.")
    with as_data_error(labels, f"give a text with lines of {LINES}."):
        text = files.read(labels, MOST_OF_LIST)
        lines = [words for line in text.splitlines() if (words := line.replace(",", " ").split())]
        named = {PurePosixPath(words[0]).stem: words[1] for words in lines if len(words) > 1}
        if not named:
            named = {name: words[0] for (name, *_), words in zip(images, lines, strict=True)}
    known = {str(number): name for number, name in enumerate(sorted(classes))} | {name: name for name in classes}
    for name, at, size in images:
        if not (label := known.get(named.get(name, ""))):
            raise DataError(
                f"{labels} must give {quoted(name)} a class of the training images, or its number from 0 in the order "
                f"of their names, got {quoted(named.get(name))}: the development kit's numbers, from 1, have another "
                f"order; give lines of {LINES}."
            )
        yield label, at, size


def _samples(read: Read, end: int) -> Iterator[Found]:
    """The images of a webdataset's tar: neighbours of one name up to its first dot, one an image and one its .cls."""
    for key, group in groupby(_members(read, 0, end), lambda found: FIRST_DOT.split(found[0], 1)[0]):
        parts = {name[len(key) :].lower(): (at, size) for name, at, size in group}
        images = [place for suffix, place in parts.items() if suffix in SUFFIXES]
        if len(images) != 1 or ".cls" not in parts:
            raise ValueError(f"{quoted(key)} must have an image and a .cls, got {quoted([*parts])}")
        at, size = parts[".cls"]
        yield read(at, min(size, LONGEST)).decode().strip(), *images[0]


def _records(read: Read, end: int) -> Iterator[Found]:
    """The images of a TFRecord file of tf.train.Example {image/class/label, image/encoded}. CRCs are not looked at."""
    at = 0
    while at < end:
        size = int.from_bytes(read(at, 8), "little")
        record = read(at + 12, min(size, MOST_BYTES))
        label, image = LABEL.search(record), ENCODED.search(record)
        if size > end - at - 16 or not (label and image):
            raise ValueError(f"no whole tf.train.Example with image/class/label and image/encoded at byte {at}")
        yield str(_number(label[4])), at + 12 + image.end(), _number(image[3])
        at += size + 16


def _number(varint: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))


Reader = Callable[[Read, int], Iterator[Found]]
FORMS: dict[str, Reader] = {
    "ILSVRC2012_img_{}.tar": _classes,
    "*{}*.tar": _samples,
    "*{}*.tfrecord*": _records,
    "*{}*-of-*[0-9]": _records,
}
"""The names of archives, with the split in the place of {}, and what reads an archive of so many bytes."""
