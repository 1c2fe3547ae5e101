"""Data-parallel training of PyTorch models over Horovod that is right, and proves it."""

import sys

__version__ = "0.1.0"

# In another user's folder `python -m hvdtrain...` must not import his jinja2.py. What a recipe names is found there
# later, and a checkout that is not installed stays, behind what is. argv is so until Python has found the module.
_module = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] if sys.argv[:1] == ["-m"] else ""
if _module == __name__ and not getattr(sys.flags, "safe_path", False):
    _here = sys.path.pop(0)
    sys.path += [_here] * __file__.startswith(f"{_here}/hvdtrain/")
