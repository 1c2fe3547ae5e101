"""Command lines: the flags of a pydantic dataclass, read into its validated, frozen value.

argparse splits the arguments and prints the help. pydantic validates the values, so that flags and keys of a recipe
obey the same rules, with the same messages.
"""

import argparse
import functools
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hvdtrain.core.values import parsed
from hvdtrain.core.wording import closest, rule
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted

MOST_ARGUMENTS = 1000
LONGEST_ARGUMENT = 4096  # a path's, on Linux
ALIASES = {"base_lr": ("--lr",), "engine": ("--strategy",)}
"""Other names of some flags of a run."""
BARE = {"best"}
"""Flags of a run that may stand alone; then their value is ""."""
QUOTES = ("'", '"')
TOGETHER = re.compile(r",\s*([\w.-]+=|$)")
"""The start of another KEY=VALUE within a text, where somebody separated them by commas."""
NUMBERS = ConfigDict(allow_inf_nan=False)
WIDEST = 100
INDENT = 28
"""Columns of the help to the left of the flags' texts."""
LONGEST_METAVAR = 50
FEW = 4
"""The most flags that the first line of a help lists."""

Model = TypeVar("Model")
Fields = Mapping[str, FieldInfo]


@dataclass(frozen=True)
class Flag:
    """How the command line shows a field: an annotation of the field's type."""

    help: str = ""
    metavar: str = ""
    name: str = ""
    """The name of the flag, where the field cannot have it because it is a keyword of Python."""
    aliases: tuple[str, ...] = ()
    is_positional: bool = False
    is_repeated: bool = False
    """Whether the flag can be given several times, once for each value."""


@dataclass(frozen=True)
class Layout:
    """How --help shows the flags."""

    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of the flags under each title; flags in no group come first."""
    hidden: Collection[str] = ()
    """Flags that are read but not shown."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of flags that replace their own."""


def parse(model: type[Model], prog: str, argv: Sequence[str]) -> Model:
    """The value of the model with the flags in argv. Prints the help and exits on -h. Raises RecipeError."""
    check_arguments(argv)
    return model(**given(fields_of(model), prog, argv, {}, model.__doc__ or ""))


def fields_of(model: type) -> dict[str, FieldInfo]:
    """The flags of a pydantic dataclass."""
    fields: dict[str, FieldInfo] = model.__pydantic_fields__  # type: ignore[attr-defined]
    return fields


def check_arguments(argv: Sequence[str]) -> None:
    """Raises RecipeError for too many arguments, and for one that is too long or that a terminal cannot show."""
    if len(argv) > MOST_ARGUMENTS:
        raise RecipeError(f"the command line must have at most {MOST_ARGUMENTS} arguments, got {len(argv)}.")
    for argument in argv:
        if len(argument) > LONGEST_ARGUMENT or not argument.isprintable():
            raise RecipeError(
                f"an argument must be printable and have at most {LONGEST_ARGUMENT} characters, got {quoted(argument)}."
            )


