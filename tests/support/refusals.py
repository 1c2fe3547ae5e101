"""The text of errors."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(kind: type[Exception], act: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The text of the error of that kind that `act(*arguments, **keys)` raises."""
    with pytest.raises(kind) as caught:
        act(*arguments, **keys)
    return str(caught.value)
