"""Command lines: a pydantic dataclass of flags -> its validated, frozen value.

tyro splits the arguments and prints the help. pydantic validates the values, so that a flag and a recipe's key obey the
same rules, with the same messages.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hvdtrain.core import recipe as recipes
from hvdtrain.core.wording import closest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted

MOST_ARGUMENTS = 1000
LONGEST_ARGUMENT = 4096  # a path's, on Linux
ALIASES = {"base_lr": ["--lr"], "engine": ["--strategy"]}
QUOTES = ("'", '"')
TOGETHER = re.compile(r",\s*([\w.-]+=|$)")
"""Of a text, what looks like the next KEY=VALUE of a list that was separated by commas."""
NUMBERS = ConfigDict(allow_inf_nan=False)


Model = TypeVar("Model")


def parse(model: type[Model], prog: str, argv: Sequence[str]) -> Model:
    """The model's value from argv. Prints the help and exits on -h. Raises RecipeError for what it does not know."""
    check_arguments(argv)
    return model(**given(fields_of(model), prog, argv, {}, model.__doc__ or ""))


def fields_of(model: type) -> dict[str, FieldInfo]:
    """The flags of a pydantic dataclass."""
    fields: dict[str, FieldInfo] = model.__pydantic_fields__  # type: ignore[attr-defined]
    return fields


def check_arguments(argv: Sequence[str]) -> None:
    """Refuses arguments that a terminal cannot show, and too many. Raises RecipeError."""
    if len(argv) > MOST_ARGUMENTS:
        raise RecipeError(f"the command line must have at most {MOST_ARGUMENTS} arguments, got {len(argv)}.")
    for argument in argv:
        if len(argument) > LONGEST_ARGUMENT or not argument.isprintable():
            raise RecipeError(
                f"an argument must be printable and have at most {LONGEST_ARGUMENT} characters, got {quoted(argument)}."
            )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a help shows its flags."""

    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Title -> names of flags; those in none stand first."""
    hidden: Collection[str] = ()
    """Flags that are read, and not shown."""
    metavars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What stands for a flag's value, where its type says too much."""


@dataclasses.dataclass(frozen=True)
class _Given:
    """The arguments given for a flag: one, or a list's."""

    arguments: str | list[str]


def given(
    fields: Mapping[str, FieldInfo],
    prog: str,
    argv: Sequence[str],
    defaults: Mapping[str, Any],
    description: str = "",
    layout: Layout | None = None,
) -> dict[str, Any]:
    """The values of the flags that argv gives; the help shows `defaults` in place of the fields' own."""
    _check_values(fields, argv)
    layout = layout or Layout()
    shown = {name: defaults.get(name, field.default) for name, field in fields.items()}
    wants_help = bool({"-h", "--help"} & set(argv))
    left_out = layout.hidden if wants_help else ()
    typed = {name: _typed(name, fields[name], shown[name], layout) for name in fields if name not in left_out}
    page = _Page()
    try:
        with contextlib.ExitStack() as captured:
            if wants_help:  # else what another thread prints meanwhile would be lost
                captured.enter_context(contextlib.redirect_stdout(page))
                captured.enter_context(contextlib.redirect_stderr(io.StringIO()))
            values, unknown = tyro.cli(  # type: ignore[var-annotated]
                _grouped(typed, layout.groups),
                prog=prog,
                description=DESCRIPTION,
                args=list(argv),
                return_unknown_args=True,
                console_outputs=wants_help,
            )
    except SystemExit as stop:
        if stop.code in {0, None}:
            _show(page.getvalue(), description)
            raise
        required = " ".join(name.upper() for name, field in fields.items() if field.is_required())
        raise RecipeError(f"{required} must be given; see {prog} --help.") from None
    if unknown:
        raise _unknown(unknown[0], list(fields), prog)
    changed = {name: value for name, value in _flat(values) if value is not shown[name]}
    return {
        key: _value(key, fields[key], value) if isinstance(value, _Given) else value for key, value in changed.items()
    }


ARG: Any = type(tyro.conf.arg())
DESCRIPTION = "[description]"
"""What stands for it in tyro's page: tyro would not break its lines."""


class _Page(io.StringIO):
    """What tyro prints, with the colours of the terminal that it is for."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = sys.stdout

    def isatty(self) -> bool:
        return self._terminal.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._terminal.encoding


def _show(page: str, description: str) -> None:
    """Prints tyro's page."""
    width = min(100, shutil.get_terminal_size().columns)
    fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    usage, _, rest = page.partition("\n")
    usage = re.sub(r"\[.*?\]", lambda flag: flag[0].replace(" ", "\xa0"), usage)
    paragraphs = "\n\n".join(map(fill, inspect.cleandoc(description).split("\n\n")))
    usage = fill(usage, subsequent_indent="       ").replace("\xa0", " ")
    print(usage, rest.replace(DESCRIPTION, paragraphs), sep="\n", end="", flush=True)


Typed = tuple[str, Any, Any]
"""A flag's name, type and default, as dataclasses.make_dataclass takes them."""


