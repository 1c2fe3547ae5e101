"""supervise with stand-ins for srun and scontrol: what is started, on which nodes, and how it ends."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import warm
from users import NOBODY, needs_root

from hvdtrain.errors import JobError
from hvdtrain.record.handover import Report
from hvdtrain.tools.supervise import _read_history
from hvdtrain.tools.supervise.decision import Ended, Lost
from hvdtrain.tools.supervise.job import SIGNALS, Job, Signals, beside_others, check_step, placed, step_of_this_job

PLACED = {  # srun's words, nodes, tasks a node, without: the words then
    "nothing given": ("srun python x.py -n 3", 3, 1, (), "srun --nodes=3 --ntasks=3 python x.py -n 3"),
    "options stay": (
        "srun --kill-on-bad-exit=1 --mpi=pmix python x.py",
        2,
        4,
        ("c",),
        "srun --nodes=2 --ntasks=8 --exclude=c --kill-on-bad-exit=1 --mpi=pmix python x.py",
    ),
    "counts are replaced": (
        "srun -N 3 --ntasks 6 -n6 --nodes=3 -c 2 python x.py",
        2,
        2,
        ("b", "c"),
        "srun --nodes=2 --ntasks=4 --exclude=b,c -c 2 python x.py",
    ),
    "what was excluded stays so": ("srun -x a python", 2, 1, ("c",), "srun --nodes=2 --ntasks=2 --exclude=a,c python"),
    "unknown tasks": ("srun python", 2, None, (), "srun --nodes=2 python"),
    "a program with srun's letters": ("srun bash -c -x", 1, 1, (), "srun --nodes=1 --ntasks=1 bash -c -x"),
}


@pytest.mark.parametrize(("words", "nodes", "tasks", "without", "then"), PLACED.values(), ids=PLACED)
def test_sruns_words_for_other_nodes(words, nodes, tasks, without, then):
    assert placed(words.split(), nodes, tasks, without) == then.split()


def test_memory_is_shared_with_a_step_that_has_not_ended():
    words = ["srun", "--mem", "4G", "-n2", "python", "--mem=1"]
    assert beside_others(words) == ["srun", "--mem=0", "-n2", "python", "--mem=1"]


REFUSED = {  # srun's words: the key of the one line
    "": "no step to supervise; give it after --",
    "python x.py": "what is supervised must be a step of srun, got 'python'; put srun before it",
    "srun -n 2": "srun must have a program to start, got none",
}


@pytest.mark.parametrize(("words", "message"), REFUSED.items())
def test_refused(words, message):
    with pytest.raises(JobError, match=f"^{message}"):
        check_step(words.split())


JOB = {"SLURM_JOB_ID": "22", "SLURM_JOB_NODELIST": "nid[001-004]", "SLURM_TASKS_PER_NODE": "2(x4)"}
NODES = ("nid001", "nid002", "nid003", "nid004")
JOBS = {  # variables over JOB: the job
    "a job": ({}, Job("22", NODES, 2)),
    "an element of an array": ({"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3"}, Job("20_3", NODES, 2)),
    "unequal nodes": ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, Job("22", NODES, None)),
    "tasks a node": ({"SLURM_NTASKS_PER_NODE": "4"}, Job("22", NODES, 4)),
}


@pytest.mark.parametrize(("changed", "job"), JOBS.values(), ids=JOBS)
def test_the_job_of_an_environment(changed, job):
    assert Job.from_environ(JOB | changed) == job


def test_outside_of_a_job():
    for lacking in JOB:
        with pytest.raises(JobError, match="supervise runs in a job's script"):
            Job.from_environ({name: value for name, value in JOB.items() if name != lacking})


def test_a_host_is_its_node():
    assert [Job("22", NODES, 1).node_of(host) for host in ("nid003", "nid003.cluster.site")] == ["nid003", "nid003"]


# What srun's stand-in reports as the ranks would: each start takes the next line.
SRUN = r"""#!{python} -IS
import json, os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["HVDTRAIN_OUTCOME"])
start = int(folder.name.removeprefix("start-"))
with open("starts", "a") as log:
    log.write(" ".join(sys.argv[1:]) + " overlap=" + os.environ.get("SLURM_OVERLAP", "0") + "\n")
script = json.loads(Path("script.json").read_text())
code, reports = script[min(start, len(script)) - 1]
if code == "replaced":  # as a stranger who may write to the folder around it
    folder.parent.rename("aside")
    folder.mkdir(parents=True)
    code = 137
for name, values in reports.items():
    (folder / f"{{name}}.json").write_text(json.dumps(values))
