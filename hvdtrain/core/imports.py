"""Import paths, as cells.nets:UNet -> the callables that they name, in the current folder too."""

import contextlib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain import files, terminal
from hvdtrain.core.own_code import IMPORT_PATH
from hvdtrain.core.wording import closest, nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import one_line, printable, quoted

LONGEST_REASON = 500
MOST_NAMES, LONGEST_NAMES = 100, 300
"""Of the arguments that a message lists: how many are looked at, and how many characters are shown."""


def load(path: str, key: str) -> Callable[..., Any]:
    """The callable that a recipe's `key` names as MODULE:NAME. Raises RecipeError where there is none."""
    if not re.fullmatch(IMPORT_PATH, path):
        raise RecipeError(f"{key} must read like package.module:name, got {quoted(path)}.")
    module_name, _, name = path.partition(":")
    found: Any = _module(module_name, path, key)
    for part in name.split("."):
        inside = found
        try:
            found = getattr(inside, part)
        except AttributeError:
            where = getattr(inside, "__file__", None) or module_name
            near = nearest(part, [public for public in dir(inside) if not public.startswith("_")], synonyms=())
            raise RecipeError(f"{key} {path}: {where} has no {quoted(part)}.{near}") from None
    if not callable(found):
        raise RecipeError(f"{key} {path} must be callable, got an object of type {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def check_arguments(function: Callable[..., Any], path: str, key: str, /, *given: Any, **arguments: Any) -> None:
    """Refuses arguments that the callable does not take, before it is called. Raises RecipeError."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of those written in C have none
        return
    try:
        signature.bind(*given, **arguments)
    except TypeError as error:
        where = f" ({_where(function)})" if _where(function) else ""
        hint = taken(error, function)
        shown = "" if hint else signature_text(signature)
        raise RecipeError(f"{key} {path}{shown}{where}: {error}.{hint}") from None


def signature_text(signature: inspect.Signature) -> str:
    """The names of a callable's arguments, as in (x, channels=...)."""
    names = [f"{one.name}=..." if one.default is not one.empty else one.name for one in signature.parameters.values()]
    return one_line(f"({', '.join(names)})", 200)


def taken(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """' It takes X, Y.' where the error is an argument by a name that nobody takes: the names that `function` has, and
    those of what it passed the argument on to, the closest first. Else nothing."""
    wrong = re.search(r"(\S*?)(?:\(\))? ?got an unexpected keyword argument '(.*?)'", str(error))
    if not isinstance(error, TypeError) or not wrong:
        return ""
    names = [name for one in (function, _callee(error, wrong[1])) if one for name in _names(one)]
    first = closest(wrong[2], names)
    names = list(dict.fromkeys([first, *names] if first else names))
    listed = ", ".join(map(printable, names[:MOST_NAMES]))
    if len(listed) > LONGEST_NAMES or len(names) > MOST_NAMES:
        listed = f"{listed[:LONGEST_NAMES].rpartition(', ')[0]} and more"
    return f" It takes {listed}." if names else ""


def _names(function: Callable[..., Any]) -> list[str]:
    """What it takes by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}]


def _callee(error: BaseException, name: str) -> Callable[..., Any] | None:
    """The class or function of that qualified name that was called where the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [*frames[-1].f_locals.values(), *frames[-1].f_globals.values()] if frames else []
    callables = (one for one in found if inspect.isclass(one) or inspect.isfunction(one))
    return next((one for one in callables if one.__qualname__ == name.removesuffix(".__init__")), None)


@contextlib.contextmanager
def explained(path: str, key: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raises RecipeError, naming the file and line, for what a callable of the user's raises of these `kinds`."""
    try:
        yield
    except kinds as error:
        raise RecipeError(f"{key} {path}: {reason(error)}") from error


def reason(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """The error in one line, with the file and line that raised it; `function`: what was called."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        where = f"{error.filename} line {error.lineno}: "
    else:
        own = [frame for frame in frames if not _is_machinery(frame.filename)]
        own = [frame for frame in own if not _is_library(frame.filename)] or own
        where = f"{own[-1].filename} line {own[-1].lineno}: " if own else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = one_line(f"{where}{type(error).__name__}: {text}".rstrip(":. "), LONGEST_REASON)
    return f"{line}.{taken(error, function)}"


def expanded(arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments with the environment's variables, as in $DATA/cells, and a home, as in ~/cells. Raises RecipeError
    where a variable is not set."""
    return {name: _expanded(value, f"{key} {name}") for name, value in arguments.items()}


def _expanded(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return files.expanded(value, where)
    if isinstance(value, list):
        return [_expanded(each, where) for each in value]
    if isinstance(value, dict):
        return {name: _expanded(each, where) for name, each in value.items()}
    return value


def _module(name: str, path: str, key: str) -> Any:
    folder = str(Path.cwd())
    if folder == hvdtrain.taken_out and sys.path[0] != folder and files.is_own(Path(folder).stat()):
        sys.path.insert(0, folder)  # as Python had it: an older copy of the user's package may be installed
    elif folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # after all others, where it hides nothing
    try:
        with terminal.postponed():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RecipeError(
                f"{key} {path}: there is no module {error.name} in {folder} or among the installed packages; "
                "start in the folder that holds it, or install it."
            ) from None
        raise RecipeError(f"{key} {path}: {reason(error)}") from None
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{key} {path} cannot be imported: {reason(error)}") from None


def _where(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename} line {code.co_firstlineno}" if code else ""


def _is_machinery(filename: str) -> bool:
    """Whether the frame is of Python's own import, or of this package."""
    return filename.startswith("<frozen") or Path(filename).is_relative_to(Path(__file__).parents[1])


def _is_library(filename: str) -> bool:
    """Whether it is a package's that is installed, or of Python's own."""
    return any(Path(filename).is_relative_to(folder) for folder in map(sysconfig.get_path, ("purelib", "stdlib")))
