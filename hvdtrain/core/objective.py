"""What both frameworks require of a loss, of a user's step and of labels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core.recipe import Recipe
from hvdtrain.core.recipe.keys import LOSSES
from hvdtrain.core.user_code import library_of, reason
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import printable

AUXILIARY = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}
"""Weights of the loss of torchvision's auxiliary classifiers: 0.3 in Szegedy et al. 2014, arXiv:1409.4842, section 5;
0.4 for Inception-v3 in TensorFlow's research models."""
TOLERANCE = 1e-4
"""The largest relative difference that rounding makes between a batch's loss and the mean of its halves' losses."""


def check_labels(r: Recipe, outputs: int, least: int, most: int, classes: str = "") -> None:
    """Raises DataError where labels from `least` to `most` are more than the outputs of the network, or RecipeError
    where the data set gives the number of its `classes`, as "4 classes"."""
    if least < 0 or most >= outputs:
        wrong = least if least < 0 else most
        names = (f"model_args {name}={most + 1}" for name, value in r.model_args.items() if value == outputs)
        more = f", or give {next(names, f'it {most + 1} outputs')}" if most >= outputs else ""
        raise (RecipeError if classes else DataError)(
            f"model {r.model} gives {outputs} outputs, dataset {r.dataset} has {classes or f'label {wrong}'}: labels "
            f"must be 0 to {outputs - 1} (PyTorch leaves out -100); change them{more}."
        )


def class_axis(outputs: Sequence[int | None], targets: Sequence[int | None], *, of_labels: bool) -> tuple[int, ...]:
    """The axes of outputs that the cross entropy may take as classes: 1, as PyTorch, and -1, as Keras. The targets are
    labels, or a probability of each class. Sizes that are not known are None, and fit any."""

    def fits(axis: int) -> bool:
        rest = [*outputs[:axis], *(outputs[axis:][1:])] if of_labels else [*outputs]
        return len(rest) == len(targets) and all(a == b or None in (a, b) for a, b in zip(rest, targets, strict=True))

    return tuple(axis for axis in (1, -1)[: max(0, len(outputs) - 1)] if fits(axis))


def misfit(loss: str, outputs: Sequence[int | None], targets: Sequence[int | None], kind: str) -> RecipeError:
    """The error for outputs and targets, of the dtype `kind`, whose shapes do not go together."""
    out, y = list(outputs), list(targets)
    remedy, rule = "reshape one in the model or in the data set", "outputs and targets of one shape"
    if loss == "cross_entropy":
        rule = "outputs [n, classes] and labels [n], or outputs [n, ..., classes] and labels [n, ...]"
        if kind.startswith(("float", "bfloat")):
            remedy = "give class numbers as int64, or a probability of each class in the shape of the outputs"
        elif y == out:
            remedy = "labels are one-hot: give class numbers, as y.argmax(-1)"
        elif y[-1:] == [1] and y[:-1] == out[:-1]:
            remedy = "drop the last axis of the labels, as y.squeeze(-1)"
        elif len(out) > 2 and y == [out[0], *out[2:]]:
            remedy = "classes come last here: move axis 1 of the outputs to the end"
    else:
        remedy = of_one_more_axis(out, y) or remedy
    return RecipeError(f"loss {loss} needs {rule}, got outputs {out} and targets {kind} {y}; {remedy}.")


def no_inputs(r: Recipe, what: str, remedy: str) -> str:
    """The line of the log for a model whose outputs are not `what` its loss takes."""
    return f"loss {r.loss} takes {what}, which the outputs of model {r.model} are not; {remedy}"


def of_one_more_axis(outputs: Sequence[int | None], targets: Sequence[int | None]) -> str:
    """The remedy where outputs [n, 1] and targets [n] would be broadcast to [n, n], or the other way round; else ""."""
    out, y = list(outputs), list(targets)
    all_with_all = "else each output is compared with every target"
    if out == [*y, 1] and y:
        return f"give the targets another axis, as y[..., None], or take the last one of the outputs: {all_with_all}"
    return f"take the last axis of the targets, as y.squeeze(-1): {all_with_all}" if y == [*out, 1] and out else ""


