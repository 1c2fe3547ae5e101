"""A file of named arrays in safetensors' format, written in blocks.

The library's own `save_file` gives the same bytes, but a checksum would then need the file to be read again. Here each
block is given to the checksum when it is written, and neither keeps Python's lock meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

BLOCK = 1 << 20
NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16"},
    **{"int32": "I32", "uint32": "U32", "float32": "F32", "complex64": "C64"},
    **{"float64": "F64", "int64": "I64", "uint64": "U64"},
}
"""The format's names of NumPy's dtypes; those that come later here come first in a file."""
RANKS = {name: rank for rank, name in enumerate(NAMES)}


def write(path: Path, arrays: Mapping[str, np.ndarray], update: Callable[[memoryview], object]) -> None:
    """Writes a new file; `update` is given its bytes, block by block. Raises OSError, and SafetensorError for an array
    of a dtype that the format has not."""
    with path.open("xb") as file:
        for block in blocks(arrays):
            update(block)
            file.write(block)


def blocks(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    """The file's bytes, at most BLOCK at once but for the header."""
    ordered = _ordered(arrays)
    yield memoryview(_header(ordered))
    for array in ordered.values():
        content = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
        for start in range(0, len(content), BLOCK):
            yield content[start : start + BLOCK]


def _ordered(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In the file's order: wide dtypes first, so that each array begins at a multiple of its own width."""
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
