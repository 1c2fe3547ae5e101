"""What rank 0 shows: its first line, a line that is repainted at a terminal, lines now and then through a launcher."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from ranks import wait_until

from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.sharing import Totals
from hvdtrain.launch.display import greet
from hvdtrain.record.progress_line import Ahead, Estimate
from hvdtrain.record.reporter import Reporter, Training
from hvdtrain.terminal import SCREEN, Screen

TRAINS = """
import os, sys
from pathlib import Path
from hvdtrain.core.progress import UserSampling, Progress
from hvdtrain.core.sharing import Totals
from hvdtrain.record.reporter import Reporter
from hvdtrain.terminal import SCREEN
SCREEN.open("bar")
SCREEN.waiting("importing PyTorch")
os.read(0, 1)
with Reporter(Path(sys.argv[1]), None, 5, screen=SCREEN) as log:
    log.begin_epoch(Progress(5, 0, 50), UserSampling(10, 75_000, 1))
    log.stepped(Progress(6, 0, 60), UserSampling(10, 75_000, 1))
    log.stepped(Progress(7, 0, 70), UserSampling(10, 75_000, 1))
    log.steps(7, 1, Totals(30.0, 8.0), 0.1, 2.0)
    log.note("[not markup] 1/2 " + "and no line of its own for a long path " * 4)
    print("somebody else's words", file=sys.stderr)
    os.read(0, 1)
SCREEN.close()
print("the end")
"""


def at_terminal(command, *awaited, columns=100):
    """What it writes to a terminal. Once it has written what is awaited next, it reads the end of a file."""
    parent, child = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ) as process:
        os.close(child)
        written, left = b"", list(awaited)
        try:
            while part := os.read(parent, 65536):
                written += part
                if left and re.search(left[0], written):
                    os.write(parent, b"\x04")
                    del left[0]
        except OSError:  # Linux's end of a terminal
            pass
    os.close(parent)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_a_line_at_the_bottom_of_a_terminal(tmp_path):
    awaited = rb"[-/|\\] importing PyTorch \(\d+ s\)", rb"this step ([3-9]|\d\d+) s"  # it follows the clock
    out = at_terminal([sys.executable, "-c", TRAINS, str(tmp_path)], *awaited)
    assert re.search(r"7/7500 +0%  [\d hmins]+ left  [━─]{4,}  epoch 1  loss 3.7500  LR 0.1  4.0 img/s", out)
    assert f"INFO - [not markup] 1/2 {'and no line of its own for a long path ' * 4}\r\n" in out
    assert "somebody else's words\r\n" in out
    assert out.endswith("the end\r\n") and "\x1b[?25h" in out
    assert out.count("this step 2 s") <= 5  # two repaints a second, and one for each line above


class Clock:
    """In the place of the screen's module time."""

    now, looks = 0.0, 0

    def monotonic(self):
        self.looks += 1
        return self.now

    def wait_for_a_look(self):
        looks = self.looks
        wait_until(lambda: self.looks > looks + 2)


def test_lines_by_the_clock_where_nothing_else_is_printed(capsys, monkeypatch):
    clock, out = Clock(), []
    monkeypatch.setattr("hvdtrain.terminal.time", clock)
    screen = Screen()
    screen.open("lines")
    screen.waiting(lambda: "waiting for rank 1, 3 to come")
    screen.print("INFO - a line")
    clock.now = 2.9
    clock.wait_for_a_look()
    assert capsys.readouterr().out == "INFO - a line\n"
    clock.now = 3.0
    wait_until(lambda: out.append(capsys.readouterr().out) or any(out))
    clock.now = 5.9
    clock.wait_for_a_look()
    screen.close()
    clock.now = 9.0
    wait_until(lambda: all(thread.name != "screen" for thread in threading.enumerate()))
    assert "".join(out) + capsys.readouterr().out == "INFO - waiting for rank 1, 3 to come (3 s)\n"


