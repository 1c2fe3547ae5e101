"""What a lab needs beyond PyTorch, and the command that brings it."""

import shlex
from importlib.util import find_spec

from hvdtrain.errors import LabError
from hvdtrain.launch.mpi import horovod_library
from labtools.processes import LABS


def tensorflow(horovod: bool = False) -> None:
    """Raises LabError, with the command that installs it, where TensorFlow is missing, or a Horovod built for it."""
    if find_spec("tensorflow") is None:
        missing = "TensorFlow"
    elif horovod and horovod_library("tensorflow") is None:
        missing = "a Horovod that was built for TensorFlow"
    else:
        return
    raise LabError(
        f"This needs {missing}, which is not installed here. In a terminal, and then restart the kernel:\n"
        f"    cd {shlex.quote(str(LABS.parent))} && make tensorflow"
    )
