"""The checks of lab 3: the learner's ring runs on threads that stand for ranks, so that no wait lasts."""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from labtools.exercises import Exercise, first_of, listed, print_right, stopped

_WAIT = 0.5  # seconds; messages among threads take microseconds
_CASES = ((4, 8), (3, 7), (5, 5), (2, 3))
"""Ranks, and the length of the array: divisible and not."""

Array = NDArray[Any]


class Deadlock(Exception):
    """A rank waits for a message that nobody sends."""


class Thread:
    """A rank among threads: mpi4py's rank, size and Sendrecv, and a record of what it sent in each step."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], Queue[Array]], size: int) -> None:
        self.rank, self.size, self.sent_bytes = rank, size, 0
        self.sent: list[Array] = []
        """Every message, as it was sent."""
        self.addresses: list[int] = []
        """Where each lies in memory: the same for the same chunk."""
        self._boxes = boxes

    def Sendrecv(self, sendbuf: Any, dest: int, recvbuf: Any = None, source: int | None = None) -> None:  # noqa: N802
        """MPI_Sendrecv, of arrays."""
        if not 0 <= dest < self.size:
            raise ValueError(f"there is no rank {dest}: the ranks are 0 to {self.size - 1}")
        message = np.array(sendbuf)
        self.sent.append(message)
        self.addresses.append(np.asarray(sendbuf).ctypes.data)
        self.sent_bytes += message.nbytes
        self._boxes[self.rank, dest].put(message)
        try:
            arrived = self._boxes[self.rank if source is None else source, self.rank].get(timeout=_WAIT)
        except (Empty, KeyError):
            raise Deadlock(f"rank {self.rank} waits for a message from rank {source}, which sends it none") from None
        if len(arrived) > len(recvbuf):
            raise ValueError(f"{len(arrived)} numbers arrive, and recvbuf has room for {len(recvbuf)}")
        recvbuf[: len(arrived)] = arrived


class Ring:
    """`function(chunks, comm)` on every thread: the arrays [rank, length] afterwards, the ranks, the first failure."""

    def __init__(self, function: Callable[[list[Array], Any], Any], arrays: Array) -> None:
        size = len(arrays)
        boxes: dict[tuple[int, int], Queue[Array]] = {
            (here, there): Queue() for here in range(size) for there in range(size)
        }
        self.arrays = arrays.copy()
        self.chunks = [np.array_split(array, size) for array in self.arrays]
        self.comms = [Thread(rank, boxes, size) for rank in range(size)]
        self.failures: dict[int, Exception] = {}
        threads = [threading.Thread(target=self._run, args=(function, rank), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    def _run(self, function: Callable[[list[Array], Any], Any], rank: int) -> None:
        try:
            function(self.chunks[rank], self.comms[rank])
        except Exception as error:
            self.failures[rank] = error

    @property
    def failure(self) -> str | None:
        """What stopped it, if anything did: a fault rather than the wait for a rank that has failed."""
        others = [error for error in self.failures.values() if not isinstance(error, Deadlock)]
        waiting = [error for error in self.failures.values() if isinstance(error, Deadlock)]
        if others:
            return stopped(others[0])
        return f"waits for ever: {waiting[0]}." if waiting else None


def arrays_of(size: int, length: int) -> Array:
    """The summands [rank, length]: rank r has 2**r everywhere, so that a sum shows whose numbers are in it."""
    return np.repeat(2 ** np.arange(size), length).reshape(size, length).astype(np.int64)


def sum_of(chunk: int) -> int:
    """What stands for the finished sum in a chunk where allgather begins: another number in every chunk."""
    return 100 * (chunk + 1)


class Check(Exercise):
    """The four gaps of lab 3."""

    lab = 3
    hints: ClassVar = {
        "neighbours": (
            "four ranks sit in a ring: 0, 1, 2, 3, and then 0 again. Who is to the right of rank 3?",
            "the remainder % wraps around: in Python it is never negative, so (0 - 1) % 4 is 3.",
        ),
        "reduce_scatter": (
            "draw it for 3 ranks: in step 0 every rank sends the chunk of its own number. Which one arrives there?",
            "what rank r receives is the chunk that its left neighbour sends: one number lower than the one it sends.",
            "receive into an array of its own, `arrived`, and then add that to the chunk in place, with +=.",
            "in step s the rank sends chunk (rank - s) % size, and adds to the chunk one number lower.",
        ),
        "allgather": (
            "rank r begins with chunk r + 1 finished. It is the first that it sends.",
            "each step passes on what arrived in the step before.",
            "nothing is added any more: the chunk that arrives can be received right into its place.",
        ),
        "bytes_sent": (
            "how many steps do the two phases have together, and how large is what a rank sends in each?",
            "each of the two phases has N - 1 steps, and a chunk is an N-th of the array.",
        ),
    }

    def neighbours(self, neighbours: Callable[[int, int], Any]) -> None:
        """Gap 1: `neighbours(rank, size)` is the rank to the left and the one to the right."""
        given = {
            (rank, size): self._call("neighbours", neighbours, rank, size) for size in (2, 4, 5) for rank in range(size)
        }
        self._judge("neighbours", of_neighbours(given))
        print_right("of four ranks, 0 has 3 to its left and 1 to its right; and 3 has 2 and 0.")

    def reduce_scatter(self, reduce_scatter: Callable[[list[Array], Any], Any]) -> None:
        """Gap 2: after `reduce_scatter(chunks, comm)` chunk r + 1 of rank r holds the sum over all ranks."""
        for size, length in _CASES:
            ring = Ring(reduce_scatter, arrays_of(size, length))
            self._judge("reduce_scatter", of_reduce_scatter(ring))
        print_right("on 2, 3, 4 and 5 ranks, each has one finished chunk after N - 1 steps, and no two the same.")

    def allgather(self, allgather: Callable[[list[Array], Any], Any]) -> None:
        """Gap 3: `allgather(chunks, comm)` brings the finished chunk r + 1 of every rank r to all."""
        for size, length in _CASES:
            before = arrays_of(size, length)
            for rank, array in enumerate(before):
                np.array_split(array, size)[(rank + 1) % size][:] = sum_of((rank + 1) % size)
            self._judge("allgather", of_allgather(Ring(allgather, before)))
        print_right("on 2, 3, 4 and 5 ranks, all have all chunks after N - 1 steps more.")

    def bytes_sent(self, bytes_sent: Callable[[int, int], Any]) -> None:
        """Gap 4: `bytes_sent(array_bytes, size)` is what one rank sends in the whole ring."""
        given = {size: self._call("bytes_sent", bytes_sent, 8_000_000, size) for size in (2, 4, 8, 1000)}
        self._judge("bytes_sent", of_bytes(given, 8_000_000))
        print_right("8 MB on 4 ranks: each sends 12 MB; on 1,000 ranks 15.98 MB, and never 16.")


def of_neighbours(given: dict[tuple[int, int], Any]) -> str | None:
    """What is wrong with the neighbours given, by rank and size."""
    for (rank, size), pair in given.items():
        right = (rank - 1) % size, (rank + 1) % size
        if pair is None:
            return "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
        if np.shape(pair) != (2,):
            return f"gives back {pair!r:.60}, and not two ranks, left and right."
        if tuple(pair) != right:
            why = first_of(
                (tuple(pair) == right[::-1], "the two are swapped: left is the rank one lower"),
                (
                    max(pair) >= size or min(pair) < 0,
                    f"there is no rank {min(pair) if min(pair) < 0 else max(pair)}: the ring has to close",
                ),
                (rank in pair, "a rank is not its own neighbour"),
                (True, "left is one lower and right one higher, around the ring"),
            )
            return f"gives {listed(pair)} for rank {rank} of {size}, and {listed(right)} is right: {why}."
    return None


def _finished(ring: Ring) -> list[list[int]]:
    """The chunks of each rank that hold the sum over all, as the array has them."""
    size = len(ring.arrays)
    return [
        [number for number, chunk in enumerate(np.array_split(array, size)) if (chunk == 2**size - 1).all()]
        for array in ring.arrays
    ]


def _common(ring: Ring, before: Array, steps: int) -> str | None:
    """What may be wrong in either phase."""
    size = len(ring.arrays)
    sends = [len(comm.sent) for comm in ring.comms]
    rebound = any(
        not np.array_equal(np.concatenate(chunks), array)
        for chunks, array in zip(ring.chunks, ring.arrays, strict=True)
    )
    return first_of(
        (ring.failure, f"on {size} ranks {ring.failure}"),
        (not any(sends), "is still empty: no rank sends anything."),
        (
            rebound,
            "puts new arrays into the list `chunks`, and the array itself is what it was. Chunks are views: "
            "change them in place, with += or with chunk[:] = ...",
        ),
        (
            max(sends) > steps,
            f"makes {max(sends)} steps on {size} ranks, and {steps} are enough: after them every chunk is there.",
        ),
        (min(sends) < steps, f"makes {min(sends)} steps on {size} ranks, and N - 1 = {steps} are needed."),
    )


def of_reduce_scatter(ring: Ring) -> str | None:
    """What is wrong after the reduce-scatter of arrays that `arrays_of` made."""
    size, length = ring.arrays.shape
    if mistake := _common(ring, arrays_of(size, length), size - 1):
        return mistake
    finished = _finished(ring)
    if finished == [[(rank + 1) % size] for rank in range(size)]:
        return None
    cut = [np.array_split(array, size) for array in ring.arrays]
    held = [[int(chunk.max()) for chunk in chunks] for chunks in cut]
    first = [int(comm.sent[0].max()) for comm in ring.comms]
    same = all(len(set(comm.addresses)) == 1 for comm in ring.comms)
    only_own = all((message == 2**comm.rank).all() for comm in ring.comms for message in comm.sent)
    return first_of(
        (
            all(len(numbers) == 1 for numbers in finished) and len({numbers[0] for numbers in finished}) == size,
            f"is a reduce-scatter, but rank 0 ends with chunk {finished[0][0] if finished[0] else '?'} finished. The "
            "allgather of gap 3 expects chunk r + 1 on rank r: begin by sending chunk r.",
        ),
        (
            size > 2 and same,
            "sends the same in every step: each step passes on the chunk that has grown in the step before, so its "
            "number depends on `step`.",
        ),
        (
            not any(value & (value - 1) for own in held for value in own),
            "adds nothing up: what arrives replaces the rank's own numbers, and these are lost. Receive into an array "
            "of its own, and add that to the chunk.",
        ),
        (
            size > 2 and only_own,
            "sends in every step numbers that nothing has been added to. What arrives belongs to the rank's own chunk "
            "of that number, r - s - 1, which is sent next: add it there, and not to the chunk just sent.",
        ),
        (
            any(value >= 2**size for own in held for value in own),
            f"adds some numbers twice: a chunk holds {max(max(own) for own in held)}, and the sum over all ranks is "
            f"{2**size - 1}. What arrives belongs to the chunk that the left neighbour has sent, not to the one sent.",
        ),
        (
            True,
            f"leaves rank 0 with {listed([whose(value) for value in held[0]])} in its chunks; chunk 1 has to be the "
            f"sum over all. (In the first step rank 0 sent the numbers of rank {whose(first[0])}.) What arrives in "
            "step s is chunk r - s - 1, and it is added to the rank's own chunk of that number.",
        ),
    )


def whose(total: int) -> str:
    """The ranks whose numbers 2**r are in a sum: "0+1"."""
    return "+".join(str(rank) for rank in range(total.bit_length()) if total >> rank & 1)


def of_allgather(ring: Ring) -> str | None:
    """What is wrong after the allgather, which began with one finished chunk on each rank."""
    size, _ = ring.arrays.shape
    if mistake := _common(ring, ring.arrays, size - 1):
        return mistake
    sums = {sum_of(chunk) for chunk in range(size)}
    cut = [np.array_split(array, size) for array in ring.arrays]
    right = [[bool((chunk == sum_of(number)).all()) for number, chunk in enumerate(own)] for own in cut]
    if all(map(all, right)):
        return None
    unfinished = [rank for rank, comm in enumerate(ring.comms) if not set(comm.sent[0].tolist()) <= sums]
    has = sum(right[0])
    return first_of(
        (
            any(value > 100 and value not in sums for value in ring.arrays.ravel().tolist()),
            "adds what arrives to what is there. The sums are finished: they are only copied.",
        ),
        (
            len(unfinished) == size,
            "begins with a chunk that is not finished: on rank 0 only chunk 1 is, and it sends the numbers of rank "
            f"{whose(int(ring.comms[0].sent[0].max()))}. Rank r begins with chunk r + 1.",
        ),
        (
            size > 2 and all(len({message.tobytes() for message in comm.sent}) == 1 for comm in ring.comms),
            "passes on nothing: each step sends what arrived in the step before, so the chunk's number depends on "
            f"`step`. Rank 0 of {size} has {has} of {size} sums in their places.",
        ),
        (
            True,
            f"leaves rank 0 of {size} with {has} of {size} sums in their places. The chunk that arrives has the number "
            "of the one that the left neighbour sends: one lower than the one sent.",
        ),
    )


def of_bytes(given: dict[int, Any], array_bytes: int) -> str | None:
    """What is wrong with the bytes given, by number of ranks."""
    if any(value is None for value in given.values()):
        return "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
    right = {size: 2 * (size - 1) / size * array_bytes for size in given}
    if all(np.isclose(given[size], right[size]) for size in given):
        return None
    known = {
        "that is one phase of the two": lambda n: (n - 1) / n,
        "each message is a chunk, an N-th of the array": lambda n: 2 * (n - 1),
        "one phase, and each message the whole array": lambda n: n - 1,
        "that is what it tends to with many ranks; with few it is less": lambda n: 2,
        "each phase has N - 1 steps, not N: a rank need not send its last chunk to itself": lambda n: 2 * (n + 1) / n,
        "that is the array's elements and not its bytes": lambda n: 2 * (n - 1) / n / 8,
        "that is the share of one message": lambda n: 1 / n,
    }
    why = [
        reason for reason, times in known.items() if all(np.isclose(given[n], times(n) * array_bytes) for n in given)
    ]
    shown = ", ".join(f"{float(given[n]) / 1e6:,.5g} MB on {n}" for n in given)
    counted = ", ".join(f"{right[n] / 1e6:,.5g}" for n in given)
    return f"gives for 8 MB {shown} ranks, where {counted} are sent: {why[0] if why else 'count steps and chunks'}."
