"""Ctrl-C, once and twice, at any moment of a run: no traceback."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from ranks import clean_environ, needs_torch

TOOLS = [["hvdtrain", "plan", "linear", "--ranks", "2"], ["hvdtrain.torch", "linear", "--epochs", "1000000"]]


@needs_torch
@pytest.mark.parametrize("command", TOOLS, ids=["tool", "training"])
@pytest.mark.parametrize("seconds", [0.5, 1, 4])
def test_ctrl_c_twice_at_any_moment(command, seconds, tmp_path):
    output = ["--output", str(tmp_path / "run")] if command[0] == "hvdtrain.torch" else []
    with subprocess.Popen(
        [sys.executable, "-m", *command, *output],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
        cwd=tmp_path,
    ) as process:
        time.sleep(seconds)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        _, printed = process.communicate(timeout=30)
    assert process.returncode in {0, 130, -signal.SIGINT}  # the last where Python has ended already
    assert printed in {"", "interrupted\n", "interrupted; the same command resumes from the last checkpoint\n"}
