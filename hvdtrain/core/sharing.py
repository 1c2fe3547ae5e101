"""Values that ranks share by sums of whole numbers, which every engine has; and sums of loss and metrics.

As JSON, never pickled: no key has signed what comes over a collective library's own connections.
"""

import contextlib
import json
import math
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.errors import DivergedError, RecipeError
from hvdtrain.untrusted import printable

Sum = Callable[[np.ndarray], np.ndarray]
"""Adds an array over all ranks and gives every rank the result."""
INT64_BYTES = 8
MOST_RANKS = 256
"""Up to so many ranks, the step time of each is recorded; of more, that of each host's slowest rank."""


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


@dataclass(frozen=True)
class Figure:
    """A number that each rank measures of its own process, and that a report shows of the rank with the highest."""

    label: str
    read: Callable[[], float]
    """Measures it now."""
    write: Callable[[float], str]
    """Its value as text for a person."""


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


FIGURES: dict[str, Figure] = {
    "memory": Figure("peak memory", lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, _gib),
}
"""One row a figure, by its name in the records: ranks measure and report, the journal records, and reports show what
stands here."""


def highest(
    before: Mapping[str, tuple[float, int]], figures: Mapping[str, Iterable[float]], ranks: Sequence[int]
) -> dict[str, tuple[float, int]]:
    """Each figure's highest value, and its rank. `figures` has a value for each of `ranks`, NaN where none is known."""
    found = dict(before)
    for name, values in figures.items():
        known = [(float(value), rank) for value, rank in zip(values, ranks, strict=False) if math.isfinite(value)]
        known += [before[name]] if name in before else []
        if known:
            found[name] = max(known)
    return found


@dataclass(frozen=True)
class Totals:
    """Sums over examples; divided once, after they were added over steps and ranks."""

    loss: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name: a sum, and how many were added up. `acc1` is top-1 accuracy: examples whose highest logit is right;
    `loss`, where the loss is no mean over examples, its sum and count."""

    @classmethod
    def of(cls, names: Iterable[str], numbers: Sequence[float]) -> "Totals":
        """The totals of these numbers: the loss, the count, then a sum and a count for each of the names."""
        loss, count, *rest = numbers
        return cls(loss, count, dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=False)))

    def over_ranks(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> "Totals":
        """The totals of all ranks. Every rank must call it, with the same metrics."""
        names = sorted(self.metrics)
        own = [self.loss, self.count, *(number for name in names for number in self.metrics[name])]
        return Totals.of(names, sum_over_ranks(np.array(own)).tolist())

    def __add__(self, other: "Totals") -> "Totals":
        sums = {
            name: (a + c, b + d)
            for name in {**self.metrics, **other.metrics}
            for (a, b), (c, d) in [(self.metrics.get(name, NONE), other.metrics.get(name, NONE))]
        }
        return Totals(self.loss + other.loss, self.count + other.count, sums)

    @property
    def mean_loss(self) -> float:
        total, count = self.metrics.get("loss", (self.loss, self.count))
        return total / count if count else math.nan

    @property
    def means(self) -> dict[str, float]:
        """Each metric over all its examples; without those that had none, and the loss."""
        return {name: total / count for name, (total, count) in self.metrics.items() if count and name != "loss"}

    @property
    def score(self) -> float:
        """What the best checkpoint has most of: accuracy where there is one, else the negative loss."""
        return self.means.get("acc1", -self.mean_loss)


PAIR = "where it divides a sum by a count, return (sum, count)"
"""What a loss that is no mean over examples may do."""


def of_halves(loss: str, measured: Callable[[slice], Any], examples: int, remedy: str = PAIR) -> list[str]:
    """What `no_mean` says of a batch of so many examples, where it can be halved; `measured` gives the loss of some of
    them: a mean, or (sum, count)."""

    def mean(*parts: slice) -> float:
        found = [(measured(part), part.stop - part.start) for part in parts]
        pairs = [of if isinstance(of, tuple) else (of * many, many) for of, many in found]
        total, count = (sum(map(float, of)) for of in zip(*pairs, strict=True))
        return total / count

    with contextlib.suppress(Exception):  # the loss may take whole batches alone
        whole, half = slice(0, examples), examples // 2
        return no_mean(loss, mean(whole), mean(whole), mean(slice(0, half), slice(half, examples)), remedy)
    return []


NONE = 0.0, 0.0
TOLERANCE = 1e-4
"""Relative: what rounding leaves between a batch's loss and the mean of its halves' is less."""


def no_mean(loss: str, whole: float, again: float, halves: float, remedy: str) -> list[str]:
    """A line of the log on a loss that is no mean over examples; none of one that is, or that is not repeatable.

    `whole` and `again` are a batch's, computed twice, `halves` the mean of its halves' by their examples (sums and
    counts added up and divided, where it gives them)."""
    limit = TOLERANCE * max(abs(whole), abs(halves))
    if abs(whole - again) > limit or not abs(whole - halves) > limit:
        return []
    return [
        f"loss {printable(loss, 200)} is no mean over examples ({whole:.5g} of the first batch, {halves:.5g} of its "
        f"halves): the result depends on the number of ranks; {remedy}"
    ]


def check_names(names: Sequence[str], before: Sequence[str]) -> None:
    """Raises RecipeError where the metrics of a batch have other names than those of the batches before it."""
    if names != before:
        raise RecipeError(
            f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
            f"{', '.join(before) or 'none'}; return the sum and count (0, 0) where there is nothing to report."
        )


def check_finite(totals: Totals, step: int, peak_lr: float) -> None:
    """Raises DivergedError where the loss of all ranks is no longer a number."""
    if not math.isfinite(totals.loss):
        raise DivergedError(
            f"the training loss is {totals.loss} at step {step}; lower the LR (peak {peak_lr:g}), lengthen the "
            "warm-up, or set --clip-norm."
        )
