"""Keras with FaultTolerance on real ranks: a user's program that is killed, stopped and resumed."""

import numpy as np
import pytest
from fault_tolerance import check_that_a_hang_is_named, digests, kill, position, state, stop, trained
from marks import marked, rows
from ranks import needs_tensorflow
from worlds import losses, of_kind

pytestmark = [pytest.mark.launched, pytest.mark.timeout(400), needs_tensorflow]

KILLED = {"dropout": 0.3, "others": "swapped"}
EXTREMES = ("lowest", "highest", "val_lowest", "val_highest")
STOPPED = {"dropout": 0.3, "warm": True, "others": "restored"}


@pytest.mark.slow
def test_one_rank_and_two_train_alike(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    trained("tensorflow", "mpi", 2, folder, {"plain": {}}).good()
    of_ranks = digests(folder)
    assert of_ranks[0] == of_ranks[1]
    trained("tensorflow", "alone", 1, tmp_path, {"alone": {}}).good()
    assert len(losses(tmp_path / "alone")) == 18
    np.testing.assert_allclose(losses(folder / "plain"), losses(tmp_path / "alone"), rtol=1e-12)
    for ours, alone in zip(of_kind("epoch", folder / "plain"), of_kind("epoch", tmp_path / "alone"), strict=True):
        for name in ("train_loss", "accuracy", "val_accuracy", "val_loss", "learning_rate", *EXTREMES):
            assert ours[name] == pytest.approx(alone[name], rel=1e-6)
    assert position(folder / "plain") == (18, 3, 0)
    assert state(folder / "plain") == "finished"


@pytest.mark.parametrize(
    ("cut_short", "case"),
    marked(
        rows({"killed": (kill, KILLED), "stopped": (stop, STOPPED)}), slow={"killed"}, only_ci={"stopped"}
    ),  # as in Lightning
)
def test_cut_short_inside_an_epoch_it_resumes_to_the_same_bits(tmp_path, cut_short, case):
    name = "killed" if cut_short is kill else "stopped"
    cut_short("tensorflow", tmp_path, case)
    ended = trained("tensorflow", "mpi", 2, tmp_path, {name: case, "whole": case}).good()
    assert "resuming from step " in ended.out and "ran out of data" not in ended.err
    for digest in digests(tmp_path):
        assert digest[name] == digest["whole"]
    np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "whole"), rtol=1e-12)
    epochs = zip(of_kind("epoch", tmp_path / name), of_kind("epoch", tmp_path / "whole"), strict=True)
    for resumed, whole in epochs:
        for key in ("accuracy", *EXTREMES):
            assert resumed[key] == pytest.approx(whole[key], rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path):
    check_that_a_hang_is_named("tensorflow", tmp_path, {})
