"""Keras's metrics over all ranks: how each of their variables merges is found out on batches, and not assumed."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from hvdtrain.core.objective import TOLERANCE
from hvdtrain.keras.ranks import hvd, sum_arrays
from hvdtrain.tensorflow import private
from hvdtrain.untrusted import printable

RULES = {"sum": hvd.Sum, "maximum": hvd.Max, "minimum": hvd.Min}
TRIES, ROWS = 10, 32
"""The rules are tried on so many rows of so many batches."""
States = Sequence[np.ndarray]
"""The values of a model's metrics_variables."""
Present = tuple[States, States]
"""The states, and those with which they began: Keras resets a metric only once a first step has been made."""


def merging_of(model: keras.Model) -> "Merging":
    """What merges the model's metrics; the first call after a compile puts it into test_step and reset_metrics."""
    found = model.test_step
    if not isinstance(found, Merging) or found.compiled is not private.compiled_metrics(model):
        model.test_step = found = Merging(model, getattr(found, "own", found))
        model.reset_metrics, model.test_function = found.reset, None
    return found


def keep(
    data: Any, awaited: tf.Variable, take: Callable[[Any, list[tf.Tensor]], None], rows: int | None = None
) -> None:
    """In a step: gives the structure and the values of its batch while some are awaited, where all are tensors."""
    values = tf.nest.flatten(data)
    if not all(isinstance(value, tf.Tensor) and value.shape.rank for value in values):
        return
    like = tf.nest.map_structure(lambda value: 0, data)

    def given() -> tf.Tensor:
        tf.py_function(lambda *values: take(like, list(values)), [value[:rows] for value in values], [])
        return awaited.assign_sub(1)

    tf.cond(awaited > 0, given, awaited.read_value)


