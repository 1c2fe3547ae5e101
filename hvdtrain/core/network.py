"""What a plan must know of a network: how large it is, whether it normalises over the batch, and what it computes."""

import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.core import optimizers, user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.user_code import MODELS
from hvdtrain.datasets import Dataset
from hvdtrain.errors import EngineUnavailable, RecipeError

RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""Of each stage, how many bottlenecks: He et al. 2016, arXiv:1512.03385, table 1, as torchvision builds them (no
convolution has a bias)."""
Shape = tuple[int, ...]
EXAMPLES = 2
"""How many examples a framework counts FLOPs of: BatchNorm has no variance of one value."""
LIBRARIES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "lightning": "Lightning"}


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
    if library := user_code.library_of(recipe.model):
        return library
    before = set(sys.modules)
    if user_code.is_path(recipe.model):
        user_code.load(recipe.model, "model")
    imported = set(sys.modules) - before
    return "tensorflow" if {"keras", "tensorflow"} & imported and "torch" not in imported else "torch"


def of(recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The recipe's network in that framework, which is loaded for any but MODELS.

    Raises RecipeError, and EngineUnavailable where the framework is missing.
    """
    user_code.check_framework(recipe.model, framework)
    if recipe.model == "linear":
        return Network(2, has_batch_norm=False, flops=2)
    if recipe.model in RESNETS:
        classes = dataset.classes or 0
        parameters = sum(math.prod(shape) for shape in weights(recipe.model, classes)[0].values())
        side = dataset.sample_shape[0] if dataset.sample_shape else None
        flops = resnet_flops(recipe.model, recipe.stem, side, classes) if side else None
        return Network(parameters, has_batch_norm=True, flops=flops)
    assert recipe.model not in MODELS
    found: Network = _module(framework, "networks", recipe).count(recipe, dataset)
    if not found.parameters:
        raise RecipeError(f"model {recipe.model} has no parameters to train.")
    return found


def with_flops(network: Network, recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The network with its FLOPs, for which the framework runs it once. Raises HvdtrainError where it cannot."""
    if network.flops is not None:
        return network
    flops = _module(framework, "flops", recipe).count(recipe, dataset)
    return dataclasses.replace(network, flops=flops)


def counted_examples(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The request for the EXAMPLES of the training set, without augmentation, of which a framework counts FLOPs."""
    return np.arange(EXAMPLES) % len(dataset.train), np.zeros((EXAMPLES, dataset.draws), np.float32)


def lr_groups(recipe: Recipe, framework: str, dataset: Dataset, lr: float) -> str:
    """Which groups of parameters have LRs of their own; empty where all have the run's. Raises RecipeError."""
    if framework != "torch" or recipe.optimizer in optimizers.NAMED:
        return ""
    return _module(framework, "flops", recipe).lr_groups(recipe, dataset, lr)  # type: ignore[no-any-return]


def resnet_flops(model: str, stem: str, side: int, classes: int) -> int:
    """Of one image of that side, in pixels: convolutions and classifier, forward, a multiply-add as 2."""
    convolutions = [(shape, out) for _, _, shape, out in _convolutions(model, stem, side)]
    features = convolutions[-1][0][0]
    return 2 * (sum(math.prod(shape) * out**2 for shape, out in convolutions) + features * classes)


def weights(model: str, classes: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """What a checkpoint holds of one of MODELS, by PyTorch's names: shapes of what is trained, and of BatchNorm's
    statistics."""
    if model == "linear":
        return {"weight": (1, 1), "bias": (1,)}, {}
    trained, statistics, shape = dict[str, Shape](), dict[str, Shape](), Shape()
    for convolution, norm, shape, _ in _convolutions(model):
        trained |= {f"{convolution}.weight": shape, f"{norm}.weight": shape[:1], f"{norm}.bias": shape[:1]}
        statistics |= {f"{norm}.running_mean": shape[:1], f"{norm}.running_var": shape[:1]}
        statistics[f"{norm}.num_batches_tracked"] = ()
    return trained | {"fc.weight": (classes, shape[0]), "fc.bias": (classes,)}, statistics


def _convolutions(model: str, stem: str = "imagenet", side: int = 0) -> Iterator[tuple[str, str, Shape, int]]:
    """Of each convolution of a ResNet: its name, the BatchNorm's behind it, its shape [out, in, height, width], and the
    side of its output for images of that side, in pixels."""
    halved = 1 if stem == "cifar" and model == "resnet50" else 2
    side = math.ceil(side / halved)
    yield "conv1", "bn1", (64, 3, 7, 7), side
    side = math.ceil(side / halved)
    channels = 64
    for stage, blocks in enumerate(RESNETS[model]):
        width = 64 << stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            before, side = side, math.ceil(side / 2) if stage and not block else side
            yield f"{name}.conv1", f"{name}.bn1", (width, channels, 1, 1), before
            yield f"{name}.conv2", f"{name}.bn2", (width, width, 3, 3), side
            yield f"{name}.conv3", f"{name}.bn3", (4 * width, width, 1, 1), side
            if not block:
                yield f"{name}.downsample.0", f"{name}.downsample.1", (4 * width, channels, 1, 1), side
            channels = 4 * width


def require(library: str, user: str) -> None:
    """Raises EngineUnavailable where the one of LIBRARIES that the `user` needs is not installed."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:  # a folder of that name alone
        remedy = f"install it: {sys.executable} -m pip install 'hvdtrain[{library}]'"
        raise EngineUnavailable(f"{user} needs {LIBRARIES[library]}, which {sys.prefix} has not; {remedy}")


def _module(framework: str, name: str, recipe: Recipe) -> Any:
    require(framework, f"model {recipe.model}")
    return importlib.import_module(f"hvdtrain.{framework}.{name}")
