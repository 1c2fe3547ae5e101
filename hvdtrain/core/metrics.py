"""Sums of loss and metrics over examples, and a recipe's metrics."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.sharing import Sum, of_all
from hvdtrain.errors import RecipeError


@dataclass(frozen=True)
class Totals:
    """Sums over examples, which are added over steps and ranks before they are divided once."""

    loss: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name, a sum and the count by which it is divided. `acc1` is top-1 accuracy: the sum counts the examples whose
    highest logit is right. `loss` is among them where the loss is not a mean over examples."""

    @classmethod
    def from_numbers(cls, names: Iterable[str], numbers: Sequence[float]) -> "Totals":
        """The totals from numbers: the loss, the count, then a sum and a count for each of the names."""
        loss, count, *rest = numbers
        return cls(loss, count, dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=False)))

    def over_ranks(self, sum_over_ranks: Sum) -> "Totals":
        """The totals of all ranks. Every rank must call it with the same metrics."""
        names = sorted(self.metrics)
        own = [self.loss, self.count, *(number for name in names for number in self.metrics[name])]
        return Totals.from_numbers(names, sum_over_ranks(np.array(own)).tolist())

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
    def of_validation(self) -> dict[str, float]:
        """The loss and all metrics by their names in metrics.jsonl; NaN for one without examples."""
        nothing = dict.fromkeys(self.metrics, math.nan)
        return {f"valid_{name}": mean for name, mean in {**nothing, **self.means, "loss": self.mean_loss}.items()}


@dataclass(frozen=True)
class TextUnits:
    """What a training on text is reported in, beside its loss in nats a token."""

    tokens: int
    """The tokens that an example predicts."""
    tokens_per_byte: float | None
    """Of the validation set; None where that is not known."""
    flops_use: float = 0.0
    """The part of the devices' FLOPs that one example a second takes; 0 where that is not known."""

    def counted(self, totals: Totals) -> float:
        """How many tokens the loss of these totals was taken of."""
        return totals.metrics.get("loss", (0.0, totals.count * self.tokens))[1]

    def of_steps(self, totals: Totals, seconds: float) -> dict[str, float]:
        """The values of steps that took so many seconds, by their names in metrics.jsonl."""
        tokens, use = self.counted(totals), self.flops_use * totals.count / seconds
        return {"tokens": tokens, "tokens_per_second": tokens / seconds} | ({"flops_use": use} if use else {})

    def of_loss(self, loss: float) -> dict[str, float]:
        """What a validation loss comes to, by their names in metrics.jsonl."""
        bits = {"valid_bits_per_byte": loss / math.log(2) * self.tokens_per_byte} if self.tokens_per_byte else {}
        return {"valid_perplexity": math.exp(min(loss, 700.0)), **bits}


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

    def __init__(self, recipe: Recipe, engine: Any, of_set: Callable[[Any, str, Any], Any], library: str) -> None:
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


def check_names(names: Sequence[str], before: Sequence[str]) -> None:
    """Raises RecipeError where the metrics of a batch have other names than those of the batches before."""
    if names != before:
        raise RecipeError(
            f"the metrics must have the same names in every step, got {', '.join(names) or 'none'} after "
            f"{', '.join(before) or 'none'}; return the sum and count (0, 0) where there is nothing to report."
        )
