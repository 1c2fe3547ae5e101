"""How recipe files, in YAML, become values, and the types of keys that are neither numbers nor texts."""

import warnings
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent

from hvdtrain.core.wording import nearest
from hvdtrain.errors import RecipeError
from hvdtrain.files import expanded, is_own, read_bytes, with_home
from hvdtrain.untrusted import printable, quoted

MOST_BYTES = 64 * 1024
MOST_EXTENDS = 10
LONGEST_NAME = 4096  # a path's, on Linux
# A recipe file may be from somebody else: these bounds keep its reading under half a second.
MOST_VALUES_OF_FILE = 10_000
MOST_DEPTH_OF_FILE = 10
BOOLEANS_OF_YAML_1_1 = {"yes", "no", "on", "off"}
"""Words, in any case, that are booleans in YAML 1.1 and texts in YAML 1.2, in which recipes are written."""

# These bounds are far above what anybody trains with; a product of three such numbers does not overflow.
Number = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Side = Annotated[int, Field(gt=0, le=4096)]
Text = Annotated[str, Field(max_length=LONGEST_NAME)]
Paths = Annotated[dict[Text, Text], Field(max_length=100)]
Folder = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(with_home(str(path))))]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Figures = Annotated[dict[Text, Annotated[float, Field(strict=True)]], Field(max_length=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what every framework's generator takes

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


def _or_auto(numbers: str) -> WrapValidator:
    def checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise _broken(f"be a whole number from {numbers}, or auto") from None

    return WrapValidator(checked)


Every = Annotated[Annotated[int, Field(gt=0, le=10**9)] | Literal["auto"] | None, _or_auto("1 to 10^9")]
"""The type of an interval: a number of steps, "auto" for Daly's formula, or None for never."""
Workers = Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], _or_auto("0 to 1024")]


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


def known() -> list[str]:
    """The names of the shipped recipes."""
    folder = resources.files("hvdtrain") / "recipes"
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))


def entry_keys(
    name: str, seen: tuple[str, ...], files: dict[str, tuple[dict[str, Any], int | None]], by: int | None = None
) -> dict[str, Any]:
    """The keys of the entry and of those that it extends. `files` holds the entries of the files that were read, and
    the owner of each that is another user's; `by` is that of the file that names the entry."""
    if name in seen:
        raise RecipeError(f"{printable(name)} extends itself through {_all(seen, ' -> ')}; remove one `extends`.")
    if len(seen) > MOST_EXTENDS:
        raise RecipeError(
            f"{printable(seen[0])} extends more than {MOST_EXTENDS} entries, one the other; name a nearer one."
        )
    check_name(name)
    file, _, entry = name.partition(":")
    if file not in files:
        text, owner = _text(file, by)
        files[file] = _entries(file, text), owner
    entries, owner = files[file]
    entry = entry or "default"
    if entry not in entries:
        near = nearest(entry, list(entries))
        raise RecipeError(
            f"recipe {printable(file)} has no entry {quoted(entry)}.{near} Entries: {_all(entries, ', ')}."
        )
    keys = entries[entry]
    if not isinstance(keys, dict):
        raise RecipeError(f"entry {printable(entry)} of {printable(file)} must map keys to values, got {quoted(keys)}.")
    keys = dict(keys)
    base = keys.pop("extends", "")
    if not isinstance(base, str):
        raise RecipeError(
            f"extends in entry {printable(entry)} of {printable(file)} must name a recipe, as linear:default does, "
            f"got {quoted(base)}."
        )
    if base in entries and base not in known():  # of the same file
        base = f"{file}:{base}"
    return over(entry_keys(base, (*seen, name), files, owner) if base else {}, keys)


def over(keys: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, replaced by `overrides`. A batch_size replaces batch_size_per_rank too, and the other way round."""
    batch = {"batch_size", "batch_size_per_rank"}
    kept = {k: v for k, v in keys.items() if k not in batch} if batch & set(overrides) else keys
    return {**kept, **overrides}


def _entries(file: str, text: str) -> dict[str, Any]:
    entries = parsed(file, text)
    if not isinstance(entries, dict):
        raise RecipeError(f"{file} must hold named entries (name: keys), got {quoted(entries)}.")
    return {shown_key(entry): keys for entry, keys in entries.items()}


def _text(file: str, by: int | None) -> tuple[str, int | None]:
    """The text, and the owner where that is another user, whose links are not followed, and whose `extends` names no
    file of anybody else: messages show what is in it."""
    if not file.endswith((".yaml", ".yml")):
        if file not in known():
            if file.endswith(".py"):
                start = f"python {printable(file, 200)}"
                raise RecipeError(
                    f"{quoted(file)} is a program, no recipe; start it as {start}, or horovodrun -np 2 {start}."
                )
            near = nearest(file, known())
            raise RecipeError(
                f"unknown recipe {quoted(file)}.{near} Recipes: {', '.join(known())}; or give a file ending in .yaml."
            )
        return (resources.files("hvdtrain") / "recipes" / f"{file}.yaml").read_text(encoding="utf-8"), None
    try:
        path = Path(expanded(file, f"recipe file {file}"))
        status = path.stat() if is_own(path.lstat()) else path.lstat()
        if by not in {None, status.st_uid}:
            raise ValueError("another user's recipe extends it, which is not theirs")
        owner = None if is_own(status) else status.st_uid
        return read_bytes(path, MOST_BYTES, follow=owner is None).decode(), owner
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"cannot read recipe file {file}: {reason}; give a readable .yaml file.") from None


def check_name(text: str) -> None:
    """Refuses a name that the log and a comment of the resolved recipe cannot show. Raises RecipeError."""
    if not text.isprintable() or len(text) > LONGEST_NAME:
        raise RecipeError(f"a name must have up to {LONGEST_NAME} characters, all printable, got {quoted(text)}.")


def _all(names: Iterable[str], between: str) -> str:
    return printable(between.join(names), 500)


def shown_key(key: Any) -> str:
    return key if isinstance(key, str) and key.isprintable() else quoted(key)
