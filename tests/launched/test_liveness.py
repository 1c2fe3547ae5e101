"""When one rank ends, all others end and name it; and all ranks stop after the same step."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from marks import marked, rows
from paths import SUPPORT
from ranks import wait_until

from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.world import World
from hvdtrain.terminal import TIME_LIMIT_SIGNALS

PROGRAM = SUPPORT / "world_ranks.py"
HOST = socket.gethostname()
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("waits")]
QUICK = {"HEARTBEAT": 0.2, "SILENCE": 10, "GRACE": 1, "CHECKPOINT": 1.5, "FAREWELL": 4}
CONTINUE = "The same command continues from the last checkpoint."
USR2, TERM, STOP, CONT = signal.SIGUSR2, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT


@pytest.fixture
def start(start_ranks, tmp_path):
    """`start(size=3, steps=50)`: how those ranks ended. In place of SLURM's commands, scripts record their calls."""
    (tmp_path / "bin").mkdir()
    for tool in ("scancel", "scontrol"):
        path = tmp_path / "bin" / tool
        path.write_text(f'#!/bin/sh\necho {tool} "$@" >> {tmp_path}/calls\n')
        path.chmod(0o755)

    def start(size, **spec):
        spec["constants"] = {**QUICK, **spec.get("constants", {})}
        return start_ranks(size, **{"environ": {"PATH": str(tmp_path / "bin")}, **spec})

    return start


@pytest.fixture
def calls(tmp_path):
    """What was requested of SLURM, but for the job's script, which every run requests."""

    def requested():
        lines = (tmp_path / "calls").read_text().splitlines(True) if (tmp_path / "calls").exists() else []
        return "".join(line for line in lines if "batch_script" not in line)

    return requested


def status(folder):
    return json.loads((folder / "run" / "status.json").read_text())


def printed(rank, text, kind="AbortedError"):
    return f"{kind} (rank {rank} on {HOST}): {text}\n"


VANISHED = f"rank 2 on {HOST} ended without a message: killed, out of memory, or crashed; all ranks end. {CONTINUE}"
SILENT = f"no heartbeat from rank 2 on {HOST} for 2 seconds: its node is down or cut off, or it hangs"
DAMAGED = "part 3 is damaged; copy it again"
REFUSED = f"rank 1 on {HOST} failed: {DAMAGED}. {CONTINUE}"
EARLY_ELSEWHERE = f"SIGTERM at rank 1 on {HOST} (scancel, the time limit or kill): no step was made yet."
STUCK = f"SIGTERM, and no step ended within 2 seconds. {CONTINUE}"

