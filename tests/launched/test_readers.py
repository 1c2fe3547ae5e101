"""Whatever ends a process of a job whose ranks read in processes: nothing is left, and a reader is named."""

import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import warm
from marks import marked
from paths import SUPPORT
from ranks import (
    CONTROLLERS,
    cold_command,
    command,
    fields,
    needs_horovod,
    needs_torch,
    parent,
    run,
    shared_memory,
    started,
    tagged,
    wait_for_step,
    wait_until,
)

from hvdtrain import processors

pytestmark = [pytest.mark.launched, needs_torch, needs_horovod, pytest.mark.timeout(900)]

PROGRAM = SUPPORT / "own_loaders.py"
GROUPS = Path("/sys/fs/cgroup/memory")


def words(pid):
    return " ".join(fields(pid, "cmdline"))


VICTIMS = {
    "rank": lambda ranks, _: ranks.members()[1],
    "launcher": lambda ranks, _: ranks.process.pid,
    "forkserver": lambda _, servers: next(pid for pid in servers if parent(pid) not in servers),
    "reader": lambda _, servers: next(pid for pid in servers if parent(pid) in servers),
}
READER = r"DataError \(rank [01] on \S+\): reader 0 of 1 \(process \d+\) ended "
ENDS = {
    "reader": READER + r"by SIGKILL at [\d,]+ MiB of memory: out of memory, or killed; take fewer workers",
    "forkserver": READER + r"with exit code 255 at [\d,]+ MiB of memory: the forkserver that starts it was killed",
    "rank": r"AbortedError \(rank 0 on \S+\): rank 1 on \S+ ended without a message: killed, out of memory, or ",
}


@pytest.mark.parametrize(
    ("launcher", "victim"),
    marked(
        itertools.product(("mpi", "gloo", "torchrun"), VICTIMS), fast={("mpi", "rank")}, only_ci={("mpi", "reader")}
    ),
)
def test_nothing_is_left_of_a_job_with_readers(launcher, victim, tmp_path):
    argv = ["linear", "--epochs", 100_000, "--log-every-steps", 1, "--workers", 1, "--output", tmp_path / "run"]
    argv += ["--engine", "ddp"] * (launcher not in CONTROLLERS)
    start = cold_command if victim == "launcher" else command  # below the warm server no rank finds its launcher
    with started(launcher, 2, start("torch", *argv)) as ranks:
        wait_for_step(ranks, tmp_path / "run", 12)
        pids = tagged(ranks.tag)
        shared = shared_memory(pids)
        assert any("/sem." in path for path in shared)
        os.kill(VICTIMS[victim](ranks, [pid for pid in pids if "forkserver" in words(pid)]), signal.SIGKILL)
        ended = ranks.wait()
    assert ended.code != 0
    assert ended.left == []
    wait_until(lambda: not any(map(os.path.exists, shared)))
    if victim in ENDS:
        assert any(re.match(ENDS[victim], line) for line in ended.lines), ended.err
        assert "Traceback" not in ended.err or launcher == "torchrun"  # whose own it is


@pytest.mark.only_ci
def test_own_loaders_end_with_their_rank(tmp_path):
    with started("alone", 1, warm.command("torch", PROGRAM, tmp_path)) as ranks:
        wait_until(lambda: len([*tmp_path.iterdir()]) == 4)
        readers = [int(file.name) for file in tmp_path.iterdir()]
        shared = shared_memory([*tagged(ranks.tag), *readers])
        ranks.process.kill()
        ended = ranks.wait()
        wait_until(lambda: not any(map(words, readers)))
    assert ended.left == []
    wait_until(lambda: not any(map(os.path.exists, shared)))


STARTS = """
import os, signal, threading
from multiprocessing import forkserver
import torch
from hvdtrain.ranks.stacks import lost_reader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __reduce__(self):
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()
        return list, ()

forkserver.ensure_running()
try:
    list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="forkserver"))
except EOFError as error:
    print(lost_reader(error, 0))
"""


def test_a_reader_that_cannot_be_started_is_named():
    ended = run("alone", 1, warm.command("torch", "-c", STARTS)).good()
    assert ended.out.startswith("a reader could not be started: the forkserver that starts it was killed; take fewer ")


@pytest.fixture
def limited(tmp_path):
    """A control group for processes that are ended where they need more than 2 GiB."""
    group = GROUPS / f"hvdtrain-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2 << 30))
    except OSError:
        pytest.skip("needs root, and control groups of version 1 at /sys/fs/cgroup/memory")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


GROWS = """
import os, sys
import hvdtrain.torch as ht
with ht.join() as world:
    world.mean(total=1, count=1)
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
    grown = []
    while world.mean(total=1, count=1):
        grown += [b"1" * (64 << 20)] * (world.rank == 1)
"""


def test_a_rank_without_memory_is_named_as_such(limited):
    ended = run("gloo", 2, warm.command("torch", "-c", GROWS, str(limited)), 120)
    assert ended.code != 0
    named = r"AbortedError \(rank 0 on \S+\): rank 1 on \S+ ended without a message: out of memory; "
    assert any(re.match(named, line) for line in ended.lines), ended.err


LOCAL, V1 = "memory.events.local", "memory.oom_control"
COUNTED = {  # this process's groups, the files of groups, the number
    "version 2": ("0::/a/b", {f"a/b/{LOCAL}": "oom 9\noom_kill 2\n", f"a/{LOCAL}": "oom_kill 5\n"}, 2),
    "before Linux 5.2": ("0::/a/b", {"a/b/memory.events": "oom 9\noom_kill 2\n"}, 2),
    "version 1": ("4:memory:/a/b\n0::/", {f"memory/a/b/{V1}": "under_oom 0\noom_kill 3\n"}, 3),
    "version 1, in a container": ("4:memory:/docker/1", {f"memory/{V1}": "under_oom 0\noom_kill 3\n"}, 3),
    "tasks of SLURM": ("0::/a/task_0", {f"a/task_{task}/{LOCAL}": f"oom_kill {task}\n" for task in range(3)}, 3),
    "unknown": ("4:memory:/a\n", {}, 0),
}


@pytest.mark.parametrize(("own", "files", "number"), COUNTED.values(), ids=COUNTED.keys())
def test_processes_ended_for_lack_of_memory_are_counted(own, files, number, tmp_path):
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processors.memory_kills(tmp_path) == number


LIMITED = {  # this process's groups, the files of groups, the bytes
    "version 2": ("0::/a/b", {"a/b/memory.max": "max\n", "a/memory.max": "7000\n"}, 7000),
    "version 1": ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "5000\n"}, 5000),
    "version 1, without a limit": ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, 8192),
    "none": ("0::/", {}, 8192),
}


@pytest.mark.parametrize(("own", "files", "size"), LIMITED.values(), ids=LIMITED.keys())
def test_memory_is_the_machines_or_what_a_control_group_grants(own, files, size, tmp_path):
    for name, text in {
        "proc/self/cgroup": own,
        "proc/meminfo": "MemTotal:              8 kB\nMemFree:               1 kB\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processors.memory(tmp_path) == size
