"""The recipe's optimizer: one of PyTorch's, LAMB and LARS from their papers, or what an import path names."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hvdtrain.core import optimizers
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.wording import counted
from hvdtrain.errors import RecipeError
from hvdtrain.torch import state
from hvdtrain.torch.finetuning import parts

Tensors = list[torch.Tensor]
NAMES = {"named_parameters", "named_params"}
"""By an argument of such a name an optimizer of the user's asks for pairs of name and parameter."""


def make(recipe: Recipe, model: nn.Module, lr: float, fused: bool) -> torch.optim.Optimizer:
    """The recipe's optimizer of all parameters. A named one has its state from the start, so that all ranks hold
    tensors of the same names. Raises RecipeError."""
    if recipe.optimizer not in optimizers.NAMED:
        return _imported(recipe, model, lr)
    settings = optimizers.settings(recipe)
    arguments = settings.model_dump()
    if settings.is_fused:
        arguments["fused"] = fused or None
    if settings.is_fused and settings.has_step:
        arguments["capturable"] = fused and next(model.parameters()).is_cuda
    kind = torch.optim.SGD if recipe.optimizer == "sgd" and recipe.compile else KINDS[recipe.optimizer]
    optimizer = kind(parts.groups(recipe, model, lr), lr=lr, **arguments)
    start(recipe, optimizer)
    return optimizer