def test_a_file_has_the_lines_alone(capsys, tmp_path):
    screen = Screen()
    with Reporter(tmp_path, None, 0, screen=screen) as log:
        screen.waiting("the first step")
        log.begin_epoch(Progress(), UserSampling(10, 100, 1))
        log.note("a line")
    assert capsys.readouterr().out == "INFO - a line\n"


@pytest.mark.parametrize(("display", "lines"), [("lines", 1), ("file", 1), ("bar", 0)])
def test_a_bar_takes_the_step_lines_place(display, lines, capsys, tmp_path):
    screen = Screen()
    screen.display = display
    with Reporter(tmp_path, None, 0, screen=screen) as log:
        log.steps(1, 1, Totals(30.0, 8.0), 0.1, 2.0)
    assert len(capsys.readouterr().out.splitlines()) == lines


def training(ahead, step=120):
    """A training that has made so many steps."""
    now = [0.0]
    shown = Training(Estimate(lambda: now[0]), epoch=6)
    shown.estimate.begin_epoch(step - 1)
    shown.estimate.expect(ahead)
    shown.logged(0.01234, 0.0453, 109.5)
    now[0] += 1
    shown.estimate.stepped(step)
    return shown, now


LONG = "1200/50000   2%  13 h 33 min left  epoch 6  loss 0.0123  LR 0.0453  109.5 img/s"
WIDTHS = {  # steps made, in all, columns: the bar's text
    "80 columns": (120, 220, 80, "120/220  55%  2 min left  ━━━━────  epoch 6  loss 0.0123  LR 0.0453  109.5 img/s"),
    "120 columns": (
        120,
        220,
        120,
        "120/220  55%  2 min left  ━━━━━━━━━━━━━━━━──────────────  epoch 6  loss 0.0123  LR 0.0453  109.5 img/s",
    ),
    "no room for a bar": (1200, 50000, 80, LONG),
    "no end": (120, None, 80, "step 120  epoch 6  loss 0.0123  LR 0.0453  109.5 img/s"),
}


@pytest.mark.parametrize(("step", "total", "columns", "text"), WIDTHS.values(), ids=WIDTHS)
def test_the_bar_takes_what_the_numbers_leave(step, total, columns, text):
    shown, _ = training(Ahead(total, 22, 22), step)
    assert shown.bar(columns) == text and len(text) <= columns


def test_what_takes_its_time_is_named():
    shown, now = training(Ahead(220, 2, 22))
    now[0] += 7
    start = "step 120/220 (55%), epoch 6, loss 0.0123, LR 0.0453, 109.5 img/s"
    assert shown.line() == f"{start}, this step 7 s, 99 s left"
    shown.estimate.stepped(121)  # the epoch's last
    now[0] += 9
    assert "validation 9 s" in shown.line()
    shown.is_ending = True
    assert "checkpoint 9 s" in shown.bar(80)


GREETINGS = {
    "a recipe": (["digits", "--epochs", "0"], {}, ["INFO - hvdtrain 0.1.0: digits with torch, 1 rank, alone"]),
    "a flag first": (["--epochs", "0", "digits"], {}, ["INFO - hvdtrain 0.1.0: torch, 1 rank, alone"]),
    "another rank": (["digits", "--epochs", "0"], {"RANK": "1", "LOCAL_RANK": "1"}, []),
    "control characters": (["a\x1b[2J"], {}, ["INFO - hvdtrain 0.1.0: a\\x1b[2J with torch, 1 rank, alone"]),
    "nothing": ([], {}, []),
}


@pytest.mark.parametrize(("arguments", "ranks", "lines"), GREETINGS.values(), ids=GREETINGS)
def test_the_first_line(arguments, ranks, lines, monkeypatch, capsys):
    launcher = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in ({**launcher, **ranks} if ranks else {}).items():
        monkeypatch.setenv(name, value)
    greet("torch", arguments)
    SCREEN.close()
    assert capsys.readouterr().out.splitlines() == lines
