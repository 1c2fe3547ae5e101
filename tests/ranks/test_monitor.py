"""The thread beside training: among hundreds of ranks, without files to open, and with faults of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import many_ranks
import pytest
from many_ranks import Fakes, world_of
from marks import marked, rows

from hvdtrain.ranks import messages, network, slow, timeouts
from hvdtrain.ranks.stacks import Process
from hvdtrain.ranks.world import World
from hvdtrain.run.process import RankProcess

pytestmark = pytest.mark.xdist_group("monitor")  # all take the same ports
MANY, PATIENCE = 500, 120.0
PROGRAM = Path(many_ranks.__file__)


def until(condition):
    """Waits for that, under a limit of minutes."""
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it does not come")


def in_thread(function, *arguments):
    """What it returns: signals are the main thread's, and one world's."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)))
    thread.start()
    thread.join(PATIENCE)
    return found[0]


@pytest.fixture
def worlds():
    """`worlds(rank, size)`: that rank's world, which leaves at the end."""
    there: list[World] = []

    def begin(rank, size):
        there.append(in_thread(world_of, rank, size))
        return there[-1]

    yield begin
    for world in reversed(there):
        world.leave("the test's end")


@pytest.fixture
def begun(worlds):
    """Rank 0 of hundreds, and the others, once all are ready."""
    rank_0 = worlds(0, MANY)
    fakes = Fakes(MANY, rank_0)
    waits = threading.Thread(target=rank_0.wait_until_ready, args=(lambda endpoints: None,))
    waits.start()
    fakes.start(rank_0.readiness.handshake.key)
    waits.join(PATIENCE)
    yield rank_0, fakes
    fakes.peers.close()


def test_of_hundreds_of_ranks_each_learns_what_it_needs_and_the_lost_one_is_named(begun):
    rank_0, fakes = begun
    assert len(rank_0.readiness.endpoints) == MANY
    assert (fakes.messages["all_ready"], fakes.messages["busy"]) == (MANY - 1, MANY - 1)
    assert sum(fakes.bytes.values()) < 500 * MANY  # it was a hundred bytes for each two of them
    compared = []
    rank_0.listener.times = lambda times, hosts: compared.append(times)
    rank_0.slow.reported(0, many_ranks.TIMES)
    for peer in fakes.peers.connections:
        peer.send(many_ranks.TIMES)
    until(lambda: compared)
    assert len(compared[0]) == MANY
    gone = fakes.peers.connections[300]
    gone.socket.close()
    until(lambda: rank_0.liveness.reason)
    rank = fakes.handshakes[gone].topology.rank
    assert rank_0.liveness.reason.startswith(f"rank {rank} on nid{rank // 8} ended without a message")


def test_rank_0_reads_no_more_a_second_of_ten_thousand_ranks_than_of_hundreds():
    def a_second(seconds, size, *most):
        return size / timeouts.of_each(seconds, size, *most)

    for size in (2, 100, 400):
        assert timeouts.of_each(timeouts.TIMES, size) == timeouts.TIMES
    for size in (1_000, 10_000, 100_000):
        assert a_second(timeouts.TIMES, size) <= a_second(timeouts.TIMES, 400) + 1
    # A rank that lives is never silent for long.
    assert timeouts.of_each(timeouts.HEARTBEAT, 10**6, timeouts.SILENCE / 2.2) * 2 < timeouts.SILENCE


LIMITS = {"raised": (256, 4096, None), "too low for good": (256, 256, "run ulimit -n 1456 before the launcher")}


