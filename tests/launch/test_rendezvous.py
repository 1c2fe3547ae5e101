"""Where ranks find one another: host and ports from the launcher's variables alone."""

import socket
import subprocess
import sys

import pytest
from environments import HOROVODRUN, JOB, OPENMPI4, STEP, TORCHRUN, environment
from refusals import refusal

from hvdtrain.errors import WorldError
from hvdtrain.launch import rendezvous, slurm
from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.world import World

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
    assert slurm.first_host(nodes) == first


def found(text, **changed):
    environ = environment(text, **changed)
    return rendezvous.from_launcher(discover(environ), environ)


SRUN = f"{STEP} SLURM_STEP_NODELIST=nid[001-002]"
ONE = "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
RENDEZVOUS = {
    "srun": (SRUN, Rendezvous("nid001", range(10176, 10184), "22-0")),
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


ALONE = "ranks on several hosts find one another over IPv4, and {} has IPv6 addresses alone; give every host an IPv4"
NAMES = {
    "IPv6's loopback": ("::1", ALONE.format("'::1'")),
    "an IPv6 address": ("fd00::7", ALONE.format("'fd00::7'")),
    "a label of 64 characters": ("a" * 64, "MASTER_ADDR must have 1 to 63 characters between its dots, got 'aaa"),
    "an empty label": (
        "a..b",
        "MASTER_ADDR must have 1 to 63 characters between its dots, got 'a..b'; set rank 0's host.",
    ),
    "nothing": ("", "MASTER_ADDR must have 1 to 63 characters between its dots, got ''"),
    "bytes that are no text": ("\udcff.example", "MASTER_ADDR must have 1 to 63 characters between its dots, got"),
}


@pytest.mark.parametrize(("host", "begins"), NAMES.values(), ids=NAMES.keys())
def test_a_host_that_no_rank_can_connect_to_is_refused_at_once(host, begins):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host}
    topology = discover(environ)
    world = World(topology, rendezvous.from_launcher(topology, environ))
    error = refusal(WorldError, world.start)
    world.leave()
    assert error.startswith(begins)


def test_a_host_of_ipv4_is_not():
    for host in ("127.0.0.1", "localhost"):
        rendezvous.check_host(host)


V6 = """
set -e
ip link set lo up
ip link add v6 type veth peer name other
ip address add fd00::1/64 dev v6 nodad
ip link set v6 up
exec "$0" -c "from hvdtrain.launch.rendezvous import check_host; check_host('127.0.0.1')"
"""


def test_a_host_of_ipv6_alone_is_named():
    ran = subprocess.run(
        ["unshare", "--net", "sh", "-c", V6, sys.executable], capture_output=True, text=True, check=False
    )
    if "check_host" not in ran.stderr:
        pytest.skip(f"needs root, unshare and ip (apt install iproute2): {ran.stderr}")
    assert ALONE.format("this host") in ran.stderr


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
        "horovodrun gives its ranks no host for a rendezvous, and they are on several; start them with srun, "
        "torchrun or horovodrun --mpi."
    )
