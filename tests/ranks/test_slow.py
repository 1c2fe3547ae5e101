"""Which ranks are slow, and why, from the times of their steps."""

import random
import statistics

import pytest

from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import timeouts
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.messages import Times, Traffic
from hvdtrain.ranks.network import DELAYED_ACK, Counters
from hvdtrain.ranks.peers import Peer, Peers
from hvdtrain.ranks.slow import OF, SAMPLED, STEPS, Clocks, Others, SlowWatch, slow_networks, slow_ranks
from hvdtrain.record.journal import Journal
from hvdtrain.run.process import RunListener


def liveness(peers):
    """Of those ranks, which report to a run."""
    return Liveness(peers, RunListener(peers.topology, Journal()))


def times(*ranks):
    """Of each rank: milliseconds of reading (None: not known), of computing, of waiting (None: not known)."""
    return {
        rank: Times(
            reading=reading and reading / 1e3,
            rest=(computing + (waiting or 0)) / 1e3,
            waiting=waiting and waiting / 1e3,
        )
        for rank, (reading, computing, waiting) in enumerate(ranks)
    }


FOUND = {
    "alike": ([(1, 40, 5), (1, 41, 4), (2, 40, 4)], []),
    "half the processor": ([(0, 40, 41), (0, 80, 1.0)], [(1, "computing")]),
    "half the processor, of four": ([(0, 80, 1.0)] + [(0, 40, 41)] * 3, [(0, "computing")]),
    "a slow disk": ([(0, 40, 81), (80, 40, 1.0)], [(1, "reading")]),
    "a slow disk, and nobody knows how long ranks wait": ([(0, 121, None), (80, 41, None)], [(1, "reading")]),
    "slow in both": ([(0, 40, 80), (0, 40, 80), (40, 80, 1.0)], [(2, "reading"), (2, "computing")]),
    "all read slowly": ([(80, 40, 2), (82, 40, 1.0)], []),
    "a slow network": ([(0, 40, 400), (0, 41, 399)], []),
    "a network that only one rank waits for": ([(0, 40, 400), (0, 40, 2), (0, 40, 2)], []),
    "a little slower": ([(0, 40, 12), (0, 51, 1.0)], []),
    "twice as slow in what takes no time": ([(0.1, 40, 5), (0.4, 40, 5)], []),
    "steps of a tenth of a millisecond": ([(0, 0.1, 0.2), (0, 0.3, 0.01)], []),
    "slow beside the others' waiting, which is short": ([(0, 40, 2), (0, 80, 2)], []),
    "nobody knows which": ([(None, 40, 41), (None, 80, 1.0)], [(1, "computing or reading")]),
    "alike, and nobody knows which": ([(None, 80, 2), (None, 81, 1.0)], []),
    "computing is not known": ([(0, 121, None), (0, 120, None)], []),
}


@pytest.mark.parametrize(("ranks", "expected"), FOUND.values(), ids=FOUND.keys())
def test_who_is_slow(ranks, expected):
    assert [(each.rank, each.cause) for each in slow_ranks(times(*ranks))] == expected


def ring(*, slow, waiting, busy=(0.05, 0.5)):
    """The times of a ring of three hosts, one rank each; what the hosts send takes the first, to and from `slow` the
    second number of seconds."""
    return {
        rank: Times(
            reading=0.0,
            rest=0.6,
            waiting=waiting,
            traffic=(
                Traffic(
                    own=f"10.0.0.{rank}",
                    other=f"10.0.0.{(rank + 1) % 3}",
                    size=5e6,
                    busy=busy[slow in {rank, (rank + 1) % 3}],
                ),
            ),
        )
        for rank in range(3)
    }


NETWORKS = {
    "a slow link": (ring(slow=2, waiting=0.5), [2]),
    "where nobody knows how long ranks wait": (ring(slow=2, waiting=None), [2]),
    "that nobody waits for": (ring(slow=2, waiting=0.1), []),
    "that takes a small part of a step": (ring(slow=2, waiting=0.5, busy=(0.01, 0.1)), []),
    "no slow link": (ring(slow=None, waiting=0.5), []),
}


