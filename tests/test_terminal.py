"""What a person sees at a terminal: a command's status, rank 0's screen, and no traceback after Ctrl-C."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from paths import REPOSITORY
from ranks import needs_torch, started, wait_until

from hvdtrain import __version__, terminal
from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.launch.display import follow, greet
from hvdtrain.launch.topology import discover
from hvdtrain.record.progress_line import Ahead
from hvdtrain.record.reporter import Reporter, Training
from hvdtrain.terminal import SCREEN, Screen, Status

SHOWS_STATUS = """
import time
from hvdtrain.terminal import Status

with Status("measuring") as status:
    time.sleep(0.3)
    print("printed")
    status.print("[answer] of status")
    status.update("round 2 of 5")
    time.sleep(0.3)
"""


def at_terminal(program, *argv, awaited=(), columns=80, stdout=None):
    """What the program writes to its terminal. Once it has written what is awaited next, it reads the end of a file."""
    parent, child = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    command = [sys.executable, "-c", program, *map(str, argv)]
    with subprocess.Popen(command, stdin=child, stdout=stdout or child, stderr=child, env=environ) as process:
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


def test_in_a_pipe_there_is_only_what_the_block_prints():
    done = subprocess.run([sys.executable, "-c", SHOWS_STATUS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("printed\n[answer] of status\n", "")


def test_at_a_terminal_the_status_is_erased_at_last():
    shown = at_terminal(SHOWS_STATUS)
    assert "measuring" in shown and "round 2 of 5" in shown and re.search(r"[-/|\\\\] measuring", shown)
    assert shown.index("printed") < shown.index("[answer] of status") < shown.rindex("round 2 of 5")
    assert shown.endswith("\x1b[2K")


def test_what_the_block_prints_into_a_file_is_not_at_the_terminal(tmp_path):
    with (tmp_path / "out").open("w") as out:
        shown = at_terminal(SHOWS_STATUS, stdout=out)
    assert (tmp_path / "out").read_text() == "printed\n[answer] of status\n"
    assert "measuring" in shown and "printed" not in shown and "answer" not in shown


def test_through_a_launcher_the_status_is_lines(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SILENCE", 0.1)
    monkeypatch.setattr(terminal, "LOOKS", 0.05)
    with Status("importing", as_lines=True) as status:
        status.update("round 2 of 5")
        seen = ""
        while not re.search(r"^round 2 of 5 \(\d+ s\)\n", seen, re.MULTILINE):
            seen += capsys.readouterr().err
    assert seen.splitlines()[0] in {"importing", "round 2 of 5"}


def test_without_rich_no_status_is_shown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    screen = Screen(on_stderr=True)
    screen.open("bar")
    screen.waiting("measuring")
    screen.print("a line")
    screen.close()
    assert capsys.readouterr() == ("a line\n", "")


TRAINS = """
import os, sys
from pathlib import Path
from hvdtrain.core.progress import UserSampling, Progress
from hvdtrain.core.metrics import Totals
from hvdtrain.record.reporter import Reporter
from hvdtrain.terminal import SCREEN
SCREEN.open("bar", 100)
SCREEN.waiting("importing PyTorch")
os.read(0, 1)
with Reporter(Path(sys.argv[1]), None, 5, screen=SCREEN) as log:
    log.begin_epoch(Progress(5, 0, 50), UserSampling(10, 75_000, 1))
    log.stepped(Progress(6, 0, 60), UserSampling(10, 75_000, 1))
    log.stepped(Progress(7, 0, 70), UserSampling(10, 75_000, 1))
    log.steps(7, 1, Totals(30.0, 8.0), 0.1, 2.0)
    log.note("[not markup] 1/2 " + "a text of more columns than the terminal has, " * 3)
    print("somebody else's words", file=sys.stderr)
    os.read(0, 1)