GOOD = [0, 0, 0], ["", "", ""]
LOST = [1, 1, -9], [printed(0, VANISHED), "", ""]
FAILED = [2, 2, 2], [printed(0, REFUSED), printed(1, f"{DAMAGED}.", "DataError"), ""]
BEHIND = (
    f"rank 1 on {HOST} left the training where rank 0 on {HOST} continued: end it after the same step on every rank"
)
ALONE = f"rank 1 on {HOST} exited with code 0 after no step, and not all ranks did"
CLOSED = printed(
    1, f"rank 1 on {HOST} failed: its program has closed file descriptors that are not its own, as os.closerange does."
)
LEFT = printed(0, "the program exited after no step; the same command continues from the last checkpoint.", "warning")
NAMING = {"TICK": 0.1, "STALLED": 0.4, "STACKS": 0.3, "STUCK": 0.7}
ENDS = {  # what happens: exit codes, what each rank prints
    "nothing": ({"steps": 30}, *GOOD),
    "over a collective library": ({"steps": 30, "launcher": "horovodrun"}, *GOOD),
    "a rank is killed": ({"acts": [[2, 20, "kill"]]}, *LOST),
    "killed, and the library waits for ever": ({"acts": [[2, 20, "kill"]], "breaks": False}, *LOST),
    "killed, on another host": ({"acts": [[2, 20, "kill"]], "nodes": [0, 1, 1]}, *LOST),
    "killed, while a child of it lives": ({"acts": [[2, 19, "fork"], [2, 20, "kill"]], "breaks": False}, *LOST),
    "killed, over a collective library": ({"acts": [[2, 20, "kill"]], "launcher": "horovodrun"}, *LOST),
    "killed before the first step": ({"acts": [[2, 0, "kill"]]}, *LOST),
    "rank 0 is killed, on another host": (
        {"acts": [[0, 20, "kill"]], "nodes": [0, 1, 1], "breaks": False},
        [-9, 1, 1],
        ["", printed(1, VANISHED.replace("rank 2", "rank 0")), ""],
    ),
    "a rank ends as if all were well": ({"acts": [[2, 20, "return"]]}, [1, 1, 0], [printed(0, VANISHED), "", ""]),
    "a rank is suspended": (
        {"orders": [[20, 2, STOP, 0]], "stopped": [2], "breaks": False, "constants": {"SILENCE": 1.5}},
        [1, 1, -9],
        [printed(0, f"{SILENT}; all ranks end. {CONTINUE}"), "", ""],
    ),
    "rank 0 is suspended": (
        {
            "orders": [[20, 0, STOP, 0]],
            "stopped": [0],
            "breaks": False,
            "constants": {"SILENCE": 1.5},
            "delay": {"1": 0.3},  # then rank 2 looks at the clock first
        },
        [-9, 1, 1],
        ["", printed(1, f"{SILENT}; all ranks end. {CONTINUE}".replace("rank 2", "rank 0")), ""],
    ),
    "a rank closes all descriptors": (
        {"acts": [[1, 20, "close"]], "breaks": False},
        [1, 1, 1],
        [printed(0, VANISHED.replace("rank 2", "rank 1")), CLOSED, ""],
    ),
    "all are suspended": (
        {"steps": 400, "orders": [[20, "all", STOP, 0], [20, "all", CONT, 2.5]], "constants": {"SILENCE": 1.5}},
        *GOOD,
    ),
    "all are suspended, and resumed one after the other": (
        {
            "steps": 400,
            "orders": [[20, "all", STOP, 0], [20, 2, CONT, 2.5], [20, 0, CONT, 0.5], [20, 1, CONT, 0.5]],
            "constants": {"SILENCE": 2},
        },
        *GOOD,
    ),
    "C code holds Python's lock, while libraries are loaded": (
        {"acts": [[1, 0, "locked"]], "steps": 30, "constants": {"SILENCE": 1.5}},
        *GOOD,
    ),
    "a rank fails": ({"acts": [[1, 20, "refuse"]]}, *FAILED),
    "a rank fails, and the library waits for ever": ({"acts": [[1, 20, "refuse"]], "breaks": False}, *FAILED),
    "a rank refuses before the others have come": (
        {"argv": {"1": ["cifar100", "--data-dir", "/none"]}, "delay": {"0": 1, "2": 1.5}, "nodes": [0, 1, 1]},
        [2, 2, 2],
        None,
    ),
    "a rank alone has another recipe": (
        {"argv": {"1": ["linear", "--epochs", "-1"]}, "constants": {"RANK_0_REPORT": 1}},
        [2, 2, 2],
        None,
    ),
    "rank 0 refuses before the others have come": (
        {"argv": {"0": ["linear", "--output", "/proc/1/none"]}, "delay": {"1": 1, "2": 1.5}},
        [2, 2, 2],
        [
            printed(0, "cannot write to the run folder /proc/1/none: No such file or directory; give a "
                 "writable --output.", "OutputError"),
            "",
            "",
        ],
    ),
    "a rank does not come": (
        {"constants": {"ARRIVAL": 5}, "delay": {"2": 600}, "orders": [[0, 2, 9, 7]]},
        [2, 2, -9],
        [
            printed(0, "rank 2 of 3 did not come within 5 seconds; read the messages of that rank and of its node, "
                 "and see whether the nodes may communicate by TCP.", "WorldError"),
            "",
            "",
        ],
    ),
    "SIGTERM before the first step": (
        {"acts": [[1, 0, "sleep"]], "orders": [["act", 1, TERM, 0.1]], "breaks": False},
        [143, 143, 143],
        [
            printed(0, EARLY_ELSEWHERE, "StoppedError")
            + printed(0, f"rank 1 on {HOST} failed: SIGTERM before the first step. {CONTINUE}"),
            "",
            "",
        ],
    ),
    "SIGTERM while others are awaited": (
        {"delay": {"2": 600}, "orders": [["wait", "all", TERM, 0.1]]},
        [143, 143, -15],
        None,
    ),
    "SIGTERM while all are inside C": (
        {"acts": [[rank, 20, "stuck"] for rank in range(3)], "orders": [[19, "all", TERM, 0.1]]},
        [143, 143, 143],
        None,
    ),
    "SIGTERM of one while all wait for another": (
        {"acts": [[2, 20, "sleep"]], "orders": [[19, 1, TERM, 0.1]], "breaks": False},
        [143, 143, 143],
        [
            printed(0, f"SIGTERM at rank 1 on {HOST} (scancel, the time limit or kill): a checkpoint after this "
                 "step or validation, then the end.", "StoppedError")
            + printed(0, f"rank 1 on {HOST} failed: {STUCK}"),
            "",
            "",
        ],
    ),
    "SIGTERM, and a checkpoint that takes longer than a collective may": (
        {"orders": [[20, 1, TERM, 0]], "checkpoint": 2.5},
        [143, 143, 143],
        None,
    ),
    "a rank exits alone": (
        {"acts": [[1, 20, "exit"]]},
        [1, 1, 1],
        [printed(0, f"{BEHIND}. {CONTINUE}"), printed(1, f"{ALONE}: {BEHIND}. {CONTINUE}"), ""],
    ),
    "a rank exits alone, with a code": ({"acts": [[1, 20, "exit 3"]]}, [3, 3, 3], None),
    "a rank exits alone, and the library waits for ever": (
        {"acts": [[1, 20, "exit"]], "breaks": False, "constants": NAMING}, [1, 1, 1], None,
    ),
    "rank 0 exits alone": (
        {"acts": [[0, 20, "exit 3"]]}, [3, 3, 3], None
    ),
    "ranks exit after different steps": (
        {"acts": [[0, 20, "exit"], [1, 20, "exit"], [2, 21, "exit"]], "ahead": 2},
        [1, 1, 1],
        None,
    ),
    "all exit after the same step": (
        {"acts": [[0, 20, "exit 3"], [1, 20, "exit 3"], [2, 20, "exit 3"]]}, [3, 3, 3], [LEFT, "", ""],
    ),
    "a rank exits before the first step": ({"acts": [[0, 1, "exit"], [1, 1, "exit"], [2, 1, "exit"]]}, *GOOD),
    "a warning at the end of the run": (
        {"steps": 20, "acts": [[0, -1, "nap"]], "orders": [[20, 1, USR2, 0]]},
        [0, 0, 0],
        None,
    ),
}  # fmt: skip


