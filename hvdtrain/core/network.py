"""What a plan must know of a network: its parameters, its FLOPs, and whether it has BatchNorm."""

import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.core import optimizers, user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import EngineUnavailable, RecipeError

RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""The number of bottlenecks in each stage: He et al. 2016, arXiv:1512.03385, table 1. As in torchvision, no convolution
has a bias."""
Shape = tuple[int, ...]
EXAMPLES = 2
"""How many examples a framework counts FLOPs with; of one, BatchNorm may have no variance."""
LIBRARIES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "lightning": "Lightning"}


@dataclass(frozen=True)
class Network:
    """What a plan must know of a recipe's network."""

    parameters: int
    """The number of trainable parameters."""
    has_batch_norm: bool
    flops: int | None = None
    """FLOPs of one example's forward pass in training; a multiply-add is 2. None where they were not counted."""
    has_dropout: bool = False
    """Whether its layers draw random numbers in training."""


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


def of(recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The recipe's network in that framework, which is loaded unless the network is one of MODELS.

    Raises RecipeError, and EngineUnavailable where the framework is not installed.
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
    found: Network = _module(framework, "networks", recipe).count(recipe, dataset)
    if not found.parameters:
        raise RecipeError(f"model {recipe.model} has no parameters to train.")
    return found


def with_flops(network: Network, recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The network with its FLOPs, which the framework may have to count. Raises HvdtrainError where it cannot."""
    if network.flops is not None:
        return network
    flops = _module(framework, "flops", recipe).count(recipe, dataset)
    return dataclasses.replace(network, flops=flops)


def curve_line(size: int, norms: Sequence[str], remedy: str, has_dropout: bool) -> str:
    """Why the curve is not the same on another number of ranks, and what makes it equal; "" where nothing is known.

    `norms` names the BatchNorm layers that normalise by their rank's examples, "" for any; the `remedy` is theirs.
    """
    why = []
    if norms:
        named = f" ({norms[0]}{f' and {len(norms) - 1} more' if norms[1:] else ''})" if norms[0] else ""
        why.append(f"BatchNorm{named} normalises by each rank's part of the batch ({remedy} makes it equal)")
    if has_dropout:
        why.append("dropout draws its random numbers on each rank (a model without it makes it equal)")
    return f"depends on the number of ranks: {'; '.join(why)}" if why and size > 1 else ""


def other_types(precision: str, products: Sequence[str], remedy: str) -> list[str]:
    """A line of the log on matrix products and convolutions of other types than the precision's, if there are any."""
    others = [each for each in products if each != precision]
    what = f"{len(others)} of {len(products)} matrix products and convolutions, {' and '.join(sorted(set(others)))}"
    return [f"precision {precision} does not hold for {what} by the model's own types; {remedy}"] * bool(others)


def counted_examples(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The request for the training examples with which a framework counts FLOPs, all with the same draws."""
    return np.arange(EXAMPLES) % len(dataset.train), np.zeros((EXAMPLES, dataset.draws), np.float32)


def lr_groups(recipe: Recipe, framework: str, dataset: Dataset, lr: float) -> str:
    """Names the groups of parameters whose LR differs from the run's; "" if there are none. Raises RecipeError."""
    if framework != "torch" or recipe.optimizer in optimizers.NAMED:
        return ""
    return _module(framework, "flops", recipe).lr_groups(recipe, dataset, lr)  # type: ignore[no-any-return]


def resnet_flops(model: str, stem: str, side: int, classes: int) -> int:
    """FLOPs of one image's forward pass through convolutions and classifier; `side` is the image's, in pixels."""
    convolutions = [(shape, out) for _, _, shape, out in _convolutions(model, stem, side)]
    features = convolutions[-1][0][0]
    return 2 * (sum(math.prod(shape) * out**2 for shape, out in convolutions) + features * classes)


def weights(model: str, classes: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of a network's trained weights and of its BatchNorm statistics, by their names in PyTorch. `model` is
    one of MODELS."""
    if model == "linear":
        return {"weight": (1, 1), "bias": (1,)}, {}
    trained, statistics, shape = dict[str, Shape](), dict[str, Shape](), Shape()
    for convolution, norm, shape, _ in _convolutions(model):
        trained |= {f"{convolution}.weight": shape, f"{norm}.weight": shape[:1], f"{norm}.bias": shape[:1]}
        statistics |= {f"{norm}.running_mean": shape[:1], f"{norm}.running_var": shape[:1]}
        statistics[f"{norm}.num_batches_tracked"] = ()
    return trained | {"fc.weight": (classes, shape[0]), "fc.bias": (classes,)}, statistics


def _convolutions(model: str, stem: str = "imagenet", side: int = 0) -> Iterator[tuple[str, str, Shape, int]]:
    """The convolutions of a ResNet: each one's name, the name of the BatchNorm after it, its shape [out, in, height,
    width], and the side of its output for images of that `side`, in pixels."""
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
    """Raises EngineUnavailable where a library of LIBRARIES is not installed; messages say that `user` needs it."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:  # the latter for a mere folder of that name
        remedy = f"install it: {sys.executable} -m pip install 'hvdtrain[{library}]'"
        raise EngineUnavailable(f"{user} needs {LIBRARIES[library]}, which {sys.prefix} has not; {remedy}")


def _module(framework: str, name: str, recipe: Recipe) -> Any:
    require(framework, f"model {recipe.model}")
    return importlib.import_module(f"hvdtrain.{framework}.{name}")
