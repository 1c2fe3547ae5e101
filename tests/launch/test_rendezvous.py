"""Where ranks find one another: host and ports from the launcher's variables alone.
The cluster that TensorFlow is given, from the ranks' endpoints."""

import json
import socket
import subprocess
import sys

import pytest
from choices import choice
from environments import HOROVODRUN, JOB, OPENMPI4, STEP, TORCHRUN, environment
from refusals import refusal

from hvdtrain.core import compatibility, recipe
from hvdtrain.errors import RecipeError, WorldError
from hvdtrain.launch import rendezvous, slurm
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous, own_endpoint
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.peers import Peer, endpoints_of
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


ENDPOINTS = [
    Endpoint("a", 0, 0, "10.0.0.1", 12000),
    Endpoint("a", 0, 1, "10.0.0.1", 12010),
    Endpoint("b", 1, 0, "10.0.0.2", 12000),
    Endpoint("b", 1, 1, "10.0.0.2", 12020),
]
WORKERS = ["10.0.0.1:12000", "10.0.0.1:12010", "10.0.0.2:12000", "10.0.0.2:12020"]


def test_every_rank_is_a_worker():
    given = rendezvous.tf_config(rendezvous.workers(ENDPOINTS), "worker", 2)
    assert json.loads(given) == {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 2}}


def test_one_rank_alone_is_no_cluster():
    assert rendezvous.workers(ENDPOINTS[:1]) == {}


def test_the_first_rank_of_a_host_has_a_server_and_the_first_of_all_leads():
    assert rendezvous.servers(ENDPOINTS) == [0, 2]
    cluster = {"chief": ["10.0.0.1:12002"], "worker": WORKERS, "ps": ["10.0.0.1:12001", "10.0.0.2:12001"]}
    assert rendezvous.with_servers(ENDPOINTS) == cluster


def test_hosts_of_one_name_are_distinguished_by_their_addresses():
    alike = [Endpoint("localhost", 0, 0, "10.0.0.1", 1), Endpoint("localhost", 0, 0, "10.0.0.2", 1)]
    assert rendezvous.servers(alike) == [0, 1]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "10.0.0.1,a,10.0.0.2,b"),
        ({"no_proxy": "localhost,.org"}, "localhost,.org,10.0.0.1,a,10.0.0.2,b"),
        pytest.param(
            {"no_proxy": "localhost", "no_grpc_proxy": "c"}, "c,10.0.0.1,a,10.0.0.2,b", id="gRPC's own goes first"
        ),
    ],
)
def test_grpc_asks_no_proxy_for_the_ranks(environ, expected):
    assert rendezvous.no_proxy(ENDPOINTS, environ) == {"no_grpc_proxy": expected}


def test_the_log_shows_who_is_where():
    assert rendezvous.placement(ENDPOINTS) == [
        "host        a: workers 0, 1; parameter server 0",
        "host        b: workers 2, 3; parameter server 1",
    ]


ENDS = {
    "one host": ([("127.0.0.1", "127.0.0.1")] * 2, ["127.0.0.1"] * 3),
    "a name that is loopback at home": (
        [("127.0.1.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.2")],
        ["10.0.0.1", "10.0.0.1", "10.0.0.2"],
    ),
    "ranks beside rank 0 that call it by its address": (
        [("10.0.0.2", "10.0.0.3"), ("10.0.0.1", "10.0.0.1")],
        ["10.0.0.2", "10.0.0.3", "10.0.0.2"],
    ),
}


@pytest.mark.parametrize(("ends", "addresses"), ENDS.values(), ids=ENDS)
def test_the_address_at_which_all_ranks_reach_a_rank(ends, addresses):
    ranks = [Peer(socket.socket(), 0.0, 0.0, rank, Endpoint("b", 1, 0, port=7), ends=ends[rank - 1]) for rank in (2, 1)]
    endpoints = endpoints_of(own_endpoint(Topology(0, 3, 0, 1, 0, "a", "srun", None)), ranks)
    for peer in ranks:
        peer.socket.close()
    assert [each.address for each in endpoints] == addresses
    assert [each.port for each in endpoints[1:]] == [7, 7]


def test_ranks_of_a_host_take_ports_of_their_own():
    first = [
        rendezvous.free_ports(Topology(rank, 3, rank, 3, 0, "a", "srun", None)) for rank in range(3) for _ in range(50)
    ]
    lanes = {
        rank: {(port - rendezvous.FIRST_PORT) % 9 for port in first[50 * rank : 50 * rank + 50]} for rank in range(3)
    }
    assert lanes == {0: {0}, 1: {3}, 2: {6}}
    assert all(10_000 <= port < 30_000 for port in first)


FAR = "XLA has no access to variables on another device (tensorflow.org/xla/known_issues); drop it."
REFUSED = {
    "xla over one copy of the variables": ("central", {"xla": True}, f"xla cannot be with engine central: {FAR}"),
    "xla over servers": ("parameter-server", {"xla": True}, f"xla cannot be with engine parameter-server: {FAR}"),
    "micro-batches": (
        "parameter-server",
        {"accumulation_steps": 2},
        "accumulation_steps must be 1 with engine parameter-server, whose workers update by themselves, got 2; take a "
        "smaller batch_size.",
    ),
    "a loss scale": (
        "parameter-server",
        {"precision": "float16"},
        "precision float16 cannot be with engine parameter-server: its workers would change the loss scale under one "
        "another; take bfloat16.",
    ),
}


@pytest.mark.parametrize(("engine", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_an_engine_cannot_do_is_refused(engine, keys, message):
    requested = choice(engine, recipe=recipe.load("linear", keys))
    assert refusal(RecipeError, compatibility.check_choice, requested, {}) == message