@pytest.mark.parametrize(("soft", "hard", "remedy"), marked(rows(LIMITS), slow={"too low for good"}))
def test_more_ranks_than_open_files(soft, hard, remedy):
    limit = ("sh", "-c", f'ulimit -n {hard}; ulimit -Sn {soft}; exec "$@"', "sh")
    rank_0 = subprocess.Popen(
        [*limit, sys.executable, PROGRAM, "limited", "300"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    key, port = rank_0.stdout.readline().split()
    fakes = Fakes(300)
    fakes.port = int(port)
    try:
        fakes.start(bytes.fromhex(key))
    except OSError:
        assert remedy
    fakes.peers.close()
    lines = rank_0.communicate(timeout=PATIENCE)[1].splitlines()
    if remedy:
        (line,) = lines
        assert remedy in line
        assert "did not come" not in line
    assert bool(rank_0.returncode) == bool(remedy)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_no_rank_passes_the_last_step_where_collectives_complete_steps_later(worlds, ahead):
    both, made, last = [worlds(rank, 2) for rank in (0, 1)], [0, 0], [0, 0]
    until(lambda: all(world.peers.came for world in both))
    assert not any(world.stops_after_step() for world in both for _ in range(2))  # of a run before

    def train(rank):
        while not last[rank]:
            until(lambda: made[rank] <= made[1 - rank] + ahead)
            made[rank] += 1
            last[rank] = both[rank].stops_after_step() and made[rank]

    trains = [threading.Thread(target=train, args=[rank]) for rank in (1, 0)]
    trains[0].start()
    until(lambda: made[1] == 1 + ahead)
    both[0].stop.signalled(signal.SIGUSR1, 0.0)
    trains[1].start()
    for thread in trains:
        thread.join(PATIENCE)
    assert last[0] == last[1]
    assert last[0] in {2 + ahead, 3 + ahead}


def test_a_rank_that_is_lost_ends_the_wait_for_the_last_step(worlds):
    rank_0, rank_1, rank_2 = (worlds(rank, 3) for rank in range(3))
    until(lambda: len(rank_0.peers.ranks()) == 2)
    rank_2.stop.prepare = lambda: None  # it never replies
    rank_0.stop.signalled(signal.SIGUSR1, 0.0)
    found = {}
    waits = [threading.Thread(target=lambda w=w: found.update({w: w.stops_after_step()})) for w in (rank_0, rank_1)]
    for thread in waits:
        thread.start()
    until(lambda: rank_1.stop._has_replied)
    rank_2.leave("it fails")
    for thread in waits:
        thread.join(PATIENCE)
    assert found == {rank_0: False, rank_1: False}
    assert rank_0.liveness.reason == rank_1.liveness.reason == "rank 2 on nid0 failed: it fails"


def test_a_rank_that_leaves_the_others_in_a_collective_is_named(worlds):
    both = [worlds(rank, 2) for rank in (0, 1)]
    until(lambda: all(world.peers.came for world in both))
    both[0].leave()
    error = both[1].aborted(OSError("shut down"))
    hosts = [world.topology.host for world in both]
    named = (
        f"rank 0 on {hosts[0]} left the training where rank 1 on {hosts[1]} continued: end it after the same step on "
    )
    assert str(error).startswith(named)
    assert not error.everywhere  # else nobody would print it


def fails(*_, **__):
    raise ZeroDivisionError("a fault\nof ours")


PROCESS = Process(pid=7, started=10**6, thread=1, memory=None)
FROM_RANK = [
    many_ranks.TIMES,
    messages.Energy(joules={"rapl:a": 1.0}),
    messages.Stack(place="outside", long=False, where=""),
    messages.ProcessState(rank=1, state="disk", where=""),
]
FROM_RANK_0 = [messages.StackRequest(), messages.ProcessRequest(rank=0, process=PROCESS)]
WATCHES = {
    "slow": ("step_begins", "step_ended", "reported"),
    "_stuck": ("look", "answered", "seen", "own", "step_made", "expect_steps", "forgive"),
    "_energy": ("reported",),
}


def test_a_fault_in_any_diagnostic_ends_nothing_and_blames_nobody(worlds, monkeypatch, capsys):
    both = [worlds(rank, 2) for rank in (0, 1)]
    waits = [threading.Thread(target=world.wait_until_ready, args=(lambda endpoints: None,)) for world in both]
    for thread in waits:
        thread.start()
    for thread in waits:
        thread.join(PATIENCE)
    for world in both:
        for watch, names in WATCHES.items():
            for name in names:
                monkeypatch.setattr(getattr(world, watch), name, fails)
        monkeypatch.setattr(world._energy.book, "totals", fails)
    monkeypatch.setattr("hvdtrain.ranks.monitor.look_at", fails)
    engine = many_ranks.Engine()
    for _ in range(3):
        for world in both:
            clocks = slow.Clocks(engine, world.slow)
            world.slow.is_measuring = True
            clocks.begin_step()
            clocks.end_step()
            world.expect_steps(True)
            world.count_energy()
        for message in FROM_RANK:
            both[1].peers.send(message)
        for message in FROM_RANK_0:
            both[0].peers.send(message)
    stopped = [[], []]
    both[1].stop.signalled(signal.SIGUSR1, 0.0)  # what comes last, and is no diagnostic, is still handled
    until(lambda: both[0].stop.signal)

    def step(world, steps):
        while not world.stops_after_step():
            steps.append(0)
            time.sleep(0.01)

    trains = [threading.Thread(target=step, args=each) for each in zip(both, stopped, strict=True)]
    for thread in trains:
        thread.start()
    for thread in trains:
        thread.join(PATIENCE)
    assert both[0].stop.step == both[1].stop.step
    assert [world.liveness.reason for world in both] == [None, None]
    err = capsys.readouterr().err.splitlines()
    found = [line for line in err if line.startswith("warning")]
    assert all("own, and training continues: ZeroDivisionError: a fault of ours, " in line for line in found)
    assert len(found) == len({line.partition(" has")[0] for line in found})  # each of each rank is reported once
    assert {line.partition("diagnostic (")[2].partition(")")[0] for line in found} == {
        "times", "energy", "stack", "process_state", "stack_request", "process_request", "slow ranks", "stuck ranks",
    }  # fmt: skip


def test_a_fault_where_connections_are_counted_loses_no_step(monkeypatch, capsys):
    monkeypatch.setattr(network, "connections", fails)
    monkeypatch.setattr(timeouts, "TIMES", 0.0)
    world = RankProcess(many_ranks.topology(0, 2)).world
    clocks = slow.Clocks(many_ranks.Engine(), world.slow)
    for _ in range(3 * slow.STEPS):
        world.slow._measured = -1.0
        clocks.begin_step()
        clocks.end_step()
    assert len(world.slow._steps) < slow.STEPS  # they do not gather for ever
    assert capsys.readouterr().err.count("\n") == 1
    world.leave()


def test_a_rank_whose_monitor_fails_is_named_by_the_others(worlds, monkeypatch, capsys):
    both = [worlds(rank, 2) for rank in (0, 1)]
    until(lambda: all(world.peers.came for world in both))
    monkeypatch.setattr(both[1]._monitor.admission, "drop_slow", fails)
    until(lambda: both[0].liveness.reason)
    assert both[0].liveness.reason.startswith("rank 1 on nid0 failed: ")
    assert "a fault of hvdtrain: ZeroDivisionError: a fault of ours" in both[0].liveness.reason
    assert both[1].liveness.reason
    assert "AbortedError (rank 1 on nid0): rank 1 on nid0 failed: a fault of hvdtrain" in capsys.readouterr().err


HANGS = """
import sys, time
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import timeouts
from hvdtrain.run.process import RankProcess
timeouts.GRACE = 0.2
world = RankProcess(Topology.alone("nid1")).world
def flush():
    raise TypeError("encoding of hostname failed")
world.peers.flush = flush
world.start()
print("trains", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signals", marked(rows({"alone": [], "SIGTERM": [signal.SIGTERM]}), slow={"SIGTERM"}))
def test_a_run_whose_monitor_fails_ends_by_name_though_it_hangs(signals):
    program = subprocess.Popen(
        [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert program.stdout.readline() == "trains\n"
    for number in signals:
        program.send_signal(number)
    err = program.communicate(timeout=PATIENCE)[1].splitlines()
    assert program.returncode
    assert any("encoding of hostname failed" in line or "SIGTERM" in line for line in err)
    assert not any(line.startswith("Traceback") for line in err)
