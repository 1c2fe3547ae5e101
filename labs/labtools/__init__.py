"""What the notebooks import: ranks in a notebook, figures at lecture size, checks of an exercise."""

from hvdtrain.errors import LabError
from labtools.ranks import Ranks, run_mpi
from labtools.worker import tell

__all__ = ["LabError", "Ranks", "run_mpi", "tell"]
