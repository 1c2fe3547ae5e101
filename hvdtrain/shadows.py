"""Files of the user's that are imported in place of a library, as a torch.py beside the program that is started."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = {  # and a part that each of them has
    "numpy": "linalg",
    "torch": "nn",
    "tensorflow": "python",
    "keras": "src",
    "lightning": "pytorch",
    "horovod": "common",
    "mpi4py": "run.py",
}


def refuse(*names: str) -> None:
    """Ends the process in one line, before one of these of PACKAGES is imported, where a file or a folder hides it."""
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