if code == "hang":
    while not os.path.exists("cancelled"):
        time.sleep(0.05)
    code = 137
if code == "until a signal":
    def stop(number, frame):
        with open("signals", "a") as log:
            log.write(signal.Signals(number).name + "\n")
        sys.exit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, stop)
    print("ready", flush=True)
    time.sleep(3600)
sys.exit(code)
"""
SCONTROL = r"""#!/bin/bash
echo "$*" >> "${0%/*}/scontrol.log"
[ "$1" = show ] && [ "$2" = config ] && echo "SlurmdPort              = $PORT"
[ "$1" = ping ] && [ -e up ] && echo "Slurmctld(primary) at head is UP"
[ "$1" = update ] && echo "$PWD $(stat -c %a .)" >> "${0%/*}/resized.log"
[ "$2" = node ] || [ "$3" = node ] && for n in 2 4; do echo "NodeName=nid00$n NodeAddr=127.0.0.${OTHERS:-1} Port"; done
[ "$2" = node ] || [ "$3" = node ] && echo "NodeName=nid001 Arch=x NodeAddr=127.0.0.1 Port"
[ "$2" = node ] || [ "$3" = node ] && echo "NodeName=nid003 NodeAddr=127.0.0.${DEAD:-1} x"
exit 0
"""


@pytest.fixture
def supervise(tmp_path):
    """supervise(script, *flags, **environ): an ended or, `started`, a running supervisor over srun's stand-in."""
    server, started = socket.create_server(("127.0.0.1", 0)), []
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("scontrol", SCONTROL),
        ("scancel", '#!/bin/sh\necho "$*" >> "${0%/*}/scancel.log"\ntouch cancelled\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | JOB
    environ |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PORT": str(server.getsockname()[1])}

    def start(script, *flags, **changed):
        (tmp_path / "script.json").write_text(json.dumps(script))
        step = ("srun", "--mpi=pmix", "python", "x.py")
        words = warm.command("hvdtrain", "-m", "hvdtrain", "supervise", *flags, "--", *step)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environ | changed, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    server.close()


DIGEST = "fc7937"
"""Of srun's words."""
RUN = {"run": "/nowhere", "step": 120, "ranks": 8, "fewer": [1, 2, 4, 6]}
LOST = {"rank": 5, "host": "nid003", "why": "rank 5 on nid003 was lost", "step_id": None}


def left(folder):
    return [path.name for path in Path(folder).glob(".hvdtrain-*")]


def lines(folder, name):
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("flags", "first"),
    [(("--spare", "1"), "--nodes=3 --ntasks=6 "), ((), "")],
    ids=["a spare node", "fewer nodes"],
)
def test_a_silent_node_is_replaced_and_given_back(supervise, tmp_path, flags, first):
    process = supervise([(137, {"run": RUN, "lost": LOST}), (0, {"run": RUN})], *flags, DEAD="9")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    again = "starts again on 3 nodes without nid003, from step 120"
    assert err == f"supervise: rank 5 on nid003 was lost; {again}\n"
    assert lines(tmp_path, "starts") == [
        f"{first}--mpi=pmix python x.py overlap=0",
        "--nodes=3 --ntasks=6 --exclude=nid003 --mem=0 --mpi=pmix python x.py overlap=1",
    ]
    assert "update JobId=22 NodeList=nid001,nid002,nid004" in lines(tmp_path, "scontrol.log")
    assert lines(tmp_path, "resized.log") == [f"{tmp_path}/.hvdtrain-22-{DIGEST} 700"]  # where its script is written
    assert left(tmp_path) == []


def test_a_node_that_is_cut_off_waits_until_slurm_answers(supervise, tmp_path):
    process = supervise([(137, {"run": RUN, "lost": LOST}), (0, {})], DEAD="9", OTHERS="9")
    assert process.stderr.readline().endswith(": this node is cut off, and waits until one does\n")
    assert len(lines(tmp_path, "starts")) == 1
    (tmp_path / "up").touch()
    assert "; starts again on 1 node without nid002, nid003, nid004" in process.communicate(timeout=250)[1]
    assert process.returncode == 0


def test_a_node_that_does_not_answer_has_lost_the_others(supervise, tmp_path):
    """The rank that was cut off has reported first."""
    reports = {"run": RUN, "lost": LOST | {"rank": 0, "host": "nid001", "why": "rank 0 on nid001 was lost"}}
    process = supervise([(137, reports), (0, {})], "--spare=1", DEAD="9")
    _, err = process.communicate(timeout=250)
    assert err == "supervise: nid003 does not answer; starts again on 3 nodes without nid003, from step 120\n"


