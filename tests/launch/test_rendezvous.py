"""Where ranks find one another: host and ports from the launcher's variables alone."""

import socket

import pytest
from environments import HOROVODRUN, JOB, OPENMPI4, STEP, TORCHRUN, environment
from refusals import refusal

from hvdtrain.errors import WorldError
from hvdtrain.launch import hostlist, rendezvous
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous
from hvdtrain.launch.topology import Topology, discover

NODES = {
    "one": ("nid001", "nid001"),
    "a range": ("nid[001-004]", "nid001"),
    "two": ("a,b", "a"),
    "a list in a list": ("jwb[0001,0005-0007],x", "jwb0001"),
    "a list later": ("login1,jwb[0001-0004]", "login1"),
    "two dimensions": ("r[0-3]n[0-7]", "r0n0"),
    "an end": ("r[12-13]i", "r12i"),
    "a dash": ("gpu-a[07-09]", "gpu-a07"),
}


@pytest.mark.parametrize(("nodes", "first"), NODES.values(), ids=NODES.keys())
def test_the_first_host(nodes, first):
    assert hostlist.first(nodes) == first


def found(text, **changed):
    environ = environment(text, **changed)
    return rendezvous.from_launcher(discover(environ), environ)


SRUN = f"{STEP} SLURM_STEP_NODELIST=nid[001-002]"
ONE = "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
RENDEZVOUS = {
    "srun": (SRUN, Rendezvous("nid001", range(10176, 10184), "22.0")),
    "torchrun": (TORCHRUN, Rendezvous("a", range(26168, 26176), "x--a-29500")),
    "srun without a list": (STEP, None),
    "horovodrun": (HOROVODRUN, None),
    "mpirun": (OPENMPI4, None),
    "a batch shell": (JOB, None),
    "one task": (f"{SRUN} {ONE}", None),
}


@pytest.mark.parametrize(("text", "expected"), RENDEZVOUS.values(), ids=RENDEZVOUS.keys())
def test_where_ranks_find_one_another(text, expected):
    assert found(text) == expected


def test_two_torchruns_on_a_host_have_two():
    names = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    one, other = (found(TORCHRUN, MASTER_PORT=port, **names) for port in ("29500", "29501"))
    assert one.token != other.token
    assert one.ports != other.ports
    again = found(TORCHRUN, **{**names, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.token != one.token


def test_neighbours_have_other_ports():
    steps = [found(SRUN, SLURM_JOB_ID=str(job), SLURM_STEP_ID="0") for job in range(4_000_000, 4_002_500)]
    taken = [port for step in steps for port in step.ports]
    assert len(set(taken)) == len(taken) == 20_000
    assert min(taken) >= 10_000
    assert max(taken) < 30_000  # 32768 and above may be anybody's
    assert found(SRUN, SLURM_STEP_ID="1").ports[0] == found(SRUN).ports[-1] + 1


@pytest.mark.parametrize("step", ["4294967291", "4294967292", "interactive"])
def test_a_step_with_a_strange_number(step):
    ports = found(SRUN, SLURM_STEP_ID=step).ports
    assert 10_000 <= ports[0] < ports[-1] < 30_000


def test_this_hosts_addresses():
    own = rendezvous.addresses()
    assert "127.0.0.1" in own
    assert [address.startswith("127.") for address in own] == sorted(address.startswith("127.") for address in own)
    for address in own:
        with socket.create_server((address, 0)):
            pass
    assert rendezvous.interface_of("127.0.0.1") == "lo"
    assert rendezvous.interface_of("192.0.2.1") is None


def test_hosts_of_one_name_are_distinguished():
    assert Endpoint("localhost", 0, 1).label != Endpoint("localhost", 1, 1).label


def test_ranks_on_one_host_have_one_where_no_launcher_names_a_host():
    environ = {"PMIX_NAMESPACE": "prterun-nid1-77@1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ranks = [
        environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} for rank in range(2)
    ]
    first, second = (rendezvous.from_host_or_mpi(discover(rank), rank) for rank in ranks)
    assert first == second
    assert (first.host, first.token, len(first.ports)) == ("127.0.0.1", "prterun-nid1-77@1", 8)
    other = ranks[0] | {"PMIX_NAMESPACE": "prterun-nid1-78@1"}
    assert not set(rendezvous.from_host_or_mpi(discover(other), other).ports) & set(first.ports)


def test_horovodrun_on_several_hosts_has_none():
    topology = Topology(0, 4, 0, 2, 0, "nid1", "horovodrun", None)
    assert refusal(WorldError, rendezvous.from_host_or_mpi, topology, {}) == (
        "horovodrun --gloo gives its ranks no host for a rendezvous, and they are on several; start them with srun, "
        "torchrun or horovodrun --mpi."
    )