SCREEN.close()
print("the end")
"""


def test_a_line_at_the_bottom_of_a_terminal(tmp_path):
    awaited = rb"[-/|\\] importing PyTorch \(\d+ s\)", rb"this step ([3-9]|\d\d+) s"  # it follows the clock
    out = at_terminal(TRAINS, tmp_path, awaited=awaited, columns=100)
    bar = r"[-/|\\] 7/7500 +0%  [\d hmins]+ left  [━─]{4,}  epoch 1  step 7: loss 3.7500  4.0 img/s  LR 0.1"
    assert re.search(bar, out)
    assert (
        "INFO - [not markup] 1/2 a text of more columns than the terminal has, a text of more columns than\r\n" in out
    )
    assert "INFO -   the terminal has, a text of" in out
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


def test_the_lines_of_a_long_run_are_further_apart(capsys, monkeypatch):
    clock, out = Clock(), []
    monkeypatch.setattr("hvdtrain.terminal.time", clock)
    screen = Screen()
    screen.open("lines")
    screen.waiting("training")
    clock.now = 3600.0
    screen.print("INFO - a line")
    clock.now += 29.9
    clock.wait_for_a_look()
    assert capsys.readouterr().out == "INFO - a line\n"
    clock.now += 0.1
    wait_until(lambda: out.append(capsys.readouterr().out) or any(out))
    screen.close()
    assert "".join(out) == "INFO - training (3630 s)\n"


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [("bar", "0", "shared"), ("lines", "0", "lines"), ("file", "0", "file"), ("bar", "1", "file")],
)
def test_a_program_has_the_last_line_of_its_terminal(kind, rank, expected, monkeypatch, capsys):
    monkeypatch.setattr("hvdtrain.launch.display.screen", lambda launcher: (kind, None))
    launcher = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    follow(discover({**launcher, "RANK": rank, "LOCAL_RANK": rank}), is_program=True)
    shown = SCREEN.display
    print("7/24 of the program's own bar", end="")
    SCREEN.print("INFO - a line")
    SCREEN.close()
    assert shown == expected
    erased = "\r\x1b[K" if shown == "shared" else ""
    first = "" if rank == "1" else f"INFO - hvdtrain {__version__}: {Path(sys.argv[0]).name}, 2 ranks, torchrun\n"
    assert capsys.readouterr().out == f"{first}7/24 of the program's own bar{erased}INFO - a line\n"


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


@pytest.mark.parametrize(("columns", "left_out"), [(None, ()), (80, ("LR",)), (65, ("LR", "Time left")), (20, ())])
def test_no_log_line_wraps(columns, left_out, capsys, tmp_path):
    with Reporter(tmp_path, None, 0, screen=Screen(columns)) as log:
        log.begin_epoch(Progress(), UserSampling(10, 2000, 1))
        log.stepped(Progress(5, 0, 50), UserSampling(10, 2000, 1))
        log.steps(5, 1, Totals(30.0, 8.0), 0.01136, 2.0)
        log.note(
            "LR          0.05 = 0.05 x 64/64 (rule linear); warm-up over 1 of 10 epochs, then cosine to 0 at epoch 10"
        )
    first, *more = capsys.readouterr().out.splitlines()
    assert all(len(line) <= (columns or 120) or columns == 20 for line in (first, *more))
    assert all(line.startswith("INFO - ") for line in more)
    if columns != 20:
        assert first.startswith("INFO - Epoch: 1, Step: 5/200, Loss: 3.7500") and first.endswith("Avg img/sec: 4.0")
        assert [name for name in ("LR", "Time left") if name not in first] == list(left_out)
    if columns == 65:
        assert more == [
            "INFO - LR          0.05 = 0.05 x 64/64 (rule linear); warm-up",
            "INFO -             over 1 of 10 epochs, then cosine to 0 at epoch",
            "INFO -             10",
        ]


def test_a_name_stays_beside_its_number():
    line = "INFO - Epoch: 1, train_loss: 1.5803, accuracy: 0.63281, loss: 1.5803"
    assert terminal.folded(line, 65) == [line[:55], f"INFO -   {line[56:]}"]


class Bar:
    """In the place of tqdm's class, of which a progress bar is shown."""

    _instances = (object(),)

    @staticmethod
    def write(text):
        print(f"above the bar: {text}")


def test_lines_come_above_the_progress_bars_of_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    Screen().print("INFO - a line")
    assert capsys.readouterr().out == "above the bar: INFO - a line\n"


def training(ahead, step=120):
    """A training that has made so many steps."""
    now = [0.0]
    shown = Training(lambda: now[0])
    shown.epoch = 6
    shown.begin_epoch(step - 1)
    shown.expect(ahead)
    shown.logged(step - 1, 0.01234, 0.0453, "109.5 img/s")
    now[0] += 1
    shown.stepped(step)
    return shown, now


NUMBERS = "epoch 6  step 119: loss 0.0123  109.5 img/s"
LONG = "1200/50000   2%  13 h 33 min left  ──────────  epoch 6  step 1199: loss 0.0123"
WIDTHS = {  # steps made, in all, columns: the bar's text
    "80 columns": (120, 220, 80, f"120/220  55%  2 min left  ━━━────  {NUMBERS}"),
    "120 columns": (120, 220, 120, f"120/220  55%  2 min left  {'━' * 16}{'─' * 14}  {NUMBERS}  LR 0.0453"),
    "long numbers": (1200, 50000, 80, LONG),
    "no end": (120, None, 80, f"step 120  {NUMBERS}  LR 0.0453"),
}


@pytest.mark.parametrize(("step", "total", "columns", "text"), WIDTHS.values(), ids=WIDTHS)
def test_the_bar_takes_what_the_numbers_leave(step, total, columns, text):
    shown, _ = training(Ahead(total, 22, 22), step)
    assert re.fullmatch(r"[-/|\\] ", shown.bar(columns)[:2])
    assert shown.bar(columns)[2:] == text and len(text) + 2 <= columns


def test_what_takes_its_time_is_named():
    shown, now = training(Ahead(220, 2, 22))
    now[0] += 7
    assert shown.line() == "Epoch: 6, Step: 120/220, Time left: 99 s, this step 7 s"  # and no loss of another step
    shown.stepped(121)  # the epoch's last
    now[0] += 9
    assert "validation 9 s" in shown.line()
    shown.is_ending = True
    assert "checkpoint 9 s" in shown.bar(80)


COUNTS = {"epoch": "epochs", "class": "classes", "micro-batch": "micro-batches", "launch": "launches", "GPU": "GPUs"}


@pytest.mark.parametrize(("thing", "things"), COUNTS.items())
def test_one_is_not_several(thing, things):
    assert [terminal.counted(n, thing) for n in (0, 1, 2000)] == [f"0 {things}", f"1 {thing}", f"2,000 {things}"]


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
    ) as program:  # fmt: skip
        os.close(writes)
        assert os.read(reads, 5) == b"begun"
        os.close(reads)
        program.communicate(b"\n")
    assert program.returncode == 0 and (tmp_path / "done").exists()