def _grouped(typed: Mapping[str, Typed], groups: Mapping[str, Sequence[str]]) -> type:
    """A dataclass of the flags, for tyro: each group one of its own, inside."""
    apart = {name for names in groups.values() for name in names}
    inside: list[Typed] = []
    for index, (title, names) in enumerate(groups.items()):
        group = dataclasses.make_dataclass("Group", [typed[name] for name in names if name in typed], kw_only=True)
        marks = tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help="")
        inside.append((f"group_{index}", Annotated[(group, *marks)], dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(
        "Flags", [*(one for name, one in typed.items() if name not in apart), *inside], kw_only=True
    )


def _flat(values: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each flag, those in groups too."""
    for name, value in vars(values).items():
        if name.startswith("group_"):
            yield from vars(value).items()
        else:
            yield name, value


def _typed(name: str, field: FieldInfo, default: Any, layout: Layout) -> Typed:
    """The flag for tyro, which parses the values of switches only."""
    marks = list(field.metadata)
    if field.description:
        marks.append(tyro.conf.arg(help=field.description, aliases=ALIASES.get(name)))
    if tyro.conf.UseAppendAction not in marks:
        marks = [_with_default_text(mark) for mark in marks]
    if field.annotation is not bool and tyro.conf.UseAppendAction not in marks:
        marks.append(ARGUMENTS if _is_mapping(field) else _unparsed(field.annotation, layout.metavars.get(name)))
    annotation = Annotated[(field.annotation, *marks)] if marks else field.annotation
    if default is PydanticUndefined:
        return name, annotation, dataclasses.field()
    return name, annotation, dataclasses.field(default_factory=lambda: default)


def _with_default_text(mark: Any) -> Any:
    return dataclasses.replace(mark, help_behavior_hint=_default_text) if isinstance(mark, ARG) else mark


def _default_text(label: str) -> str:
    """What the help says of a flag that is left out; nothing where its text says it."""
    return "" if label in {"", "None", "'{}'"} else f"(default: {label})"


def _unparsed(annotation: Any, metavar: str | None) -> PrimitiveConstructorSpec[Any]:
    """tyro's spec of the annotation, whose value is a _Given."""
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    assert isinstance(spec, PrimitiveConstructorSpec)
    own = re.sub(r"^\[(.+) \[\1 \.\.\.\]\]$", r"\1 ...", spec.metavar.removeprefix("{None}|").replace("{None,", "{"))
    return dataclasses.replace(
        spec,
        metavar=metavar or own,
        choices=None,
        instance_from_str=lambda given: _Given(given[0] if spec.nargs == 1 else given),
        is_instance=lambda value: True,
    )


ARGUMENTS: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs="*",
    metavar="KEY=VALUE ...",
    instance_from_str=_Given,
    is_instance=lambda value: True,
    str_from_instance=lambda value: [f"{key}={json.dumps(one)}" for key, one in value.items()] or ["{}"],
)
"""tyro's spec of a mapping."""


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _check_values(fields: Mapping[str, FieldInfo], argv: Sequence[str]) -> None:
    """Refuses a flag without its value, and a switch with one."""
    spelt = {spelling: name for name in fields for spelling in (f"--{name.replace('_', '-')}", *ALIASES.get(name, ()))}
    for argument, following in zip(argv, [*argv[1:], "--"], strict=False):
        flag, equals, _ = argument.replace("_", "-").partition("=")
        name = spelt.get(flag)
        if name is None:
            continue
        if fields[name].annotation is bool and equals:
            raise RecipeError(f"{flag} takes no value; {flag.replace('--', '--no-', 1)} switches it off.")
        if fields[name].annotation is not bool and not equals and following.startswith("--"):
            raise RecipeError(f"{_spelt(name)} needs a value; --help lists the flags.")


def _spelt(name: str) -> str:
    return "/".join([*ALIASES.get(name, ()), f"--{name.replace('_', '-')}"])


def _unknown(argument: str, names: list[str], prog: str) -> RecipeError:
    if not argument.startswith("-"):
        return RecipeError(f"{quoted(argument)} belongs to no flag; see {prog} --help.")
    flag = argument.partition("=")[0]
    near = closest(flag.lstrip("-"), names)
    hint = f" Did you mean --{near.replace('_', '-')}?" if near else ""
    return RecipeError(f"unknown flag {quoted(flag)}.{hint} See {prog} --help.")


def _value(name: str, field: FieldInfo, given: _Given) -> Any:
    """The validated value of a flag's arguments. Raises RecipeError."""
    has_none = type(None) in get_args(field.annotation)
    if has_none and given.arguments == "None":
        return None
    try:
        kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        reads: TypeAdapter[Any] = TypeAdapter(kind, config=NUMBERS)
        value = reads.validate_python(
            _mapping(_spelt(name), given.arguments) if _is_mapping(field) else given.arguments
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        or_none = " or None" if has_none and first["type"].endswith("_parsing") else ""
        rule = recipes.rule(first)
        raise RecipeError(
            f"{_spelt(name)} must {rule}{or_none}, got {quoted(first['input'])}; --help lists the flags."
        ) from None
    if isinstance(value, int) and abs(value) >= 2**64:  # no arithmetic on fractions takes it
        raise RecipeError(f"{_spelt(name)} must be less than 2^64, got {quoted(value)}.")
    return value


def _mapping(flag: str, arguments: str | list[str]) -> dict[str, Any]:
    """KEY=VALUE ..., each value as YAML; `{}` is an empty one. Raises RecipeError."""
    values: dict[str, Any] = {}
    for argument in [] if arguments == ["{}"] else arguments:
        key, equals, text = argument.partition("=")
        if not (key and equals):
            raise RecipeError(f"{flag} must be KEY=VALUE ..., got {quoted(argument)}; {{}} leaves it empty.")
        if key in values:
            raise RecipeError(f"{flag} has {quoted(key)} twice; remove one of them.")
        values[key] = recipes.parsed(f"{flag} {printable(key)}", text)
        if isinstance(values[key], str) and text[0] not in QUOTES and TOGETHER.search(text):
            raise RecipeError(
                f"{flag} must be KEY=VALUE ..., separated by spaces, got {quoted(argument)}; a text that holds such a "
                f"comma needs quotes: '{printable(key)}=\"...\"'."
            )
    return values
