"""The simple noise scale of gradients: up to how many examples a larger batch is useful."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from hvdtrain.errors import RecipeError

NAMES = ("noise_scale", "gradient_trace", "gradient_square")
"""Its values in a step's record: the scale in examples, and the estimates that it is the ratio of."""


class Noise(BaseModel):
    """What is measured of gradients beside their norm."""

    gradient_noise: bool = Field(
        False, description="measure up to how many examples a batch is useful; costs two norms of the gradients a step"
    )


def check(r: Any) -> None:
    """Raises RecipeError where updates are not made of the mean gradient."""
    if r.gradient_noise and r.reduction == "adasum":
        raise RecipeError("gradient_noise compares mean gradients, which reduction adasum has not; drop one.")


def lines(r: Any) -> list[str]:
    """What the plan says of it."""
    return ["noise       of the gradients is measured in each step"] if r.gradient_noise else []


def estimated(sums: NDArray[np.float64]) -> dict[str, float]:
    """The values of NAMES, from sums [5] over updates and ranks: of the squared norm of the gradient of a part of the
    batch, and of the whole batch's; of 1 / the part's examples, and 1 / the batch's; and how many parts were added.
    Without a part there are none; the scale is left out where an estimate is negative, as those of few updates may be.

    Unbiased estimates of the trace of the covariance that gradients of single examples have, and of the squared norm of
    their mean: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    small, big, of_part, of_whole, count = sums
    if not count or of_part <= of_whole:
        return {}
    trace = (small - big) / (of_part - of_whole)
    square = (big - trace * of_whole) / count
    found = {"gradient_trace": float(trace), "gradient_square": float(square)}
    return {"noise_scale": float(trace / square), **found} if trace > 0 and square > 0 else found
