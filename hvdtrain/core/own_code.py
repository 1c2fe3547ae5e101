"""What a recipe may name of the user's own code, and the rules between such keys."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hvdtrain import datasets
from hvdtrain.core.wording import nearest
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import quoted

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

IMPORT_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)*:\w+(\.\w+)*"
MODELS = ("linear", "resnet50", "resnet101")
"""hvdtrain's own, the same in both frameworks."""
NAMED = {
    "inception_v3": {"torch": "torchvision:inception_v3", "tensorflow": "hvdtrain.tensorflow.inception:inception_v3"},
    "vgg16": {"torch": "torchvision:vgg16", "tensorflow": "keras.applications:VGG16"},
}
"""Short names of networks that other libraries have: by framework, the import path that each stands for."""
LIBRARIES: dict[str, Literal["torch", "tensorflow"]] = {
    "torch": "torch",
    "torchvision": "torch",
    "timm": "torch",
    "keras": "tensorflow",
    "tensorflow": "tensorflow",
}
"""Packages whose networks only one framework can train."""
LOSSES = ("cross_entropy", "mse", "bce_with_logits", "l1")
CROSS_ENTROPIES = {"cross_entropy", "torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"}
"""Names of one loss."""
AUXILIARY = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}
"""Weight of the loss of torchvision's auxiliary classifiers: 0.3 in Szegedy et al. 2014, arXiv:1409.4842, section 5;
of Inception-v3 0.4, as TensorFlow's research models take it."""


def is_path(name: str) -> bool:
    """Whether a value names code of the user's, as cells.nets:UNet does, and nothing of hvdtrain's."""
    return re.fullmatch(IMPORT_PATH, name) is not None


def network_path(model: str, framework: str) -> str:
    """The import path of a network that is not one of MODELS: a short name's, or the recipe's own."""
    return NAMED[model][framework] if model in NAMED else model


def library_of(model: str) -> Literal["torch", "tensorflow"] | None:
    """The framework of a library's network; None of the user's own, and of short names, which both have."""
    return LIBRARIES.get(model.partition(":")[0].partition(".")[0]) if is_path(model) else None


def check_framework(model: str, framework: str) -> None:
    """Raises RecipeError for a network of the other framework's libraries."""
    library = library_of(model)
    if library == "torch" and framework == "tensorflow":
        raise RecipeError(
            f"model {model} is PyTorch's, this run is TensorFlow's; take one of keras.applications, as "
            "keras.applications:InceptionV3."
        )
    if library == "tensorflow" and framework == "torch":
        raise RecipeError(
            f"model {model} is TensorFlow's, this run is PyTorch's; take one of torchvision, as torchvision:resnet101."
        )


def check_labels(r: "Recipe", outputs: int, least: int, most: int, classes: str = "") -> None:
    """Raises DataError where labels from `least` to `most` are not all outputs of the network, and RecipeError where
    they are of that many `classes`, as "4 classes"."""
    if least < 0 or most >= outputs:
        wrong = least if least < 0 else most
        names = (f"model_args {name}={most + 1}" for name, value in r.model_args.items() if value == outputs)
        more = f", or give {next(names, f'it {most + 1} outputs')}" if most >= outputs else ""
        raise (RecipeError if classes else DataError)(
            f"model {r.model} gives {outputs} outputs, dataset {r.dataset} has {classes or f'label {wrong}'}: labels "
            f"must be 0 to {outputs - 1} (PyTorch leaves out -100); change them{more}."
        )


def check(r: "Recipe") -> None:
    """Raises RecipeError for what names neither hvdtrain's nor the user's, or does not go together."""
    _check_name_or_path("model", r.model, (*MODELS, *NAMED))
    _check_name_or_path("dataset", r.dataset, datasets.NAMES)
    _check_name_or_path("loss", r.loss or LOSSES[0], LOSSES)
    for key, path in (
        ("step", r.step),
        ("collate", r.collate),
        *((f"metrics {name}", r.metrics[name]) for name in r.metrics),
    ):
        if path is not None:
            _check_name_or_path(key, path, ())
    own_model, own_data = is_path(r.model), is_path(r.dataset)
    if not own_model and not own_data and (r.model == "linear") != (r.dataset == "linear"):
        raise RecipeError(f"model {r.model} cannot learn dataset {r.dataset}: linear goes with linear only.")
    if r.model_args and r.model in MODELS:
        raise RecipeError(f"model_args go with a model of your own, got model {r.model}; drop them.")
    if (r.dataset_args or r.collate) and not own_data:
        key = "dataset_args go" if r.dataset_args else "collate goes"
        raise RecipeError(f"{key} with a data set of your own, got dataset {r.dataset}; drop it.")
    if own_data and not (r.loss or r.step):
        raise RecipeError(
            f"dataset {r.dataset} needs a loss ({', '.join(LOSSES)}, or your own, as cells.losses:dice), or a step."
        )
    if r.step and (r.loss or r.metrics or r.label_smoothing):
        raise RecipeError("step computes loss and metrics itself; drop loss, metrics and label_smoothing.")
    for name in r.metrics:
        if not name.isidentifier() or name in {"loss", "acc1"}:
            raise RecipeError(f"a metric's name must be a word other than loss and acc1, got {quoted(name)}.")


def _check_name_or_path(key: str, value: str, names: Sequence[str]) -> None:
    if value not in names and not is_path(value):
        either = f"one of {', '.join(names)}, or " if names else ""
        raise RecipeError(
            f"{key} must be {either}an import path such as package.module:name, got {quoted(value)}."
            f"{nearest(value, list(names))}"
        )
