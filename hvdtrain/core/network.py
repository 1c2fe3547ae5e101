"""What a plan must know of a network: how large it is, and whether it normalises over the batch."""

import importlib
from dataclasses import dataclass

from hvdtrain.core.own_code import MODELS
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset

# He et al. 2016 as torchvision builds it (no convolution bias): everything but the classifier.
RESNET50_BODY = 23_508_032
RESNET50_FEATURES = 2048


@dataclass(frozen=True)
class Network:
    """A recipe's network."""

    parameters: int
    """Trainable ones."""
    has_batch_norm: bool


def of(recipe: Recipe, framework: str, dataset: Dataset) -> Network:
    """The recipe's network in that framework, which is loaded for a network of the user's only. Raises RecipeError."""
    if recipe.model == "linear":
        return Network(2, has_batch_norm=False)
    if recipe.model == "resnet50":
        return Network(RESNET50_BODY + (RESNET50_FEATURES + 1) * (dataset.classes or 0), has_batch_norm=True)
    assert recipe.model not in MODELS
    networks = importlib.import_module(f"hvdtrain.{framework}.networks")
    return networks.count(recipe, dataset)  # type: ignore[no-any-return]
