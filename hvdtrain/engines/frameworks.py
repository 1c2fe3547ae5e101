"""What a plan asks of the recipe's framework. A framework is loaded only where it must count."""

import dataclasses
import importlib.util
import sys
from typing import Any, Literal

from hvdtrain.core import network, optimizers, user_code
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import Recipe, finetuning, memory
from hvdtrain.datasets import Dataset
from hvdtrain.engines import registry
from hvdtrain.errors import EngineUnavailable, RecipeError

LIBRARIES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "lightning": "Lightning"}


def framework_of(recipe: Recipe) -> Literal["torch", "tensorflow"]:
    """The framework of the recipe's network, by its import path or by what its module imports; torch where both have
    the network. Raises RecipeError where the module cannot be imported."""
    if library := user_code.library_of(recipe.model):
        return library
    before = set(sys.modules)
    if user_code.is_path(recipe.model):
        user_code.load(recipe.model, "model")
    imported = set(sys.modules) - before
    return "tensorflow" if {"keras", "tensorflow"} & imported and "torch" not in imported else "torch"


def network_of(recipe: Recipe, framework: str, dataset: Dataset, *, keeps: bool = False) -> Network:
    """The recipe's network in that framework, which is loaded unless the network is one of MODELS.

    `keeps`: in PyTorch the network that is made to be counted is the one that will be trained, with its weights.
    BatchNorm layers that `freeze` means for good do not count as such.

    Raises RecipeError, and EngineUnavailable where the framework is not installed.
    """
    user_code.check_framework(recipe.model, framework)
    if recipe.model in user_code.MODELS:
        named = network.named(recipe, dataset.classes or 0, framework)
        found = dataclasses.replace(named, flops=network.flops(recipe, dataset))
        patterns = [pattern for pattern in recipe.checkpoint_activations if pattern != memory.BLOCKS]
        finetuning.chosen("checkpoint_activations", patterns, found.sizes, {})
    else:
        found = _asked(framework, "networks", recipe).count(recipe, dataset, **{"keeps": True} if keeps else {})
    if not found.parameters:
        raise RecipeError(f"model {recipe.model} has no parameters to train.")
    if not found.has_batch_norm:
        return found
    frozen = finetuning.frozen_modules(recipe, found.batch_norms, network.NORM_LEAVES[framework])
    learns = recipe.freeze_until_epoch is not None or not recipe.freeze or len(frozen) < len(found.batch_norms)
    return dataclasses.replace(found, has_batch_norm=learns)


def with_flops(counted: Network, recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The network with its FLOPs, which the framework may have to count. Raises HvdtrainError where it cannot."""
    if counted.flops is not None:
        return counted
    return dataclasses.replace(counted, flops=_asked(framework, "flops", recipe).count(recipe, dataset))


def lr_groups(recipe: Recipe, framework: str, dataset: Dataset, lr: float) -> str:
    """Names the groups of parameters whose LR differs from the run's; "" if there are none. Raises RecipeError."""
    if framework != "torch" or recipe.optimizer in optimizers.NAMED:
        return ""
    return _asked(framework, "flops", recipe).lr_groups(recipe, dataset, lr)  # type: ignore[no-any-return]


def kept_bytes(recipe: Recipe, framework: str, dataset: Dataset, examples: int) -> int:
    """How many bytes of so many examples forward keeps for backward. Raises HvdtrainError where that is not known."""
    count = {"torch": ("trainer", "kept_by_module"), "tensorflow": ("flops", "kept_by_layer")}
    module, function = count[framework]
    found = getattr(_asked(framework, module, recipe), function)(recipe, dataset, examples=examples)
    return int(found[0][1])


def require(library: str, user: str) -> None:
    """Raises EngineUnavailable where a library of LIBRARIES is not installed; messages say that `user` needs it."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:  # the latter for a mere folder of that name
        remedy = f"install it: {sys.executable} -m pip install 'hvdtrain[{library}]'"
        raise EngineUnavailable(f"{user} needs {LIBRARIES[library]}, which {sys.prefix} has not; {remedy}")


def _asked(framework: str, module: str, recipe: Recipe) -> Any:
    require(framework, f"model {recipe.model}")
    return registry.module(framework, module)
