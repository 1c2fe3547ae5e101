"""The status line: at a terminal it moves by the clock, in a file there is nothing of it."""

import os
import pty
import re
import subprocess
import sys

from hvdtrain import terminal
from hvdtrain.terminal import Status

PROGRAM = """
import time
from hvdtrain.terminal import Status

with Status("measuring") as status:
    time.sleep(0.3)
    print("printed")
    status.print("[answer] of status")
    status.update("round 2 of 5")
    time.sleep(0.3)
"""


def at_terminal(stdout_too):
    """What the program writes to its stdout where that is a pipe, and to its terminal."""
    ours, theirs = pty.openpty()
    stdout = theirs if stdout_too else subprocess.PIPE
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=stdout, stderr=theirs, env=environ) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # the program has ended
            pass
        printed = process.stdout.read().decode() if process.stdout else ""
    os.close(ours)
    assert process.returncode == 0
    return printed, shown.decode()


def test_in_a_pipe_there_is_only_what_the_block_prints():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("printed\n[answer] of status\n", "")


def test_at_a_terminal_it_is_erased_at_last():
    _, shown = at_terminal(stdout_too=True)
    assert "measuring" in shown and "round 2 of 5" in shown and "0:00:00" in shown
    assert shown.index("printed") < shown.index("[answer] of status") < shown.rindex("round 2 of 5")
    assert shown.endswith("\x1b[2K")


def test_what_the_block_prints_into_a_file_is_not_at_the_terminal():
    printed, shown = at_terminal(stdout_too=False)
    assert printed == "printed\n[answer] of status\n"
    assert "measuring" in shown and "printed" not in shown and "answer" not in shown


def test_through_a_launcher_it_is_lines(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SILENCE", 0.1)
    monkeypatch.setattr(terminal, "LOOKS", 0.05)
    with Status("importing", as_lines=True) as status:
        status.update("round 2 of 5")
        seen = ""
        while not re.search(r"^round 2 of 5 \(\d+ s\)\n", seen, re.MULTILINE):
            seen += capsys.readouterr().err
    assert seen.splitlines()[0] in {"importing", "round 2 of 5"}


def test_without_rich_nothing_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert terminal._progress() is None
