"""Values that ranks exchange by sums of whole numbers, which every engine has; and sums of the loss and metrics.

Values are sent as JSON and never pickled, because messages over a collective library's connections are not signed.
"""

import json
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.core import user_code
from hvdtrain.core.wording import duration
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

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


@dataclass(frozen=True)
class Figure:
    """A number that each rank measures of its process. A report shows the highest value, with its rank."""

    label: str
    read: Callable[[], float]
    """Measures the figure now."""
    write: Callable[[float], str]
    """The figure as text for a person."""


FIGURES: dict[str, Figure] = {
    "memory": Figure(
        "peak memory",
        read=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        write=lambda size: f"{size / 2**30:.2f} GiB",
    ),
    "processor": Figure("most processor time", read=time.process_time, write=duration),
}
"""The figures, by their name in the journal's records."""


def highest(
    before: Mapping[str, tuple[float, int]], figures: Mapping[str, Iterable[float]], ranks: Sequence[int]
) -> dict[str, tuple[float, int]]:
    """The highest value of each figure, and its rank. `figures` holds a value for each of `ranks`, or NaN."""
    found = dict(before)
    for name, values in figures.items():
        known = [(float(value), rank) for value, rank in zip(values, ranks, strict=False) if math.isfinite(value)]
        known += [before[name]] if name in before else []
        if known:
            found[name] = max(known)
    return found


@dataclass(frozen=True)
class Totals:
    """Sums over examples, which are added over steps and ranks before they are divided once."""

    loss: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name, a sum and the count by which it is divided. `acc1` is top-1 accuracy: the sum counts the examples whose
    highest logit is right. `loss` is among them where the loss is not a mean over examples."""

    @classmethod
    def of(cls, names: Iterable[str], numbers: Sequence[float]) -> "Totals":
        """The totals from numbers: the loss, the count, then a sum and a count for each of the names."""
        loss, count, *rest = numbers
        return cls(loss, count, dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=False)))

    def over_ranks(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> "Totals":
        """The totals of all ranks. Every rank must call it with the same metrics."""
        names = sorted(self.metrics)
        own = [self.loss, self.count, *(number for name in names for number in self.metrics[name])]
        return Totals.of(names, sum_over_ranks(np.array(own)).tolist())

    def __add__(self, other: "Totals") -> "Totals":
        sums = {
            name: (a + c, b + d)
            for name in {**self.metrics, **other.metrics}
            for (a, b), (c, d) in [(self.metrics.get(name, (0.0, 0.0)), other.metrics.get(name, (0.0, 0.0)))]
        }
        return Totals(self.loss + other.loss, self.count + other.count, sums)

    @property
    def mean_loss(self) -> float:
        total, count = self.metrics.get("loss", (self.loss, self.count))
        return total / count if count else math.nan

    @property
    def means(self) -> dict[str, float]:
        """The mean of each metric but the loss; a metric without examples is left out."""
        return {name: total / count for name, (total, count) in self.metrics.items() if count and name != "loss"}

    @property
    def score(self) -> float:
        """What is highest for the best checkpoint: the accuracy, or the negative loss where there is none."""
        return self.means.get("acc1", -self.mean_loss)


class Summed:
    """A metric of a whole set, by a pair of functions: update(outputs, targets) gives an array or a tuple of arrays,
    which are added up over batches and the engine's ranks in float64, and compute(*sums) makes a number of them.
    `to_numpy` and `of_numpy` convert a framework's arrays."""

    def __init__(self, name: str, pair: Sequence[Any], engine: Any, to_numpy: Any, of_numpy: Any) -> None:
        self._name, (self._update, self._compute), self._engine = name, pair, engine
        self._to_numpy, self._of_numpy = to_numpy, of_numpy
        self._sums: list[np.ndarray] | None = None

    def update(self, out: Any, y: Any) -> None:
        """Adds a batch. Raises RecipeError where it does not give the same arrays as those before."""
        given = self._update(out, y)
        try:
            arrays = [self._to_numpy(one) for one in (given if isinstance(given, tuple | list) else [given])]
        except (TypeError, ValueError, RuntimeError):
            what = f"a number, an array or a tuple of them, got a {type(given).__name__}"
            rule = f"update of metric {self._name} must give {what}"
            raise RecipeError(f"{rule}; sum over the batch what compute needs.") from None
        before = [np.zeros_like(array) for array in arrays] if self._sums is None else self._sums
        self._check_alike([_shapes(before), _shapes(arrays)])
        self._sums = [np.asarray(total + array) for total, array in zip(before, arrays, strict=True)]

    def compute(self) -> Any:
        """The number over all ranks, whose sums are added here. Every rank calls it."""
        shapes = [each for each in of_all(self._sums and _shapes(self._sums), self._engine) if each is not None] or [[]]
        self._check_alike(shapes)
        own = [np.zeros(shape) for shape in shapes[0]] if self._sums is None else self._sums
        sums = (self._engine.sum(array.ravel()).reshape(array.shape) for array in own)
        return self._compute(*map(self._of_numpy, sums))

    def reset(self) -> None:
        """Begins anew."""
        self._sums = None

    def _check_alike(self, shapes: Sequence[Any]) -> None:
        if other := next((each for each in shapes if each != shapes[0]), None):
            rule = f"update of metric {self._name} must give arrays of the same shapes for all batches and ranks"
            raise RecipeError(f"{rule}, got {shapes[0]} and {other}; sum over the examples of a batch.")


