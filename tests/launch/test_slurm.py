"""The one client of SLURM's commands, with stand-ins for them: requests, answers, and what is no answer."""

import os

import pytest
from environments import PMIX, SHELL, STEP, TORCHRUN, environment

from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError

ARRAY = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(tool, does)`: from now on the command does that; the file with what was requested."""

    def make(tool, does):
        path = tmp_path / tool
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requests\n{does}\n')
        path.chmod(0o755)
        return tmp_path / "requests"

    monkeypatch.setenv("PATH", f"{tmp_path}")
    return make


AGAIN = "submit the job again to continue."
REQUEUES = {  # what scontrol does, the message
    "done": (":", "job 22 is queued again."),
    "killed with the step": ("kill -TERM $$", "job 22 is queued again."),
    "refused": (
        "echo slurm_requeue error >&2; exit 1",
        f"scontrol requeue 22 has failed: slurm_requeue error; {AGAIN}",
    ),
    "refused without a message": ("exit 3", f"scontrol requeue 22 has failed with exit code 3; {AGAIN}"),
    "no answer": ("read forever < /dev/zero", f"scontrol requeue 22 did not answer within 1 s; {AGAIN}"),
    "escapes": (
        "printf 'a\\033[2J\\nb\\377' >&2; exit 1",
        f"scontrol requeue 22 has failed: a\\x1b[2J; b\ufffd; {AGAIN}",
    ),
}


@pytest.mark.parametrize(("does", "message"), REQUEUES.values(), ids=REQUEUES)
def test_a_job_is_queued_again(does, message, stand_in, monkeypatch):
    monkeypatch.setattr(slurm, "SECONDS", 1)
    requests = stand_in("scontrol", does)
    assert slurm.requeue("22") == message
    assert requests.read_text() == "requeue 22\n"


ELSEWHERE = {  # what the updated job's scontrol does, the message
    "granted": (":", "job 22 is queued again, without a,b,c."),
    "refused": ("exit 1", "job 22 is queued again; not without a,b,c: scontrol update has failed with exit code 1."),
}


@pytest.mark.parametrize(("does", "message"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_job_is_queued_again_without_some_nodes(does, message, stand_in):
    requests = stand_in("scontrol", f"case $2 in show) echo ExcNodeList=a,b;; JobId=22) {does};; esac")
    assert slurm.requeue("22", ["c"]) == message
    assert requests.read_text().splitlines() == [
        "--oneliner show job 22", "requeue 22", "update JobId=22 ExcNodeList=a,b,c"
    ]  # fmt: skip


def test_without_slurm(stand_in):
    assert slurm.requeue("22") == AGAIN
    assert slurm.controller_answers()  # nobody can say that it does not
    assert slurm.endpoints(["a"]) == {"a": ("a", slurm.SLURMD_PORT)}
    slurm.cancel("22.0")
    with pytest.raises(SlurmError, match="is not installed here") as error:
        slurm.batch_script("22")
    assert error.value.cause == "missing"


@pytest.mark.parametrize(("text", "step"), [(PMIX, "22.0"), (STEP, "22.0"), (TORCHRUN, None), (SHELL, "22.0")])
def test_the_names_of_a_job_and_a_step(text, step):
    environ = environment(text)
    assert slurm.step_id(environ) == step
    assert slurm.job_id(environ) == ("22" if step else None)
    assert slurm.step_id(environ | ARRAY) == ("20_3.0" if step else None)
    assert slurm.job_id(environ | ARRAY) == "20_3"


def test_a_step_is_cancelled_and_not_waited_for(stand_in, tmp_path):
    os.mkfifo(tmp_path / "requests")
    requests = stand_in("scancel", "")
    slurm.cancel("22.0", "--signal=KILL")
    assert requests.read_text() == "--signal=KILL 22.0\n"


ANSWERS = {  # what squeue does: the values, or the cause of the error
    "a job": ("echo '1:00 |  a b'", ["1:00", "a b"]),
    "several lines": ("echo '1|2'; echo '3|4'", ["1", "2"]),
    "not UTF-8": ("printf '\\377|2'", ["\ufffd", "2"]),
    "ended just now": (":", "gone"),
    "ended long ago": ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "gone"),
    "no controller": ("echo 'Unable to contact slurm controller' >&2; exit 1", "refused"),
    "another number of values": ("echo '1|2|3'", "refused"),
    "killed": ("kill -KILL $$", "killed"),
    "no answer": ("read forever < /dev/zero", "no answer"),
}


@pytest.mark.parametrize(("does", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_what_squeue_answers(does, answer, stand_in, monkeypatch):
    if answer == "no answer":
        monkeypatch.setattr(slurm, "SECONDS", 0.5)
    stand_in("squeue", does)
    try:
        found = slurm.query("22", "%L", "%j")
    except SlurmError as error:
        found = error.cause
    assert found == answer


def test_the_times_of_a_job_are_those_of_the_caller(stand_in):
    stand_in("squeue", 'echo "$SLURM_TIME_FORMAT|$2"')
    found = slurm.query("22", "%V", "%S", environ={"SLURM_TIME_FORMAT": "%s"})
    assert found == ["%s", "--jobs=22"]


def test_a_command_that_cannot_be_run(stand_in, tmp_path):
    stand_in("scontrol", "")
    (tmp_path / "scontrol").write_text("#!/nowhere\n")
    with pytest.raises(SlurmError, match=r"cannot be run \(No such file") as error:
        slurm.batch_script("22")
    assert error.value.cause == "cannot run"
