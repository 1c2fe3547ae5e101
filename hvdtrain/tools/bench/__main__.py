"""`python -m hvdtrain.tools.bench MODULE ARGUMENTS`: a rank that the user's launcher started."""

import sys

from hvdtrain.tools.bench import ranks

if __name__ == "__main__":
    ranks.work(*sys.argv[1:])
