"""Values that ranks share by sums of whole numbers, which every engine has.

As JSON, never pickled: no key has signed what comes over a collective library's own connections.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Sum = Callable[[np.ndarray], np.ndarray]
"""Adds an array over all ranks and gives every rank the result."""
INT64_BYTES = 8


def from_rank_0(value: Any, rank: int, sum_over_ranks: Sum) -> Any:
    """Rank 0's value, on every rank; every rank calls it."""
    return json.loads(bytes_from_rank_0(json.dumps(value).encode() if rank == 0 else b"", sum_over_ranks))


def bytes_from_rank_0(content: bytes, sum_over_ranks: Sum) -> bytes:
    """Rank 0's bytes, on every rank; the others give none."""
    length = int(sum_over_ranks(np.array([len(content)]))[0])
    return sum_over_ranks(_padded(content, length)).tobytes()[:length] if length else b""


def of_ranks(value: Any, rank: int, size: int, sum_over_ranks: Sum) -> list[Any]:
    """Every rank's value, by rank; every rank calls it."""
    content = json.dumps(value).encode()
    lengths = gather(np.array([len(content)]), rank, size, sum_over_ranks)[:, 0]
    rows = gather(_padded(content, int(lengths.max())), rank, size, sum_over_ranks)
    return [json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]


def gather(row: np.ndarray, rank: int, size: int, sum_over_ranks: Sum) -> np.ndarray:
    """Every rank's row, [size, len(row)]: the sum of arrays that are zero except for the rank's own row."""
    table = np.zeros((size, row.size), dtype=row.dtype)
    table[rank] = row
    return sum_over_ranks(table)


def _padded(content: bytes, length: int) -> np.ndarray:
    """The bytes as int64, padded with zeros to at least `length` bytes."""
    numbers = np.zeros(-(-length // INT64_BYTES), np.int64)
    numbers.view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    return numbers
