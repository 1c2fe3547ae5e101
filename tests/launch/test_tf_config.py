"""The cluster that TensorFlow is given, from the ranks' endpoints."""

import json
import socket

import pytest
from choices import choice
from refusals import refusal

from hvdtrain.core import compatibility, recipe
from hvdtrain.errors import RecipeError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import Endpoint, own_endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.peers import Peer, endpoints_of

ENDPOINTS = [
    Endpoint("a", 0, 0, "10.0.0.1", 12000),
    Endpoint("a", 0, 1, "10.0.0.1", 12010),
    Endpoint("b", 1, 0, "10.0.0.2", 12000),
    Endpoint("b", 1, 1, "10.0.0.2", 12020),
]
WORKERS = ["10.0.0.1:12000", "10.0.0.1:12010", "10.0.0.2:12000", "10.0.0.2:12020"]


def test_every_rank_is_a_worker():
    given = rendezvous.of(rendezvous.workers(ENDPOINTS), "worker", 2)
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
    assert refusal(RecipeError, compatibility.check, requested, {}) == message
