"""Which ranks keep the others waiting, and where they stand."""

import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import messages, stacks, timeouts
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.peers import Peer, Peers
from hvdtrain.ranks.stacks import (
    AVERAGING,
    LONG,
    READERS,
    Frame,
    Process,
    Stacks,
    described,
    has_any,
    is_operation,
    last_of,
    mark_module,
    observed,
    operation_of,
    place_of,
    takes_long,
    waits_for_ranks,
)
from hvdtrain.ranks.stuck import StuckWatch, keeping_others_waiting
from hvdtrain.record.journal import Journal
from hvdtrain.run.process import RunListener

IN, MAYBE, OUT, SILENT = "collective", "framework", "outside", "silent"
KEEPING = {
    "all wait": ([IN, IN, IN], set()),
    "all compute": ([OUT, OUT], set()),
    "one of two": ([IN, OUT], {1}),
    "rank 0": ([OUT, IN, MAYBE], {0}),
    "in a graph, or waiting": ([MAYBE, OUT, MAYBE], {1}),
    "a long step, which one has ended": ([OUT, OUT, IN, OUT], set()),
    "a host of four ranks": ([IN] * 4 + [OUT] * 4, {4, 5, 6, 7}),
    "one does not answer": ([IN, IN, SILENT], {2}),
    "nobody waits for who does not answer": ([OUT, OUT, SILENT], set()),
}


@pytest.mark.parametrize(("places", "expected"), KEEPING.values(), ids=KEEPING.keys())
def test_who_keeps_the_others_waiting(places, expected):
    assert keeping_others_waiting(dict(enumerate(places))) == expected


USERS, LIBRARY = "/home/u/train.py", f"{os.path.dirname(os.__file__)}/queue.py"  # noqa: PTH120
OURS = f"{os.path.dirname(stacks.__file__)}/loop.py"  # noqa: PTH120
SYNCHRONIZE = Frame("horovod.torch.mpi_ops", "synchronize", LIBRARY, 5)
MAIN, STEP = Frame("__main__", "main", USERS, 3), Frame("nets", "forward", USERS, 9)
BACKWARD = Frame("torch.autograd.graph", "_engine_run_backward", LIBRARY, 7)
EXECUTE = Frame("tensorflow.python.eager.execute", "quick_execute", LIBRARY, 7)
NEXT = Frame("tensorflow.python.data.ops.iterator_ops", "__next__", LIBRARY, 7)
GATHER = Frame("torch.distributed.distributed_c10d", "all_gather", LIBRARY, 1)


@waits_for_ranks
@is_operation
@takes_long
def marked():
    """Named in no table."""


mark_module(AVERAGING, f"{__name__}.averaging")
MARKED = Frame(__name__, "marked", OURS)
STACKS = {  # the innermost frame first
    "ours, in a function that says so": ([MARKED, MAIN], IN),
    "Horovod": ([SYNCHRONIZE, MAIN], IN),
    "DistributedDataParallel's backward": ([BACKWARD, Frame("torch._tensor", "backward", LIBRARY), MAIN], MAYBE),
    "the user's backward": ([STEP, BACKWARD, MAIN], OUT),
    "a hook that communicates, in backward": ([SYNCHRONIZE, BACKWARD, MAIN], IN),
    "a graph": ([EXECUTE, MAIN], MAYBE),
    "TensorFlow's data": ([EXECUTE, NEXT, MAIN], OUT),
    "forward below a wrapper": ([STEP, Frame("torch.distributed.fsdp", "forward", LIBRARY), MAIN], OUT),
    "a queue": ([Frame("queue", "get", LIBRARY, 2), MAIN], OUT),
    "another module of that beginning": ([Frame("horovodlike", "f", LIBRARY), MAIN], OUT),
    "nothing": ([], OUT),
}


@pytest.mark.parametrize(("stack", "place"), STACKS.values(), ids=STACKS.keys())
def test_where_a_stack_stands(stack, place):
    assert place_of(stack) == place


