"""Keras with FaultTolerance on real ranks: a program of one's own that is killed, stopped and resumed."""

import numpy as np
import pytest
from fault_tolerance import check_that_a_hang_is_named, digests, killed_stopped_and_resumed, position, state, trained
from ranks import needs_tensorflow
from worlds import losses, of_kind

pytestmark = [pytest.mark.launched, pytest.mark.timeout(400), needs_tensorflow]

SLOW = ("hangs", "one_rank_and_two")
KILLED = {"dropout": 0.3, "others": "swapped"}
STOPPED = {"dropout": 0.3, "warm": True, "others": "restored"}
UNDISTURBED = {"plain": {}, "killed": KILLED, "stopped": STOPPED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs of two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    trained("tensorflow", "mpi", 2, folder, UNDISTURBED).good()
    return folder


def test_one_rank_and_two_train_alike(folder, tmp_path):
    of_ranks = digests(folder)
    assert of_ranks[0] == of_ranks[1]
    trained("tensorflow", "alone", 1, tmp_path, {"alone": {}}).good()
    assert len(losses(tmp_path / "alone")) == 18
    np.testing.assert_allclose(losses(folder / "plain"), losses(tmp_path / "alone"), rtol=1e-12)
    for ours, alone in zip(of_kind("epoch", folder / "plain"), of_kind("epoch", tmp_path / "alone"), strict=True):
        for name in ("train_loss", "accuracy", "val_accuracy", "val_loss", "learning_rate"):
            assert ours[name] == pytest.approx(alone[name], rel=1e-6)
    assert position(folder / "plain") == (18, 3, 0)
    assert state(folder / "plain") == "finished"


def test_killed_or_stopped_inside_an_epoch_it_resumes_to_the_same_bits(folder, tmp_path):
    ended = killed_stopped_and_resumed("tensorflow", tmp_path, KILLED, STOPPED)
    assert "ran out of data" not in ended.err
    for found, expected in zip(digests(tmp_path), digests(folder), strict=True):
        assert found == {name: expected[name] for name in ("killed", "stopped")}
    np.testing.assert_allclose(losses(tmp_path / "killed"), losses(folder / "killed"), rtol=1e-12)


def test_a_rank_that_hangs_is_named(tmp_path):
    check_that_a_hang_is_named("tensorflow", tmp_path, {})
