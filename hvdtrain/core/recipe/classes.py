"""Classes of unequal size: the keys, the label of each training example, and the weights of the classes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hvdtrain.core.recipe.keys import CROSS_ENTROPIES
from hvdtrain.datasets import Dataset
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import quoted

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

HEAVIEST = 1e9
REMEDY = "give the data set `targets`, a whole number from 0 for each example"


def _checked(value: Any) -> Any:
    if value is None or value == "balanced":
        return value
    given: Any = value.items() if isinstance(value, dict) else ()
    if given and all(type(key) in {str, int} and _is_weight(weight) for key, weight in given):
        return {str(key): float(weight) for key, weight in given}
    rule = "be balanced, or map classes to weights from 0 to 10^9, as in {0: 1, 1: 2.5}"
    raise PydanticCustomError("arguments", rule)


def _is_weight(value: Any) -> bool:
    return type(value) in {int, float} and 0 <= value <= HEAVIEST


Weights = Annotated[Literal["balanced"] | dict[str, float] | None, BeforeValidator(_checked)]


class Classes(BaseModel):
    """Classes of unequal size: weighed in the loss, or drawn alike often."""

    class_weights: Weights = Field(
        None,
        description="cross_entropy, training only: balanced, or weights of classes by number or name, as 0=1 1=2.5; "
        "the loss is divided by the weights of the global batch",
    )
    sample: Literal["each", "balanced"] = Field(
        "each", description="each: an epoch has each example once; balanced: each class alike often"
    )


def check(r: "Recipe") -> None:
    """Raises RecipeError where a key for classes does not go with the others."""
    keys = {"class_weights": r.class_weights is not None, "sample balanced": r.sample == "balanced"}
    given = next((key for key, is_set in keys.items() if is_set), "")
    if given and r.dataset == "linear":
        raise RecipeError(f"{given} is for classes, which dataset linear has not; drop it.")
    if r.class_weights is not None and (r.step or (r.loss or "cross_entropy") not in CROSS_ENTROPIES):
        raise RecipeError(
            f"class_weights goes with loss cross_entropy, got {f'step {r.step}' if r.step else f'loss {r.loss}'}; "
            "weigh the examples there, and return (sum, count)."
        )
    if r.class_weights is not None and r.reduction == "adasum":
        raise RecipeError("class_weights cannot be divided after reduction adasum; drop one.")
    if r.sample == "balanced" and r.shuffle == "shards":
        raise RecipeError("sample balanced reads examples of all shards at any time; drop shuffle shards.")


def lines(r: "Recipe", weights: Sequence[float], labels: NDArray[np.int64] | None) -> list[str]:
    """How classes are weighed and drawn, for the plan. What is not known of the data is left out."""
    texts = []
    if r.class_weights is not None:
        how = "balanced: " if r.class_weights == "balanced" else ""
        shown = f"{min(weights):.4g} to {max(weights):.4g} over {len(weights)} classes" if weights else "by the labels"
        texts.append(f"weights     {how}{shown}; the training loss is divided by those of the global batch")
    if r.sample == "balanced":
        counts = np.unique(np.empty(0) if labels is None else labels, return_counts=True)[1]
        each = f"{counts.sum() // len(counts):,}" if len(counts) else "equally many"
        of = f", of {counts.min():,} to {counts.max():,} in the data" if len(counts) else ""
        texts.append(f"sample      balanced: an epoch has {each} examples of each class{of}")
    return texts


def labels_of(dataset: Dataset, key: str) -> NDArray[np.int64] | None:
    """The label of each training example, for that key of a recipe; None where the files are not here. Raises
    DataError where the data set does not say them."""
    found: Any = getattr(dataset.train, "labels", ())
    if found is None:
        return None
    labels = np.asarray(found) if not dataset.items else np.empty(0)
    if labels.shape != (len(dataset.train),) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(f"{key} needs the label of each training example, which {dataset.name} does not say; {REMEDY}.")
    return labels.astype(np.int64)


def weights_of(
    chosen: Literal["balanced"] | Mapping[str, float] | None, labels: NDArray[np.int64] | None, dataset: Dataset
) -> tuple[float, ...]:
    """The weight of each class, by label; () where none was chosen, or labels are not known.

    Balanced are examples / (classes * examples of the class), over the classes that occur, as scikit-learn's
    compute_class_weight has it. A class that is not named, or does not occur, has weight 1. Raises DataError for a
    class that there is not.
    """
    if chosen == "balanced":
        counts = np.bincount(labels, minlength=dataset.classes or 0) if labels is not None else np.empty(0, np.int64)
        present = np.maximum(counts, 1) * np.count_nonzero(counts)
        return tuple(np.where(counts, counts.sum() / present, 1.0).tolist()) if len(counts) else ()
    numbered = {_number(name, dataset): weight for name, weight in (chosen or {}).items()}
    count = dataset.classes or len(dataset.names) or max(numbered, default=-1) + 1
    return tuple(numbered.get(label, 1.0) for label in range(count)) if numbered else ()


def _number(name: str, dataset: Dataset) -> int:
    if name in dataset.names:
        return dataset.names.index(name)
    most = dataset.classes or len(dataset.names) or 10**7
    if name.isdecimal() and int(name) < most:
        return int(name)
    raise DataError(f"class_weights names class {quoted(name)}, {dataset.name} has 0 to {most - 1}; name one of these.")
