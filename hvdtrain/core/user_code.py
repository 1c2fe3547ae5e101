"""The user's code that a recipe names by import paths, as cells.nets:UNet: the rules for such keys, and the import of
the callables, also from the current folder.
"""

import contextlib
import functools
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import hvdtrain
from hvdtrain import files, terminal
from hvdtrain.core.wording import closest, nearest
from hvdtrain.errors import HvdtrainError, ProgramError, RecipeError
from hvdtrain.untrusted import one_line, printable, quoted

IMPORT_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)*:\w+(\.\w+)*"
PLAIN = ("linear", "resnet50", "resnet101")
MODELS = (*PLAIN, "gpt")
"""The networks that hvdtrain itself has, the same in both frameworks."""
NAMED = ("inception_v3", "vgg16")
"""Short names of networks in other libraries, whose import paths each framework has in `networks.py`."""
LIBRARIES: dict[str, Literal["torch", "tensorflow"]] = {
    **dict.fromkeys(("torch", "torchvision", "timm", "torchmetrics"), "torch"),
    **dict.fromkeys(("keras", "tensorflow"), "tensorflow"),
}
"""Packages with networks and metrics, and the framework that can train them."""
FOUND_IN = {
    "torch": ("PyTorch", "torchvision, as torchvision:resnet101", "torchmetrics"),
    "tensorflow": ("TensorFlow", "keras.applications, as keras.applications:InceptionV3", "keras.metrics"),
}
"""Each framework's name, and where it has networks and metrics."""


def is_path(name: str) -> bool:
    """Whether a recipe's value is an import path, as cells.nets:UNet, and so names the user's code."""
    return re.fullmatch(IMPORT_PATH, name) is not None


def library_of(model: str) -> Literal["torch", "tensorflow"] | None:
    """The framework of a network in one of LIBRARIES; None for other import paths and for short names."""
    return LIBRARIES.get(model.partition(":")[0].partition(".")[0]) if is_path(model) else None


def check_framework(model: str, framework: str, metrics: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises RecipeError where the network or a metric is from a library of the other framework."""
    for key, path in {"model": model, **{f"metrics {name}": path for name, path in metrics.items()}}.items():
        if (library := library_of(path)) not in {None, framework}:
            own, theirs = FOUND_IN[framework], FOUND_IN[str(library)]
            raise RecipeError(
                f"{key} {path} is {theirs[0]}'s, this run is {own[0]}'s; take one of {own[1 if key == 'model' else 2]}."
            )


LONGEST_REASON = 500
MOST_NAMES, LONGEST_NAMES = 100, 300
"""How many arguments a message may list, in how many characters."""


def load(path: str, key: str) -> Callable[..., Any]:
    """The callable that a recipe's `key` names as MODULE:NAME. Raises RecipeError where there is none."""
    found = _found(path, key)
    if not callable(found):
        raise RecipeError(f"{key} {path} must be callable, got an object of type {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def metric(path: str, key: str, given: Mapping[str, Any]) -> Any:
    """The function, pair or object that a recipe's `key` names: a class is called with the arguments, a function gets
    them in each call. Raises RecipeError."""
    found, arguments = _found(path, key), expanded(given, f"{key} arguments")
    if inspect.isclass(found):
        check_arguments(found, path, key, **arguments)
        with explained(path, key, (Exception,)):
            return found(**arguments)
    if arguments and not callable(found):
        raise RecipeError(f"metrics_args go with a class or a function, {key} {path} is a {type(found).__name__}.")
    return functools.partial(found, **arguments) if arguments else found


def pair_of(metric: Any) -> tuple[Any, Any] | None:
    """The functions (update, compute) of a metric that is such a pair or has both as methods; None for another one."""
    own = getattr(metric, "update", None), getattr(metric, "compute", None)
    pair = tuple(metric) if isinstance(metric, tuple | list) else own
    return pair if len(pair) == 2 and all(map(callable, pair)) else None


def no_metric(name: str, got: str, library: str, examples: Any = "") -> RecipeError:
    """The error for a metric that gives neither a value an example nor a sum and count."""
    return RecipeError(
        f"metric {name} must give a value for each of the {examples}examples of a batch, or (sum, count), got {got}; "
        f"where it is no mean over examples, give a pair (update, compute) or a metric of {library}."
    )


def _found(path: str, key: str) -> Any:
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
    return found


def check_arguments(function: Callable[..., Any], path: str, key: str, /, *given: Any, **arguments: Any) -> None:
    """Raises RecipeError where the callable would not take these arguments, before it is called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(*given, **arguments)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename} line {code.co_firstlineno})" if code else ""
        hint, named = names_hint(error, function), signature.parameters.values()
        names = ", ".join(one.name if one.default is one.empty else f"{one.name}=..." for one in named)
        shown = "" if hint else one_line(f"({names})", 200)
        raise RecipeError(f"{key} {path}{shown}{where}: {error}.{hint}") from None


def names_hint(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """' It takes X, Y.' where the error says that an argument's name is unknown, else "".

    It lists the names that `function` takes and those of the callable to which it passed the argument, the closest one
    first.
    """
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
    """The names of the arguments that the callable takes by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}]


def _callee(error: BaseException, name: str) -> Callable[..., Any] | None:
    """The class or function with that qualified name whose call raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [*frames[-1].f_locals.values(), *frames[-1].f_globals.values()] if frames else []
    callables = (one for one in found if inspect.isclass(one) or inspect.isfunction(one))
    return next((one for one in callables if one.__qualname__ == name.removesuffix(".__init__")), None)


@contextlib.contextmanager
def explained(path: str, key: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turns errors of these `kinds` from a user's callable into RecipeErrors that name the file and the line."""
    try:
        yield
    except kinds as error:
        raise RecipeError(f"{key} {path}: {reason(error)}") from error


@contextlib.contextmanager
def failing(what: str, passes: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    """Turns an error of the user's code within the block into a ProgramError, but for those that `passes` lets
    through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HvdtrainError) or passes(error):
            raise
        raise ProgramError(f"{what}: {reason(error)}") from error


def reason(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """The error in one line, with the file and the line that raised it; `function` is the callable that was called."""
    if isinstance(error, SyntaxError):
        where, text = f"{error.filename} line {error.lineno}: ", error.msg
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
        frames = [frame for frame in frames if not _is_library(frame.filename)] or frames
        where, text = f"{frames[-1].filename} line {frames[-1].lineno}: " if frames else "", str(error)
    line = one_line(f"{where}{type(error).__name__}: {text}".rstrip(":. "), LONGEST_REASON)
    return f"{line}.{names_hint(error, function)}"


def expanded(arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments, in whose texts environment variables, as in $DATA/cells, and ~ are replaced by their values.
    Raises RecipeError where a variable is not set."""
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
        sys.path.insert(0, folder)  # where Python had it: an older copy of the user's package may be installed
    elif folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # at the end, where it hides no other module
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


def _is_machinery(filename: str) -> bool:
    """Whether the file is a part of Python's import system or of hvdtrain."""
    return filename.startswith("<frozen") or Path(filename).is_relative_to(Path(__file__).parents[1])


def _is_library(filename: str) -> bool:
    """Whether the file belongs to an installed package or to Python's library."""
    return any(Path(filename).is_relative_to(folder) for folder in map(sysconfig.get_path, ("purelib", "stdlib")))
