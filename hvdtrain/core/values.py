"""How YAML text becomes a recipe's values, and the types of keys that are neither numbers nor texts."""

import warnings
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent

from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted

# A recipe file may be from somebody else: these bounds keep its reading under half a second.
MOST_VALUES_OF_FILE = 10_000
MOST_DEPTH_OF_FILE = 10
BOOLEANS_OF_YAML_1_1 = {"yes", "no", "on", "off"}
"""Words, in any case, that are booleans in YAML 1.1 and texts in YAML 1.2, in which recipes are written."""

MOST_VALUES = 1000
MOST_DEPTH = 5
LONGEST_TEXT = 4096
LARGEST = 2**63


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    if _count(arguments, 1) > MOST_VALUES:
        raise _broken(f"hold at most {MOST_VALUES} values")
    return arguments


Arguments = Annotated[dict[str, Any], AfterValidator(_checked)]
"""The type of a key whose value maps names to values; its flag reads KEY=VALUE ..., each value as YAML."""


def _count(value: Any, depth: int) -> int:
    """The number of values in this one. Raises PydanticCustomError, whose text follows "must"."""
    if depth > MOST_DEPTH:
        raise _broken(f"go at most {MOST_DEPTH} levels deep")
    match value:
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise _broken("map names to values")
            return 1 + sum(_count(key, depth) + _count(one, depth + 1) for key, one in value.items())
        case list():
            return 1 + sum(_count(one, depth + 1) for one in value)
        case str() if len(value) > LONGEST_TEXT or not value.isprintable():
            raise _broken(f"hold printable texts of at most {LONGEST_TEXT} characters")
        case int() | float() if not abs(value) < LARGEST:  # NaN is refused too
            raise _broken("hold numbers between -2^63 and 2^63")
        case str() | bool() | int() | float() | None:
            return 1
    raise _broken("hold numbers, texts, true, false, null, lists and mappings")


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError("arguments", rule)


def _whole_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        raise _broken("be a whole number from 1 to 10^9, or auto") from None


Every = Annotated[Annotated[int, Field(gt=0, le=10**9)] | Literal["auto"] | None, WrapValidator(_whole_or_auto)]
"""The type of an interval: a number of steps, "auto" for Daly's formula, or None for never."""


class _Bounded(Composer):
    """Composes a YAML file and counts its values; an alias counts as all the values that it stands for."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False
        self._values = self._depth = 0
        self._behind: dict[str, int] = {}  # for each anchor that was read, the number of its values

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.parser.peek_event(), self._values
        is_alias = isinstance(event, AliasEvent)
        if not is_alias:
            self._behind.pop(event.anchor, None)
        self._depth += 1
        self._refuse(self._depth > MOST_DEPTH_OF_FILE, f"goes more than {MOST_DEPTH_OF_FILE} levels deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        is_value = (index is not None or parent is None) and getattr(index, "value", "") != "sample_check"
        if isinstance(event, ScalarEvent) and event.implicit[0] and is_value:
            rule = f"has {event.value}, which is a text in YAML 1.2 and true or false in 1.1; write true or false, or "
            self._refuse(event.value.lower() in BOOLEANS_OF_YAML_1_1, f"{rule}'{event.value}' for the text", event)
        self._refuse(is_alias and event.anchor not in self._behind, "has an alias of what it stands in", event)
        self._values += self._behind[event.anchor] if is_alias else 1
        rule = f"holds more than {MOST_VALUES_OF_FILE} values, those of aliases too"
        self._refuse(self._values > MOST_VALUES_OF_FILE, rule, event)
        if event.anchor and not is_alias:
            self._behind[event.anchor] = self._values - before
        return node

    def _refuse(self, broken: bool, rule: str, event: Any) -> None:
        if broken:
            raise _OutOfBounds(problem=rule, problem_mark=event.start_mark)


class _OutOfBounds(MarkedYAMLError):
    pass


def parsed(file: str, text: str) -> Any:
    """The values of the YAML text, which messages call `file`. Raises RecipeError."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Bounded
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ruamel warns programmers, not users
            return yaml.load(text)
    except DuplicateKeyError as error:
        where = error.problem_mark
        key = str(error.problem).partition('"')[2].partition('"')[0]
        raise RecipeError(
            f"{file} line {where.line + 1}: key {quoted(key)} stands twice in one entry; remove one of them."
        ) from None
    except MarkedYAMLError as error:
        where = error.problem_mark
        line = f" line {where.line + 1}" if where else ""
        wrong = "" if isinstance(error, _OutOfBounds) else " is not YAML:"
        raise RecipeError(f"{file}{line}{wrong} {printable(str(error.problem), 200)}.") from None
    except (YAMLError, ValueError) as error:  # a control character; a date such as 2024-13-01
        reason = printable(str(error).partition("\n")[0], 200)
        # Python's own message suggests to raise its limit.
        reason = "a number has more than 4,300 digits" if reason.startswith("Exceeds the limit") else reason
        raise RecipeError(f"{file} is not YAML: {reason}.") from None
    except Exception:  # ruamel raises IndexError, KeyError, AssertionError and more for `!!int ""` and the like
        raise RecipeError(f"{file} is not YAML: a value is none of its tag.") from None
