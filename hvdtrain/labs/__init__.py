"""What the notebooks under labs/ import: ranks in a notebook, pictures at lecture size, checks of an exercise."""

from hvdtrain.errors import LabError
from hvdtrain.labs.ranks import Ranks, run_mpi
from hvdtrain.labs.worker import tell

__all__ = ["LabError", "Ranks", "run_mpi", "tell"]
