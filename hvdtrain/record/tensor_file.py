"""A file of named arrays in safetensors' format, written in blocks that bypass the page cache.

The library's own `save_file` and `load_file` write and read the same bytes, but for a checksum the file would have to
be read again. Here each block is given to the checksum when it is written or read, and neither holds Python's lock
meanwhile. To fill and free the pages of the page cache would take more processor time than everything else.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
from safetensors import SafetensorError

from hvdtrain import files

DIRECT = getattr(os, "O_DIRECT", 0)
"""0 on macOS, which has no such flag."""
BLOCK = 2 << 20
"""The bytes of a block, a multiple of all page sizes. Blocks of 256 KiB take 50 % more processor time, and
blocks of 8 MiB more too."""
NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16"},
    **{"int32": "I32", "uint32": "U32", "float32": "F32", "complex64": "C64"},
    **{"float64": "F64", "int64": "I64", "uint64": "U64"},
}
"""The format's names of NumPy's dtypes, in the reverse of their order in a file."""
NUMPY = {kind: name for name, kind in NAMES.items()}
RANKS = {name: rank for rank, name in enumerate(NAMES)}


def write(path: Path, arrays: Mapping[str, np.ndarray], update: Callable[[memoryview], object]) -> None:
    """Writes a new file; calls `update` with its bytes, block by block. Raises OSError; SafetensorError for a dtype
    that the format does not have."""
    with path.open("xb", buffering=0) as file:
        with contextlib.suppress(OSError):  # a file system without O_DIRECT
            _set_direct(file.fileno(), True)
        for block in blocks(arrays):
            update(block)
            _write(file.fileno(), block)


def blocks(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    """The file's bytes in blocks. Each overwrites the one before. O_DIRECT requires that a block begins at a page's
    boundary, in memory that a fork shares."""
    block, filled = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8), 0
    ordered = _ordered(arrays)
    bytes_of = (np.asarray(array, order="C").reshape(-1).view(np.uint8) for array in ordered.values())
    for content in itertools.chain([np.frombuffer(_header(ordered), np.uint8)], bytes_of):
        start = 0
        while start < len(content):
            piece = content[start : start + BLOCK - filled]
            block[filled : filled + len(piece)] = piece
            start, filled = start + len(piece), filled + len(piece)
            if filled == BLOCK:
                yield block.data
                filled = 0
    if filled:
        yield block[:filled].data


def _write(file: int, block: memoryview) -> None:
    """Writes all of a block; through the page cache where O_DIRECT is refused, as for a last block that is short."""
    while block:
        try:
            block = block[os.write(file, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT:
                raise
            _set_direct(file, False)


def _set_direct(file: int, direct: bool) -> None:
    """Sets whether writes bypass the page cache. Raises OSError where the file system cannot."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | DIRECT if direct else flags & ~DIRECT)


def _ordered(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays in the file's order: wide dtypes first, so that each begins at a multiple of its width."""
    if wrong := next((name for name, array in arrays.items() if array.dtype.name not in NAMES), None):
        raise SafetensorError(f"{wrong} is of {arrays[wrong].dtype}, which the format has not")
    return dict(sorted(arrays.items(), key=lambda item: (-RANKS[item[1].dtype.name], item[0].encode())))


def _header(ordered: Mapping[str, np.ndarray]) -> bytes:
    entries, end = {}, 0
    for name, array in ordered.items():
        begin, end = end, end + array.nbytes
        kind = NAMES[array.dtype.name]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


Places = Mapping[str, tuple[str, list[int], int]]
"""By an array's name: NumPy's name of its dtype, its shape, and at which byte of the file it begins."""


def places(header: bytes) -> tuple[Places, int]:
    """Where the arrays are, and the bytes of the file.

    Raises ValueError, KeyError, TypeError, AttributeError where it is no header, or arrays lie apart or overlap.
    """
    found, data = {}, 8 + len(header)
    end = data
    entries = [each for each in files.parse_json(header.decode()).items() if each[0] != "__metadata__"]
    for name, entry in sorted(entries, key=lambda each: each[1]["data_offsets"]):
        if (kind := entry["dtype"]) not in NUMPY:
            raise ValueError(f"it has arrays of {kind}")
        shape, begin = entry["shape"], end
        if any(type(number) is not int or number < 0 for number in shape):
            raise ValueError(f"{name} has the shape {shape}")
        end += math.prod(shape) * np.dtype(NUMPY[kind]).itemsize
        if entry["data_offsets"] != [begin - data, end - data]:
            raise ValueError(f"the bytes of {name} are not as many as its shape has")
        found[name] = NUMPY[kind], shape, begin
    return found, end


def read(file: IO[bytes], where: Places, size: int, update: Callable[[memoryview], object]) -> dict[str, np.ndarray]:
    """The arrays of an open file of `size` bytes, in one piece of memory; calls `update` with its bytes, block by
    block. Raises OSError; ValueError where the file is shorter."""
    content = np.empty(size, np.uint8).data
    for start in range(0, size, BLOCK):
        block = content[start : start + BLOCK]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise ValueError("it became shorter")
        update(block)
    return {name: np.ndarray(shape, dtype, content, begin) for name, (dtype, shape, begin) in where.items()}
