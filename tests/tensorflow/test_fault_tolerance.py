"""Keras with FaultTolerance on real ranks: a program of one's own that is killed, stopped and resumed."""

import json
import signal

import numpy as np
import pytest
import warm
from paths import SUPPORT
from ranks import held, lacking, run

from hvdtrain.run import checkpoint

pytestmark = [
    pytest.mark.launched,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(lacking("tensorflow")), reason=lacking("tensorflow")),
]

SLOW = ("hangs",)
PROGRAM = SUPPORT / "tensorflow_fault_tolerance.py"
KILLED, STOPPED = {"dropout": 0.3}, {"dropout": 0.3, "warm": True}
UNDISTURBED = {"plain": {}, "killed": KILLED, "stopped": STOPPED}


def trained(launcher, ranks, folder, cases, **environ):
    """How the launch ended that trains these cases, each in the folder of its name."""
    given = [{"folder": str(folder / name), **case} for name, case in cases.items()]
    return run(launcher, ranks, warm.command("tensorflow", PROGRAM, folder, json.dumps(given)), **environ)


def digests(folder, ranks):
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return [{name.rpartition("/")[2]: digest for name, digest in of_rank.items()} for of_rank in found]


def records(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def losses(folder):
    return [record["loss"] for record in records(folder, "step")]


def position(folder):
    """Step and epoch of the newest checkpoint, and how many of the epoch's examples were used."""
    meta = checkpoint.metadata(checkpoint.committed(folder / "checkpoints")[-1])
    return meta["step"], meta["epoch"], meta["sample"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs of two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    trained("mpi", 2, folder, UNDISTURBED).good()
    return folder


def test_one_rank_and_two_train_alike(folder, tmp_path):
    of_ranks = digests(folder, 2)
    assert of_ranks[0] == of_ranks[1]
    trained("alone", 1, tmp_path, {"alone": {}}).good()
    assert len(losses(tmp_path / "alone")) == 18
    np.testing.assert_allclose(losses(folder / "plain"), losses(tmp_path / "alone"), rtol=1e-12)
    for ours, alone in zip(records(folder / "plain", "epoch"), records(tmp_path / "alone", "epoch"), strict=True):
        for name in ("train_loss", "accuracy", "val_accuracy", "val_loss", "learning_rate"):
            assert ours[name] == pytest.approx(alone[name], rel=1e-6)
    assert position(folder / "plain") == (18, 3, 0)
    assert json.loads((folder / "plain" / "status.json").read_text())["state"] == "finished"


def test_killed_or_stopped_inside_an_epoch_it_resumes_to_the_same_bits(folder, tmp_path):
    killed = trained("mpi", 2, tmp_path, {"killed": {**KILLED, "at": 9, "signal": signal.SIGKILL}})
    assert killed.code != 0
    assert any("rank 1 on " in line and "ended without a message" in line for line in killed.lines), killed.err
    assert position(tmp_path / "killed") == (8, 1, 16)
    stopped = trained("mpi", 2, tmp_path, {"stopped": {**STOPPED, "at": 9, "signal": signal.SIGTERM}}, **held(9))
    assert stopped.code == 128 + signal.SIGTERM
    assert any("SIGTERM: stopped after step" in line for line in stopped.lines), stopped.err
    assert position(tmp_path / "stopped") == (11, 1, 40)
    assert json.loads((tmp_path / "stopped" / "status.json").read_text())["state"] == "stopped"
    ended = trained("mpi", 2, tmp_path, {"killed": KILLED, "stopped": STOPPED}).good()
    assert "resuming from step 8" in ended.out and "ran out of data" not in ended.err
    for found, expected in zip(digests(tmp_path, 2), digests(folder, 2), strict=True):
        assert found == {name: expected[name] for name in found}
    np.testing.assert_allclose(losses(tmp_path / "killed"), losses(folder / "killed"), rtol=1e-12)


def test_a_rank_that_hangs_is_named(tmp_path):
    hung = trained("mpi", 2, tmp_path, {"hung": {"at": 5, "signal": signal.SIGSTOP}})
    assert hung.code != 0
    assert any("no heartbeat from rank 1 on " in line for line in hung.lines), hung.err