LONG = {
    "over a collective library", "killed, and the library waits for ever", "killed, on another host",
    "killed, over a collective library", "rank 0 is killed, on another host", "all are suspended",
    "all are suspended, and resumed one after the other", "C code holds Python's lock, while libraries are loaded",
    "a rank fails, and the library waits for ever", "a rank does not come", "SIGTERM while others are awaited",
    "SIGTERM of one while all wait for another", "SIGTERM, and a checkpoint that takes longer than a collective may",
    "a rank exits alone, and the library waits for ever",
}  # fmt: skip


@pytest.mark.parametrize(("spec", "codes", "messages"), marked(rows(ENDS), slow=LONG))
def test_how_a_run_ends(spec, codes, messages, start):
    ended = start(len(codes), **spec)
    assert ended["codes"] == codes, ended
    assert not ended["ended_here"]
    if messages is not None:
        assert ended["err"] == messages


WAITING = "keeps the others waiting: no step has ended for N seconds, and it"
STOPPED = "does not answer: its process is stopped (SIGSTOP, or a debugger)"
GIVEN_UP = "after 20 seconds without an answer it is given up"


def line_of(text):
    """The number of that line of the ranks' program."""
    return 1 + next(number for number, line in enumerate(PROGRAM.read_text().splitlines()) if text in line)


