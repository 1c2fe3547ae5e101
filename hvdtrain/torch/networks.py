"""Networks that a recipe names: a user's network by its import path, one of torchvision or timm by its name there."""

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.core import user_code
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import Recipe, finetuning
from hvdtrain.core.recipe.memory import BLOCKS
from hvdtrain.datasets import Dataset
from hvdtrain.errors import RecipeError
from hvdtrain.torch.resumable import check_kept

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
NAMED = {"inception_v3": "torchvision:inception_v3", "vgg16": "torchvision:vgg16"}
"""The import paths of `user_code.NAMED`."""
LIBRARIES = {"torchvision": "torchvision.models:get_model", "timm": "timm:create_model"}
"""The function of each library that makes a network by its name."""
INITIALIZED = ("inception_v3", "googlenet")
"""torchvision's networks that warn unless `init_weights` asks for the first weights of their papers."""


CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_MADE: list[tuple[Any, nn.Module]] = []
"""The network that `count` has kept, and what it was made by."""


def build(recipe: Recipe, classes: int | None) -> nn.Module:
    """The network that the recipe names, on the CPU: what `count` has kept of it, else a new one. Its first weights
    depend on the recipe's seed alone.

    Raises RecipeError where the network cannot be made.
    """
    if _MADE and _MADE[0][0] == _made_by(recipe, classes):
        return _MADE.pop()[1]
    return _made(recipe, _maker(recipe, classes))


def _made_by(recipe: Recipe, classes: int | None) -> tuple[Any, ...]:
    return recipe.model, recipe.model_args, recipe.seed, classes


def _maker(recipe: Recipe, classes: int | None) -> functools.partial[Any]:
    """The call that makes the network. Imports its module. Raises RecipeError."""
    torch.manual_seed(recipe.seed)  # a module may make its model as it is imported
    path = NAMED.get(recipe.model, recipe.model)
    library, _, name = path.partition(":")
    arguments = user_code.expanded(recipe.model_args, "model_args")
    given: tuple[Any, ...] = ()
    if library in LIBRARIES:
        if name in INITIALIZED:
            arguments = {"init_weights": True, **arguments}
        if classes is not None:
            arguments = {"num_classes": classes, **arguments}
        make, given = _of_library(library), (name,)
    else:
        make = user_code.load(path, "model")
    user_code.check_arguments(make, path, "model", *given, **arguments)
    return functools.partial(make, *given, **arguments)


def _made(recipe: Recipe, make: functools.partial[Any]) -> nn.Module:
    path = NAMED.get(recipe.model, recipe.model)
    random.seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    torch.manual_seed(recipe.seed)
    try:
        model = make()
    except Exception as error:
        raise RecipeError(f"model {path}: {user_code.reason(error, make.func)}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model {path} must return a torch.nn.Module, got a {type(model).__name__}.")
    check_kept(model)
    return model


def without_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the modules that the patterns of `checkpoint_activations` mean, of which none is part of another
    one. Raises RecipeError."""
    names = [
        name for name, each in model.named_modules() if name and not isinstance(each, nn.ModuleList | nn.ModuleDict)
    ]
    blocks = _blocks(model)
    if BLOCKS in patterns and not blocks:
        rule = f"checkpoint_activations {BLOCKS} finds no repeated blocks in the model"
        raise RecipeError(f"{rule}; name modules, as {names[0] if names else 'layers.*'}.")
    found = finetuning.chosen("checkpoint_activations", patterns, names, {BLOCKS: blocks})
    return [name for name in names if name in found and not any(name.startswith(f"{other}.") for other in found)]


def _blocks(model: nn.Module, prefix: str = "") -> list[str]:
    """The modules in the outermost lists of modules that have modules themselves; or such lists of single layers."""
    found = list[str]()
    for name, module in model.named_children():
        children = [(key, child) for key, child in module.named_children() if [*child.parameters()]]
        inner = [f"{prefix}{name}.{key}" for key, child in children if [*child.children()]]
        if isinstance(module, CONTAINERS) and inner:
            found += inner
        elif isinstance(module, nn.Sequential) and len(children) > 1:
            found.append(f"{prefix}{name}")
        else:
            found += _blocks(module, f"{prefix}{name}.")
    return found


def count(recipe: Recipe, dataset: Dataset, *, keeps: bool = False) -> Network:
    """Parameters of the recipe's network, and whether it has BatchNorm and dropout, for a plan. `keeps`: `build`, which
    is called next, gives this network, so that it is made once. Raises RecipeError."""
    classes = dataset.classes
    model = _made(recipe, _maker(recipe, classes)) if keeps else without_memory(recipe, classes)
    if recipe.checkpoint_activations:
        without_activations(model, recipe.checkpoint_activations)
    _MADE[:] = [(_made_by(recipe, classes), model)] if keeps else []
    sizes = {name: each.numel() * each.requires_grad for name, each in model.named_parameters()}
    batch_norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    dropout, norms = has_dropout(model), norm_parameters(model)
    return Network(sum(sizes.values()), bool(batch_norms), None, dropout, sizes, norms, batch_norms)


def norm_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that layers have whose class is called a norm."""
    norms = [(name, each) for name, each in model.named_modules() if "norm" in type(each).__name__.lower()]
    own = [
        f"{name}.{leaf}".removeprefix(".") for name, each in norms for leaf, _ in each.named_parameters(recurse=False)
    ]
    return [name for name, _ in model.named_parameters() if name in {*own}]


def has_dropout(model: nn.Module) -> bool:
    """Whether a layer has a rate of dropout, as Dropout, timm's DropPath, LSTM and MultiheadAttention have."""
    rates = [getattr(each, name, 0) for each in model.modules() for name in ("dropout", "drop_prob")]
    rates += [each.p for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def without_memory(recipe: Recipe, classes: int | None) -> nn.Module:
    """The network on the device "meta", or on the CPU where its code computes with its weights."""
    make = _maker(recipe, classes)  # outside of the block below: tensors of the imported module stay on the CPU
    with contextlib.suppress(RecipeError), torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # where it loads weights
        return _made(recipe, make)
    return _made(recipe, make)


def _of_library(library: str) -> Any:
    try:
        return user_code.load(LIBRARIES[library], "model")
    except RecipeError:
        extra = "timm" if library == "timm" else "torch"
        raise RecipeError(f"model {library}:... needs {library}; install it: pip install hvdtrain[{extra}]") from None


class Beside(nn.Module):
    """A class that a module gets beside its own, `kind`. One that is read from a pickle has its first class again."""

    kind: type[nn.Module]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Beside":
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        return self.kind.__new__, (self.kind,), self.__dict__


def put_beside(
    module: nn.Module, base: type[Beside], kinds: dict[type, type], name: str = "", **attributes: Any
) -> None:
    """Gives the module the class `base` beside its own, one for all modules of its class in `kinds`. The class has the
    attributes: a copy of the module would copy its own. `name`: how that of the class begins; "": as the base's."""
    kind = type(module)
    if kind not in kinds:
        kinds[kind] = type(f"{name or base.__name__}{kind.__name__}", (base, kind), {**attributes, "kind": kind})
    module.__class__ = kinds[kind]
