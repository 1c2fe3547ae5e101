"""How much of a lab's work is done: all of it in front of a class, a little in the tests, more on a large machine."""

import math
import os

from hvdtrain.errors import LabError

VARIABLE = "HVDTRAIN_LAB_SCALE"


def scaled(count: int, least: int = 1) -> int:
    """`count` times HVDTRAIN_LAB_SCALE (1 where it is not set), rounded, and at least `least`.

    Raises LabError for a scale that is not a positive number.
    """
    text = os.environ.get(VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise LabError(f"{VARIABLE} must be a positive number, got {text!r}; unset it for a lab of a minute.")
    return max(least, round(count * scale))
