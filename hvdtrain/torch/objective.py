"""What a batch costs: the loss and metrics of a recipe, of the model's outputs or from a step of the user's."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hvdtrain.core import user_code
from hvdtrain.core.sharing import of_halves
from hvdtrain.core.user_code import AUXILIARY, CROSS_ENTROPIES, MODELS, is_path
from hvdtrain.errors import HvdtrainError, ProgramError, RecipeError

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

Metric = tuple[torch.Tensor, torch.Tensor | int]
"""A sum, and how many were added up."""


@dataclass(frozen=True)
class Batch:
    """A batch of a data set of the user's: whatever its `collate` makes of so many samples."""

    data: Any
    count: int


@dataclass(frozen=True)
class Seen:
    """A batch's mean loss and metrics, on the device and without gradient; `count` examples. The metric `loss` is the
    loss's sum and count, where it gives them."""

    loss: torch.Tensor
    count: int
    metrics: Mapping[str, Metric]


def call(network: Any, x: Any) -> Any:
    """The network's outputs: called as network(**x) for a mapping, network(*x) for a tuple or list, else network(x)."""
    if isinstance(x, Mapping):
        return network(**x)
    return network(*x) if isinstance(x, tuple | list) else network(x)


class Objective:
    """A recipe's loss and metrics."""

    def __init__(self, recipe: "Recipe") -> None:
        """Raises RecipeError where code that the recipe names cannot be imported."""
        self._recipe = recipe
        self._step = _load(recipe.step, "step", None, None) if recipe.step else None
        self._may_ignore = is_path(recipe.dataset) and recipe.reduction != "adasum"
        """Whether labels of -100, which no data set of ours has, are left out over all ranks."""
        self._loss_name = "cross_entropy" if recipe.loss in CROSS_ENTROPIES else recipe.loss
        own = self._loss_name not in {None, *NAMED}
        self._own_loss = _load(recipe.loss, "loss", None, None) if recipe.loss and own else None
        if type(self._own_loss) in {nn.CrossEntropyLoss, nn.NLLLoss} and recipe.reduction != "adasum":
            self._own_loss = functools.partial(_counted, self._own_loss)
        self._name = f"step {recipe.step}" if recipe.step else f"loss {recipe.loss or 'of the data set'}"
        self.notes: list[str] = []
        """Lines of the log on the loss, once a training batch has shown them."""
        self._unseen: Any = self._own_loss
        self._metrics = {name: _load(path, f"metrics {name}", None, None) for name, path in recipe.metrics.items()}
        self._forward_of = f"step {recipe.step}" if recipe.step else f"model {recipe.model}"
        self._all_ours = not recipe.step and not is_path(recipe.model) and not is_path(recipe.dataset)
        self.forward: Callable[[Any, Any], Any] = self._first_step if self._step else call
        """Network and inputs -> outputs, which `measure` takes."""
        self.classes: int | None = None
        """Of the data set, where they are known."""
        self._unchecked = set() if recipe.model in MODELS else {True, False}
        """Of training and validation those whose labels are to be looked at."""

    @contextlib.contextmanager
    def explained(self, is_lost: Callable[[Exception], bool]) -> Iterator[None]:
        """Raises ProgramError for what the user's model or step raises, but for a rank that an engine has lost."""
        with _explained(self._forward_of, lambda error: self._all_ours or is_lost(error)):
            yield

    def inputs(self, batch: Any) -> Any:
        """What `forward` takes of a batch: the whole for a step, else x."""
        data = batch.data if isinstance(batch, Batch) else batch
        if self._step:
            return data
        return user_code.pair(self._recipe, data)[0]

    def measure(self, out: Any, batch: Any, training: bool = False) -> tuple[torch.Tensor, Seen]:
        """The mean loss over the batch's examples, or its sum where it gives that and a count, with its gradient, and
        what is to be reported. Raises RecipeError where the user's code returns anything else than it should."""
        data, count = (batch.data, batch.count) if isinstance(batch, Batch) else (batch, len(batch[1]))
        if self._step:
            loss, metrics = user_code.of_step(self._name, out, _is_pair)
        else:
            loss, metrics = self._loss(out, data[1], training), self._measured(out, data[1])
        if _is_pair(loss):
            loss, metrics = loss[0], {**metrics, "loss": loss}
            if not self.notes and (self._step or self._own_loss):
                self.notes.append(f"{self._name} gives (sum, count): sums and counts of all ranks are divided")
        self._check(loss, training)
        if training and self._unseen:
            self._look(loss, out, data[1], count)
        mean = loss.detach() / count if "loss" in metrics else loss.detach()
        return loss, Seen(mean, count, {name: self._sum(name, of, count) for name, of in metrics.items()})

    def _first_step(self, model: torch.nn.Module, batch: Any) -> Any:
        """The step, whose first call may show a loss that is no mean over examples."""
        assert self._step
        self.forward = self._step
        with Watched(self._name, "return (sum, count)") as watched:
            out = self._step(model, batch)
        self.notes += watched.notes
        return out

    def _loss(self, out: Any, y: Any, training: bool) -> Any:
        if self._own_loss:
            with _explained(f"loss {self._recipe.loss}"):
                return self._own_loss(out, y)
        name = self._loss_name or ("mse" if y.is_floating_point() else "cross_entropy")
        if weight := AUXILIARY.get(type(out).__name__):
            auxiliary = [getattr(out, field) for field in out._fields if field != "logits"]
            losses = [self._named(name, one, y, training) for one in auxiliary if one is not None]
            loss = self._named(name, out.logits, y, training) + weight * sum(losses)
        else:
            loss = self._named(name, out, y, training)
        return (loss, (y != IGNORED).sum()) if self._sums(name, y) else loss

    def _sums(self, name: str, y: Any) -> bool:
        """Whether the named loss is a sum over labels of which some may be ignored, on whichever rank."""
        return name == "cross_entropy" and self._may_ignore and not y.is_floating_point()

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
            smoothing, reduction = self._recipe.label_smoothing * training, "sum" if self._sums(name, y) else "mean"
            return F.cross_entropy(out, y, label_smoothing=smoothing, reduction=reduction)
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
        if self.classes and not self._step and self._loss_name in {None, "cross_entropy"}:
            user_code.check_labels(self._recipe, logits.shape[1], 0, self.classes - 1, f"{self.classes} classes")

    def _check_labels(self, out: torch.Tensor, y: torch.Tensor, training: bool) -> None:
        """In every batch on a CPU; in the first on a GPU, for which the host waits."""
        if not y.is_cpu:
            self._unchecked.discard(training)
        self.check_outputs(out)
        if len(kept := y[y != IGNORED]):
            user_code.check_labels(self._recipe, out.shape[1], int(kept.min()), int(kept.max()))

    def _measured(self, out: Any, y: Any) -> dict[str, Any]:
        with torch.no_grad():
            metrics = {}
            for name, metric in self._metrics.items():
                with _explained(f"metrics {name} {self._recipe.metrics[name]}"):
                    metrics[name] = metric(out, y)
            logits = getattr(out, "logits", out)
            if self._loss_name in {None, "cross_entropy"} and y.dim() == 1 and not y.is_floating_point():
                metrics["acc1"] = (logits.argmax(1) == y).sum(), len(y)
            return metrics

    def _check(self, loss: Any, training: bool) -> None:
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise user_code.no_number(self._name, got)
        if training and not loss.requires_grad:
            raise RecipeError(
                f"{self._name} gives a loss without gradient; compute it of the model's outputs, without detach(), "
                "item() or no_grad()."
            )

    def _look(self, loss: torch.Tensor, out: Any, y: Any, examples: int) -> None:
        """Notes where the user's loss is no mean over examples, as a batch's halves show."""
        own, self._unseen = self._unseen, None

        def measured(part: slice) -> Any:
            return copy.deepcopy(own)(*tree_map_only(torch.Tensor, lambda one: _cut(one, part, examples), (out, y)))

        random_state = torch.random.fork_rng([loss.device] if loss.is_cuda else [])
        with torch.no_grad(), random_state, torch.autocast(loss.device.type, enabled=False):
            self.notes += of_halves(str(self._recipe.loss), measured, examples)

    def _sum(self, name: str, of: Any, count: int) -> Metric:
        if isinstance(of, tuple | list) and len(of) == 2 and all(map(_is_number, of)):
            return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in of)  # type: ignore[return-value]
        if isinstance(of, torch.Tensor) and of.shape == (count,):
            return of.detach().double().sum(), count
        got = f"shape {list(of.shape)}" if isinstance(of, torch.Tensor) else f"a {type(of).__name__}"
        raise RecipeError(
            f"metric {name} must give a value for each of the {count} examples, or (sum, count), got {got}."
        )


