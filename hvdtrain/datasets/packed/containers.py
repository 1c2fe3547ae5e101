"""The two containers that images are packed into: tar as webdataset names its members, and TFRecord."""

import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import google_crc32c

Name = Literal["webdataset", "tfrecord"]

MASK_DELTA = 0xA282EAD8


@dataclass(frozen=True)
class Container:
    """How one image is framed, what ends a shard, and the names of the shards."""

    frame: Callable[[str, str, int, bytes], tuple[bytes, bytes]]
    """(key, suffix, label, encoded) -> what stands before the encoded image, and behind it."""
    end: bytes
    shard: Callable[[str, int, int], str]
    """(split, number, count of shards) -> file name."""


def tar_frame(key: str, suffix: str, label: int, encoded: bytes) -> tuple[bytes, bytes]:
    """The members KEY.cls and KEY.SUFFIX, which webdataset makes one sample of: the label in digits, the image."""
    digits = str(label).encode()
    label_member = _tar_header(f"{key}.cls", len(digits)) + digits + _padding(len(digits))
    return label_member + _tar_header(f"{key}.{suffix}", len(encoded)), _padding(len(encoded))


def _tar_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def tfrecord_frame(key: str, suffix: str, label: int, encoded: bytes) -> tuple[bytes, bytes]:
    """A tf.train.Example {image/class/label, image/encoded} between the length and the CRCs of a TFRecord.

    Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/{example,feature}.proto.
    """
    int64_list = _field(3, _field(1, _varint(label)))
    # Map entries may stand in any order; the image's last byte is the record's.
    head = _field(1, _entry(b"image/class/label", int64_list))
    image = _field(1, _entry(b"image/encoded", _field(1, _field(1, encoded))))
    example = _field(1, head + image)
    length = struct.pack("<Q", len(example))
    return length + masked_crc(length) + example[: -len(encoded)], masked_crc(example)


def _entry(key: bytes, feature: bytes) -> bytes:
    return _field(1, key) + _field(2, feature)


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
    """The CRC-32C, rotated and offset: it is stored beside the bytes that it covers."""
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
