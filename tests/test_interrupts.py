"""Ctrl-C, once and twice, at any moment of a run: no traceback."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from paths import REPOSITORY
from ranks import needs_torch, started, wait_until

TOOLS = [["hvdtrain", "plan", "linear", "--ranks", "2"], ["hvdtrain.torch", "linear", "--epochs", "1000000"]]

LISTENS = """
import pathlib
from hvdtrain import terminal

def listen(before=terminal.listen):
    before()
    pathlib.Path("listens").touch()

terminal.listen = listen
"""


@needs_torch
@pytest.mark.parametrize(
    ("command", "seconds"),
    [(TOOLS[0], 0.5), *((TOOLS[1], seconds) for seconds in (0.5, 1, 4))],
    ids=["tool", "importing hvdtrain", "importing PyTorch", "training"],
)
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


WRITES = """
import signal, sys
from hvdtrain import terminal
terminal.listen()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("begun", flush=True)
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr) * 2:
    print("more", file=stream, flush=True)
open("done", "w")
"""


@pytest.mark.parametrize("end", [os.pipe, pty.openpty], ids=["| head", "a closed terminal"])
def test_whoever_read_the_output_may_leave(end, tmp_path):
    reads, writes = end()
    command = [sys.executable, "-c", WRITES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=writes, stderr=writes, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as program:  # fmt: skip
        os.close(writes)
        assert os.read(reads, 5) == b"begun"
        os.close(reads)
        program.communicate(b"\n")
    assert program.returncode == 0 and (tmp_path / "done").exists()
