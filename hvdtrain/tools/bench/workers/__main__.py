"""`python -m hvdtrain.tools.bench.workers MODULE ARGUMENTS`: a rank that a person's own launcher started.

It shows from its first moment on that the libraries are imported.
"""

import os
import runpy
import sys

from hvdtrain.launch.topology import discover
from hvdtrain.tools.bench import ranks

if __name__ == "__main__":
    _, module, *argv = sys.argv
    ranks.show_imports(discover(os.environ))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__")
