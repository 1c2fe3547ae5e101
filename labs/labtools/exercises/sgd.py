"""The checks of lab 1: a gradient by hand, SGD's update, the batches of an epoch, and a step in PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.terminal import counted
from labtools.exercises import Exercise, first_of, listed, print_right

_LR = 0.1
_PARAMETERS = (("m", "slope"), ("n", "intercept"))

Array = NDArray[Any]


class Check(Exercise):
    """The four gaps of lab 1."""

    lab = 1
    hints: ClassVar = {
        "gradient": (
            "write e = m * x + n - y for the error at every point. The loss is the mean of the squares of e.",
            "the derivative of a square is twice what is squared, times the derivative of that, for each parameter.",
            "de/dm is x, and de/dn is 1. Both results are means over the batch: one number each.",
        ),
        "update": (
            "the gradient points uphill, in the direction in which the loss grows.",
            "`gradient` is a pair: its first number belongs to m, its second to n. Both new values are given back.",
            "the distance moved is the learning rate times the gradient.",
        ),
        "batches": (
            "a slice of `order` is a batch. Where does the second one begin, where the third?",
            "range(0, len(order), batch_size) gives the positions at which the batches begin.",
            "a slice that ends behind the end of an array is shorter, and no error: the rest becomes a batch.",
        ),
        "step": (
            "it has four lines: clear the gradients, compute the loss, compute its gradients, update.",
            "the loss comes from torch.nn.functional.mse_loss, the gradients from a method of the loss.",
            "the optimizer has the other two: one method for clearing the gradients, and one for the update.",
        ),
    }

    def gradient(self, gradient: Callable[[Array, Array, float, float], Any]) -> None:
        """Gap 1: `gradient(x, y, m, n)` is the derivative of the mean squared error for m, and for n."""
        x, y = _points(40)
        m, n = 0.5, -0.25
        given = self._call("gradient", gradient, x, y, m, n)
        error = m * x + n - y
        right = np.array([2 * np.mean(error * x), 2 * np.mean(error)])
        self._judge("gradient", of_gradient(given, x, error, right, m * x - y))
        print_right(f"at m = {m}, n = {n} the gradient is ({right[0]:.4f}, {right[1]:.4f}), to the last digit.")

    def update(self, update: Callable[[float, float, Any, float], Any]) -> None:
        """Gap 2: `update(m, n, gradient, lr)` is the pair m, n after a step."""
        before, slopes = np.array([0.25, -0.4]), np.array([-0.3, 0.7])
        given = self._call("update", update, *before.tolist(), tuple(slopes.tolist()), _LR)
        self._judge("update", of_update(given, before, slopes))
        after = before - _LR * slopes
        print_right(f"with a gradient of (-0.3, 0.7) and an LR of 0.1, m = {after[0]:.2f} and n = {after[1]:.2f}.")

    def batches(self, batches: Callable[[Array, int], Any]) -> None:
        """Gap 3: `batches(order, batch_size)` cuts the epoch's order into batches; the last one may be shorter."""
        for count, size in ((1000, 100), (1000, 300), (7, 1)):
            order = 5000 + np.random.default_rng(count).permutation(count)  # none is a position in the order, too
            given = self._call("batches", lambda *each: list(batches(*each) or ()), order.copy(), size)
            mistake = of_batches(given, order, size)
            where = f"for {count} points and a batch size of {size}, "
            self._judge("batches", mistake and where + mistake)
        print_right("1,000 points become 10 batches of 100, or 300, 300, 300 and 100: each point in one batch.")

    def step(self, step: Callable[[Any, Any, Any, Any], Any]) -> None:
        """Gap 4: `step(model, optimizer, x, y)` makes one step of PyTorch."""
        path, events = self._call("step", _torch_steps, step)
        self._judge("step", of_step(path, events))
        print_right("three steps of yours and three computed by hand end at the same slope and intercept.")


def _points(count: int) -> tuple[Array, Array]:
    """Points around y = 3x + 1, whose mean x is not 0."""
    random = np.random.default_rng(1)
    x = random.uniform(0.1, 1.0, (count, 1)).astype(np.float32)
    return x, (3 * x + 1 + random.normal(0, 0.3, (count, 1))).astype(np.float32)


