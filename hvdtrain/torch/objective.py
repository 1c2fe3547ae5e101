"""What a batch costs: the loss and metrics of a recipe, of the model's outputs or from a step of the user's."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from hvdtrain.core import imports, own_code
from hvdtrain.core.own_code import AUXILIARY, MODELS, is_path
from hvdtrain.errors import HvdtrainError, ProgramError, RecipeError

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

Metric = tuple[torch.Tensor, torch.Tensor | int]
"""A sum, and how many were added up."""


@dataclass(frozen=True)
class Batch:
    """A batch of a data set of the user's: whatever its `collate` makes of so many samples.

    Examples:
        >>> Batch({"tokens": torch.zeros(8, 16)}, count=8).count
        8
    """

    data: Any
    count: int


@dataclass(frozen=True)
class Seen:
    """A batch's mean loss and metrics, on the device and without gradient; `count` examples.

    Examples:
        >>> Seen(torch.tensor(0.5), count=8, metrics={"acc1": (torch.tensor(6), 8)}).metrics["acc1"]
        (tensor(6), 8)
    """

    loss: torch.Tensor
    count: int
    metrics: Mapping[str, Metric]


def call(network: Any, x: Any) -> Any:
    """The network's outputs: called as network(**x) for a mapping, network(*x) for a tuple or list, else network(x).

    Examples:
        >>> call(lambda a, b: a + b, {"a": 1, "b": 2}), call(lambda a, b: a + b, (1, 2)), call(abs, -3)
        (3, 3, 3)
    """
    if isinstance(x, Mapping):
        return network(**x)
    return network(*x) if isinstance(x, tuple | list) else network(x)


class Objective:
    """A recipe's loss and metrics.

    Examples:
        >>> from hvdtrain.core.recipe import load
        >>> objective = Objective(load("linear"))
        >>> batch = torch.ones(4, 1), torch.zeros(4, 1)
        >>> loss, seen = objective.measure(objective.forward(torch.nn.Identity(), objective.inputs(batch)), batch)
        >>> loss, seen.count, seen.metrics
        (tensor(1.), 4, {})
    """

    def __init__(self, recipe: "Recipe") -> None:
        """Raises RecipeError where code that the recipe names cannot be imported."""
        self._recipe = recipe
        self._step = _load(recipe.step, "step", None, None) if recipe.step else None
        own = recipe.loss is not None and recipe.loss not in NAMED
        self._own_loss = _load(recipe.loss, "loss", None, None) if recipe.loss and own else None
        self._metrics = {name: _load(path, f"metrics {name}", None, None) for name, path in recipe.metrics.items()}
        self._forward_of = f"step {recipe.step}" if recipe.step else f"model {recipe.model}"
        self._all_ours = not recipe.step and not is_path(recipe.model) and not is_path(recipe.dataset)
        self.forward: Callable[[Any, Any], Any] = self._step or call
        """Network and inputs -> outputs, which `measure` takes."""
        self.classes: int | None = None
        """Of the data set, where they are known."""
        self._unchecked = set() if recipe.model in MODELS else {True, False}
        """Of training and validation those whose labels are to be looked at."""

    @contextlib.contextmanager
    def explained(self, is_lost: Callable[[Exception], bool]) -> Iterator[None]:
        """Raises ProgramError for what the user's model or step raises, but for a rank that an engine has lost."""
        try:
            yield
        except HvdtrainError:
            raise
        except Exception as error:
            if self._all_ours or is_lost(error):
                raise
            raise ProgramError(f"{self._forward_of}: {imports.reason(error)}") from error

    def inputs(self, batch: Any) -> Any:
        """What `forward` takes of a batch: the whole for a step, else x."""
        data = batch.data if isinstance(batch, Batch) else batch
        if self._step:
            return data
        if not isinstance(data, tuple | list) or len(data) != 2:
            held = f"{len(data)} values" if isinstance(data, tuple | list) else f"a {type(data).__name__}"
            raise RecipeError(
                f"a sample of {self._recipe.dataset} must be a pair (x, y), got {held}; return a pair, or give a step."
            )
        return data[0]

    def measure(self, out: Any, batch: Any, training: bool = False) -> tuple[torch.Tensor, Seen]:
        """The mean loss over the batch's examples, with its gradient, and what is to be reported. Raises RecipeError
        where the user's code returns anything else than it should."""
        data, count = (batch.data, batch.count) if isinstance(batch, Batch) else (batch, len(batch[1]))
        if self._step:
            loss, metrics = self._of_step(out)
        else:
            loss, metrics = self._loss(out, data[1], training), self._measured(out, data[1])
        self._check(loss, training)
        return loss, Seen(loss.detach(), count, {name: self._sum(name, of, count) for name, of in metrics.items()})

    def loss(self, out: Any, batch: Any) -> Any:
        """The training loss alone, unchecked: what a loop without metrics computes.

        Examples:
            >>> from hvdtrain.core.recipe import load
            >>> Objective(load("linear")).loss(torch.ones(4, 1), (None, torch.zeros(4, 1)))
            tensor(1.)
        """
        return self._of_step(out)[0] if self._step else self._loss(out, batch[1], training=True)

    def _of_step(self, out: Any) -> tuple[Any, Mapping[str, Any]]:
        if not isinstance(out, tuple):
            return out, {}
        if len(out) != 2 or not isinstance(out[1], Mapping):
            raise RecipeError(
                f"step {self._recipe.step} must return a loss, or (loss, metrics) with a dict of metrics."
            )
        return out

    def _loss(self, out: Any, y: Any, training: bool) -> Any:
        if self._own_loss:
            with _explained(f"loss {self._recipe.loss}"):
                return self._own_loss(out, y)
        name = self._recipe.loss or ("mse" if y.is_floating_point() else "cross_entropy")
        if weight := AUXILIARY.get(type(out).__name__):
            auxiliary = [getattr(out, field) for field in out._fields if field != "logits"]
            losses = [self._named(name, one, y, training) for one in auxiliary if one is not None]
            return self._named(name, out.logits, y, training) + weight * sum(losses)
        return self._named(name, out, y, training)

    def _named(self, name: str, out: torch.Tensor, y: torch.Tensor, training: bool) -> torch.Tensor:
        if not isinstance(out, torch.Tensor):
            raise RecipeError(
                f"loss {name} needs a model that returns a tensor, {self._recipe.model} returns a "
                f"{type(out).__name__}; give a loss of your own, or a step."
            )
        shapes = f"of outputs {list(out.shape)} and targets {str(y.dtype).removeprefix('torch.')} {list(y.shape)}"
        with _explained(f"loss {name} {shapes}"):
            return self._of_tensors(name, out, y, training)

    def _of_tensors(self, name: str, out: torch.Tensor, y: torch.Tensor, training: bool) -> torch.Tensor:
        if name == "cross_entropy":
            if training in self._unchecked and not y.is_floating_point():
                self._check_labels(out, y, training)
            return F.cross_entropy(out, y, label_smoothing=self._recipe.label_smoothing if training else 0.0)
        if out.shape != y.shape:  # PyTorch would broadcast them
            raise RecipeError(
                f"loss {name} needs outputs and targets of one shape, got {list(out.shape)} and {list(y.shape)}; "
                "reshape one in the model or in the data set."
            )
        return NAMED[name](out, y.to(out.dtype))

    def check_outputs(self, out: Any) -> None:
        """Raises RecipeError where the data set has more classes than the network has outputs.

        Examples:
            >>> from hvdtrain.core.recipe import load
            >>> Objective(load("digits")).check_outputs(torch.zeros(2, 10))
        """
        logits = getattr(out, "logits", out)
        if self.classes and not self._step and self._recipe.loss in {None, "cross_entropy"}:
            own_code.check_labels(self._recipe, logits.shape[1], 0, self.classes - 1, f"{self.classes} classes")

    def _check_labels(self, out: torch.Tensor, y: torch.Tensor, training: bool) -> None:
        """In every batch on a CPU; in the first on a GPU, for which the host waits."""
        if not y.is_cpu:
            self._unchecked.discard(training)
        self.check_outputs(out)
        if len(kept := y[y != -100]):  # which cross_entropy leaves out
            own_code.check_labels(self._recipe, out.shape[1], int(kept.min()), int(kept.max()))

    def _measured(self, out: Any, y: Any) -> dict[str, Any]:
        with torch.no_grad():
            metrics = {}
            for name, metric in self._metrics.items():
                with _explained(f"metrics {name} {self._recipe.metrics[name]}"):
                    metrics[name] = metric(out, y)
            logits = getattr(out, "logits", out)
            if self._recipe.loss in {None, "cross_entropy"} and y.dim() == 1 and not y.is_floating_point():
                metrics["acc1"] = (logits.argmax(1) == y).sum(), len(y)
            return metrics

    def _check(self, loss: Any, training: bool) -> None:
        key = "step" if self._step else "loss"
        name = getattr(self._recipe, key) or "of the data set"
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise RecipeError(f"{key} {name} must give one number, the mean over the batch's examples, got {got}.")
        if training and not loss.requires_grad:
            raise RecipeError(
                f"{key} {name} gives a loss without gradient; compute it of the model's outputs, without detach(), "
                "item() or no_grad()."
            )

    def _sum(self, name: str, of: Any, count: int) -> Metric:
        if isinstance(of, tuple | list) and len(of) == 2 and all(map(_is_number, of)):
            return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in of)  # type: ignore[return-value]
        if isinstance(of, torch.Tensor) and of.shape == (count,):
            return of.detach().double().sum(), count
        got = f"shape {list(of.shape)}" if isinstance(of, torch.Tensor) else f"a {type(of).__name__}"
        raise RecipeError(
            f"metric {name} must give a value for each of the {count} examples, or (sum, count), got {got}."
        )


NAMED: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        raise ProgramError(f"{what}: {imports.reason(error)}") from error


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _load(path: str, key: str, *given: Any) -> Callable[..., Any]:
    """What the path names, which takes so many arguments."""
    function = imports.load(path, key)
    imports.check_arguments(function, path, key, *given)
    return function