LOOP, READ = (f"{PROGRAM}:{line_of(text)}" for text in ("any(time.monotonic() > ends", "library(None).read("))
NAMED = {  # what a rank does for two seconds, or until it is named: the rank, who names it, and how
    "an endless loop": ({"acts": [[2, 20, "loop"]]}, 2, 0, f"stands in {LOOP}, in <genexpr>."),
    "an endless loop on rank 0": ({"acts": [[0, 20, "loop"]]}, 0, 0, f"stands in {LOOP}, in <genexpr>."),
    "a read": ({"acts": [[1, 20, "read"]]}, 1, 0, f"stands in {READ}, in act."),
    "suspended": (
        {"orders": [[20, 2, STOP, 0], ["named", 2, CONT, 0]]}, 2, 0, f"{STOPPED}; {GIVEN_UP}.",
    ),
    "rank 0 is suspended": (
        {"orders": [[20, 0, STOP, 0], ["named", 0, CONT, 0]]}, 0, 1, f"{STOPPED}; {GIVEN_UP}.",
    ),
    "C code holds Python's lock": (
        {"acts": [[1, 20, "locked"]], "nodes": [0, 1, 1]}, 1, 0,
        f"does not answer: C code holds Python's lock, in {READ}, in act; {GIVEN_UP}.",
    ),
    "C code holds Python's lock, alone on its host": (
        {"acts": [[2, 20, "locked"]], "nodes": [0, 1, 2]}, 2, 0,
        "does not answer: its process is stopped, or C code holds Python's lock, and then prints its lines on stderr; "
        f"{GIVEN_UP}.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "rank", "by", "how"),
    marked(
        rows(NAMED),
        slow={
            "an endless loop on rank 0",
            "C code holds Python's lock",
            "C code holds Python's lock, alone on its host",
        },
    ),
)
def test_who_keeps_the_others_waiting_is_named_and_goes_on(spec, rank, by, how, start):
    ended = start(3, **{"steps": 1500, "breaks": False, **spec}, constants={**NAMING, "SILENCE": 20})
    assert ended["codes"] == [0, 0, 0], ended
    named = re.sub(r"for \d seconds", "for N seconds", ended["err"][by])
    assert named == (
        printed(by, f"rank {rank} on {HOST} {WAITING} {how}", "warning")
        + printed(by, f"rank {rank} on {HOST} has resumed: the others wait no longer.", "warning")
    )
    for other in {0, 1, 2} - {by}:
        dumped = f'File "{PROGRAM}", line {line_of("library(None).read(")} in act' in ended["err"][other]
        assert dumped if "on stderr" in how and other == rank else not ended["err"][other]


def test_an_error_of_ours_reaches_all_in_one_line(start):
    ended = start(3, acts=[[2, 20, "crash"]])
    assert ended["codes"] == [1, 1, 1]
    assert ended["err"][0] == printed(0, f"rank 2 on {HOST} failed: RuntimeError: two lines. {CONTINUE}")
    assert ended["err"][2].startswith("Traceback")


@pytest.mark.parametrize("launcher", marked(["srun", "horovodrun"], slow={"srun"}))
def test_all_stop_at_one_step_whoever_was_signalled(launcher, start, tmp_path):
    steps = set()
    for number in range(4):
        pause = 0.023 * number
        ended = start(4, launcher=launcher, orders=[[5 + number, number % 4, USR2, pause]])
        assert ended["codes"] == [140] * 4, ended
        assert len(set(ended["steps"])) == 1
        assert -ended["steps"][0] >= 5 + number
        stopped = (
            f"SIGUSR2: stopped after step {-ended['steps'][0]}, with a checkpoint; the same command continues from it."
        )
        assert ended["err"][0].endswith(printed(0, stopped, "StoppedError")) or launcher == "srun"
        assert stopped in ended["err"][0]
        assert ended["err"][1:] == [""] * 3
        assert status(tmp_path)["state"] == "stopped"
        steps.add(ended["steps"][0])
    assert len(steps) > 2


@pytest.mark.parametrize("slow", [0, 2])
def test_all_stop_at_one_step_where_some_are_many_steps_ahead(slow, start):
    ended = start(3, ahead=7, acts=[[slow, 21, "nap"]], orders=[[20, 1, USR2, 0.5]])
    assert ended["codes"] == [140] * 3, ended
    assert len(set(ended["steps"])) == 1
    assert ended["steps"][0] <= -28


def test_all_are_signalled_at_once_and_again(start):
    ended = start(4, orders=[[5, "all", USR2, 0], [5, "all", USR2, 0]])
    assert ended["codes"] == [140] * 4
    assert ended["err"][0].count("the time limit is near") == 1


REQUEUED = {
    "the time limit is near": (USR2, 20, "scontrol requeue {job}\n", "job {job} is queued again."),
    "it came too early": (
        USR2,
        "act",
        "",
        "job {job} is not queued again: the warning came before the first step; ask for more time.",
    ),
    "scancel": (TERM, 20, "", None),
}


@pytest.mark.parametrize(("number", "after", "requested", "message"), REQUEUED.values(), ids=REQUEUED.keys())
def test_a_job_is_queued_again(number, after, requested, message, start, calls):
    ended = start(2, orders=[[after, 0, number, 0]], acts=[[1, 0, "nap"]])
    assert ended["codes"] == [128 + number] * 2
    assert calls() == requested.format(job=ended["job"])
    last = ended["err"][0].splitlines()[-1]
    assert last == message.format(job=ended["job"]) if message else last.startswith("StoppedError")


def test_a_rank_that_vanished_has_its_step_cancelled(start, calls, tmp_path):
    ended = start(3, acts=[[2, 20, "kill"]], breaks=False)
    assert calls() == f"scancel {ended['job']}.0\n"
    assert status(tmp_path)["state"] == "failed"
    assert "ended without a message" in status(tmp_path)["error"]


@pytest.mark.slow
def test_many_ranks(start):
    ended = start(64, orders=[[3, 40, USR2, 0]])
    assert ended["codes"] == [140] * 64
    assert len(set(ended["steps"])) == 1
    assert ended["steps"][0] < 0


STRANGE = [  # what a scanner sends, and a rank without a key
    b"",
    b"\0\xff\n",
    b"[" * 100_000 + b"\n",
    b"x" * 3_000_000,
    b'{"kind": "stop_at", "step": 1, "signal": 12}\n',
    b'{"kind": "lost", "text": "", "code": 3}\n',
    b'{"kind": "identity", "rank": 1, "endpoint": {"host": "", "node": 0, "local_rank": 0}}\n',
]


def test_strangers_and_taken_ports(start, job):
    ports = range(10_000 + job * 8 % 20_000, 10_000 + job * 8 % 20_000 + 3)
    with socket.create_server(("", ports[0])) as mute, socket.create_server(("", ports[1])) as rude:
        done = threading.Event()

        def answer():
            rude.settimeout(0.2)
            while not done.is_set():
                with contextlib.suppress(OSError):
                    rude.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        def disturb():
            for line in itertools.cycle(STRANGE):
                if done.wait(0.02):
                    return
                with contextlib.suppress(OSError), socket.create_connection(("localhost", ports[2]), 1) as stranger:
                    stranger.sendall(line)

        threads = [threading.Thread(target=work) for work in (answer, disturb)]
        for thread in threads:
            thread.start()
        try:
            ended = start(3, job=job, steps=1500, constants={"HANDSHAKE": 0.5, "SILENCE": 20})
        finally:
            done.set()
            for thread in threads:
                thread.join()
        mute.accept()
    assert ended["codes"] == [0, 0, 0], ended
    assert ended["err"] == ["", "", ""]


def test_nothing_is_left_of_many_runs():
    for warm in range(12):
        if warm == 2:
            handlers = [signal.getsignal(number) for number in TIME_LIMIT_SIGNALS]
            open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            threads_before = threading.active_count()
        world = World(Topology.alone())
        world.start()
        os.kill(os.getpid(), USR2)
        while not world.stops_after_step():
            time.sleep(0.001)
        world.leave()
    wait_until(lambda: threading.active_count() <= threads_before)  # the last one that reads energy may still end
    assert len(os.listdir("/proc/self/fd")) <= open_before  # noqa: PTH208
    assert [signal.getsignal(number) for number in TIME_LIMIT_SIGNALS] == handlers


def test_the_last_signal_counts():
    world = World(Topology.alone())
    world.start()
    assert not world.stops_after_step()
    os.kill(os.getpid(), USR2)
    while not world.stops_after_step():
        time.sleep(0.001)
    error = world.stopped(2)
    world.leave()
    assert (str(error), error.exit_code) == (
        "SIGUSR2: stopped after step 2, with a checkpoint; the same command continues from it.",
        140,
    )
