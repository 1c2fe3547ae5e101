"""The two containers that pictures are packed into: tar as webdataset names its members, and TFRecord."""

import functools
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Name = Literal["webdataset", "tfrecord"]

CASTAGNOLI = np.uint32(0x82F63B78)
BLOCK = 1024
ROWS = np.arange(BLOCK) * 256
MASK_DELTA = 0xA282EAD8


@dataclass(frozen=True)
class Container:
    """How one picture is framed, what ends a shard, and the names of the shards."""

    frame: Callable[[str, str, int, bytes], tuple[bytes, bytes]]
    """(key, suffix, label, encoded) -> what stands before the encoded picture, and behind it."""
    end: bytes
    shard: Callable[[str, int, int], str]
    """(split, number, count of shards) -> file name."""


def tar_frame(key: str, suffix: str, label: int, encoded: bytes) -> tuple[bytes, bytes]:
    """The members KEY.cls and KEY.SUFFIX, which webdataset makes one sample of: the label in digits, the picture."""
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
    """A tf.train.Example {image/class/label, image/encoded} between the lengths and sums of a TFRecord.

    Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/{example,feature}.proto.
    """
    int64_list = _field(3, _field(1, _varint(label)))
    # Map entries may stand in any order; the picture's last byte is the record's.
    head = _field(1, _entry(b"image/class/label", int64_list))
    picture = _field(1, _entry(b"image/encoded", _field(1, _field(1, encoded))))
    example = _field(1, head + picture)
    length = struct.pack("<Q", len(example))
    return length + _masked(length) + example[: -len(encoded)], _masked(example)


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


def _masked(content: bytes) -> bytes:
    """TFRecord's sum: a CRC that is itself stored beside what it covers is turned and shifted first."""
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    """The CRC-32C (Castagnoli, RFC 3720) of 4 bytes or more, a block at a time in NumPy."""
    front = -len(content) % BLOCK  # zeros in front leave a register of 0 as it is
    padded = np.zeros(front + len(content), np.uint8)
    padded[front:] = np.frombuffer(content, np.uint8)
    padded[front : front + 4] ^= 0xFF  # as an initial register of ones would
    table, (low, second, third, high) = _tables()
    blocks = np.bitwise_xor.reduce(table.take(padded.reshape(-1, BLOCK) + ROWS), axis=1)
    crc = 0
    for block in blocks.tolist():
        crc = block ^ low[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ high[crc >> 24]
    return crc ^ 0xFFFFFFFF


@functools.cache
def _tables() -> tuple[NDArray[np.uint32], list[list[int]]]:
    """What a byte at each place of a block adds to the sum at the block's end, [BLOCK * 256], and, for each of the
    four bytes of a sum, what becomes of it over a block of zeros."""
    bytewise = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        bytewise = np.where(bytewise & 1, bytewise >> 1 ^ CASTAGNOLI, bytewise >> 1)
    rows = [bytewise]
    for _ in range(BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ bytewise[rows[-1] & 0xFF])
    sums = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    for _ in range(BLOCK):
        sums = sums >> 8 ^ bytewise[sums & 0xFF]
    return np.concatenate(rows[::-1]), sums.tolist()


CONTAINERS: dict[Name, Container] = {
    "webdataset": Container(
        tar_frame, bytes(2 * tarfile.BLOCKSIZE), lambda split, number, count: f"{split}-{number:06}.tar"
    ),
    "tfrecord": Container(
        tfrecord_frame, b"", lambda split, number, count: f"{split}-{number:05}-of-{count:05}.tfrecord"
    ),
}