@pytest.mark.parametrize(("reports", "expected"), NETWORKS.values(), ids=NETWORKS.keys())
def test_whose_network_is_slow(reports, expected):
    assert [each.rank for each in slow_networks(reports, {0: 0, 1: 1, 2: 2})] == expected


def test_a_rank_that_has_left_has_no_host():
    assert slow_networks(ring(slow=2, waiting=0.5), {0: 0, 1: 1}) == []


class Watch:
    """A watch on rank 0 of two, and what it printed."""

    def __init__(self, capsys):
        self.watch = SlowWatch(liveness(Peers(Topology(0, 2, 0, 2, 0, "nid1", "srun", None))))
        self.capsys = capsys

    def compare(self, *ranks):
        for rank, each in times(*ranks).items():
            self.watch.reported(rank, each)
        return self.capsys.readouterr().err


def test_it_is_named_once_when_it_stays_slow(capsys):
    watch, slow, well = Watch(capsys), [(0, 80, 1.0), (0, 40, 41)], [(0, 40, 2), (0, 40, 2)]
    for ranks in (slow, slow, slow, well, well, slow, slow, slow):  # never four of five
        assert watch.compare(*ranks) == ""
    assert watch.compare(*slow) == (
        "warning (rank 0 on nid1): rank 0 on nid1 is slow in computing: 80 ms of each step, where the others take 40 "
        "ms and wait for it.\n"
    )
    for _ in range(2 * OF):
        assert watch.compare(*slow) == ""


@pytest.mark.parametrize(
    ("waiting", "known"), [(0.5, "all wait for it"), (None, "it is not known whether ranks wait for it")]
)
def test_a_slow_network_is_named_with_its_rank_and_host(waiting, known, capsys):
    peers = Peers(Topology(0, 3, 0, 1, 0, "nid1", "srun", None))
    peers.connections = [Peer(None, 0, 0, rank, Endpoint(f"nid{rank + 1}", rank, 0)) for rank in (1, 2)]
    watch = SlowWatch(liveness(peers))
    for _ in range(OF):
        for rank, each in ring(slow=2, waiting=waiting).items():
            watch.reported(rank, each)
    assert capsys.readouterr().err == (
        "warning (rank 0 on nid1): rank 2 on nid3 is slow in network: 500 ms of each step for 5.0 MB, which take 50 ms "
        f"between other hosts, and {known}.\n"
    )


def test_a_host_is_its_first_rank():
    peers = Peers(Topology(0, 4, 0, 2, 0, "nid1", "srun", None))
    endpoints = [Endpoint("nid1", 0, 1), Endpoint("nid2", 1, 0), Endpoint("nid2", 1, 1)]
    peers.connections = [Peer(None, 0, 0, rank, endpoint) for rank, endpoint in enumerate(endpoints, 1)]
    assert SlowWatch(liveness(peers)).hosts() == {0: 0, 1: 0, 2: 2, 3: 2}


def test_noise_is_no_alarm(capsys):
    """Each rank now and then loses its processor, as on a machine that others load."""
    watch, draw = Watch(capsys), random.Random(0)
    for _ in range(2000):
        own, other = (
            statistics.median(40 * (2 if draw.random() < 0.25 else draw.uniform(1, 1.3)) for _ in range(STEPS))
            for _ in range(2)
        )
        longest = max(own, other) + 1
        assert watch.compare((0, own, longest - own), (0, other, longest - other)) == ""


