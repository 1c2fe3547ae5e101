"""What Horovod's Gloo is given, as horovodrun would give it."""

import pytest
from costs import growth
from ranks import needs_horovod

from hvdtrain.launch import gloo
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology

KEY = bytes(range(32))


def endpoints(*ranks_a_host):
    return [Endpoint(f"h{node}", node, local) for node, ranks in enumerate(ranks_a_host) for local in range(ranks)]


CROSS = {  # ranks a host: by rank, local rank of local size, cross rank of cross size
    "one": ((1,), ["0/1 0/1"]),
    "one host": ((2,), ["0/2 0/1", "1/2 0/1"]),
    "two hosts": ((2, 2), ["0/2 0/2", "1/2 0/2", "0/2 1/2", "1/2 1/2"]),
    "unequal": ((2, 1), ["0/2 0/2", "1/2 0/1", "0/1 1/2"]),
    "unequal, the smaller first": ((1, 2, 1), ["0/1 0/3", "0/2 1/3", "1/2 0/1", "0/1 2/3"]),
}


@pytest.mark.parametrize(("hosts", "expected"), CROSS.values(), ids=CROSS.keys())
def test_ranks_of_hosts(hosts, expected):
    there = endpoints(*hosts)
    for rank, own in enumerate(there):
        topology = Topology(rank, len(there), own.local_rank, hosts[own.node], own.node, own.host, "srun", "1")
        given = gloo.variables(topology, there, "10.0.0.1", 4321, "ib0", KEY)
        local = f"{given['HOROVOD_LOCAL_RANK']}/{given['HOROVOD_LOCAL_SIZE']}"
        assert f"{local} {given['HOROVOD_CROSS_RANK']}/{given['HOROVOD_CROSS_SIZE']}" == expected[rank]
        assert (given["HOROVOD_RANK"], given["HOROVOD_SIZE"]) == (str(rank), str(len(there)))


def test_variables():
    there = endpoints(1, 1)
    topology = Topology(1, 2, 0, 1, 1, "h1", "srun", "1")
    given = gloo.variables(topology, there, "10.0.0.1", 4321, "ib0", KEY)
    assert given == {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "h1-1",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
        "HOROVOD_RENDEZVOUS_KEY": KEY.hex(),
        "HOROVOD_GLOO_IFACE": "ib0",
    }
    assert "HOROVOD_GLOO_IFACE" not in gloo.variables(topology, there, "10.0.0.1", 4321, None, KEY)


@needs_horovod
def test_ten_times_as_many_ranks_are_ten_times_the_work():
    server = gloo.RendezvousServer(KEY)
    assert growth(lambda count: server.expect(endpoints(*[8] * count)), 20) < 11
    server._server.stop()


@needs_horovod
def test_the_rendezvous_answers_who_has_its_key_at_rank_0s_address():
    from horovod.runner.http.http_auth import request

    port = gloo.serve([Endpoint("h0", 0, 0, "127.0.0.2"), Endpoint("h1", 1, 0, "127.0.0.3")], KEY)
    assert request(KEY, "127.0.0.2", port, "PUT", "global", "0", b"an address")[0] == 200
    assert request(KEY, "127.0.0.2", port, "GET", "global", "0") == (200, b"an address")
    with pytest.raises(RuntimeError, match="refused the key of this run"):
        request(bytes(32), "127.0.0.2", port, "GET", "global", "0")
    with pytest.raises(RuntimeError, match="does not answer"):
        request(KEY, "127.0.0.1", port, "GET", "global", "0")
