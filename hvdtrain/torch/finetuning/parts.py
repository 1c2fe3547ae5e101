"""The parts of a network that learn apart: frozen ones, and those with an LR or a weight decay of their own."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from hvdtrain.core import network
from hvdtrain.core.recipe import Recipe, finetuning
from hvdtrain.core.recipe.finetuning import Part
from hvdtrain.torch import networks


def of_model(recipe: Recipe, model: nn.Module) -> dict[str, Part]:
    """How each of the network's parameters learns."""
    return finetuning.parts(recipe, dict(model.named_parameters()), networks.norm_parameters(model))


def learning(recipe: Recipe, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ever learn, by name."""
    ever, found = recipe.freeze_until_epoch is not None, of_model(recipe, model)
    return {name: each for name, each in model.named_parameters() if ever or not found[name].is_frozen}


def groups(recipe: Recipe, model: nn.Module, lr: float) -> Iterable[Any]:
    """What an optimizer is given: all parameters, or groups of those that ever learn, with their LR and without weight
    decay where the recipe says so."""
    if not (recipe.freeze or recipe.lr_scale or recipe.no_weight_decay):
        return model.parameters()
    parts, found = of_model(recipe, model), dict[tuple[float, bool], list[nn.Parameter]]()
    for name, parameter in learning(recipe, model).items():
        found.setdefault(parts[name][1:], []).append(parameter)
    return [
        {"params": parameters, "lr": lr * scale} | ({} if has_decay else {"weight_decay": 0.0})
        for (scale, has_decay), parameters in found.items()
    ]


class Freezing:
    """Which of a network's parameters learn in which epoch. BatchNorm whose parameters are frozen takes its running
    statistics, and leaves them as they are."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        """Freezes what is frozen at the start."""
        self._until = recipe.freeze_until_epoch
        found = of_model(recipe, model) if recipe.freeze else {}
        self._parameters = [
            each for name, each in model.named_parameters() if found.get(name, Part()).is_frozen and each.requires_grad
        ]
        norms = {name: each for name, each in model.named_modules() if isinstance(each, networks.BATCH_NORMS)}
        frozen = finetuning.frozen_modules(recipe, norms, network.NORM_LEAVES["torch"])
        self._norms = [norms[name] for name in norms if name in frozen]
        self.enter(0)

    def enter(self, epoch: int) -> None:
        """Freezes or thaws them for that epoch."""
        is_frozen = self._until is None or epoch < self._until
        for parameter in self._parameters:
            parameter.requires_grad_(not is_frozen)
        for norm in self._norms if is_frozen else ():
            norm.training = False
