"""The TensorFlow adapter: `python -m hvdtrain.tensorflow RECIPE [flags]`.

It offers the names of `hvdtrain.keras` too, for code that imports them from here.
"""

import importlib
from typing import Any

from hvdtrain import installed

installed.refuse("numpy", "tensorflow", "keras", "horovod", "mpi4py")


def __getattr__(name: str) -> Any:
    # Imported by name: hvdtrain.keras is the layer above this one.
    if not name.startswith("__") and hasattr(library := importlib.import_module("hvdtrain.keras"), name):
        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(importlib.import_module("hvdtrain.keras"))})
