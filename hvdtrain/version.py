"""`--version`: what is installed, without loading it."""

from collections.abc import Sequence

from hvdtrain import __version__

LIBRARIES = {
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
    """hvdtrain's version, and those of the installed libraries."""
    return f"hvdtrain {__version__} ({', '.join(_installed()) or 'neither PyTorch nor TensorFlow'})"


def _installed() -> list[str]:
    from importlib import metadata

    found = []
    for name, title in LIBRARIES.items():
        try:
            found.append(f"{title} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found