def start(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of a named optimizer for parameters that learn and have none."""
    if recipe.optimizer in optimizers.NAMED:
        settings = optimizers.settings(recipe)
        state.start(optimizer, settings.slots, settings.has_step)


def _imported(recipe: Recipe, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    def made(kind: Callable[..., Any]) -> Any:
        wanted = set[str]()
        with contextlib.suppress(TypeError, ValueError):  # of a class without a signature
            wanted = NAMES & inspect.signature(kind).parameters.keys()
        if wanted and (recipe.lr_scale or recipe.no_weight_decay):
            raise RecipeError(
                f"lr_scale and no_weight_decay do not go with optimizer {recipe.optimizer}, which makes groups by "
                "names; drop them."
            )
        if wanted:
            named = list(parts.learning(recipe, model).items())
            return kind(**dict.fromkeys(wanted, named), lr=lr, **recipe.optimizer_args)
        return kind(parts.groups(recipe, model, lr), lr=lr, **recipe.optimizer_args)

    optimizer: torch.optim.Optimizer = optimizers.imported(recipe, made, torch.optim.Optimizer, "torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        raise RecipeError(
            f"optimizer {recipe.optimizer} computes the loss several times in a step, which a recipe's does once; take "
            "another, or keep your loop."
        )
    return optimizer


def _keep_compiler_out() -> None:
    """Keeps the methods of every optimizer from importing PyTorch's compiler, which takes each rank over a second.

    Where a release of PyTorch marks these methods in another way, they import it after all.
    """
    if "torch._dynamo" not in sys.modules:
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            if method := getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None):
                vars(method).setdefault("__dynamo_disable", method)


class SGD(torch.optim.SGD):
    """PyTorch's SGD, whose step does not import PyTorch's compiler."""

    def __init__(self, *args: Any, **options: Any) -> None:
        _keep_compiler_out()
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return _STEP(self, closure)


_STEP = inspect.unwrap(torch.optim.SGD.step)


class _Layerwise(torch.optim.Optimizer):
    """An optimizer that scales the update of each layer by the layer's norm. Norms and steps stay on the device."""

    def __init__(self, params: Iterable[torch.Tensor], arguments: dict[str, Any]) -> None:
        """`arguments`: the locals() of a constructor whose other parameters are the defaults of each group."""
        _keep_compiler_out()
        super().__init__(params, {k: v for k, v in arguments.items() if k not in {"self", "params", "__class__"}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes one update. `closure`, where it is given, first computes the gradients and the loss to return."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if weights:
                self._update(group, weights, [weight.grad for weight in weights])
        return loss

    def _update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        raise NotImplementedError

    def _slot(self, name: str, weights: Tensors, shaped: bool = True) -> Tensors:
        """The tensors of that name in the weights' state, zeros at first: shaped as the weights, or numbers."""
        for weight in weights:
            if name not in self.state[weight]:
                zeros = torch.zeros_like(weight) if shaped else torch.zeros((), device=weight.device)
                self.state[weight][name] = zeros
        return [self.state[weight][name] for weight in weights]


def _is_adapted(group: dict[str, Any], weight: torch.Tensor) -> bool:
    return weight.dim() > 1 or not group["exclude_1d"]


_norm = torch.linalg.vector_norm


class LAMB(_Layerwise):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2, phi(z) = z): Adam's update r with weight decay, scaled to
    the norm of the layer's weights.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps);
    w -= lr |w| / |r + weight_decay w| (r + weight_decay w). Where a norm is 0, the ratio is 1.
    With `exclude_1d` parameters of one dimension (biases, norms) take w -= lr r.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = LAMB(model.parameters(), lr=0.01, weight_decay=0.01)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        exclude_1d: bool = True,
    ) -> None:
        super().__init__(params, locals() | {"capturable": True})  # torch.optim then loads steps onto the device

    def _update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        steps = self._slot("step", weights, shaped=False)
        mean, square = self._slot("exp_avg", weights), self._slot("exp_avg_sq", weights)
        torch._foreach_add_(steps, 1)
        torch._foreach_mul_(mean, beta1)
        torch._foreach_add_(mean, gradients, alpha=1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)
        for weight, step, m, v in zip(weights, steps, mean, square, strict=True):
            wide = step.double()  # 1 - b^t of a float32 b is wrong in the fifth digit at first
            update = (m / (1 - beta1**wide)).div_((v / (1 - beta2**wide)).sqrt_().add_(group["eps"]))
            if _is_adapted(group, weight):
                update.add_(weight, alpha=decay)
                of_weight, of_update = _norm(weight), _norm(update)
                is_at_0 = (of_weight == 0) | (of_update == 0)
                update.mul_((of_weight / of_update).masked_fill_(is_at_0, 1.0))
            weight.sub_(update.mul_(group["lr"]))


class LARS(_Layerwise):
    """LARS (You et al. 2017, arXiv:1708.03888, algorithm 1): SGD with momentum, with a learning rate for each layer.

    local = trust_coefficient |w| / (|g| + weight_decay |w| + eps), or 1 where a norm is 0;
    v = momentum v + lr local (g + weight_decay w);  w -= v.
    With `exclude_1d` parameters of one dimension (biases, norms) take v = momentum v + lr g.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = LARS(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        exclude_1d: bool = True,
    ) -> None:
        super().__init__(params, locals())

    def _update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        velocities = self._slot("momentum_buffer", weights) if momentum else []
        updates = torch._foreach_mul(gradients, group["lr"])
        for weight, gradient, update in zip(weights, gradients, updates, strict=True):
            if _is_adapted(group, weight):
                of_weight, of_gradient = _norm(weight), _norm(gradient)
                local = group["trust_coefficient"] * of_weight / (of_gradient + decay * of_weight + group["eps"])
                is_at_0 = (of_weight == 0) | (of_gradient == 0)
                update.add_(weight * (decay * group["lr"])).mul_(local.masked_fill_(is_at_0, 1.0))
        if momentum:
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(weights, velocities or updates)


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": LAMB,
    "lars": LARS,
}
"""The classes of the optimizers in `hvdtrain.core.optimizers.NAMED`."""


def lr_ratios(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """The LR of each group of parameters divided by `lr`, with which the optimizer was made."""
    return [float(group["lr"]) / lr for group in optimizer.param_groups]


def lr_groups(optimizer: torch.optim.Optimizer, ratios: list[float]) -> str:
    """Names the groups of parameters with other LRs than the run's; empty where there are none."""
    if set(ratios) == {1.0}:
        return ""
    sizes = [sum(each.numel() for each in group["params"]) for group in optimizer.param_groups]
    return ", ".join(f"x{ratio:g} for {counted(size, 'parameter')}" for ratio, size in zip(ratios, sizes, strict=True))
