"""Versions of the installed libraries, found without loading them; their private members; and user files
that hide a library."""

import platform
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import LoopError

PACKAGES = {  # library: a module or folder that only the real one has
    "numpy": "linalg",
    "torch": "nn",
    "tensorflow": "python",
    "keras": "src",
    "lightning": "pytorch",
    "horovod": "common",
    "mpi4py": "run.py",
}
ABSENT = object()
"""In place of a member that an object has not."""


def refuse(*names: str) -> None:
    """Ends the process with one line where a file or folder would be imported in place of one of these PACKAGES."""
    for name in names:
        spec = PathFinder.find_spec(name)
        if (
            spec
            and spec.origin
            and not any(Path(top, PACKAGES[name]).exists() for top in spec.submodule_search_locations or ())
        ):
            path = Path(spec.origin)
            path = path.parent if path.stem == "__init__" else path
            print(f"ImportError: {path} is imported in place of the library {name}; rename it.", file=sys.stderr)
            sys.exit(2)


TITLES = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "tensorflow-cpu": "TensorFlow",
    "lightning": "Lightning",
    "horovod": "Horovod",
}


def answer(argv: Sequence[str]) -> None:
    """Prints the versions and exits where --version is the program's first argument."""
    if argv[1:2] == ["--version"]:
        print(line())
        raise SystemExit(0)


def line() -> str:
    """The version of hvdtrain and those of the installed frameworks, as --version prints them."""
    found = versions()
    frameworks = [f"{title} {found[name]}" for name, title in TITLES.items() if name in found]
    return f"hvdtrain {__version__} ({', '.join(frameworks) or 'neither PyTorch nor TensorFlow'})"


RECORDED = "hvdtrain", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "lightning", "keras", "horovod", "numpy"


def versions() -> dict[str, str]:
    """The versions of Python and of the RECORDED libraries that are installed, by name."""
    found = {name: version for name in RECORDED if (version := version_of(name))}
    return {"python": platform.python_version(), **found}


def version_of(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def member(library: str, tried: str, owner: Any, name: str) -> Any:
    """The owner's private member. Raises LoopError where the library's installed release has none of that name;
    `tried`: the one to take."""
    if (found := getattr(owner, name, ABSENT)) is ABSENT:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise LoopError(
            f"{library} {version_of(library)} has no {kind}.{name}; hvdtrain needs a release that it was tried with: "
            f"pip install {library}=={tried}."
        )
    return found


def replace(library: str, tried: str, owner: Any, name: str, value: Any) -> None:
    """Sets the owner's private member. Raises LoopError as `member` does."""
    member(library, tried, owner, name)
    setattr(owner, name, value)
