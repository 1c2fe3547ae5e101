"""The keys for classes of unequal size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hvdtrain.core.recipe.keys import CROSS_ENTROPIES
from hvdtrain.errors import RecipeError

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

HEAVIEST = 1e9


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
