"""Types of a recipe's keys: a callable's arguments by name, bounded and as JSON has them; steps between checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError

MOST_VALUES = 1000
MOST_DEPTH = 5
LONGEST_TEXT = 4096
LARGEST = 2**63


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same. Raises PydanticCustomError, whose text follows "must"."""
    if _count(arguments, 1) > MOST_VALUES:
        raise _broken(f"hold at most {MOST_VALUES} values")
    return arguments


Arguments = Annotated[dict[str, Any], AfterValidator(_checked)]
"""The type of such a key; its flag reads KEY=VALUE ..., each value as YAML."""


def _count(value: Any, depth: int) -> int:
    if depth > MOST_DEPTH:
        raise _broken(f"go at most {MOST_DEPTH} levels deep")
    match value:
        case dict():
            return 1 + sum(_count(key, depth) + _count(one, depth + 1) for key, one in value.items() if _is_name(key))
        case list():
            return 1 + sum(_count(one, depth + 1) for one in value)
        case str() if len(value) > LONGEST_TEXT or not value.isprintable():
            raise _broken(f"hold printable texts of at most {LONGEST_TEXT} characters")
        case int() | float() if not abs(value) < LARGEST:  # nor infinite, nor no number
            raise _broken("hold numbers between -2^63 and 2^63")
        case str() | bool() | int() | float() | None:
            return 1
    raise _broken("hold numbers, texts, true, false, null, lists and mappings")


def _is_name(key: Any) -> bool:
    if not isinstance(key, str):
        raise _broken("map names to values")
    return True


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError("arguments", rule)  # type: ignore[arg-type]


def _whole_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """The same. Raises PydanticCustomError, whose text follows "must"."""
    try:
        return handler(value)
    except ValidationError:
        raise _broken("be a whole number from 1 to 10^9, or auto") from None


Every = Annotated[Annotated[int, Field(gt=0, le=10**9)] | Literal["auto"] | None, WrapValidator(_whole_or_auto)]
"""A number of steps; or auto, by Daly's formula; None is never."""
