"""How the ranks of several nodes come by one key: from a home that all see, through munge where they see none."""

import sys

import pytest
from paths import REPOSITORY, SUPPORT
from ranks import left_by

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SRUN = ("srun", "-N2", "-n4", "--mpi=pmix")
HOMES = {
    "one home for all nodes": "mkdir -p home && HOME=$PWD/home",
    "a home of each node's own": "mkdir -p /tmp/home && HOME=/tmp/home",
    "no home": "HOME=/none",
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_the_ranks_of_two_nodes_join(cluster, tmp_path_factory, home):
    folder = tmp_path_factory.mktemp("ranks", numbered=True)
    program = f"{home} XDG_CONFIG_HOME= exec {sys.executable} {SUPPORT / 'endpoint.py'} {folder}"
    ended = cluster.run(*SRUN, "bash", "-c", program).good()
    assert ended.err == ""
    ranks = left_by(4, folder)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]


def test_without_home_and_munge_a_run_is_refused(cluster):
    program = f"HOME=/none XDG_CONFIG_HOME= PATH=/none exec {sys.executable} -m hvdtrain.torch linear"
    ended = cluster.run(*SRUN, "bash", "-c", program)
    assert ended.code == 2
    assert all("no key of this user's (/none: no such home), and munge does not answer" in line for line in ended.lines)
    assert [line.partition(":")[0] for line in sorted(ended.lines)] == [
        "WorldError (rank 0 on nid001)",
        "WorldError (rank 2 on nid002)",
    ]


def test_munge_itself(cluster):
    tests = (sys.executable, "-m", "pytest", "-q", "-k", "munge_carries", "tests/launch/test_keys.py")
    ended = cluster.run("exec", "nid001", *tests, cwd=REPOSITORY).good()
    assert "2 passed" in ended.out
