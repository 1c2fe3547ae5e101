"""What is requested of SLURM for a run's own job."""

import time

import pytest
from environments import PMIX, STEP, TORCHRUN, environment

from hvdtrain.launch import slurm_job


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, which do as a test says and write down what was requested."""

    def make(tool, does):
        path = tmp_path / tool
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requests\n{does}\n')
        path.chmod(0o755)
        return tmp_path / "requests"

    monkeypatch.setenv("PATH", f"{tmp_path}")
    return make


REQUEUES = {
    "done": (":", "job 22 is queued again."),
    "refused": (
        "echo slurm_requeue error >&2; exit 1",
        "scontrol requeue 22: slurm_requeue error; submit the job again to continue.",
    ),
    "refused without a message": ("exit 3", "scontrol requeue 22: 3; submit the job again to continue."),
    "no answer": ("read forever < /dev/zero", "scontrol requeue 22 did not answer; submit the job again to continue."),
}


@pytest.mark.parametrize(("does", "message"), REQUEUES.values(), ids=REQUEUES.keys())
def test_a_job_is_queued_again(does, message, slurm, monkeypatch):
    monkeypatch.setattr(slurm_job, "REQUEUE_SECONDS", 1)
    requests = slurm("scontrol", does)
    assert slurm_job.requeue("22") == message
    assert requests.read_text() == "requeue 22\n"


def test_a_job_is_not_queued_again_without_slurm(slurm):
    assert slurm_job.requeue("22") == "submit the job again to continue."


@pytest.mark.parametrize(("text", "expected"), [(PMIX, "22.0\n"), (STEP, "22.0\n"), (TORCHRUN, None)])
def test_a_step_is_cancelled(text, expected, slurm):
    requests = slurm("scancel", ":")
    slurm_job.cancel_step(environment(text))
    for _ in range(200):
        if requests.exists() and requests.read_text():
            break
        time.sleep(0.001 if expected is None else 0.05)
    assert (requests.read_text() if requests.exists() else None) == expected
