"""Ctrl-C, once and twice, at any moment of a run: no traceback."""

import contextlib
import signal
import sys
import time

import pytest
from paths import REPOSITORY
from ranks import needs_torch, started, wait_until

TOOLS = [["hvdtrain", "plan", "linear", "--ranks", "2"], ["hvdtrain.torch", "linear", "--epochs", "1000000"]]

LISTENS = """
import pathlib
from hvdtrain import interrupts

def listen(before=interrupts.listen):
    before()
    pathlib.Path("listens").touch()

interrupts.listen = listen
"""


@needs_torch
@pytest.mark.parametrize("command", TOOLS, ids=["tool", "training"])
@pytest.mark.parametrize("seconds", [0.5, 1, 4])
def test_ctrl_c_twice_at_any_moment(command, seconds, tmp_path):
    output = ["--output", str(tmp_path / "run")] if command[0] == "hvdtrain.torch" else []
    (tmp_path / "sitecustomize.py").write_text(LISTENS)
    command = [sys.executable, "-m", *command, *output]
    with started("alone", 1, command, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{REPOSITORY}") as launched:
        wait_until((tmp_path / "listens").exists)
        time.sleep(seconds)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                launched.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        ended = launched.wait()
    assert ended.code in {0, 130, -signal.SIGINT}  # the last where Python has ended already
    assert ended.err in {"", "interrupted\n", "interrupted; the same command resumes from the last checkpoint\n"}