def test_without_slurms_commands_a_silent_node_is_lost(supervise, tmp_path):
    (tmp_path / "scontrol").unlink()
    environ = {"SLURM_JOB_NODELIST": "localhost,127.0.0.9", "PATH": str(tmp_path)}
    process = supervise([(137, {"run": RUN | {"fewer": []}, "lost": LOST})], **environ)
    assert process.communicate(timeout=250)[1].splitlines() == [
        "supervise: 127.0.0.9 does not answer; 1 of 2 nodes remain, on which it cannot continue",
        "supervise: submit the job again to continue.",
    ]


DAMAGED = (
    "1",
    '[{"code": 1',
    '[{"code": 1, "nodes": 1, "lost": {"node": "a"}}]',
    '[{"code": 1, "nodes": 1, "checkpoint": "x"}]',
)


def test_a_history_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path):
    history = [Ended(137, 2, 30, 10, 61.5, reports=True, lost=Lost("nid002", "killed")), Ended(0, 2)]
    (tmp_path / "history.json").write_text(json.dumps([asdict(each) for each in history]))
    assert _read_history(tmp_path / "history.json") == history
    for text in DAMAGED:
        (tmp_path / "history.json").write_text(text)
        assert _read_history(tmp_path / "history.json") == []


INFINITE = math.inf
TIMES_LEFT = {
    "2:05": 125,
    "1:00:00": 3600,
    "1-00:00:01": 86401,
    "UNLIMITED": INFINITE,
    "INVALID": INFINITE,
    "": INFINITE,
}


@pytest.mark.parametrize(("shown", "seconds"), TIMES_LEFT.items())
def test_the_time_that_is_left(shown, seconds, tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{shown}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Job("22", ("a",), 1).seconds_left() == seconds


def test_a_signal_to_end_is_not_forgotten_for_a_later_one_nor_while_srun_starts():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signals = Signals()
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert signals.last == signal.SIGTERM
        with subprocess.Popen(["sleep", "3600"]) as starting:
            signals.follow(starting)
        assert starting.returncode == -signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_element_of_an_array_is_queued_again_alone(supervise, tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3", "DEAD": "9"}
    process = supervise([(137, {"run": RUN | {"fewer": []}, "lost": LOST})], **array)
    _, err = process.communicate(timeout=250)
    assert process.returncode == 137
    assert err.splitlines() == [
        "supervise: rank 5 on nid003 was lost; 3 of 4 nodes remain, on which it cannot continue",
        "supervise: job 20_3 is queued again, without nid003.",
    ]
    requests = [line for line in lines(tmp_path, "scontrol.log") if not line.startswith("show") and "show" not in line]
    assert requests == ["requeue 20_3", "update JobId=20_3 ExcNodeList=nid003"]
    assert len(left(tmp_path)) == 1  # the starts so far, which the job counts on


def test_three_starts_without_progress_also_over_a_requeue(supervise, tmp_path):
    reports = {"run": RUN | {"step": 0}, "lost": LOST}
    for count, codes in ((2, ["requeue 22"]), (3, ["requeue 22"])):
        process = supervise([(137, reports | {"run": RUN | {"step": 0, "fewer": []}})])
        _, err = process.communicate(timeout=250)
        assert process.returncode == 137
        assert len(lines(tmp_path, "starts")) == count
        requests = [line for line in lines(tmp_path, "scontrol.log") if "show" not in line and "update" not in line]
        assert requests == codes
    assert err.endswith("; 3 starts in a row ended without a new checkpoint, so the job ends\n")
    assert left(tmp_path) == []


ENDS = {
    "bad input": (2, {"error": {"kind": "PlanError", "code": 2}}),
    "diverged": (1, {"run": RUN, "error": {"kind": "DivergedError", "code": 1}}),
    "a traceback": (1, {"run": RUN, "error": {"kind": "ZeroDivisionError", "code": 1}}),
    "another program": (3, {}),
    "a damaged report": (3, {"run": [], "lost": [], "error": []}),
    "other types": (3, {"lost": LOST | {"host": 5}, "run": RUN | {"step": "x"}, "error": {"kind": []}}),
    "huge numbers": (3, {"lost": LOST | {"rank": -1}, "run": RUN | {"step": -1}, "error": {"code": 1.5}}),
    "other fields": (3, {"lost": {"a": 1}, "run": {"step": 1}, "error": {"text": "x"}}),
}


@pytest.mark.parametrize("script", ENDS.values(), ids=ENDS)
def test_what_is_never_started_again(supervise, tmp_path, script):
    process = supervise([script])
    _, err = process.communicate(timeout=250)
    assert (process.returncode, err) == (script[0], "")
    assert len(lines(tmp_path, "starts")) == 1
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2"])
def test_a_signal_reaches_the_step_and_nothing_starts_again(supervise, tmp_path, name):
    process = supervise([("until a signal", {"run": RUN})])
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[name])
    process.communicate(timeout=250)
    assert process.returncode == 128 + signal.Signals[name]
    assert lines(tmp_path, "signals") == [name]
    assert len(lines(tmp_path, "starts")) == 1


def test_what_is_refused_in_a_job(supervise, tmp_path):
    process = supervise([(0, {})], "--spare=4")
    refusal = "JobError: --spare must be less than the job's 4 nodes, got 4; request more: --nodes.\n"
    assert (process.communicate(timeout=250)[1], process.returncode) == (refusal, 2)
    (tmp_path / f".hvdtrain-22-{DIGEST}").touch()
    _, err = supervise([(0, {})]).communicate(timeout=250)
    assert err.startswith("JobError: ") and "must be a folder of uid" in err and "got something else" in err


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["his", "his, and private"])
def test_a_strangers_folder_is_not_taken(supervise, tmp_path, mode):
    """He knows the job's number and the words from squeue, and would choose what is lost and whom scancel ends."""
    folder = tmp_path / f".hvdtrain-22-{DIGEST}"
    (folder / "start-1").mkdir(parents=True)
    (folder / "start-1/lost.json").write_text(json.dumps(LOST | {"step_id": "--me"}))
    for path in (folder / "start-1/lost.json", folder / "start-1", folder):
        os.chown(path, NOBODY, NOBODY)
    folder.chmod(mode)
    process = supervise([(0, {})])
    assert process.communicate(timeout=250)[1] == (
        f"JobError: {folder} must be a folder of uid 0 with mode 700, got a folder of uid {NOBODY} with mode {mode:o}; "
        "submit the job from a folder of your own that its nodes may write.\n"
    )
    assert process.returncode == 2 and lines(tmp_path, "starts") == lines(tmp_path, "scancel.log") == []


