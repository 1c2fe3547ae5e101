"""The loss and metrics of a recipe: of the model's outputs and the targets, or from a step of the user's."""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from hvdtrain.core import objective, sharing, user_code
from hvdtrain.core.metrics import Metrics, Summed
from hvdtrain.core.recipe import Recipe, augmentation
from hvdtrain.core.recipe.keys import CROSS_ENTROPIES
from hvdtrain.core.user_code import MODELS, is_path
from hvdtrain.datasets.base import IGNORED
from hvdtrain.errors import RecipeError
from hvdtrain.torch.objective.means import is_number, no_means

Metric = tuple[torch.Tensor, torch.Tensor | int]
"""A sum and the number of its terms."""


@dataclass(frozen=True)
class Batch:
    """A batch of a user's data set: the data that its `collate` makes of `count` samples."""

    data: Any
    count: int


@dataclass(frozen=True)
class StepOutput:
    """The mean loss and the metrics of a batch of `count` examples, on the device and without gradient. A loss that is
    given as sum and count is also the metric `loss`."""

    loss: torch.Tensor
    count: int
    metrics: Mapping[str, Metric]


def call(network: Any, x: Any) -> Any:
    """The network's outputs: network(**x) for a mapping, network(*x) for a tuple or list, but of texts, else
    network(x)."""
    if isinstance(x, Mapping):
        return network(**x)
    return network(*x) if isinstance(x, tuple | list) and not isinstance(x[0], str) else network(x)


class Objective:
    """A recipe's loss and metrics."""

    def __init__(self, recipe: Recipe, engine: Any) -> None:
        """Raises RecipeError where code that the recipe names cannot be imported. `engine`: the ranks over which
        metrics of a set are computed."""
        self._recipe, self._is_lost = recipe, engine.is_lost
        self._step = _load(recipe.step, "step", None, None) if recipe.step else None
        self._loss = _Loss(recipe, self.check_outputs)
        self._name = f"step {recipe.step}" if recipe.step else f"loss {recipe.loss or 'of the data set'}"
        code = self._step or self._loss.given
        self.owner: Any = getattr(code, "__self__", code)
        """The user's function or object that computes the loss, if there is one."""
        self._is_new, self.notes = True, list[str]()
        """Lines of the log on the loss, once there was a training batch."""
        self.metrics = Metrics(recipe, engine, of_set, "torchmetrics")
        self._forward_of = f"step {recipe.step}" if recipe.step else f"model {recipe.model}"
        self._has_user_code = bool(recipe.step) or is_path(recipe.model) or is_path(recipe.dataset)
        self.forward: Callable[[Any, Any], Any] = self._step or call
        """Computes the outputs that `measure` takes, of the network and its inputs."""
        self.weigh = self._loss.weigh
        self.classes: int | None = None
        """Classes of the data set, where they are known."""

    def explained(self) -> AbstractContextManager[None]:
        """Raises ProgramError where the user's model or step raises an error, unless the engine has lost a rank."""
        return user_code.failing(self._forward_of, lambda error: not self._has_user_code or self._is_lost(error))

    def inputs(self, batch: Any) -> Any:
        """The part of a batch that `forward` takes: the whole for a step, else x."""
        data = batch.data if isinstance(batch, Batch) else batch
        return data if self._step else objective.pair(self._recipe, data)[0]

    def measure(self, out: Any, batch: Any, training: bool = False) -> tuple[torch.Tensor, StepOutput]:
        """The batch's loss with its gradient, and its loss and metrics for the report. The loss is the mean over the
        examples, or a sum where the user's code returns (sum, count). Raises RecipeError where that code returns
        anything else."""
        data, count = (batch.data, batch.count) if isinstance(batch, Batch) else (batch, len(batch[1]))
        if self._step:
            loss, metrics = objective.of_step(self._name, out, _is_pair)
        else:
            loss, metrics = self._loss(out, data[1], training), self._measured(out, data[1], training)
        if _is_pair(loss):
            loss, metrics = loss[0], {**metrics, "loss": loss}
            if not self.notes and (self._step or self._loss.of_user):
                self.notes.append(f"{self._name} gives (sum, count): sums and counts of all ranks are divided")
        self._check(loss, training)
        if training and self._is_new and not self._step:
            self.notes += self._loss.of_first_batch(out, data[1])
        if training and self._loss.unseen:
            self.notes += self._loss.look(loss, out, data[1], count)
        elif training and self._is_new and self._step and "loss" not in metrics:
            self.notes += no_means(loss, count, self._name, "return (sum, count)")
        self._is_new = False
        mean = loss.detach() / count if "loss" in metrics else loss.detach()
        return loss, StepOutput(mean, count, {name: _sum(name, of, count) for name, of in metrics.items()})

    def check_outputs(self, out: Any) -> None:
        """Raises RecipeError where the data set has more classes than the network has outputs.

        Examples:
            >>> from hvdtrain.core.recipe import load
            >>> from hvdtrain.torch.engines.local import LocalEngine
            >>> Objective(load("digits"), LocalEngine(torch.device("cpu"))).check_outputs(torch.zeros(2, 10))
        """
        if self.classes and not self._step and self._loss.is_of_classes:
            logits, labels = getattr(out, "logits", out), f"{self.classes} classes"
            objective.check_labels(self._recipe, logits.shape[1], 0, self.classes - 1, labels)

    @torch.no_grad()
    def _measured(self, out: Any, y: Any, training: bool) -> dict[str, Any]:
        metrics = self.metrics.of_batch(out, y)
        if self.metrics.have_sets:
            wide = tree_map_only(torch.Tensor, _wide, out.logits if type(out).__name__ in objective.AUXILIARY else out)
            with torch.autocast(next(iter(tree_leaves(wide))).device.type, enabled=False):
                (self.metrics.try_once if training else self.metrics.update)(wide, y)
        if (right := self._loss.right(y)) is not None:
            metrics["acc1"] = (getattr(out, "logits", out).argmax(1) == right).sum(), len(y)
        return metrics

    def _check(self, loss: Any, training: bool) -> None:
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            raise objective.no_number(self._name, _described(loss))
        if training and not loss.requires_grad:
            raise RecipeError(
                f"{self._name} gives a loss without gradient; compute it of the model's outputs, without detach(), "
                "item() or no_grad()."
            )


