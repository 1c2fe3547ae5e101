"""Data-parallel training of PyTorch models over Horovod that is right, and proves it."""

import os
import sys

__version__ = "0.1.0"
taken_out = ""
"""The current folder, if `python -m` had put it first in sys.path and it was removed here; else ""."""

# `python -m hvdtrain...` in another user's folder must not import his jinja2.py. Modules that a recipe names are
# found there later. A checkout that is not installed stays in sys.path, but last. argv[0] is -m until Python has found
# the module.
_module = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] if sys.argv[:1] == ["-m"] else ""
try:
    _is_first = sys.path[0] == os.getcwd()  # noqa: PTH109 - pathlib may be in the current folder too
except OSError:  # it was removed
    _is_first = False
if _module == __name__ and _is_first:  # it is not with -P, nor while sitecustomize is imported
    taken_out = sys.path.pop(0)
    sys.path += [taken_out] * __file__.startswith(f"{taken_out}/hvdtrain/")