class Clocked:
    """The clocks of rank 1 of two, in steps whose times are given, and what it has sent."""

    def __init__(self, monkeypatch, *, waited=0.0):
        self.now, self.waited, self.read_count, self.sent = 1000.0, waited, 0, []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("hvdtrain.ranks.slow.FIGURES", {})
        self.watch = SlowWatch(liveness(Peers(Topology(1, 2, 1, 2, 0, "nid1", "srun", None))))
        self.watch.peers.send = self.sent.append
        self.clocks = Clocks(self, self.watch)

    @property
    def waited(self):
        self.read_count += 1
        return self._waited

    @waited.setter
    def waited(self, seconds):
        self._waited = seconds

    def batches(self, reading):
        while True:
            self.now += reading
            yield None

    def step(self, batches=None, computing=0.0, waiting=None, between=0.0):
        self.clocks.begin_step()
        if batches:
            next(batches)
        self.now += computing + (waiting or 0.0)
        if waiting is not None:
            self._waited += waiting
        self.clocks.end_step()
        self.now += between
        if waiting is not None:
            self._waited += between  # a sum of the totals, say


def test_steps_are_measured_apart_from_what_comes_between(monkeypatch):
    rank = Clocked(monkeypatch)
    batches = rank.clocks.read(rank.batches(0.125))
    ends = [bytes([2, 0, 0, 1, 10, 0, 0, host]) for host in (1, 2)]
    counters = (Counters(10**6 * STEPS * report, 0.25 * STEPS * report) for report in range(4))
    monkeypatch.setattr("hvdtrain.ranks.slow.network.connections", lambda: {tuple(ends): next(counters)})
    traffic = (Traffic(own="10.0.0.1", other="10.0.0.2", size=1e6, busy=0.25 - DELAYED_ACK),)
    for step in range(3 * STEPS):
        rank.step(batches, computing=100 if step == 5 else 0.0625, waiting=0.0625, between=timeouts.TIMES)
    assert rank.sent == [Times(reading=0.125, rest=0.125, waiting=0.0625, traffic=traffic)] * 3
    rank.clocks.end_step()  # of another loop, which did not begin it
    for _ in range(STEPS - 1):
        rank.step(batches, computing=0.0625, waiting=0.0625, between=timeouts.TIMES)
    assert len(rank.sent) == 3


def test_what_no_clock_measures_is_not_reported(monkeypatch):
    rank = Clocked(monkeypatch, waited=None)
    for _ in range(STEPS):
        rank.step(computing=0.25, between=timeouts.TIMES)
    assert rank.sent == [Times(reading=None, rest=0.25, waiting=None)]


@pytest.mark.parametrize("steps", [1, 5])
def test_every_step_of_a_short_epoch_counts_once(monkeypatch, steps):
    """A step begins with its epoch, and before that with the end of the last one."""
    rank, epochs = Clocked(monkeypatch), 2 * STEPS // steps
    for _ in range(epochs):
        rank.clocks.begin_step()
        for _ in range(steps):
            rank.step(computing=0.05, waiting=0.0)
        rank.clocks.begin_step()
        rank.now += 0.001
    assert rank.watch.made + STEPS * len(rank.sent) == 2 * STEPS
    assert len(rank.watch._steps) + STEPS * len(rank.sent) == 2 * STEPS


@pytest.mark.parametrize("count", range(2, 8))
def test_the_median_of_the_others(count):
    numbers = [random.choice([0.5, 1.0, 1.0, 2.0, 3.0]) for _ in range(count)]
    for index, own in enumerate(numbers):
        rest = numbers[:index] + numbers[index + 1 :]
        assert Others(numbers).median(own) == statistics.median(rest)


def test_of_short_steps_a_few_are_measured(monkeypatch):
    """Reading a clock inside a graph takes time."""
    rank = Clocked(monkeypatch)
    batches = rank.clocks.read(rank.batches(0.0005))
    for _ in range(4000):  # four seconds
        rank.step(batches, computing=0.00025, waiting=0.00025)
    assert rank.read_count <= 2 * 4 / SAMPLED + 2
    assert len(rank.sent) == 4
    assert rank.sent[0].waiting == pytest.approx(0.00025)
