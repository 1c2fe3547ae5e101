"""Values shared by sums: the same on every rank, whatever their size, and never a pickle."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdtrain.core import sharing

VALUES = [None, True, "é" * 7, [1.5, float("inf")], {"a": {"b": [0]}}, "x" * 10_000, list(range(8))]


def in_ranks(size, program):
    """What `program(rank, sum)` returns in each of so many threads, which add with one another."""
    rows, barrier = [None] * size, threading.Barrier(size)

    def work(rank):
        def add(array):
            rows[rank] = array
            barrier.wait(120)
            total = np.sum(rows, axis=0)
            barrier.wait(120)
            return total

        return program(rank, add)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_all_have_rank_0s_value(value, size):
    results = in_ranks(size, lambda rank, add: sharing.from_rank_0(value if rank == 0 else "another", rank, add))
    assert results == [value] * size


@pytest.mark.parametrize("size", [1, 3])
def test_all_have_every_ranks_value(size):
    values = [VALUES[-1 - rank] for rank in range(size)]
    results = in_ranks(size, lambda rank, add: sharing.of_ranks(values[rank], rank, size, add))
    assert results == [values] * size


@pytest.mark.parametrize("content", [b"", b"1", b"12345678", bytes(range(256)) * 3])
def test_all_have_rank_0s_bytes(content):
    results = in_ranks(2, lambda rank, add: sharing.bytes_from_rank_0(content if rank == 0 else b"", add))
    assert results == [content] * 2
