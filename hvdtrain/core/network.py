"""What a plan must know of a network: how large it is, whether it normalises over the batch, and what it computes."""

import dataclasses
import importlib
import importlib.util
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.core import imports, optimizers, own_code
from hvdtrain.core.own_code import MODELS
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import EngineUnavailable

# He et al. 2016 as torchvision builds it (no convolution bias): everything but the classifier.
RESNET50_BODY = 23_508_032
RESNET50_FEATURES = 2048
RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Of each stage, how many bottlenecks and how wide."""
LIBRARIES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Network:
    """A recipe's network."""

    parameters: int
    """Trainable ones."""
    has_batch_norm: bool
    flops: int | None = None
    """Of one example forward, in training; a multiply-add is 2. None where not counted."""


def framework_of(recipe: Recipe) -> Literal["torch", "tensorflow"]:
    """What the recipe's network is of: seen from its import path, else from what its module imports; torch where both
    have the network. Raises RecipeError where the module cannot be imported."""
    if library := own_code.library_of(recipe.model):
        return library
    before = set(sys.modules)
    if own_code.is_path(recipe.model):
        imports.load(recipe.model, "model")
    imported = set(sys.modules) - before
    return "tensorflow" if {"keras", "tensorflow"} & imported and "torch" not in imported else "torch"


def of(recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The recipe's network in that framework, which is loaded for any but linear and resnet50.

    Raises RecipeError, and EngineUnavailable where the framework is missing.
    """
    own_code.check_framework(recipe.model, framework)
    if recipe.model == "linear":
        return Network(2, has_batch_norm=False, flops=2)
    if recipe.model == "resnet50":
        classes = dataset.classes or 0
        parameters = RESNET50_BODY + (RESNET50_FEATURES + 1) * classes
        side = dataset.sample_shape[0] if dataset.sample_shape else None
        flops = resnet50_flops(recipe.stem, side, classes) if side else None
        return Network(parameters, has_batch_norm=True, flops=flops)
    assert recipe.model not in MODELS
    return _module(framework, "networks", recipe).count(recipe, dataset)  # type: ignore[no-any-return]


def with_flops(network: Network, recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The network with its FLOPs, for which the framework runs it once. Raises HvdtrainError where it cannot."""
    if network.flops is not None:
        return network
    flops = _module(framework, "flops", recipe).count(recipe, dataset)
    return dataclasses.replace(network, flops=flops)


def lr_groups(recipe: Recipe, framework: str, dataset: Dataset, lr: float) -> str:
    """Which groups of parameters have LRs of their own; empty where all have the run's. Raises RecipeError."""
    if framework != "torch" or recipe.optimizer in optimizers.NAMED:
        return ""
    return _module(framework, "flops", recipe).lr_groups(recipe, dataset, lr)  # type: ignore[no-any-return]


def resnet50_flops(stem: str, side: int, classes: int) -> int:
    """Of one image of that side, in pixels: convolutions and classifier, forward, a multiply-add as 2."""
    side = side if stem == "cifar" else math.ceil(side / 2)
    weights = [(49 * 3 * 64, side)]
    """Of each convolution: how many, and the side of its output."""
    side = side if stem == "cifar" else math.ceil(side / 2)
    channels = 64
    for stage, (blocks, width) in enumerate(RESNET50_STAGES):
        for block in range(blocks):
            first, side = side, math.ceil(side / 2) if stage and not block else side
            weights += [(channels * width, first), (9 * width**2, side), (4 * width**2, side)]
            weights += [] if block else [(channels * 4 * width, side)]
            channels = 4 * width
    return 2 * (sum(count * out**2 for count, out in weights) + channels * classes)


def _module(framework: str, name: str, recipe: Recipe) -> Any:
    if importlib.util.find_spec(framework) is None:
        raise EngineUnavailable(
            f"model {recipe.model} needs {LIBRARIES[framework]}; install it: pip install hvdtrain[{framework}]"
        )
    return importlib.import_module(f"hvdtrain.{framework}.{name}")