class _Loss:
    """A recipe's loss of outputs and targets: a named one, or the user's function."""

    def __init__(self, recipe: Recipe, check_outputs: Callable[[Any], None]) -> None:
        self._recipe, self._check_outputs = recipe, check_outputs
        self._mixes = augmentation.mixes(recipe)
        is_cross_entropy = recipe.loss in CROSS_ENTROPIES or (self._mixes and recipe.loss is None)
        self._name = "cross_entropy" if is_cross_entropy else recipe.loss
        self._is_one_hot = self._name == "bce_with_logits" and not is_path(recipe.dataset)
        """Whether labels are to become one probability for each class."""
        self.is_of_classes = self._is_one_hot or self._name in {None, "cross_entropy"}
        self.of_user: Callable[..., Any] | None = None
        """The user's function, of a loss that is no named one."""
        self.given: Any = None
        self._weights: torch.Tensor | None = None
        may_divide = recipe.reduction != "adasum"
        if recipe.loss and self._name not in NAMED:
            self.given = self.of_user = _load(recipe.loss, "loss", None, None)
        if type(self.of_user) in {nn.CrossEntropyLoss, nn.NLLLoss} and may_divide:
            self.of_user = functools.partial(_counted, self.of_user)
        self._is_of_torch = str(recipe.loss).startswith("torch.")
        self.unseen: Any = self.of_user
        """The user's function, until `look` has seen a batch."""
        self._axes: tuple[int, ...] = ()
        """The axes that could be the classes of the last batch, of which the first was taken."""
        self._may_ignore = (is_path(recipe.dataset) or recipe.dataset == "tokens") and may_divide
        """Whether labels of -100, which our data sets of images have not, are left out over all ranks."""
        self._unchecked = set() if recipe.model in MODELS else {True, False}
        """Whether labels of training (True) and of validation (False) are to be checked."""

    def weigh(self, weights: Sequence[float], device: torch.device) -> None:
        """Gives each class, by label, a weight in training; () weighs all alike."""
        self._weights = torch.tensor(weights, dtype=torch.float64, device=device) if weights else None

    def __call__(self, out: Any, y: Any, training: bool) -> Any:
        """A mean, or (sum, count)."""
        if self.of_user:
            shapes = [list(each.shape) for each in (out, y) if isinstance(each, torch.Tensor)]
            if self._is_of_torch and len(shapes) == 2 and objective.of_one_more_axis(shapes[0], shapes[1]):
                raise objective.misfit(
                    str(self._recipe.loss), shapes[0], shapes[1], str(y.dtype).removeprefix("torch.")
                )
            with user_code.failing(f"loss {self._recipe.loss}"):
                return self.of_user(out, y)
        name = self._name or ("mse" if y.is_floating_point() else "cross_entropy")
        if weight := objective.AUXILIARY.get(type(out).__name__):
            auxiliary = [getattr(out, field) for field in out._fields if field != "logits"]
            losses = [self._named(name, one, y, training) for one in auxiliary if one is not None]
            loss = self._named(name, out.logits, y, training) + weight * sum(losses)
        else:
            loss = self._named(name, out, y, training)
        if not self._sums(name, y):
            return loss
        weights = self._weights_of(getattr(out, "logits", out).movedim(self._axes[0], 1), training)
        return loss, (y != IGNORED).sum() if weights is None else _weight_of(y, weights)

    def right(self, y: Any) -> torch.Tensor | None:
        """The classes [n] that top-1 accuracy counts: the labels, or of mixed ones that of the largest share. None
        where the loss or the targets are not of classes."""
        if not self.is_of_classes or y.dim() > 2:
            return None
        if y.is_floating_point():
            return y.argmax(1) if self._mixes and y.dim() == 2 else None
        return y if y.dim() == 1 else None

    def look(self, loss: torch.Tensor, out: Any, y: Any, examples: int) -> list[str]:
        """A line of the log where a batch's halves show that the user's loss is no mean over examples."""
        user_loss, self.unseen = self.unseen, None

        def measured(part: slice) -> Any:
            of_part = tree_map_only(torch.Tensor, lambda one: cut(one, part, examples), (out, y))
            return copy.deepcopy(user_loss)(*of_part)

        random_state = torch.random.fork_rng([loss.device] if loss.is_cuda else [])
        with torch.no_grad(), random_state, torch.autocast(loss.device.type, enabled=False):
            remedy = objective.of_one_more_axis(*([*getattr(each, "shape", ())] for each in (out, y)))
            return objective.of_halves(str(self._recipe.loss), measured, examples, *[remedy] * bool(remedy))

    def of_first_batch(self, out: Any, y: Any) -> list[str]:
        """Lines of the log on what a named loss makes of a training batch."""
        if not isinstance(out, torch.Tensor) or not out.numel():
            return []
        if self.of_user:
            is_wrong = isinstance(getattr(self.of_user, "args", [None])[0], nn.NLLLoss) and bool((out > 0).any())
            return [objective.no_inputs(self._recipe, "log-probabilities", "end it with log_softmax")] * is_wrong
        name = self._name or ("mse" if y.is_floating_point() else "cross_entropy")
        axes = self._axes if name == "cross_entropy" else ()
        return objective.of_first_batch(self._recipe, name, axes, _wide(out.detach()).to("cpu").numpy(), y.shape)

    def _sums(self, name: str, y: Any) -> bool:
        """Whether the named loss is a sum over labels, some of which may be ignored on one rank or another, or weigh
        more than others in training, of which validation has to have the metrics."""
        may_ignore = self._may_ignore and not y.is_floating_point()
        return name == "cross_entropy" and (may_ignore or self._weights is not None)

    def _weights_of(self, out: torch.Tensor, training: bool) -> torch.Tensor | None:
        """The weight of each of the outputs, 1 for classes that have none and in validation; None without weights."""
        if self._weights is None:
            return None
        own = self._weights[: len(self._weights) * training]
        return F.pad(own, (0, out.shape[1] - len(own)), value=1.0).to(_wide(out).dtype)

    def _named(self, name: str, out: torch.Tensor, y: torch.Tensor, training: bool) -> torch.Tensor:
        if not isinstance(out, torch.Tensor):
            raise RecipeError(
                f"loss {name} needs a model that returns a tensor, {self._recipe.model} returns a "
                f"{type(out).__name__}; give a loss of your own, or a step."
            )
        kind = str(y.dtype).removeprefix("torch.")
        shapes = f"of outputs {list(out.shape)} and targets {kind} {list(y.shape)}"
        with user_code.failing(f"loss {name} {shapes}"):
            if name == "cross_entropy":
                of_labels = not y.is_floating_point()
                if not (axes := objective.class_axis(out.shape, y.shape, of_labels=of_labels)):
                    raise objective.misfit(name, out.shape, y.shape, kind)
                self._axes, out, y = axes, out.movedim(axes[0], 1), y.long() if of_labels else y
                if training in self._unchecked and of_labels:
                    self._check_labels(out, y, training)
                reduction = "sum" if self._sums(name, y) else "mean"
                smoothing, weights = self._recipe.label_smoothing * training, self._weights_of(out, training)
                wide = out if weights is None else _wide(out)
                y = y.to(wide.dtype) if y.is_floating_point() else y
                return F.cross_entropy(wide, y, weights, label_smoothing=smoothing, reduction=reduction)
            if self._is_one_hot and y.dim() == 1 and not y.is_floating_point():
                self._check_outputs(out)
                y = F.one_hot(y, out.shape[1])
            if out.shape != y.shape:  # PyTorch would broadcast them
                raise objective.misfit(name, out.shape, y.shape, kind)
            if name == "bce_with_logits" and training in self._unchecked and y.numel():
                self._unchecked -= set() if y.is_cpu else {training}
                objective.check_probabilities(self._recipe, float(y.min()), float(y.max()))
            return NAMED[name](out, y.to(out.dtype))

    def _check_labels(self, out: torch.Tensor, y: torch.Tensor, training: bool) -> None:
        """On a CPU checks every batch, on a GPU the first alone: the host waits for it."""
        if not y.is_cpu:
            self._unchecked.discard(training)
        self._check_outputs(out)
        if len(kept := y[y != IGNORED]):
            objective.check_labels(self._recipe, out.shape[1], int(kept.min()), int(kept.max()))


