"""Early stopping on real ranks: the same epoch for any number of them, in each framework, and after a resume. Seeds."""

import json

import pytest
from marks import marked
from ranks import needs_lightning, needs_tensorflow, needs_torch, train

from hvdtrain.record.checkpoint import chosen
from hvdtrain.tools.report.assemble import run_report

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]

ARGV = ("linear", "--epochs", 50, "--precision", "float64", "--stop-patience", 3, "--stop-min-delta", 0.01)
LINE = "stopped early at epoch 6: valid_loss has not been below 0.08748 by more than 0.01 since epoch 3; best is kept"
NEEDED = {"torch": needs_torch, "tensorflow": needs_tensorflow, "lightning": needs_lightning}


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [each["valid_loss"] for each in records if each["kind"] == "epoch" and each["step"] % 10 == 0]


@pytest.mark.parametrize(
    "adapter",
    marked([pytest.param(name, marks=mark) for name, mark in NEEDED.items()], only_ci={"tensorflow", "lightning"}),
)
def test_all_ranks_stop_after_the_same_epoch_also_after_a_resume(adapter, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(adapter, "alone", 1, *ARGV, "--output", one).good()
    assert len(losses(one)) == 6
    left = train(adapter, "mpi", 2, *ARGV, "--output", two, "--max-steps", 45).good()
    assert "stopped early" not in left.out
    ended = train(adapter, "mpi", 4 if adapter == "torch" else 1, *ARGV, "--output", two).good()
    assert f"INFO - {LINE}\n" in ended.out
    assert losses(two) == pytest.approx(losses(one), rel=1e-12)
    again = train(adapter, "alone", 1, *ARGV, "--output", two, "--epochs", 60).good()
    why = "nothing is trained: a stop_patience above 3 trains on, another --output begins anew"
    assert f"INFO - this run was {LINE}; {why}\n" in again.out
    assert chosen(two, best=True)[0].meta["step"] == 60
    assert run_report(two).verdict.headline == f"Ended early after epoch 6 of 60: {LINE.partition(': ')[2]}."
    other = ("--stop-patience", 4, "--stop-metric", "loss", "--best", "highest loss")
    train(adapter, "alone", 1, *ARGV, "--output", two, *other).good()
    assert len(losses(two)) == 7
    assert chosen(two, best=True)[0].meta["step"] == 70  # the only one that is scored by it


@needs_torch
def test_the_folder_of_a_run_that_has_finished_with_another_recipe_is_refused(tmp_path, train_here):
    def train_with(seed, steps, *more):
        return train_here("torch", "linear", "--output", tmp_path / "x", "--seed", seed, "--max-steps", steps, *more)

    train_with(1, 5).good()
    refused = train_with(2, 9)
    assert refused.code == 2
    text = f"a run with seed 1 has finished in {tmp_path}/x, got seed 2; give another --output, or seed 1."
    assert f"OutputError: {text}" in refused.err
    refused = train_with(1, 5, "--base-lr", 0.25)
    text = f"a run with base_lr 0.5 has finished in {tmp_path}/x, got base_lr 0.25; give another --output, or base_lr 0"
    assert refused.code == 2 and f"OutputError: {text}" in refused.err
    assert "finished at step 5 before: nothing was trained; everything" in train_with(1, 5, "--workers", 1).good().out
    assert "before: nothing" not in train_with(1, 9, "--base-lr", 0.25).good().out