def _pair(given: Any, where: str) -> tuple[Array | None, str | None]:
    """The two numbers given back, or what is wrong with them."""
    if given is None:
        return None, "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
    try:
        pair = [np.asarray(each, dtype=float) for each in given]
    except (TypeError, ValueError):
        pair = []
    if len(pair) != 2:
        return None, f"gives back {given!s:.60}, and not two numbers, {where}."
    for (name, _), each in zip(_PARAMETERS, pair, strict=True):
        if each.size != 1:
            return None, (
                f"gives back {each.size} numbers for {name}, one for every point: the mean over the batch is missing."
            )
    return np.array([float(each.reshape(())) for each in pair]), None


def _known(given: Array, candidates: Mapping[str, Any]) -> str | None:
    return next((why for why, wrong in candidates.items() if np.allclose(given, wrong, rtol=1e-3, atol=1e-6)), None)


def of_gradient(given: Any, x: Array, error: Array, right: Array, without_n: Array) -> str | None:
    """What is wrong with the gradient given for these errors mx + n - y; `without_n` are the errors mx - y."""
    pair, mistake = _pair(given, "the derivatives for m and for n")
    if pair is None or np.allclose(pair, right, rtol=1e-4):
        return mistake
    count = len(x)
    why = _known(
        pair,
        {
            "the factor 2 is missing: the derivative of e squared is 2 e": right / 2,
            "the sign is wrong. The error is mx + n - y; for y - (mx + n) the derivative brings another minus": -right,
            "that is the sum over the batch. With the mean, the step does not depend on the batch size": count * right,
            "that is half the sum over the batch: neither the mean nor the factor 2": count * right / 2,
            "the two are swapped: the derivative for m comes first": right[::-1],
            "the derivative for m lacks the factor x, by which m acts on the error": (right[1], right[1]),
            "the derivative for n has a factor x too many: n acts on all points alike": (right[0], right[0]),
            "the error is mx + n - y, and n is missing in it": 2 * np.array([np.mean(without_n * x), without_n.mean()]),
            "that is the derivative of |e|, not of e squared": (np.mean(np.sign(error) * x), np.mean(np.sign(error))),
            "the factor x is outside the mean: multiply each error by its own x first": (right[1] * x.mean(), right[1]),
        },
    )
    shown = f"gives ({pair[0]:.4f}, {pair[1]:.4f}), and ({right[0]:.4f}, {right[1]:.4f}) is right"
    return f"{shown}: {why}." if why else f"{shown} (by finite differences of the loss, too)."


def of_update(given: Any, before: Array, slopes: Array) -> str | None:
    """What is wrong with m, n given after an update."""
    pair, mistake = _pair(given, "the new m and n")
    right = before - _LR * slopes
    if pair is None or np.allclose(pair, right):
        return mistake
    why = _known(
        pair,
        {
            "it moves uphill: the gradient points to where the loss grows, and is subtracted": before + _LR * slopes,
            "the learning rate is missing: it moves by the whole gradient": before - slopes,
            "it divides by the learning rate; a smaller LR has to make smaller steps": before - slopes / _LR,
            "it gives back by how much they change, and not the new values": -_LR * slopes,
            "it gives back LR times gradient, and not the new values": _LR * slopes,
            "nothing has changed": before,
            "n has not been updated": (right[0], before[1]),
            "m has not been updated": (before[0], right[1]),
            "the two are swapped: m moves along the gradient of n": before - _LR * slopes[::-1],
            "m moves along the gradient of n, too": before - _LR * slopes[1],
            "n moves along the gradient of m, too": before - _LR * slopes[0],
        },
    )
    return f"gives m = {pair[0]:.3f}, n = {pair[1]:.3f}, and {right[0]:.3f}, {right[1]:.3f} is right" + (
        f": {why}." if why else ": the parameter minus LR times its gradient."
    )