def check_probabilities(r: Recipe, least: float, most: float) -> None:
    """Raises DataError where targets of bce_with_logits are no probabilities."""
    if least < 0 or most > 1:
        got = f"dataset {r.dataset} has {least if least < 0 else most:g}"
        remedy = "change them, as (y + 1) / 2 for -1 and 1"
        raise DataError(f"loss bce_with_logits needs targets from 0 to 1, {got}; {remedy}.")


def of_first_batch(
    r: Recipe, loss: str, axes: Sequence[int], outputs: NDArray[Any], targets: Sequence[int]
) -> list[str]:
    """Lines of the log on what a named loss makes of the outputs [n, ...] of a training batch."""
    lines, many = list[str](), outputs.size >= 8 and np.ptp(outputs) > 0
    if len(axes) > 1:
        lines.append(
            f"loss {loss}: outputs {list(outputs.shape)} and targets {list(targets)} fit with axis 1 or the last as "
            "classes; axis 1 is taken, as PyTorch does"
        )
    sums = outputs.sum(axes[0]) if axes else np.zeros(1)
    is_softmax = loss == "cross_entropy" and many and outputs.min() >= 0 and np.abs(sums - 1).max() < 1e-3
    is_sigmoid = loss == "bce_with_logits" and many and outputs.min() >= 0 and outputs.max() <= 1
    if is_softmax or is_sigmoid:
        function = "softmax" if is_softmax else "sigmoid"
        lines.append(
            f"model {r.model} gives probabilities and loss {loss} takes logits: {function} is taken twice; let the "
            f"model end without {function}"
        )
    return lines


def pair(r: Recipe, data: Any) -> tuple[Any, Any]:
    """The data of a batch, if they are a pair (x, y). Raises RecipeError where they are not, or y are texts."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        held = f"{len(data)} values" if isinstance(data, tuple | list) else f"a {type(data).__name__}"
        raise RecipeError(f"a sample of {r.dataset} must be a pair (x, y), got {held}; return a pair, or give a step.")
    x, y = data
    first = y[0] if isinstance(y, tuple | list) and y else y
    kind = getattr(getattr(first, "dtype", None), "name", type(first).__name__)
    if kind.startswith(("str", "bytes", "object")) and (r.loss in LOSSES or library_of(str(r.loss))):
        rule = f"loss {r.loss} needs numbers as labels, {r.dataset} gives texts ({kind})"
        raise RecipeError(f"{rule}; number them, as by sorted(set(labels)).index(label).")
    return x, y


def of_step(name: str, out: Any, is_pair: Callable[[Any], bool]) -> tuple[Any, Mapping[str, Any]]:
    """The loss and the metrics in what a user's step returned; `is_pair` says whether that is a loss as (sum, count).
    Raises RecipeError where it is neither a loss nor (loss, metrics)."""
    if not isinstance(out, tuple) or is_pair(out):
        return out, {}
    if len(out) != 2 or not isinstance(out[1], Mapping) or "loss" in out[1]:
        raise RecipeError(
            f"{name} must return a loss, or (loss, metrics) with a dict of metrics, none of them called loss."
        )
    return out


def no_number(name: str, got: str) -> RecipeError:
    """The error for a user's step or loss that returned something other than a loss."""
    return RecipeError(f"{name} must give one number, the mean over the batch's examples, or (sum, count), got {got}.")


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
        return [f"{unknown} raises {reason(error)}"] if copy else []
    limit = TOLERANCE * max(abs(whole), abs(halves))
    if abs(whole - again) > limit:
        return [f"{unknown} gives another one each time"] if copy else []
    if abs(whole - halves) <= limit or not math.isfinite(whole):
        return []
    return [
        f"{loss} is no mean over examples ({whole:.5g} of the first batch, {halves:.5g} of its "
        f"halves): the result depends on the number of ranks; {remedy}"
    ]