def test_the_users_line_is_shown():
    queue = Frame("queue", "get", LIBRARY, 2)
    assert described([STEP, MAIN]) == f"{USERS}:9, in forward"
    assert described([queue, MAIN]) == f"{USERS}:3, in main (inside {LIBRARY}:2, in get)"
    assert described([queue]) == f"{LIBRARY}:2, in get"
    assert described([]) == "no line of Python"


def test_what_may_take_long_and_what_reads():
    assert has_any([SYNCHRONIZE, MARKED], LONG)
    assert has_any([Frame("hvdtrain.datasets.packed", "read", OURS)], READERS)
    assert not has_any([STEP, MAIN], LONG | READERS)


DUMP = f'''Thread 0x00000000000000ff (most recent call first):
  File "/home/u/other.py", line 1 in other
Current thread 0x0000000000000abc (most recent call first):
  File "{LIBRARY}", line 10 in get
  File "/home/u/an "odd\x1b[2J" name.py", line 12 in read
Thread 0x0000000000000001 (most recent call first):
  File "/home/u/other.py", line 2 in other
'''
HOSTILE = ["", "\n" * 9, "Thread 0xzz (most recent call first):\n", DUMP[:130], "\0" * 999, 'File "', DUMP * 3]


def test_a_dump_is_read():
    odd = f'/home/u/an "odd\x1b[2J" name.py:12, in read (inside {LIBRARY}:10, in get)'
    assert last_of(DUMP, 0xABC) == last_of(DUMP + DUMP.replace("0abc", "0abd"), 0xABC) == odd
    assert last_of(DUMP, 0xABB) == ""
    assert "\x1b" not in messages.Stack(place="outside", long=False, where=odd).where
    for text in HOSTILE:
        assert isinstance(last_of(text, 0xABC), str)


HOLDS = """
import ctypes, threading, time
from hvdtrain.ranks.stacks import Stacks
own = Stacks()
process = own.open(alone=False)
threading.Thread(target=lambda: [own.answer_here(), time.sleep(60)], daemon=True).start()
print(process.model_dump_json(), flush=True)
ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
print("read", flush=True)
"""


def test_a_process_is_seen_from_outside():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        other = Process.model_validate_json(process.stdout.readline())
        assert observed(other.model_copy(update={"started": other.started + 1})) == ("unknown", "")
        while observed(other) != ("python", "<string>:8, in <module>"):  # at first it may be a line before
            time.sleep(0.01)
        assert observed(other.model_copy(update={"memory": 1})) == ("unknown", "")
        process.send_signal(signal.SIGSTOP)
        while observed(other)[0] != "stopped":
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        assert process.communicate("x")[0] == "read\n"
    assert observed(other) == ("unknown", "")


def test_nothing_of_ones_own_is_left():
    gc.collect()  # what other tests have left open
    own, before = Stacks(), os.listdir("/proc/self/fd")  # noqa: PTH208
    assert own.open(alone=False) == own.open(alone=False)
    assert own.now()[0] == "outside"
    assert own.now()[2].endswith(", in now")
    own.close()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert signal.SIGURG not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_that_is_the_users_stays():
    signal.signal(signal.SIGURG, signal.SIG_IGN)
    try:
        assert Stacks().open(alone=False) is None
    finally:
        signal.signal(signal.SIGURG, signal.SIG_DFL)