class Merging:
    """A model's test_step, which also merges the states of its metrics over the ranks.

    The states of Keras's own metrics are sums. For others the states after a batch are compared with those after its
    halves, merged by each rule. A value is exact where all rules that fit come to it.
    """

    def __init__(self, model: keras.Model, own: Callable[[Any], Any]) -> None:
        self.compiled, self.own, self._model = private.compiled_metrics(model), own, model
        self._awaited = tf.Variable(TRIES, trainable=False)
        self._batches: list[tuple[Any, list[tf.Tensor]]] = []
        self._fits: dict[int, Any] = {}
        """By a variable's id, whether each rule fits all batches."""
        self._said: set[str] = set()
        self._trained: tuple[int, Present] = -1, ([], [])
        """The number of training steps, and the states after them."""
        made = [each for each in private.given_metrics(self.compiled) if isinstance(each, keras.metrics.Metric)]
        self._begun = {id(v): v.numpy() for each in made for v in each.variables}

    def __call__(self, data: Any) -> Any:
        found = self.own(data)
        self.keep(data)
        return found

    def keep(self, data: Any) -> None:
        """Keeps some of a step's batch, where that is awaited. The metrics have been made."""
        if hvd.size() > 1 and not all(_is_keras(each) and self._is_given(each) for each in _flat(self._model)):
            keep(data, self._awaited, lambda *batch: self._batches.append(batch), ROWS)

    def reset(self) -> None:
        """Keras's reset_metrics, which an evaluation inside of an epoch calls too."""
        self._trained = int(self._model.train_step.totals[2]), self.trained()
        type(self._model).reset_metrics(self._model)
        self._begun |= {id(v): v.numpy() for v in self._model.metrics_variables}

    def trained(self) -> Present:
        """The states after the last training step, before an evaluation that followed."""
        steps, states = self._trained
        return states if steps == int(self._model.train_step.totals[2]) else self.present()

    def present(self) -> Present:
        """The states now."""
        return _states(self._model), [self._begun.get(id(v), np.zeros(v.shape)) for v in self._model.metrics_variables]

    def of_all_ranks(self, logs: Mapping[str, Any], parts: Mapping[str, Present]) -> dict[str, Any]:
        """The logs with the metrics of all ranks' examples, or the mean of the ranks' own where a line says so.
        `parts`: states, by the prefix of their names in the logs. Every rank calls it."""
        fits, lines, held = self._agreed(), dict[str, str](), set[str]()
        own, exact, other = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for prefix, present in parts.items():
            both = _merged(*present, fits)
            for results, given in zip((own, exact, other), (present[0], *both), strict=True):
                results.update(self._results(prefix, given, held))
            owned = [(metric.name, variable.name) for metric in _flat(self._model) for variable in metric.variables]
            for (metric, variable), fit, one, another in zip(owned, fits, *both, strict=True):
                if not np.array_equal(one, another, equal_nan=True):
                    rules = " or ".join(rule for rule, does in zip(RULES, fit, strict=True) if does)
                    lines[metric] = f"{variable} of a batch is {rules or 'no sum, maximum or minimum'} of its halves'"
        values = {name: np.asarray((own if name in held else logs)[name], np.float64) for name in sorted(logs)}
        known = [name in own and np.allclose(own[name], value, 1e-6, 0, True) for name, value in values.items()]
        clear = [np.array_equal(exact.get(name, 0), other.get(name, 0), True) for name in values]
        merged = [_as_logged(exact.get(name, value), value) for name, value in values.items()]
        of_known, of_clear, *totals = sum_arrays([np.array(known), np.array(clear), *values.values()])
        ends = zip(sum_arrays(merged, hvd.Max), sum_arrays(merged, hvd.Min), strict=True)
        alike = [
            ranks == hvd.size() and np.array_equal(*each, True) for ranks, each in zip(of_known, ends, strict=True)
        ]
        odd = [name for name, is_alike in zip(values, alike, strict=True) if name in own and not is_alike]
        lines |= {name.removeprefix("val_"): "its value depends on more than its variables" for name in odd}
        for name in lines.keys() - self._said if hvd.rank() == 0 else ():
            print(f"metric {printable(name, 200)}: {lines[name]}; the logs have the mean of the ranks' own", flush=True)
        self._said |= lines.keys()
        is_exact = [is_alike and ranks == hvd.size() for is_alike, ranks in zip(alike, of_clear, strict=True)]
        found = zip(values, is_exact, merged, totals, strict=True)
        means = {name: value if is_whole else total / hvd.size() for name, is_whole, value, total in found}
        return {name: value if value.ndim else float(value) for name, value in means.items()}

    def kept(self) -> dict[str, np.ndarray]:
        """The states over all ranks for a checkpoint, by index; with ".each" those that every rank takes, and not rank
        0 alone. Every rank calls it."""
        fits, present = self._agreed(), self.present()
        totals, found = sum_arrays(present[0]), dict[str, np.ndarray]()
        for index, (one, other, total) in enumerate(zip(*_merged(*present, fits), totals, strict=True)):
            is_clear = np.array_equal(one, other, equal_nan=True)
            found[f"{index}{'' if is_clear and fits[index][0] else '.each'}"] = one if is_clear else total / hvd.size()
        return found

    def _agreed(self) -> np.ndarray:
        """For each variable, whether each rule fits the batches of all ranks."""
        batches, self._batches = self._batches, []
        for like, values in batches:
            with contextlib.suppress(Exception):  # of a model that takes whole batches only
                self._try(like, values)
        found = dict(self._fits)
        for each in filter(_is_keras, _flat(self._model)):  # a sum, unless a model or layer feeds it means of batches
            does = [True if self._is_given(each) else found.get(id(v), [True])[0] for v in each.variables]
            found |= {id(v): [fits, False, False] for v, fits in zip(each.variables, does, strict=True)}
        fits = [found.get(id(v), [True] * 3) for v in self._model.metrics_variables]
        return sum_arrays([np.array(fits)])[0] == hvd.size()

    def _is_given(self, metric: keras.metrics.Metric) -> bool:
        """Whether Keras itself feeds the metric, example by example."""
        model, losses = self._model, getattr(private.compiled_loss(self._model), "metrics", None) or []
        compiled = self.compiled.metrics if self.compiled else []
        return any(metric is each for each in (private.loss_tracker(model), *compiled, *losses))

    def _try(self, like: Any, values: Sequence[tf.Tensor]) -> None:
        """Finds out which rules fit a batch; the metrics stay as they are."""
        model, middle = self._model, len(values[0]) // 2
        outside: dict[int, Any] = {}
        """What a batch changes besides, such as the state of random numbers."""

        def after(rows: slice) -> States:
            with _scope(model) as scope:
                scope.state_mapping.update(outside)
                self.own(tf.nest.pack_sequence_as(like, [value[rows] for value in values]))
                ids = {id(variable) for variable in model.metrics_variables}
                outside.update({key: value for key, value in scope.state_mapping.items() if key not in ids})
                return _states(model)

        whole, *halves = map(after, [slice(None), slice(middle), slice(middle, None)])
        with _scope(model):
            begun = _states(model)
        for variable, *of_one in zip(model.metrics_variables, begun, whole, *halves, strict=True):
            self._fits[id(variable)] = np.logical_and(self._fits.get(id(variable), True), _fitting(*of_one)).tolist()

    def _results(self, prefix: str, states: States, held: set[str]) -> dict[str, np.ndarray]:
        """The metrics for these states, by their names in the logs; `held` takes the names of those that are variables,
        which the next reset changes."""
        found = {}
        with _scope(self._model, states):
            for name, value in _leaves(self._model.get_metrics_result()):
                found[prefix + name] = np.asarray(keras.ops.convert_to_numpy(value), np.float64)
                held |= {prefix + name} if isinstance(value, keras.Variable | tf.Variable) else set()
        return found