def of_batches(given: Sequence[Any], order: Array, size: int) -> str | None:
    """What is wrong with the batches of an order; continues "for 1000 points and a batch size of 100, "."""
    if not given:
        return "it is still empty: there is no batch (if it makes them, a `return` is missing)."
    cut = [np.atleast_1d(np.asarray(batch)).ravel() for batch in given]
    lengths, flat = [len(batch) for batch in cut], np.concatenate(cut)
    full, rest = divmod(len(order), size)
    right = [size] * full + [rest] * bool(rest)
    missing, again = len(order) - len(np.unique(flat)), len(flat) - len(np.unique(flat))
    lost = f"{missing} of {len(order)} points are in no batch" + (f", and {again} are in several" if again else "")
    return first_of(
        (
            not np.isin(flat, order).all(),
            "it gives back positions, not points: index `order` with them, or the points are never shuffled.",
        ),
        (
            len(cut) == size != len(right) and len(set(lengths)) <= 2 and not missing,
            f"there are {size} batches, as though batch_size were their number: it is the points in each.",
        ),
        (len(cut) == 1 < len(right), f"there is one batch only, of {lengths[0]}; {len(right)} are right."),
        (missing == rest > 0 == again, f"{lost}: the last batch, of {rest}, belongs to the epoch as well."),
        (missing, f"{lost}."),
        (again, f"{again} points come twice: a batch begins where the one before it ends."),
        (lengths != right, f"the batches have {listed(lengths[:5])} ... points; batch_size is {size}."),
        (not np.array_equal(flat, order), "the points come in another order than `order`, which is shuffled."),
    )


def _torch_steps(step: Callable[[Any, Any, Any, Any], Any]) -> tuple[Array, list[list[str]]]:
    """Slope and intercept at the start and after each of three steps [4, 2]; what happened in each, in its order."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    events: list[list[str]] = []
    model.weight.register_hook(lambda gradient: events[-1].append("backward"))
    optimizer.register_step_post_hook(lambda *given: events[-1].append("step"))
    clear = optimizer.zero_grad
    optimizer.zero_grad = lambda *given, **named: (events[-1].append("zero"), clear(*given, **named))  # type: ignore
    x, y = map(torch.from_numpy, _points(60))
    path = [(model.weight.item(), model.bias.item())]
    for start in (0, 20, 40):
        events.append([])
        step(model, optimizer, x[start : start + 20], y[start : start + 20])
        path.append((model.weight.item(), model.bias.item()))
    return np.array(path), events


def _steps_by_hand(start: Array, accumulate: bool = False) -> Array:
    """The same three steps without PyTorch; or with gradients that are never cleared."""
    x, y = _points(60)
    path, total = [start], np.zeros(2)
    for at in (0, 20, 40):
        xs = x[at : at + 20]
        error = path[-1][0] * xs + path[-1][1] - y[at : at + 20]
        slopes = 2 * np.array([np.mean(error * xs), np.mean(error)])
        total = total + slopes if accumulate else slopes
        path.append(path[-1] - _LR * total)
    return np.array(path)


def of_step(path: Array, events: Sequence[Sequence[str]]) -> str | None:
    """What is wrong with three steps, from the path [4, 2] and what each did, in its order."""
    right = _steps_by_hand(path[0])
    if np.allclose(path, right, atol=1e-5):
        return None
    order = " ".join(events[0])
    steps, gradients = order.count("step"), order.count("backward")
    known = first_of(
        (not any(events), "is still empty: the model is what it was."),
        (
            not gradients,
            "never computes a gradient: loss.backward() is missing, so there is nothing to step along.",
        ),
        (
            not steps,
            "computes the gradients and never uses them: optimizer.step() is missing, and the model stays as it is.",
        ),
        (
            np.allclose(path, _steps_by_hand(path[0], accumulate=True), atol=1e-5),
            "makes a right first step and wrong ones from then on: the gradients of earlier batches are never cleared, "
            "and backward adds to them. optimizer.zero_grad() clears them.",
        ),
        (
            "backward zero step" in order,
            "clears the gradients between backward and step: all are gone when the optimizer needs them.",
        ),
        (
            steps > 1 or gradients > 1,
            f"makes {counted(steps, 'update')} of {counted(gradients, 'gradient')}: one of each is a step.",
        ),
        (
            order.find("step") < order.find("backward"),
            "updates before the gradient is there: each step uses the one before's. loss.backward() comes first.",
        ),
    )
    return known or _of_first_step(path[1] - path[0], right[1] - right[0])


def _of_first_step(moved: Array, should: Array) -> str:
    times = float(moved @ should / (should @ should))
    why = {
        -1.0: "it goes uphill: the loss has the wrong sign",
        20.0: "that is the sum over the 20 points of the batch; the loss is their mean",
        0.5: "that is half the loss",
    }
    known = [reason for factor, reason in why.items() if np.allclose(moved, factor * should, rtol=1e-3)]
    return (
        f"moves the slope by {moved[0]:.4f} in the first step, and {should[0]:.4f} is right"
        f" ({times:.2f} times): {known[0] if known else 'the loss is the mean squared error of model(x) and y'}."
    )