class Clock:
    """A watch of rank 0 of three, whose other ranks answer what `places` says, and what it printed."""

    def __init__(self, capsys, monkeypatch):
        peers = Peers(Topology(0, 3, 0, 3, 0, "nid1", "srun", None))
        self.monkeypatch = monkeypatch
        self.capsys, self.now, self.places, self.long = capsys, 1000.0, {1: IN, 2: IN}, False
        self.watch = StuckWatch(Liveness(peers, RunListener(peers.topology, Journal())), Endpoint("nid1", 0, 0))
        self.sockets = []
        for rank in (1, 2):
            self.sockets += socket.socketpair()
            self.sockets[-1].setblocking(False)
            peers.connections.append(Peer(self.sockets[-1], 0, 0, rank=rank, endpoint=Endpoint("nid1", 0, rank)))
        self.watch.own = lambda: messages.Stack(**{"place": IN, "long": False, "where": "a.py:3, in f"} | self.waits[0])
        self.waits = {rank: {} for rank in range(3)}
        """In which collective, of each rank."""

    def step(self):
        with self.monkeypatch.context() as patched:
            patched.setattr("time.monotonic", lambda: self.now)
            self.watch.step_made()

    def run(self, seconds):
        """The lines printed while rank 0 looks so often."""
        for _ in range(int(seconds / timeouts.TICK)):
            self.now += timeouts.TICK
            self.watch.look(self.now)
            for peer in self.watch.peers.connections:
                if (place := self.places[peer.rank]) != SILENT:
                    peer.last_received = self.now
                    stack = {"place": place, "long": self.long, "where": "a.py:3, in f", **self.waits[peer.rank]}
                    self.watch.answered(peer, messages.Stack(**stack))
        return self.capsys.readouterr().err.splitlines()


@pytest.fixture
def clock(capsys, monkeypatch):
    clock = Clock(capsys, monkeypatch)
    yield clock
    for end in clock.sockets:
        end.close()


def test_it_is_named_within_thirty_seconds_then_rarely_until_it_resumes(clock):
    assert clock.run(100) == []  # before the first step
    clock.step()
    clock.places[2] = OUT
    (line,) = clock.run(30)
    seconds = int(line.partition("ended for ")[2].split()[0])
    assert 15 <= seconds <= 25
    assert line == (
        "warning (rank 0 on nid1): rank 2 on nid1 keeps the others waiting: no step has ended for "
        f"{seconds} seconds, and it stands in a.py:3, in f."
    )
    assert clock.run(270) == []
    assert len(clock.run(60)) == 1
    clock.step()
    (line,) = clock.run(10)
    assert line == "warning (rank 0 on nid1): rank 2 on nid1 has resumed: the others wait no longer."


def test_one_that_does_not_answer(clock):
    clock.step()
    clock.places[1] = SILENT
    (line,) = clock.run(30)
    assert "rank 1 on nid1 keeps" in line
    assert line.endswith(
        "it does not answer: its process is stopped, or C code holds Python's lock; after 60 seconds without an answer "
        "it is given up."
    )


def test_no_alarm_where_ranks_take_turns_or_steps_are_long(clock):
    clock.step()
    for _ in range(10):
        clock.places = {1: IN, 2: OUT}
        assert clock.run(10) == []
        clock.places = {1: OUT, 2: IN}
        assert clock.run(10) == []
        clock.places = {1: OUT, 2: OUT}
        assert clock.run(60) == []


def test_long_steps_and_long_phases_have_long_limits(clock):
    for _ in range(5):
        clock.step()
        clock.now += 40
    clock.places[2] = OUT
    clock.step()
    assert clock.run(80) == []
    assert len(clock.run(20)) == 1
    clock.step()
    clock.run(2)
    clock.long = True
    assert clock.run(290) == []
    (line,) = clock.run(30)
    assert "and it validates, or writes a checkpoint; it stands in" in line


def test_a_thread_that_trains_is_found_and_so_is_its_reader():
    own, ready, done = Stacks(), threading.Event(), threading.Event()

    def train():
        own.train_here()
        ready.set()
        done.wait()

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    where = own.now()[2]
    done.set()
    thread.join()
    assert ", in train" in where


def calling(module):
    """A function of that module, whose stack has the same under it."""
    names = {"__name__": module}
    exec(compile("def call(function): function()", LIBRARY, "exec"), names)
    return names["call"]


def users(function):
    """The user's."""
    function()


def trains(own, function):
    """The thread that trains."""
    own.train_here()
    function()