def _states(model: keras.Model) -> States:
    return [keras.ops.convert_to_numpy(variable.value) for variable in model.metrics_variables]


def _merged(states: States, begun: States, fits: np.ndarray) -> tuple[States, States]:
    """The states over all ranks, and others for those that are not clear."""
    with np.errstate(invalid="ignore"):
        gains = [state - each for state, each in zip(states, begun, strict=True)]
        sums = [each + gain for each, gain in zip(begun, sum_arrays(gains), strict=True)]
    merged = zip(sums, sum_arrays(states, hvd.Max), sum_arrays(states, hvd.Min), strict=True)
    first, second = list[np.ndarray](), list[np.ndarray]()
    for by, fit in zip(merged, fits, strict=True):
        found = [each for each, does in zip(by, fit, strict=True) if does] or [by[0], by[0] + 1]
        first.append(found[0])
        second.append(next((each for each in found if not np.array_equal(each, found[0], True)), found[0]))
    return first, second


def _as_logged(value: np.ndarray, logged: np.ndarray) -> np.ndarray:
    """The value in the shape of the logs: before NumPy 2.4 Keras logs an array of one number as a float."""
    return value.reshape(logged.shape) if value.size == logged.size else value


def _leaves(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values, as Keras flattens dictionaries for its logs."""
    for name, value in results.items():
        yield from _leaves(value) if isinstance(value, dict) else [(name, value)]


@contextlib.contextmanager
def _scope(model: keras.Model, states: States | None = None) -> Iterator[keras.StatelessScope]:
    """A scope with these states, or those that Keras begins with; also for metrics' tf.functions, lists and arrays."""
    variables = model.metrics_variables
    with contextlib.ExitStack() as stack:
        stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
        for metric in _flat(model):
            attributes = dict(vars(metric))
            stack.callback(vars(metric).update, attributes)
            memo = {id(each): each for each in (*private.inner_parts(metric), *metric.variables)}
            for name, value in attributes.items():
                if isinstance(value, list | dict | set | np.ndarray):
                    with contextlib.suppress(Exception):
                        vars(metric)[name] = copy.deepcopy(value, dict(memo))
        values = states or [np.zeros(variable.shape) for variable in variables]
        scope = stack.enter_context(keras.StatelessScope(zip(variables, values, strict=True)))
        if states is None:
            type(model).reset_metrics(model)
        yield scope


def _flat(model: keras.Model) -> list[keras.metrics.Metric]:
    return [one for each in model.metrics for one in (each.metrics if isinstance(each, CompileMetrics) else [each])]


def _is_keras(metric: keras.metrics.Metric) -> bool:
    """Whether the metric is one of Keras's own, and not made of a function of the user's."""
    makers = [type(metric), *private.wrapped(metric)]
    return all(getattr(each, "__module__", "").startswith("keras.") for each in makers)


def _fitting(begun: np.ndarray, whole: np.ndarray, *halves: np.ndarray) -> list[bool]:
    """Which rules merge the halves' states into that of the whole batch."""
    with np.errstate(invalid="ignore"):
        merged = begun + sum(half - begun for half in halves), np.maximum(*halves), np.minimum(*halves)
        limit = np.maximum.reduce([np.abs(each, dtype=np.float64) for each in (whole, *halves)]) * TOLERANCE
        limit = np.nan_to_num(limit, posinf=0)
        return [np.isclose(each, whole, 0, limit, equal_nan=True).all() for each in merged]