IGNORED = -100
"""The label that PyTorch's cross_entropy leaves out."""
NAMED: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}


@contextlib.contextmanager
def _explained(what: str, passes: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, HvdtrainError) or passes(error):
            raise
        raise ProgramError(f"{what}: {user_code.reason(error)}") from error


def _counted(loss: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    """PyTorch's loss of classes: its sum, and what its mean over labels that count divides that by."""
    if loss.reduction != "mean" or y.is_floating_point():
        return loss(out, y)
    summed, kept = copy.copy(loss), y[y != loss.ignore_index]
    summed.reduction = "sum"
    return summed(out, y), torch.tensor(len(kept)) if loss.weight is None else loss.weight[kept].sum()


def _is_pair(loss: Any) -> bool:
    """Whether it is (sum, count)."""
    return isinstance(loss, tuple) and len(loss) == 2 and _is_number(loss[1])


def _cut(one: torch.Tensor, part: slice, examples: int) -> torch.Tensor:
    """A copy of these examples of an output or target, precise enough for sums. Raises ValueError where it has none."""
    if one.dim() and len(one) != examples:
        raise ValueError
    cut = one[part].clone() if one.dim() else one
    return cut.float() if cut.dtype in {torch.bfloat16, torch.float16} else cut


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _load(path: str, key: str, *given: Any) -> Callable[..., Any]:
    """What the path names, which takes so many arguments."""
    function: Any = user_code.load(path, key)
    if inspect.isclass(function) and issubclass(function, nn.Module):  # as torch.nn:SmoothL1Loss
        with user_code.explained(path, key, (TypeError,)):
            function = function()
    user_code.check_arguments(function, path, key, *given)
    return function  # type: ignore[no-any-return]


class Watched(TorchFunctionMode):
    """Within it PyTorch's losses of classes that are no mean over examples are noted."""

    def __init__(self, whose: str, remedy: str) -> None:
        super().__init__()
        self._whose, self._remedy = whose, remedy
        self.notes: list[str] = []

    def __torch_function__(
        self, called: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if called in {F.cross_entropy, F.nll_loss}:
            given = inspect.signature(called).bind(*args, **kwargs)
            given.apply_defaults()
            y, weight, ignored = (given.arguments[name] for name in ("target", "weight", "ignore_index"))
            counts = weight is not None or (not y.is_floating_point() and bool((y == ignored).any()))
            if counts and given.arguments["reduction"] == "mean":
                self.notes.append(
                    f"{self._whose}: {called.__name__} with weights or labels that are left out is no mean over "
                    f"examples: the result depends on the number of ranks; {self._remedy}"
                )
        return called(*args, **kwargs)
