"""The shell in which horovodrun waits for mpirun: found above a rank, and seen to end."""

import os
import signal
import subprocess
import sys

import pytest

from hvdtrain.launch.ancestors import above, arguments_of, is_below_terminal_task, is_launcher_shell, is_runner

RANK = """
import sys
from hvdtrain.launch.ancestors import LauncherShell
shell = LauncherShell()
print(shell.take_end(), flush=True)
sys.stdin.readline()
print(shell.take_end(), shell.take_end(), flush=True)
"""


@pytest.mark.parametrize(("command", "found"), [("mpirun", "True False"), ("./mpirun", "False False")])
def test_the_end_of_the_shell_is_seen_once(command, found, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{sys.executable} -c '{RANK}'\n")
    mpirun.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["/bin/sh", "-c", f"{command} -np 1; true"], cwd=tmp_path, env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as shell:  # fmt: skip
        assert shell.stdout.readline() == "False\n"
        shell.send_signal(signal.SIGKILL)
        shell.wait()
        shell.stdin.write("\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == f"{found}\n"


UNREAD = """
import os, sys
from hvdtrain.launch.ancestors import discard_unread
sys.stdin.readline()
discard_unread()
print("lost", flush=True)
print("kept", file=sys.stderr, flush=True)
"""


def test_what_nobody_reads_is_discarded():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", UNREAD], text=True, stdin=pipe, stdout=pipe, stderr=pipe) as rank:
        rank.stdout.close()
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stderr.read() == "kept\n"
    assert rank.returncode == 0


def test_what_is_above_a_process():
    assert above(os.getpid())[:2] == [os.getpid(), os.getppid()]
    assert arguments_of(os.getpid())[0].rpartition("/")[2].startswith("python")
    assert above(2**22 + 1)[1:] == arguments_of(2**22 + 1) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/bin/sh", "-c", "mpirun -np 2 python", ""], True),
        (["sh", "-c", "nohup mpirun -np 2 python", ""], False),
        (["bash", "job.sh"], False),
        (["mpirun", "-np", "2"], False),
        ([], False),
    ],
)
def test_which_shell_it_is(arguments, expected):
    assert is_launcher_shell(arguments) == expected


@pytest.mark.parametrize(
    ("task", "environ", "expected"),
    [
        (["/usr/bin/bash"], {"SLURM_PTY_PORT": "1"}, True),
        (["-bash", "--login", "-i"], {"SLURM_PTY_PORT": "1"}, True),
        (["python"], {"SLURM_PTY_PORT": "1"}, True),
        (["bash"], {}, False),
        (["bash", "job.sh"], {"SLURM_PTY_PORT": "1"}, False),
        (["bash", "-lc", "python train.py"], {"SLURM_PTY_PORT": "1"}, False),
        (["python", "-mhvdtrain.torch"], {"SLURM_PTY_PORT": "1"}, False),
        ([], {"SLURM_PTY_PORT": "1"}, False),
    ],
)
def test_a_command_in_the_shell_of_task_0(task, environ, expected, tmp_path):
    if task:
        (tmp_path / "52").mkdir()
        (tmp_path / "52" / "cmdline").write_text("".join(f"{word}\0" for word in task))
    assert is_below_terminal_task({"SLURM_TASK_PID": "52", **environ}, tmp_path) == expected
    assert not is_below_terminal_task({"SLURM_PTY_PORT": "1", "SLURM_TASK_PID": "../x"}, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/usr/bin/python3", "/opt/bin/torchrun", "--nproc-per-node", "2"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["/usr/bin/python3", "/opt/bin/horovodrun", "--gloo", "-np", "2"], True),
        (["python", "train.py", "--launcher", "torchrun"], False),
    ],
)
def test_launchers_in_python_are_known(arguments, expected):
    assert is_runner(arguments) == expected