def given(
    fields: Fields,
    prog: str,
    argv: Sequence[str],
    defaults: Mapping[str, Any],
    description: str = "",
    layout: Layout | None = None,
) -> dict[str, Any]:
    """The values of the flags in argv. The help shows `defaults` in place of the fields' own. Raises RecipeError."""
    parser = _parser(fields, prog, defaults, description, layout or Layout())
    try:
        known = {spelling for name, one in fields.items() for spelling in _spellings(name, one)}
        found, unknown = parser.parse_known_args([_dashed(argument, known) for argument in argv])
    except argparse.ArgumentError as error:
        raise _wrong(error, fields, prog) from None
    if unknown:
        raise _unknown(unknown[0], fields, prog)
    return {name: _value(name, fields[name], value) for name, value in vars(found).items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _parser(
    fields: Fields, prog: str, defaults: Mapping[str, Any], description: str, layout: Layout
) -> argparse.ArgumentParser:
    width = min(WIDEST, shutil.get_terminal_size().columns)
    paragraphs = (_filled(paragraph, width) for paragraph in inspect.cleandoc(description).split("\n\n"))
    positional = (_metavar(name, one) for name, one in fields.items() if _mark(name, one).is_positional)
    parser = _Parser(
        prog,
        usage=None if len(fields) <= FEW else " ".join([prog, "[-h] [OPTIONS]", *positional]),
        description="\n\n".join(paragraphs),
        formatter_class=functools.partial(argparse.RawTextHelpFormatter, max_help_position=INDENT, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    grouped = {name for names in layout.groups.values() for name in names}
    for title, names in {"": [name for name in fields if name not in grouped], **layout.groups}.items():
        group = parser.add_argument_group(f"{title} options") if title else parser
        for name in names:
            if name in fields:
                default = defaults.get(name, fields[name].default)
                text = _text(name, fields[name], default, layout.texts.get(name))
                shown = argparse.SUPPRESS if name in layout.hidden else _filled(text, width - INDENT)
                kind = _kind(name, fields[name], default is PydanticUndefined)
                group.add_argument(*_spellings(name, fields[name]), **kind, help=shown)
    return parser


def _kind(name: str, one: FieldInfo, is_required: bool) -> dict[str, Any]:
    """The arguments of argparse's `add_argument` for the flag."""
    mark = _mark(name, one)
    kind: dict[str, Any] = {} if mark.is_positional else {"dest": name, "required": is_required}
    if one.annotation is bool:
        return {**kind, "action": argparse.BooleanOptionalAction}
    kind["metavar"] = _metavar(name, one)
    if mark.is_repeated:
        return {**kind, "action": "append"}
    if get_origin(one.annotation) is tuple or _takes_mapping(one):
        return {**kind, "nargs": "*"}
    if name in BARE:
        return {**kind, "nargs": "?", "const": ""}
    return {**kind, "nargs": "?"} if mark.is_positional and not is_required else kind


def _text(name: str, one: FieldInfo, default: Any, text: str | None) -> str:
    """What the help says of a flag, with its default, if it has one."""
    text = (text or _mark(name, one).help).replace("%", "%%")
    if default is PydanticUndefined:
        return f"{text} (required)"
    if _mark(name, one).is_repeated:
        return f"{text} (repeatable)"
    if isinstance(default, Mapping):
        default = " ".join(f"{key}={json.dumps(value)}" for key, value in default.items())
    elif isinstance(default, tuple):
        default = " ".join(map(str, default))
    return text if default in {None, ""} else f"{text} (default: {default})".strip()


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _mark(name: str, one: FieldInfo) -> Flag:
    """The field's Flag, or one made from its description."""
    described = Flag(one.description or "", aliases=ALIASES.get(name, ()))
    return next((mark for mark in one.metadata if isinstance(mark, Flag)), described)


def _spellings(name: str, one: FieldInfo) -> list[str]:
    mark = _mark(name, one)
    return [name] if mark.is_positional else [*mark.aliases, f"--{(mark.name or name).replace('_', '-')}"]


def _metavar(name: str, one: FieldInfo) -> str:
    """The word that the help shows for the flag's value."""
    metavar = _mark(name, one).metavar or (name.upper() if _mark(name, one).is_positional else _of_type(one.annotation))
    return metavar if len(metavar) <= LONGEST_METAVAR else "NAME"


def _of_type(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    origin = get_origin(annotation)
    if origin in {Annotated, tuple}:
        return _of_type(kinds[0])
    if origin is Literal:
        return f"{{{','.join(kinds)}}}"
    if origin is dict:
        return "KEY=VALUE"
    return "|".join(map(_of_type, kinds)) if kinds else annotation.__name__.upper()


def _dashed(argument: str, known: Collection[str]) -> str:
    """The argument with dashes in the name of a flag: --batch_size=4 becomes --batch-size=4."""
    flag, equals, value = argument.partition("=")
    dashed = flag.replace("_", "-")
    is_flag = dashed in known or dashed.replace("--no-", "--", 1) in known
    return f"{dashed}{equals}{value}" if is_flag else argument


def _wrong(error: argparse.ArgumentError, fields: Fields, prog: str) -> RecipeError:
    """The error for a missing argument, a flag without a value, or a switch with one."""
    if not error.argument_name:
        required = " ".join(name.upper() for name, one in fields.items() if one.is_required())
        return RecipeError(f"{required} must be given; see {prog} --help.")
    flag, _, negative = error.argument_name.partition("/")
    if negative.startswith("--no-"):
        return RecipeError(f"{flag} takes no value; {negative} switches it off.")
    return RecipeError(f"{error.argument_name} needs a value; --help lists the flags.")


def _unknown(argument: str, fields: Fields, prog: str) -> RecipeError:
    if not argument.startswith("-"):
        return RecipeError(f"{quoted(argument)} belongs to no flag; see {prog} --help.")
    flag = argument.partition("=")[0]
    near = closest(flag.lstrip("-"), list(fields))
    hint = f" Did you mean {_spellings(near, fields[near])[-1]}?" if near else ""
    return RecipeError(f"unknown flag {quoted(flag)}.{hint} See {prog} --help.")


def _value(name: str, one: FieldInfo, arguments: bool | str | list[str]) -> Any:
    """The value that the flag's arguments stand for. Raises RecipeError."""
    has_none = NoneType in get_args(one.annotation)
    if isinstance(arguments, bool):
        return arguments
    if has_none and arguments in ("None", ["None"]):
        return None
    flag = "/".join(_spellings(name, one))
    if arguments == []:
        raise RecipeError(f"{flag} needs a value; --help lists the flags.")
    try:
        kind: Any = Annotated[(one.annotation, *one.metadata)] if one.metadata else one.annotation
        reads: TypeAdapter[Any] = TypeAdapter(kind, config=NUMBERS)
        value = reads.validate_python(_read(flag, one, arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        or_none = " or None" if has_none and first["type"].endswith("_parsing") else ""
        raise RecipeError(
            f"{flag} must {rule(first)}{or_none}, got {quoted(first['input'])}; --help lists the flags."
        ) from None
    if isinstance(value, int) and abs(value) >= 2**64:  # a float could not hold it
        raise RecipeError(f"{flag} must be less than 2^64, got {quoted(value)}.")
    return value


def _takes_mapping(one: FieldInfo) -> bool:
    return any(get_origin(kind) is dict for kind in (one.annotation, *get_args(one.annotation)))


def _read(flag: str, one: FieldInfo, arguments: str | list[str]) -> Any:
    """The arguments as what they are written for: a mapping, or where it may be a word as well, that word."""
    if not _takes_mapping(one):
        return arguments
    is_word = get_origin(one.annotation) is not dict and len(arguments) == 1 and "=" not in arguments[0]
    return arguments[0] if is_word else _mapping(flag, list(arguments))


def _mapping(flag: str, arguments: list[str]) -> dict[str, Any]:
    """The mapping for the arguments KEY=VALUE ..., in which each value is YAML; `{}` is empty. Raises RecipeError."""
    values: dict[str, Any] = {}
    for argument in [] if arguments == ["{}"] else arguments:
        key, equals, text = argument.partition("=")
        if not (key and equals):
            raise RecipeError(f"{flag} must be KEY=VALUE ..., got {quoted(argument)}; {{}} leaves it empty.")
        if key in values:
            raise RecipeError(f"{flag} has {quoted(key)} twice; remove one of them.")
        values[key] = parsed(f"{flag} {printable(key)}", text)
        if isinstance(values[key], str) and text[0] not in QUOTES and TOGETHER.search(text):
            raise RecipeError(
                f"{flag} must be KEY=VALUE ..., separated by spaces, got {quoted(argument)}; a text that holds such a "
                f"comma needs quotes: '{printable(key)}=\"...\"'."
            )
    return values
