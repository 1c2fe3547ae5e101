"""The program for a first hour on a GPU runs, on the CPU; killed, it leaves nothing behind."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import REPOSITORY
from ranks import clean_environ, needs_torch

pytestmark = [needs_torch, pytest.mark.launched]


PROGRAM = REPOSITORY / "tests" / "gpu" / "first_hour.py"


def begin(folder, *argv):
    # A folder of its own for a name that is in no other process's environment.
    environ = {**clean_environ(), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    command = [sys.executable, PROGRAM, *argv]
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def running(folder):
    """The processes that were started for this folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
        except OSError:
            continue
    return found


@pytest.mark.only_ci  # what it checks other tests show on the CPU
def test_every_check_passes_its_dry_run(tmp_path):
    with begin(tmp_path, "--dry-run") as process:
        output, _ = process.communicate()
    claims = [row.split(" | ") for row in output.splitlines() if row.startswith("| ") and " | no card" in row]
    assert [row for row in claims if row[1] != "pass"] == [], output
    assert len(claims) == len(program().CHECKS) and process.returncode == 0
    assert not running(tmp_path) and not list(tmp_path.glob("first-hour-*"))


def program():
    spec = importlib.util.spec_from_file_location("first_hour", PROGRAM)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_run(tmp_path):
    with begin(tmp_path) as process:
        output, _ = process.communicate()
    assert process.returncode == 0 and output.startswith("no GPU that PyTorch can use"), output


@pytest.mark.slow
def test_killed_it_leaves_no_process(tmp_path):
    with begin(tmp_path, "--dry-run", "--part", "3") as process:
        for line in process.stdout:
            if line.startswith("== two ranks on one card: Horovod"):
                break
        process.send_signal(signal.SIGKILL)
        process.stdout.read()  # until the last process that could write has ended
    while running(tmp_path):
        time.sleep(0.05)
