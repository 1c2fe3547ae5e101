"""FaultTolerance under Lightning on real ranks: a program that is killed, stopped and resumed; what is refused."""

import json

import numpy as np
import pytest
import warm
from fault_tolerance import check_that_a_hang_is_named, digests, kill, position, state, stop, trained
from marks import marked
from paths import SUPPORT
from ranks import NEEDS, needs_lightning, run
from worlds import losses, of_kind

pytestmark = [pytest.mark.launched, pytest.mark.timeout(300), NEEDS["torch"], needs_lightning]

DROPPING = {"dropout": 0.3, "passes": 2}
KILLED, STOPPED = {"strategy": "horovod", **DROPPING}, {"strategy": "ddp", **DROPPING}


@pytest.mark.slow
def test_one_rank_and_two_train_alike(tmp_path):
    trained("lightning", "mpi", 2, tmp_path, {name: {"strategy": name} for name in ("horovod", "ddp")}).good()
    of_ranks = digests(tmp_path)
    assert of_ranks[0] == of_ranks[1]
    cases = {"alone": {"strategy": "alone"}, "passes": {"strategy": "alone", "passes": 4}}
    assert "FaultTolerance" not in trained("lightning", "alone", 1, tmp_path, cases).good().err
    reference = losses(tmp_path / "alone")
    assert len(reference) == 18 and reference[-1] < reference[0]
    for name in ("horovod", "ddp", "passes"):
        np.testing.assert_allclose(losses(tmp_path / name), reference, rtol=1e-12)
    assert position(tmp_path / "ddp") == (18, 3, 0)
    assert [record["accuracy"] > 0 for record in of_kind("epoch", tmp_path / "ddp")] == [True] * 3
    assert state(tmp_path / "ddp") == "finished"


def test_killed_or_stopped_inside_an_epoch_it_resumes_to_the_same_bits(tmp_path):
    kill("lightning", tmp_path, KILLED)
    stop("lightning", tmp_path, STOPPED)
    cases = {"killed": KILLED, "stopped": STOPPED, "never killed": KILLED, "never stopped": STOPPED}
    ended = trained("lightning", "mpi", 2, tmp_path, cases).good()
    assert "resuming from step 8" in ended.out, ended.out
    for found in digests(tmp_path):
        assert (found["killed"], found["stopped"]) == (found["never killed"], found["never stopped"])
    assert len(losses(tmp_path / "killed")) == 18


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path):
    check_that_a_hang_is_named("lightning", tmp_path, {"strategy": "horovod"})


def test_each_callback_of_lightnings_is_resumed_or_refused(tmp_path):
    ended = run("alone", 1, warm.command("lightning", SUPPORT / "lightning_callbacks.py", tmp_path)).good()
    found = json.loads((tmp_path / "found.json").read_text())
    refused = {name: case["error"] for name, case in found.items() if "error" in case}
    trainings = {name: case for name, case in found.items() if name not in refused}
    for name, case in trainings.items():
        assert set(case["resumed"]) == {case["whole"]}, name
        assert (case["again"], case["more"]) == (case["whole"], 0), name
    batches = {name: case["batches"] for name, case in trainings.items()}
    assert batches == {"averages": 16, "epoch of statistics": 20, "watched": 27, "stopped early": 8}
    part = "train of this epoch is that of the steps since the resume, and callbacks decide by it"
    assert ended.out.count(part) == 1  # of the one that was resumed inside an epoch
    assert "no mean has such losses" in ended.out and "train_loss: nan" not in ended.out
    assert ended.out.count("the program gives lr=0.01, this run began with lr=0.02 and keeps its own") == 1
    other = "nothing would be trained, as another run has finished in this folder: optimizer: the program gives lr=0.01"
    assert other in found["watched"]["of another LR"]
    assert len(refused) == 6
    for name, printed in refused.items():
        assert f"FaultTolerance does not go with {name}" in printed and printed.count("\n") == 1, printed


NAMED = {
    "apart": "the ranks differ in accuracy: rank 1 on ",
    "counted": "the training data of rank 1 ended after 4 of 6 batches",
    "streamed": "the training data of rank 1 ended after 4 of 6 batches",
}


@pytest.mark.parametrize("case", marked(NAMED, slow={"apart", "streamed"}))
def test_a_rank_that_trains_otherwise_is_named(tmp_path, case):
    given = {"apart": True} if case == "apart" else {"short": case}
    ended = trained("lightning", "mpi", 2, tmp_path, {case: {"strategy": "horovod", **given}})
    assert ended.code != 0
    assert any(NAMED[case] in line for line in ended.lines), ended.err
    assert state(tmp_path / case) == "failed"
