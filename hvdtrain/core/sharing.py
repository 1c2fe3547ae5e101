"""Values that ranks exchange by sums of whole numbers, which every engine has.

Values are sent as JSON and never pickled, because messages over a collective library's connections are not signed.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Sum = Callable[[np.ndarray], np.ndarray]
"""Adds an array over all ranks and returns the result on every rank. Like all functions here that take a Sum, every
rank must call it."""
INT64_BYTES = 8
MOST_RANKS = 256
"""Up to so many ranks, the step time of each is recorded; of more, that of each host's slowest rank."""


def from_rank_0(value: Any, rank: int, sum_over_ranks: Sum) -> Any:
    """The value of rank 0."""
    return json.loads(bytes_from_rank_0(json.dumps(value).encode() if rank == 0 else b"", sum_over_ranks))


def bytes_from_rank_0(content: bytes, sum_over_ranks: Sum) -> bytes:
    """The bytes of rank 0; the other ranks give none."""
    length = int(sum_over_ranks(np.array([len(content)]))[0])
    return sum_over_ranks(_padded(content, length)).tobytes()[:length] if length else b""


def of_ranks(value: Any, rank: int, size: int, sum_over_ranks: Sum) -> list[Any]:
    """The values of all ranks, by rank."""
    content = json.dumps(value).encode()
    lengths = gather(np.array([len(content)]), rank, size, sum_over_ranks)[:, 0]
    rows = gather(_padded(content, int(lengths.max())), rank, size, sum_over_ranks)
    return [json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]


def of_all(value: Any, engine: Any) -> list[Any]:
    """The values of all of an engine's ranks, by rank."""
    return of_ranks(value, engine.rank, engine.size, engine.sum)


def gather(row: np.ndarray, rank: int, size: int, sum_over_ranks: Sum) -> np.ndarray:
    """The rows of all ranks, [size, len(row)]: a sum of arrays that are zero except for the rank's own row."""
    table = np.zeros((size, row.size), dtype=row.dtype)
    table[rank] = row
    return sum_over_ranks(table)


def _padded(content: bytes, length: int) -> np.ndarray:
    """The bytes as int64, padded with zeros to at least `length` bytes."""
    numbers = np.zeros(-(-length // INT64_BYTES), np.int64)
    numbers.view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    return numbers