@pytest.mark.parametrize("kind", ["a link", "a folder for all", "a pipe"])
def test_what_lies_in_the_place_of_the_folder_is_left_alone(supervise, tmp_path, kind):
    """Through a link scontrol's resize script would be written over a file of ours."""
    folder, ours = tmp_path / f".hvdtrain-22-{DIGEST}", tmp_path / "ours"
    ours.mkdir()
    {"a link": lambda: folder.symlink_to(ours), "a pipe": lambda: os.mkfifo(folder), "a folder for all": folder.mkdir}[
        kind
    ]()
    if kind != "a link":
        folder.chmod(0o777)
    process = supervise([(137, {"run": RUN, "lost": LOST}), (0, {})], DEAD="9")
    assert "must be a folder of uid" in process.communicate(timeout=250)[1]
    assert os.path.lexists(folder) and list(ours.iterdir()) == []


def test_another_folder_in_the_place_of_ours_is_not_read(supervise, tmp_path):
    process = supervise([("replaced", {"lost": LOST}), (0, {})])
    assert process.communicate(timeout=250)[1] == ""
    assert process.returncode == 137 and len(lines(tmp_path, "starts")) == 1


STEPS = {"22.0": "22.0", "--me": "", "23.0": "", "22": "", "22.0 --me": "", "22.0\n23.0": "", "220.0": "", None: ""}


@pytest.mark.parametrize(("given", "step"), STEPS.items())
def test_a_step_of_another_job_is_none_to_cancel(given, step):
    assert step_of_this_job(Report(host="nid001", step_id=given), JOB) == step


def test_only_a_step_of_this_job_is_cancelled(supervise, tmp_path):
    reports = [("hang", {"run": RUN, "lost": LOST | {"step_id": step}}) for step in ("--me", "22.1")]
    process = supervise([*reports, (0, {})], "--spare=1", DEAD="9")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert lines(tmp_path, "scancel.log") == ["--signal=KILL 22.1"]


def test_a_pipe_for_a_lock_and_escapes_for_a_reason(supervise, tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run/.lock")
    reports = {
        "run": RUN | {"run": str(tmp_path / "run")},
        "lost": LOST | {"why": "\x1b[2Jgone\nsupervise: all is well"},
    }
    process = supervise([(137, reports), (0, {})], DEAD="9")
    _, err = process.communicate(timeout=60)
    assert err.startswith("supervise: \\x1b[2Jgone supervise: all is well; starts again") and err.count("\n") == 1