EXECUTES, CALLED, ENQUEUES, REDUCES = map(
    calling,
    (
        "tensorflow.python.eager.execute",
        "tensorflow.python.ops.script_ops",
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "horovod.tensorflow",
    ),
)
IN_USERS = ", in users (inside "
BESIDE_A_GRAPH = {  # what the threads beside it do, the outermost first
    "nothing": ([], MAYBE, ""),
    "it calls the user's code": ([[CALLED, users]], OUT, IN_USERS),
    "it calls a library's": ([[CALLED]], OUT, "/threading.py:"),
    "a generator waits for a pool": ([[CALLED, ENQUEUES], [ENQUEUES], [ENQUEUES, users]], OUT, IN_USERS),
    "a full queue": ([[ENQUEUES]], MAYBE, ""),
    "one reads ahead, in the user's code": ([[ENQUEUES, users]], MAYBE, ""),
    "what it calls communicates": ([[CALLED, users, REDUCES]], MAYBE, ""),
}


@pytest.mark.parametrize(("beside", "place", "line"), BESIDE_A_GRAPH.values(), ids=BESIDE_A_GRAPH.keys())
def test_a_graph_that_waits_for_python_is_outside_of_collectives(beside, place, line):
    own, all_wait = Stacks(), threading.Barrier(len(beside) + 2)
    threads = [[functools.partial(trains, own), EXECUTES], *beside]
    for functions in threads:
        nested = functools.reduce(lambda inner, each: functools.partial(each, inner), functions[::-1], all_wait.wait)
        threading.Thread(target=nested).start()
    while all_wait.n_waiting < len(threads):
        time.sleep(0.01)
    found, _, where, *_ = own.now()
    all_wait.wait()
    assert found == place
    assert line in where
    assert where.endswith(", for which TensorFlow waits") == (place == OUT)


SUM, GRADIENTS = {"operation": "sum", "steps": 6}, {"operation": "gradients", "steps": 6}
FIRST, SECOND = ({"operation": "sum", "users_line": f"a.py:{line}, in f"} for line in (3, 9))
APART = {
    "an epoch's end, and a step": ([GRADIENTS, SUM, GRADIENTS], (10, 40)),
    "two lines of the user's": ([FIRST, SECOND, FIRST], (50, 90)),
    "one that may compute yet": ([{**GRADIENTS, "place": MAYBE}, SUM, GRADIENTS], (50, 90)),
    "one that validates": ([{**GRADIENTS, "place": MAYBE, "long": True}, SUM, GRADIENTS], (None, None)),
    "one line": ([FIRST] * 3, (None, None)),
    "all in a step": ([GRADIENTS] * 3, (None, None)),
    "one of which nobody knows": ([GRADIENTS, SUM, {}], (None, None)),
}


@pytest.mark.parametrize(("waits", "when"), APART.values(), ids=APART.keys())
def test_ranks_in_different_collectives_end(clock, waits, when):
    clock.waits = dict(enumerate(waits))
    clock.step()
    before, until = when
    assert clock.run(before or 300) == []
    assert clock.watch.liveness.reason is None
    if until:
        (line,) = clock.run(until - before)
        assert line.startswith("LoopError (rank 0 on nid1): the ranks wait in different collectives, for ever: rank 0 ")
        assert "; rank 1 on nid1 has made " in line
        assert "rank 2" not in line  # which is where rank 0 is
        assert clock.watch.liveness.reason


def test_a_rank_that_computes_is_waited_for_whatever_the_others_wait_in(clock):
    clock.waits, clock.places = {0: GRADIENTS, 1: SUM, 2: {}}, {1: IN, 2: OUT}
    clock.step()
    assert all("rank 2 on nid1 keeps the others waiting" in line for line in clock.run(100))
    assert clock.watch.liveness.reason is None


OPERATIONS = {
    "marked": ([Frame("horovod.torch.mpi_ops", "poll", LIBRARY), MARKED]),
    "gradients": ([SYNCHRONIZE, Frame(f"{__name__}.averaging", "finish", OURS), MAIN]),
    "": ([GATHER, MAIN]),
}


@pytest.mark.parametrize(("operation", "stack"), OPERATIONS.items(), ids=OPERATIONS)
def test_in_which_collective_a_stack_waits(operation, stack):
    assert operation_of(stack) == operation
    assert operation_of([EXECUTE, MAIN]) == operation_of([BACKWARD, MAIN]) == "gradients"