NAMED: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}


def _weight_of(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weight of all targets together: labels, or each class's probability [n, classes, ...]."""
    if y.is_floating_point():
        return (y.movedim(1, -1) * weights).sum()
    return (weights[y.clamp(min=0)] * (y != IGNORED)).sum()


def _counted(loss: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    """The user's CrossEntropyLoss or NLLLoss as (sum, count): the count by which its mean would divide."""
    if loss.reduction != "mean" or y.is_floating_point():
        return loss(out, y)
    summed, kept = copy.copy(loss), y[y != loss.ignore_index]
    summed.reduction = "sum"
    return summed(out, y), torch.tensor(len(kept)) if loss.weight is None else loss.weight[kept].sum()


def _sum(name: str, of: Any, count: int) -> Metric:
    """The metric as sum and count, given as such or as a tensor [count]. Raises RecipeError."""
    if isinstance(of, tuple | list) and len(of) == 2 and all(map(is_number, of)):
        return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in of)  # type: ignore[return-value]
    if isinstance(of, torch.Tensor) and of.shape == (count,):
        return of.detach().double().sum(), count
    raise user_code.no_metric(name, _described(of), "torchmetrics", f"{count} ")


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _is_pair(loss: Any) -> bool:
    return isinstance(loss, tuple) and len(loss) == 2 and is_number(loss[1])


def cut(one: torch.Tensor, part: slice, examples: int) -> torch.Tensor:
    """A copy of these examples of an output or target, precise enough for sums. Raises ValueError where the tensor's
    first dimension is not that of the examples."""
    if one.dim() and len(one) != examples:
        raise ValueError("its tensors have other first dimensions")
    return _wide(one[part].clone() if one.dim() else one)


def _wide(one: torch.Tensor) -> torch.Tensor:
    return one.float() if one.dtype in {torch.bfloat16, torch.float16} else one


SUMS = ("dim_zero_sum", "dim_zero_cat", "dim_zero_min", "dim_zero_max")
"""The names of those functions of torchmetrics that merge the ranks' states into the state of the whole set."""


def of_set(metric: Any, name: str, engine: Any) -> Any:
    """The object whose update(outputs, targets), compute() and reset() are this metric's over all ranks: that of
    torchmetrics itself, or one for a pair (update, compute); None for another metric. Raises RecipeError."""
    modules = list(metric.modules()) if isinstance(metric, nn.Module) else []
    parts = [each for each in modules if hasattr(each, "dist_sync_fn")]
    if not parts:
        pair = user_code.pair_of(metric)
        return Summed(name, pair, engine, _to_numpy, torch.as_tensor) if pair else None
    for part in parts:
        for state, merge in part._reductions.items():
            if getattr(merge, "__name__", None) not in SUMS:
                how = getattr(merge, "__name__", "None").removeprefix("dim_zero_")
                raise RecipeError(
                    f"metric {name}: {type(part).__name__} merges its state {state} by {how}, which is exact for "
                    "sum, cat, min and max alone; give a pair (update, compute)."
                )
        part.dist_sync_fn = lambda tensor, group=None: not_empty(gathered(tensor, engine))
        part.distributed_available_fn = lambda: engine.size > 1
    return metric.to(engine.device)


@torch.inference_mode(False)  # whose tensors Horovod's thread may not write
def gathered(tensor: torch.Tensor, engine: Any, about: Sequence[Any] = ()) -> list[torch.Tensor]:
    """The ranks' tensors, by rank, whose types and shapes may differ. Every rank calls it. `about`: the dtype and the
    shape of each, where they are known."""
    own = tensor.detach().to(engine.device).clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    about = about or sharing.of_all([str(tensor.dtype), list(tensor.shape)], engine)
    kinds = [(getattr(torch, dtype.removeprefix("torch.")), shape) for dtype, shape, *_ in about]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
    row = own.new_zeros(max(*sizes, 1))
    row[: len(own)] = own
    rows = zip(engine.gather_rows(row), sizes, kinds, strict=True)
    return [each[:size].clone().view(dtype).view(shape).to(tensor.device) for each, size, (dtype, shape) in rows]


def not_empty(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors without the empty ones, unless all are empty."""
    return [each for each in tensors if each.numel()] or tensors


def _to_numpy(value: Any) -> Any:
    return torch.as_tensor(value).detach().double().cpu().numpy()


def _load(path: str, key: str, *given: Any) -> Callable[..., Any]:
    """The function that the path names. Raises RecipeError where it does not take as many arguments as are given."""
    function: Any = user_code.load(path, key)
    if inspect.isclass(function) and issubclass(function, nn.Module):  # as torch.nn:SmoothL1Loss
        with user_code.explained(path, key, (TypeError,)):
            function = function()
    user_code.check_arguments(function, path, key, *given)
    return function  # type: ignore[no-any-return]
