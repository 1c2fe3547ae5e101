"""Whose network link is slow, by what Linux counts of connections; figures recorded on a minicluster of four nodes."""

import os
import socket
import sys
import threading

import pytest
from ranks import wait_until

from hvdtrain.ranks import network
from hvdtrain.ranks.messages import FROM_RANK, MOST_ADDRESSES, Times, Traffic
from hvdtrain.ranks.network import Counters, Edge, SlowLink

# Of Linux 6.18, once 50 MB were sent over loopback: busy for 16 ms.
TCP_INFO = bytes.fromhex(
    "010000000007aa00e01c030000000000cbff000018020000000000000000000000000000000000000000000000000000000000002400000000"
    "000000ffff0000d7ff00001d0000000b000000180000000e000000cbff00000400000000000000d7ff0000020000003927032503000000ffff"
    "ffffffffffff81f0fa020000000000000000000000000b0300008c0100000000000005000000000000000903000075e1838a02000000803e00"
    "00000000000000000000000000000000000000000000"
)
MB = 1e6


def test_a_tcp_info_is_read():
    assert network.parsed(TCP_INFO) == Counters(50_000_001, 0.016)


def test_time_without_room_and_a_kernel_that_does_not_count_are_left_out():
    assert network.parsed(TCP_INFO[:176] + (12_000).to_bytes(8, sys.byteorder) + TCP_INFO[184:]).busy == 0.004
    assert network.parsed(TCP_INFO[:104]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
def test_the_connections_of_this_process_are_counted_and_stay_as_they_are(here):
    def sent(before, now):
        return [each for each in now if now[each].acked - before[each].acked >= 2**22]

    def receive():
        while other.recv(2**20):
            pass

    socket.setdefaulttimeout(7.0)
    try:
        with socket.create_server((here, 0), family=socket.AF_INET6 if ":" in here else socket.AF_INET) as server:
            own = socket.create_connection(server.getsockname()[:2])
            other, _ = server.accept()
            with own, other:
                for each in (own, other):
                    each.setblocking(True)
                receiver = threading.Thread(target=receive)
                receiver.start()
                before = network.connections()
                own.sendall(bytes(2**22))
                own.shutdown(socket.SHUT_WR)
                receiver.join()
                wait_until(lambda: sent(before, network.connections()))
                now = network.connections()
                assert os.get_blocking(own.fileno())
    finally:
        socket.setdefaulttimeout(None)
    assert [[network.address(end) for end in each] for each in sent(before, now)] == [[here, here]]
    assert before.keys() == now.keys()
    assert network.traffic(before, now, 1) == ()  # no other host


def test_no_linux_is_no_error(monkeypatch):
    def missing(folder):
        raise FileNotFoundError(folder)

    monkeypatch.setattr("hvdtrain.ranks.network.os.listdir", missing)
    assert network.connections() == {}


def end(address, port=1):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    port = port.to_bytes(2, "big")
    return family.to_bytes(2, sys.byteorder) + (port + bytes(4) + packed if ":" in address else port + packed)


def carried(*connections, steps=10):
    """Of connections (own, other, bytes, seconds) that had 5 MB and a second before, and of one that is new."""
    keys = [(end(own, port), end(other)) for port, (own, other, *_) in enumerate(connections)]
    before = {key: Counters(5_000_000, 1.0) for key in keys}
    return [
        (each.own, each.other, each.size, round(each.busy, 6))
        for each in network.traffic(
            before,
            {
                key: Counters(5_000_000 + size, 1.0 + busy)
                for key, (_, _, size, busy) in zip(keys, connections, strict=True)
            },
            steps,
        )
    ]


CARRIED = {
    "the acknowledgement that may be late is left out": (
        [("10.0.0.1", "10.0.0.2", 10_000_000, 1.4)],
        [("10.0.0.1", "10.0.0.2", MB, 0.1)],
    ),
    "but for a quarter of all": ([("10.0.0.1", "10.0.0.2", 10_000_000, 0.4)], [("10.0.0.1", "10.0.0.2", MB, 0.01)]),
    "parallel connections, and IPv4 in IPv6": (
        [("10.0.0.1", "10.0.0.2", 10_000_000, 1.4), ("::ffff:10.0.0.1", "::ffff:10.0.0.2", 20_000_000, 2.4)],
        [("10.0.0.1", "10.0.0.2", 3 * MB, 0.2)],
    ),
    "messages without data": ([("10.0.0.1", "10.0.0.2", 500_000, 1.4)], []),
    "a connection whose ends another one had": (
        [("10.0.0.1", "10.0.0.2", -4_000_000, -1.0), ("10.0.0.1", "10.0.0.3", 10_000_000, -0.6)],
        [("10.0.0.1", "10.0.0.3", 1.5 * MB, 0.01), ("10.0.0.1", "10.0.0.2", 0.1 * MB, 0.0)],
    ),
    "this host": ([("10.0.0.1", "10.0.0.1", 10_000_000, 1), ("127.0.0.1", "127.0.1.1", 10_000_000, 1)], []),
    "IPv6": ([("fd00::1", "fd00::2", 10_000_000, 1.4)], [("fd00::1", "fd00::2", MB, 0.1)]),
}


@pytest.mark.parametrize(("connections", "expected"), CARRIED.values(), ids=CARRIED.keys())
def test_what_each_step_sends(connections, expected):
    assert carried(*connections) == expected


def test_a_report_has_room_for_the_most_traffic():
    many = [("10.0.0.1", f"10.0.1.{number}", 1_000_000 * number, 1.0) for number in range(1, 2 * MOST_ADDRESSES)]
    found = network.traffic({}, {(end(own), end(other)): Counters(size, busy) for own, other, size, busy in many}, 10)
    assert [each.other for each in found] == [each[1] for each in reversed(many)][:MOST_ADDRESSES]
    times = Times(reading=0.0, rest=0.1, waiting=None, traffic=found)
    assert FROM_RANK.validate_json(times.model_dump_json(), strict=True) == times
    with pytest.raises(ValueError, match="at most 8 items"):
        FROM_RANK.validate_json(
            times.model_dump_json().replace('"traffic":[', '"traffic":[' + found[0].model_dump_json() + ","),
            strict=True,
        )


def test_edges_are_between_hosts_of_ranks():
    """Ranks 0 and 1 on one host, rank 2 on another."""
    here, there, elsewhere = "10.0.0.1", "10.0.0.2", "192.0.2.1"
    reports = {
        0: (Traffic(own=here, other=there, size=1.0, busy=0.5), Traffic(own=here, other=elsewhere, size=9.0, busy=1.0)),
        1: (Traffic(own=here, other=there, size=2.0, busy=0.25),),
        2: (Traffic(own=there, other=here, size=4.0, busy=2.0),),
    }
    assert network.edges(reports, {0: 0, 1: 0, 2: 2}) == [Edge(0, 2, 3.0, 0.5), Edge(2, 0, 4.0, 2.0)]


def of(steps, **measured):
    """Edges `from_to` of megabytes and milliseconds in so many steps."""
    sums = []
    for name, (megabytes, busy) in measured.items():
        source, target = map(int, name[1:].split("_"))
        seconds = busy / 1e3 / steps
        sums.append(Edge(source, target, megabytes * MB / steps, max(seconds - network.DELAYED_ACK, seconds / 4)))
    return sums


# Links of 1 Gbit/s, that of host 3 of 100 Mbit/s where it is slow; some edges wait for a late acknowledgement.
OPEN_MPI = of(
    10,
    _1_2=(10.5, 104),
    _1_3=(5.3, 696),
    _2_1=(10.5, 392),
    _2_4=(5.3, 360),
    _3_1=(5.4, 452),
    _3_4=(10.5, 780),
    _4_2=(5.3, 40),
    _4_3=(10.5, 1176),
)
DDP = of(3.5, _1_4=(21.0, 276), _2_1=(21.0, 44), _3_2=(21.1, 1952), _4_3=(21.7, 1940))
FOUND = {
    "Open MPI": (OPEN_MPI, 0.04, [3]),
    "Gloo's ring": (DDP, 0.1, [3]),
    "Open MPI, no link is slow": (
        of(
            41,
            _1_2=(86.2, 820),
            _1_3=(43.2, 636),
            _2_1=(86.2, 856),
            _2_4=(44, 696),
            _3_1=(43.2, 640),
            _3_4=(86.2, 832),
            _4_2=(43.2, 636),
            _4_3=(86.2, 768),
        ),
        0.01,
        [],
    ),
    "Gloo's ring, no link is slow": (
        of(24, _1_4=(152.3, 1396), _2_1=(152.6, 1368), _3_2=(154.1, 1352), _4_3=(153.7, 1416)),
        0.016,
        [],
    ),
    "a slow link that does not matter": (DDP, 0.6, []),
    "a slow link one way": ([Edge(1, 2, MB, 0.01), Edge(2, 3, MB, 0.01), Edge(3, 1, MB, 0.1)], 0.02, []),
    "two of eight": (
        [Edge(host, (host + 1) % 8, MB, 0.1 if {host, (host + 1) % 8} & {2, 6} else 0.01) for host in range(8)],
        0.02,
        [2, 6],
    ),
    "beside a host of many edges": (
        [Edge(0, other, MB, 0.02) for other in range(1, 7)]
        + [Edge(other, 0, MB, 0.02) for other in range(1, 7)]
        + [Edge(1, 7, MB, 0.1), Edge(7, 2, MB, 0.1)],
        0.02,
        [7],
    ),
    "two hosts": ([Edge(0, 1, MB, 0.1), Edge(1, 0, MB, 0.1)], 0.02, []),
    "three hosts": ([Edge(0, 1, MB, 0.01), Edge(1, 2, MB, 0.1), Edge(2, 0, MB, 0.1)], 0.02, [2]),
    "a host that only receives": ([Edge(0, 1, MB, 0.1), Edge(0, 2, MB, 0.01), Edge(0, 3, MB, 0.01)], 0.02, []),
    "no traffic": ([], 0.02, []),
}


@pytest.mark.parametrize(("found", "least", "expected"), FOUND.values(), ids=FOUND.keys())
def test_whose_link_is_slow(found, least, expected):
    assert [each.host for each in network.slow_links(found, least)] == expected


def test_the_slowest_transfer_is_reported():
    found = [Edge(0, 1, MB, 0.01), Edge(1, 2, 2 * MB, 0.2), Edge(2, 0, MB, 0.1)]
    assert network.slow_links(found, 0.02) == [SlowLink(2, 0.2, 0.02, 2 * MB)]
