"""Runs that a signal stops end in order, and the same command ends with the bits of an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from marks import marked
from paths import SUPPORT
from ranks import (
    FRAMEWORKS,
    LAUNCHERS,
    NEEDS,
    SESSION,
    SMALL,
    command,
    held,
    needs_signalled_horovodrun,
    needs_torch,
    started,
    stopped_at,
    tagged,
    train,
    wait_until,
)
from worlds import LINE, arrays, of_kind

pytestmark = pytest.mark.launched

CODES = {signal.SIGUSR2: 140, signal.SIGTERM: 143, signal.SIGHUP: 129}


def check_resumed(folder, whole, ended, framework, launcher, size, argv, steps=200):
    """The run stopped in order, and the same command ends with the bits of the undisturbed run in `whole`."""
    state = json.loads((folder / "status.json").read_text())
    assert state["state"] == "stopped"
    assert ended.left == []
    train(framework, launcher, size, *argv).good()
    assert arrays(folder) == arrays(whole)
    assert [line["step"] for line in of_kind("step", folder)] == list(range(1, steps + 1))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("number", marked(CODES, fast={signal.SIGTERM}))
@pytest.mark.parametrize("framework", FRAMEWORKS[:1])
def test_a_run_alone_stops_in_order(framework, number, train_here, tmp_path):
    train_here(framework, *LINE, "--output", tmp_path / "whole").good()
    argv = [*LINE, "--output", tmp_path / "stopped"]
    with started("alone", 1, command(framework, *argv), **held(7)) as ranks:
        ended = stopped_at(ranks, tmp_path / "stopped", 7, lambda: ranks.process.pid, number)
    assert ended.code == CODES[number]
    name = signal.Signals(number).name
    assert ended.lines[0].startswith(f"StoppedError: {name} (")
    assert ended.lines[1].startswith(f"StoppedError: {name}: stopped after step ")
    check_resumed(tmp_path / "stopped", tmp_path / "whole", ended, framework, "alone", 1, argv)


@pytest.mark.parametrize(("launcher", "ranks"), marked([("alone", 1), ("mpi", 2)], only_ci={"mpi"}))  # as alone
@needs_torch
def test_a_run_of_one_step_an_epoch_stops_in_order(launcher, ranks, tmp_path):
    argv = [*LINE, "--batch-size", "1000", "--output"]
    train("torch", launcher, ranks, *argv, tmp_path / "whole").good()
    folder = tmp_path / "stopped"
    with started(launcher, ranks, command("torch", *argv, folder), **held(7)) as launched:
        victim = (lambda: launched.members()[1]) if ranks > 1 else (lambda: launched.process.pid)
        ended = stopped_at(launched, folder, 7, victim, signal.SIGUSR2)
    assert ended.code == 140 or ranks > 1
    check_resumed(folder, tmp_path / "whole", ended, "torch", launcher, ranks, [*argv, folder], steps=20)


@pytest.mark.parametrize(
    ("framework", "launcher", "rank"),
    marked(
        [
            pytest.param(framework, *at, marks=[needed, pytest.mark.slow])
            for at in (("mpi", 1), ("gloo", 0))
            for framework, needed in NEEDS.items()
        ],
        only_ci={("torch", "gloo")},  # as a loop of one's own under horovodrun
    ),
)
def test_ranks_of_horovod_stop_in_order(framework, launcher, rank, world, tmp_path):
    folder = tmp_path / "stopped"
    argv = [*LINE, "--output", folder]
    with started(launcher, 2, command(framework, *argv), **held(7)) as ranks:
        ended = stopped_at(ranks, folder, 7, lambda: ranks.members()[rank], signal.SIGUSR2)
    assert ended.code != 0
    assert any("SIGUSR2: stopped after step" in line for line in ended.lines), ended.err
    whole = world("mpi-2", framework).folder / "line"
    check_resumed(folder, whole, ended, framework, launcher, 2, argv)


TERMINAL = """
import os, pty, sys
pty.spawn(sys.argv[1:], lambda end: os.read(end, 65536))
"""


def newest(folder):
    """The step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "launcher", marked(["alone", "gloo", pytest.param("mpi", marks=needs_signalled_horovodrun)], fast={"alone"})
)
@needs_torch
def test_a_run_whose_terminal_is_closed_stops_in_order(launcher, tmp_path):
    folder = tmp_path / "stopped"
    cold = [sys.executable, str(SMALL), "hvdtrain.torch", *LINE, "--output", str(folder)]  # below the launcher's shell
    launch = [*LAUNCHERS[launcher](2), *(cold if launcher == "mpi" else command("torch", *LINE, "--output", folder))]
    with started("alone", 1, [sys.executable, "-c", TERMINAL, *launch], **held(7)) as terminal:
        ended = stopped_at(terminal, folder, 7, lambda: terminal.process.pid, signal.SIGKILL)
    assert ended.left == []
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "stopped" and "stopped after step" in status["error"]
    assert newest(folder) == int(re.search(r"after step (\d+)", status["error"])[1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=needs_signalled_horovodrun)])
@needs_torch
def test_a_launcher_that_is_killed_is_the_cause(launcher, tmp_path):
    folder = tmp_path / "stopped"
    cold = [sys.executable, str(SMALL), "hvdtrain.torch", *LINE, "--output", str(folder)]  # below the launcher
    with started(launcher, 2, cold, **held(7)) as ranks:
        stopped_at(ranks, folder, 7, lambda: ranks.process.pid, signal.SIGKILL)
        wait_until(lambda: "after step" in json.loads((folder / "status.json").read_text()).get("error", ""))
    error = json.loads((folder / "status.json").read_text())["error"]
    assert error.startswith("SIGTERM (the launcher was ended by a signal): stopped after step ")
    assert newest(folder) == int(re.search(r"after step (\d+)", error)[1])


KILLED = """
import os, signal
from ranks import started, tagged, wait_until
with started("alone", 1, ["sh", "-c", "sleep 3600 & sleep 3600; true"]) as ranks:
    wait_until(lambda: len(tagged(ranks.tag)) == 3)
    print(ranks.tag, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_tests_that_are_killed():
    command = [sys.executable, "-c", KILLED]
    environ = {name: value for name, value in os.environ.items() if name != SESSION}  # a session of its own
    killed = subprocess.run(command, check=False, cwd=SUPPORT, stdout=subprocess.PIPE, text=True, env=environ)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: not tagged(killed.stdout.strip()))
