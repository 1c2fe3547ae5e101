"""Some faults of tests/faults.py, which has what must come of each."""

import subprocess
import sys

import pytest
from paths import REPOSITORY
from ranks import NEEDS, needs_lightning, needs_our_horovod

pytestmark = [
    pytest.mark.launched,
    NEEDS["torch"],
    NEEDS["tensorflow"],
    needs_lightning,
    needs_our_horovod,
    pytest.mark.xdist_group("waits"),
]
SOME = (
    "exit 3 of rank 1",
    "exit 0 of all",
    "run folder removed",
    "exit 0 of rank 1, Keras",
    "exit 0 of rank 1, Lightning",
    "SIGHUP to the group",
    "launcher killed",
)


@pytest.mark.only_ci
@pytest.mark.parametrize("name", SOME)
def test_a_fault_ends_the_training_as_it_must(name, tmp_path):
    argv = [sys.executable, REPOSITORY / "tests/faults.py", "--keep", tmp_path, name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / name / "output").read_text()
