"""How often a checkpoint is worth its cost, and the type of the key that says it."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError


def daly(cost: float, mtbf: float) -> float:
    """Seconds of training between two checkpoints that lose least, of which each costs so many seconds, where failures
    are so many seconds apart.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (2006), equation 37; its first term alone is J. W. Young's, Communications of the ACM 17 (1974).
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def _checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """The same. Raises PydanticCustomError, whose text follows "must"."""
    try:
        return handler(value)
    except ValidationError:
        raise PydanticCustomError("arguments", "be a whole number from 1 to 10^9, or auto") from None


Every = Annotated[Annotated[int, Field(gt=0, le=10**9)] | Literal["auto"] | None, WrapValidator(_checked)]
"""A number of steps; or auto, by `daly`; None is never."""