def _shapes(arrays: Iterable[np.ndarray]) -> list[list[int]]:
    return [list(array.shape) for array in arrays]


class Metrics:
    """A recipe's metrics: functions of a batch's examples; and those of a whole validation set, which are no mean over
    examples and have update(outputs, targets), compute() over all of the engine's ranks, and reset()."""

    def __init__(self, recipe: "Recipe", engine: Any, of_set: Callable[[Any, str, Any], Any], library: str) -> None:
        """`of_set(metric, name, engine)` is the metric of a whole set that a recipe names, or None for another one;
        `library` has such metrics. Raises RecipeError where code cannot be imported."""
        self._paths, self._engine, self._is_tried = recipe.metrics, engine, False
        self._of_examples, self._of_sets = dict[str, Callable[..., Any]](), dict[str, Any]()
        for name, path in recipe.metrics.items():
            found = user_code.metric(path, key := f"metrics {name}", recipe.metrics_args.get(name, {}))
            if (of_whole := of_set(found, name, engine)) is not None:
                self._of_sets[name] = of_whole
            elif not callable(found):
                raise user_code.no_metric(name, f"a {type(found).__name__}", library)
            else:
                user_code.check_arguments(found, path, key, None, None)
                self._of_examples[name] = found

    @property
    def have_sets(self) -> bool:
        """Whether there are metrics of a whole set."""
        return bool(self._of_sets)

    def of_batch(self, out: Any, y: Any) -> dict[str, Any]:
        """The metrics of a batch's examples."""
        return {name: self._explained(name, metric, out, y) for name, metric in self._of_examples.items()}

    def update(self, out: Any, y: Any) -> None:
        """Adds a batch of this rank's part of the validation set to the metrics of the whole."""
        for name, metric in self._of_sets.items():
            self._explained(name, metric.update, out, y)

    def try_once(self, out: Any, y: Any) -> None:
        """Tries those of a whole set with the first training batch, long before a validation. Every rank calls it.
        Raises RecipeError and ProgramError."""
        if not self._is_tried:
            self._is_tried = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the batch lacks a class
                self.update(out, y)
                self._values()

    def added_to(self, totals: Totals) -> Totals:
        """This rank's totals of a validation, with the metrics over all ranks, which the first rank that has examples
        gives. Every rank calls it."""
        if not self._of_sets:
            return totals
        is_first = [*of_all(totals.count > 0, self._engine), True].index(True) == self._engine.rank
        values = {name: (value, 1.0) if is_first else (0.0, 0.0) for name, value in self._values().items()}
        return replace(totals, metrics={**totals.metrics, **values})

    def _values(self) -> dict[str, float]:
        values = {}
        for name, metric in self._of_sets.items():
            value = self._explained(name, metric.compute)
            metric.reset()
            try:
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                got = f"shape {list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
                remedy = "take a mean of it, as average=macro in torchmetrics"
                raise RecipeError(f"metric {name} must come to one number, got {got}; {remedy}.") from None
        return values

    def _explained(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """What the metric's code returns; its errors are ProgramErrors, unless the engine has lost a rank."""
        with user_code.failing(f"metrics {name} {self._paths[name]}", self._engine.is_lost):
            return function(*given)


TOLERANCE = 1e-4
"""The largest relative difference that rounding makes between a batch's loss and the mean of its halves' losses."""


def of_halves(
    loss: str,
    measured: Callable[[slice], Any],
    examples: int,
    remedy: str = "where it divides a sum by a count, return (sum, count)",
    copy: str = "",
) -> list[str]:
    """A line for the log where the loss of a batch is not the mean of its halves' losses; else none.

    `measured` computes the loss of some of the batch's examples: a mean, or (sum, count). A loss that differs when it
    is computed again, or that needs a whole batch, is not judged; where a `copy` of that name computes it, a line
    says so.
    """
    loss = f"loss {printable(loss, 200)}"
    unknown = f"whether {loss} is a mean over examples is not known: {copy}"

    def mean(*parts: slice) -> float:
        found = [(measured(part), part.stop - part.start) for part in parts]
        pairs = [of if isinstance(of, tuple) else (of * many, many) for of, many in found]
        total, count = (sum(map(float, of)) for of in zip(*pairs, strict=True))
        return total / count

    middle = examples // 2
    try:
        whole, again = (mean(slice(0, examples)) for _ in range(2))
        halves = mean(slice(0, middle), slice(middle, examples))
    except Exception as error:
        return [f"{unknown} raises {user_code.reason(error)}"] if copy else []
    limit = TOLERANCE * max(abs(whole), abs(halves))
    if abs(whole - again) > limit:
        return [f"{unknown} gives another one each time"] if copy else []
    if abs(whole - halves) <= limit or not math.isfinite(whole):
        return []
    return [
        f"{loss} is no mean over examples ({whole:.5g} of the first batch, {halves:.5g} of its "
        f"halves): the result depends on the number of ranks; {remedy}"
    ]


def check_names(names: Sequence[str], before: Sequence[str]) -> None:
    """Raises RecipeError where the metrics of a batch have other names than those of the batches before."""
    if names != before:
        raise RecipeError(
            f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
            f"{', '.join(before) or 'none'}; return the sum and count (0, 0) where there is nothing to report."
        )
