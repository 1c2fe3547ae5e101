"""`hvdtrain watch`: what is seen of a run folder, whatever it holds, and of a job."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
import warm

from hvdtrain.core.wording import duration
from hvdtrain.errors import RecipeError
from hvdtrain.record.folder import hold
from hvdtrain.record.reader import CHUNK, read, recorded_state
from hvdtrain.tools import watch
from hvdtrain.tools.report.assemble import run_report
from hvdtrain.tools.watch.frame import GONE, Frame, Job, frame, rows, seconds_left

NOW = 1_795_000_000.0
PLAN = {"framework": "torch", "size": 4, "global_batch": 64, "steps_per_epoch": 22, "total_steps": 220}
PLAN |= {"schedule": {"epochs": 10}}
LAUNCH = {"kind": "launch", "time": NOW - 100, "launcher": "srun", "engine": "horovod", "framework": "torch"}
LAUNCH |= {"ranks": 4, "job": None}
WORLD = {"kind": "world", "clock": 1.5, "hosts": ["nid001", "nid001", "nid002", "nid002"]}
RANKS = {"kind": "ranks", "step": 40, "reading": [0.01, None, 0.01, 0.01], "computing": [0.1, 0.1, 0.1, 0.16]}
METRICS = [
    {"kind": "step", "step": 22, "epoch": 1, "loss": 1.5, "lr": 0.05, "examples_per_second": 32.0, "time": NOW - 60},
    {"kind": "epoch", "step": 22, "epoch": 1, "valid_loss": 1.25, "valid_acc1": 0.75, "valid_examples": 3,
     "time": NOW - 50},
    {"kind": "step", "step": 40, "epoch": 2, "loss": 0.5, "lr": 0.05, "examples_per_second": 64.0, "time": NOW - 20},
    {"kind": "step", "step": 42, "epoch": 2, "loss": None, "lr": 0.05, "examples_per_second": 64.0, "time": NOW - 10},
]  # fmt: skip
EVENTS = [
    {"kind": "event", "event": "checkpoint", "clock": 50.0, "text": "checkpoint of step 22"},
    {"kind": "event", "event": "slow", "clock": 85.0, "text": "rank 3 on nid002 is slow in computing"},
]
DRAWN = {
    "run": "digits in {folder}",
    "state": "running, last record 10 s ago",
    "ranks": "4 on nid001, nid002, srun, horovod, torch",
    "progress": "step 42 of 220  19%  #####...................  4 min left",
    "training": "epoch 2 of 10  loss not finite  LR 0.05  64.0 examples/s",
    "validation": "epoch 1: acc1 0.75, loss 1.25",
    "slowest": "rank 3 on nid002: 170 ms of its own a step; the median rank 110 ms",
}


FAILED = {"state": "failed", "time": NOW, "error": "the loss is nan"}


def write(folder, name, content):
    """A JSON file, or one of JSON lines."""
    lines = [json.dumps(one) for one in content] if isinstance(content, list) else [json.dumps(content)]
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path):
    """The folder of a running run."""
    folder = tmp_path / "runs" / "digits" / "77"
    (folder / "checkpoints" / "step-00000022").mkdir(parents=True)
    write(folder, "plan.json", PLAN)
    write(folder, "status.json", {"state": "running", "time": NOW - 50, "step": 22})
    write(folder, "metrics.jsonl", METRICS)
    write(folder, "launches.jsonl", [LAUNCH, WORLD, RANKS, *EVENTS])
    (folder / "recipe.yaml").write_text("# digits, resolved\ndefault:\n")
    return folder


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Ten seconds after the last record."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def drawn(folder, job=None):
    """The rows that are shown, by label."""
    return {label: text for label, text in rows(frame(read(folder, recent=True), job, NOW), NOW) if text}


def test_what_is_seen_of_a_running_run(run):
    rows = drawn(run)
    assert {label: rows[label] for label in DRAWN} == {k: v.format(folder=run) for k, v in DRAWN.items()}
    when = time.strftime("%H:%M:%S", time.localtime(NOW - 15))
    assert rows["events"] == (f"{when}  slow  rank 3 on nid002 is slow in computing")
    assert rows["checkpoint"].startswith("of step 22, ") and "missing" not in rows
    # 178 steps of a second, nine validations of the ten seconds that the first took
    assert seconds_left(read(run, recent=True)) == 178 + 9 * 10


def test_the_whole_width_of_80_columns_is_enough(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert watch.main([str(run), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith("progress     step 42 of 220") for line in lines)


ENDS = {  # status, exit code, text
    "finished": ({"state": "finished", "time": NOW}, 0, "finished"),
    "ended early": ({"state": "finished", "time": NOW, "ended": "no better"}, 0, "ended early, no better"),
    "stopped": ({"state": "stopped", "time": NOW, "error": "SIGTERM at step 9"}, 0, "SIGTERM at step 9"),
    "left": ({"state": "left", "time": NOW, "error": "exited after 9 of 220 steps"}, 0, "exited after 9 of 220 steps"),
    "failed": ({"state": "failed", "time": NOW, "error": "rank 1 \x1b[31mvm\nended"}, 1, "rank 1 \\x1b[31mvm ended"),
}  # fmt: skip


@pytest.mark.parametrize(("status", "code", "text"), ENDS.values(), ids=ENDS)
def test_the_exit_code_of_a_run_that_has_ended(status, code, text, run, capsys):
    write(run, "status.json", status)
    assert watch.main([str(run)]) == code  # a pipe: once
    assert text in capsys.readouterr().out
    seen = read(run, recent=True)
    assert frame(seen, None, NOW).is_over and not frame(seen, Job("77", "PENDING"), NOW).is_over


LIVE = {  # what happens at the terminal, the exit code, what is seen then
    "the run fails": (lambda run, _: write(run, "status.json", FAILED), 1, b"failed"),
    "Ctrl-C": (lambda run, process: process.send_signal(signal.SIGINT), 0, b"running"),
    "it is silent": (lambda run, _: write(run, "status.json", {"state": "running", "time": NOW}), 1, b"killed"),
}


@pytest.mark.parametrize(("happens", "code", "seen"), LIVE.values(), ids=LIVE)
def test_a_live_display_ends(happens, code, seen, run, monkeypatch):
    monkeypatch.undo()
    write(run, "status.json", {"state": "running", "time": time.time()})
    parent, child = pty.openpty()
    command = warm.command("hvdtrain", "-m", "hvdtrain", "watch", str(run))
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ) as process:
        os.close(child)
        written = b""
        while b"last record" not in written:
            written += os.read(parent, 65536)
        happens(run, process)
        try:
            while part := os.read(parent, 65536):
                written += part
        except OSError:  # Linux's end of a terminal
            pass
    os.close(parent)
    assert process.returncode == code
    assert b"running, last record" in written and seen in written
    assert b"Traceback" not in written and b"interrupted" not in written


FILES = ("status.json", "metrics.jsonl", "plan.json", "launches.jsonl", "recipe.yaml")
ODD = {
    "an own program's, torn": ({"plan.json": None, "recipe.yaml": None, "run.json": '{"model"'}, "run.json cannot be"),
    "a plan of zeros": (
        {"plan.json": '{"total_steps": 0, "global_batch": 0, "steps_per_epoch": 0, "schedule": 3}'},
        "",
    ),
    "ranks that are none": ({"launches.jsonl": '{"kind": "ranks", "computing": [1, null, "x"], "of": [9]}\n'}, ""),
    "hosts that are none": ({"launches.jsonl": '{"kind": "launch", "hosts": [3, {}], "ranks": 2, "time": []}\n'}, ""),
    "one line": ({"metrics.jsonl": "x" * (1 << 20)}, ""),
}


@pytest.mark.parametrize(("content", "missing"), ODD.values(), ids=ODD)
def test_an_odd_folder_is_no_traceback(content, missing, run, capsys):
    """Other damages: test_damaged.py of the report, which reads as `watch` does."""
    for name, text in content.items():
        if text is None:
            (run / name).unlink()
        else:
            (run / name).write_text(text)
    assert watch.main([str(run), "--once"]) == 0
    assert missing in capsys.readouterr().out


def test_the_end_of_a_large_file_is_read_alone(run):
    with (run / "metrics.jsonl").open("w") as file:
        file.truncate(file.seek(1 << 40))  # more than fits into memory
        file.write('\n{"kind": "step", "step": 1}\n' * 100_000 + json.dumps(METRICS[-1]) + "\n")
    assert read(run, recent=True).recent_of("step")[-1] == METRICS[-1]
    assert drawn(run)["progress"].startswith("step 42 of 220")


QUEUED = "PENDING|Priority|2026-11-25T03:00:00|{}|1:00:00||/home/me\n"
RUNNING = "RUNNING|None|2026-11-25T03:00:00|2026-11-25T04:00:00|3:20:00|nid[001-002]|/home/me\n"
SLURM, PENDING = "slurm_load_jobs error: ", "pending, reason Priority, submitted {} ago"
SQUEUE = {  # exit code, squeue's output, its errors: the row
    "queued": (0, QUEUED.format("2030-01-01T00:00:00"), "", f"{PENDING}, expected to start in "),
    "queued, no time": (0, QUEUED.format("N/A"), "", f"{PENDING}, start not known yet"),
    "running": (0, RUNNING, "", "running, 3:20:00 left of its time limit, on nid[001-002]"),
    "gone": (1, "", f"{SLURM}Invalid job id specified\n", "ended"),
    "just ended": (0, "", "", "ended"),
    "no answer": (1, "", f"{SLURM}Unable to contact slurm controller\n", "SLURM has not answered yet"),
}


@pytest.mark.parametrize(("code", "out", "err", "row"), SQUEUE.values(), ids=SQUEUE)
def test_the_job_as_squeue_has_it(code, out, err, row, run, squeue):
    squeue(out, err, code)
    job = Job.requested("77")
    since = duration(max(0.0, NOW - datetime(2026, 11, 25, 3).timestamp()), rough=True)
    assert drawn(run, job)["job"].startswith(f"77: {row.format(since)}")
    assert job.is_waiting == ("pending" in row) and job.is_over == ("ended" in row)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """squeue(text): what the command squeue prints from now on, and how it ends."""
    script = tmp_path / "bin" / "squeue"
    script.parent.mkdir()
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def prints(text, errors="", code=0):
        fields = f"""case "$*" in *=%T) printf '%s' '{text.partition("|")[0]}';; *) printf '%s' '{text}';; esac"""
        script.write_text(f"#!/bin/sh\n{fields}\nprintf '%s' '{errors}' >&2\nexit {code}\n")
        script.chmod(0o755)

    return prints


def test_a_jobs_number_finds_its_folder(run, squeue, tmp_path, monkeypatch, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    squeue(f"RUNNING|None|N/A|N/A|1:00|nid001|{tmp_path}")
    assert watch.main(["77"]) == 0
    assert "step 42 of 220" in capsys.readouterr().out
    squeue("PENDING|Priority|N/A|N/A|1:00||/nowhere")
    assert watch.main(["77_3", "--once"]) == 0
    assert "77_3: pending" in capsys.readouterr().out


def test_the_newest_run_is_the_one_that_is_left_out(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = tmp_path / "runs" / "linear" / "1"
    older.mkdir(parents=True)
    write(older, "status.json", {"state": "finished"})
    os.utime(older / "status.json", (1, 1))
    (tmp_path / "runs" / "digits" / "notes").mkdir()
    assert watch.find("").folder == Path("runs/digits/77")
    assert watch.of_job("77", tmp_path) == run and watch.of_job("78", tmp_path) is None


HERE, THERE = socket.gethostname(), "nid001"
KILLED = {  # rank 0's host, whether the folder is held, seconds since the last record, squeue's answer: the state
    "just now": (HERE, False, 25, "", "running"),
    "its processes are gone": (HERE, False, 60, "", "killed"),
    "they are here, but the job is over": (HERE, True, 7200, "", "running"),
    "they are gone, though the job runs": (HERE, False, 60, RUNNING, "killed"),
    "elsewhere, and its job runs": (THERE, False, 7200, RUNNING, "running"),
    "elsewhere, and its job is over": (THERE, False, 60, "", "killed"),
    "elsewhere, and SLURM says nothing": (THERE, False, 60, None, "running"),
    "elsewhere, and silent for long": (THERE, False, 7200, None, "killed"),
    "nobody knows where": ("", False, 60, None, "running"),
}


@pytest.mark.parametrize(("host", "held", "silent", "answer", "state"), KILLED.values(), ids=KILLED)
def test_every_tool_says_the_same_of_a_run_that_may_be_killed(
    host, held, silent, answer, state, run, squeue, monkeypatch
):
    if answer is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        squeue(answer)
    write(run, "status.json", {"state": "running", "time": NOW - silent})
    (run / "metrics.jsonl").unlink()
    launch = {**LAUNCH, "time": NOW - silent - 2, "job": {"id": "77"}}
    world = {"kind": "world", "clock": 1.0, "time": NOW - silent - 1}
    before = {**world, "hosts": [HERE], "time": 1.0}  # where an earlier launch was says nothing of this one
    write(run, "launches.jsonl", [before, launch, *[{**world, "hosts": [host]}] * bool(host)])
    lock = hold(run).lock
    if not held:
        lock.close()
    seen = watch.find(str(run)).frame(waits=True)
    assert (seen.state, seen.is_bad, run_report(run).state) == (state, state == "killed", state)
    assert ("ended without a message" in dict(rows(seen, NOW))["state"]) == (state == "killed")
    lock.close()


HOLDER = """
import os, sys
from pathlib import Path
from hvdtrain.record.folder import hold
folder = hold(Path(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_run_whose_process_is_killed_is_killed_for_every_tool(run):
    write(run, "status.json", {"state": "running", "time": NOW - 60})
    write(run, "launches.jsonl", [{**LAUNCH, "time": NOW - 70}, {**WORLD, "hosts": [HERE]}])
    (run / "metrics.jsonl").unlink()
    command = warm.command("hvdtrain", "-c", HOLDER, str(run))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        holder = int(process.stdout.readline())
        assert watch.find(str(run)).frame().state == run_report(run).state == "running"
        os.kill(holder, signal.SIGKILL)
    assert watch.find(str(run)).frame().state == run_report(run).state == "killed"
    assert recorded_state(run) == "running"


STATES = {  # status.json's state, that of the end record, seconds since the last sign of life: how the run stands
    ("finished", "finished", 0): "finished",
    ("running", "finished", 0): "finished",  # the status is not written yet
    ("failed", None, 0): "failed",
    (None, "stopped", 0): "stopped",
    (None, None, 5): "running",
    ("running", None, 60): "running",
    ("running", None, 3600): "killed",
    ("dancing", None, 3600): "killed",
}


@pytest.mark.parametrize(("found", "state"), STATES.items(), ids=str)
def test_states(found, state, run):
    status, end, silent = found
    for name in ("metrics.jsonl", "status.json"):
        (run / name).unlink()
    began = NOW - silent
    ends = [{"kind": "end", "clock": 0.0, "state": end}] if end else []
    write(run, "launches.jsonl", [{**LAUNCH, "time": began}, *ends])
    if status:
        write(run, "status.json", {"state": status, "time": began})
    assert watch.find(str(run)).frame().state == run_report(run).state == state


REFUSED = {
    "no such folder": ("runs/none", "RUN must be a run folder or a job's number, got 'runs/none'"),
    "a folder that is no run": (".", "'.' is no run folder"),
    "an unknown job": ("123", "job 123 has no folder in runs/ here, and no SLURM answers"),
    "no runs": ("", "there is no run in runs/ here"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_watched(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RecipeError, match=f"^{message}"):
        watch.main([given] if given else [])


def test_a_folder_of_runs_names_the_newest(tmp_path):
    for age, name in enumerate(("b", "a", "c")):
        (run := tmp_path / "digits" / name).mkdir(parents=True)
        write(run, "status.json", {"state": "finished", "time": NOW})
        os.utime(run / "status.json", (NOW - age, NOW - age))
    for folder in (tmp_path, tmp_path / "digits"):
        with pytest.raises(RecipeError, match=rf"The newest run in it: python -m hvdtrain watch {tmp_path}/digits/b$"):
            watch.find(str(folder))


def bytes_read():
    """By this process so far."""
    return int(re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("name", FILES)
def test_of_a_sparse_terabyte_a_part_is_read(name, run):
    with (run / name).open("ab") as file:
        file.truncate(1 << 40)
    before = bytes_read()
    assert watch.find(str(run)).frame()
    assert bytes_read() - before < 256e6


@pytest.mark.parametrize("before", [0, 10, CHUNK - 30, CHUNK - 10, CHUNK, 3 * CHUNK])
def test_the_launch_is_found_however_much_was_recorded_since(tmp_path, before):
    path, filler = tmp_path / "launches.jsonl", '{"kind":"ranks","of":[%s]}\n'
    launches = "".join(f'{{"kind":"launch","ranks":{ranks}}}\n' for ranks in (1, 2))
    path.write_text(launches + filler % ("1," * (before // 2)))
    assert read(tmp_path, recent=True).launch.ranks == 2


JOBS = {  # the run's state, the job's: whether nothing more will come
    ("running", "RUNNING"): False, ("running", GONE): False, ("failed", "RUNNING"): False,
    ("stopped", "COMPLETING"): False, ("failed", GONE): True, ("finished", "RUNNING"): True,
}  # fmt: skip


@pytest.mark.parametrize("states", JOBS, ids="-".join)
def test_a_job_that_runs_may_start_the_training_again(states):
    seen = Frame(state=states[0], job=Job(number="7", state=states[1]))
    assert seen.is_over is JOBS[states]
