"""Lightning with FaultTolerance on real ranks: a program of one's own that is killed, stopped and resumed."""

import json
import signal

import numpy as np
import pytest
import warm
from paths import SUPPORT
from ranks import held, lacking, run

from hvdtrain.run import checkpoint

pytest.importorskip("lightning", reason="needs Lightning: pip install -e .[lightning]")
pytestmark = [
    pytest.mark.launched,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch")),
]

SLOW = ("hangs",)
PROGRAM = SUPPORT / "lightning_fault_tolerance.py"
DROPPING = {"dropout": 0.3, "passes": 2}
UNDISTURBED = {
    "horovod": {"strategy": "horovod"},
    "ddp": {"strategy": "ddp"},
    "horovod dropping": {"strategy": "horovod", **DROPPING},
    "ddp dropping": {"strategy": "ddp", **DROPPING},
}
KILLED = {"strategy": "horovod", **DROPPING, "at": 9, "signal": signal.SIGKILL}
STOPPED = {"strategy": "ddp", **DROPPING, "at": 9, "signal": signal.SIGTERM}
HUNG = {"strategy": "horovod", "at": 5, "signal": signal.SIGSTOP}


def trained(launcher, ranks, folder, cases, **environ):
    """How the launch ended that trains these cases, each in the folder of its name."""
    given = [{"folder": str(folder / name), **case} for name, case in cases.items()]
    return run(launcher, ranks, warm.command("lightning", PROGRAM, folder, json.dumps(given)), **environ)


def digests(folder, ranks):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def losses(folder):
    """Of every step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


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
    alone = trained(
        "alone", 1, tmp_path, {"alone": {"strategy": "alone"}, "passes": {"strategy": "alone", "passes": 4}}
    )
    assert "FaultTolerance" not in alone.good().err
    reference = losses(tmp_path / "alone")
    assert len(reference) == 18 and reference[-1] < reference[0]
    for run_folder in (folder / "horovod", folder / "ddp", tmp_path / "passes"):
        np.testing.assert_allclose(losses(run_folder), reference, rtol=1e-12)
    assert position(folder / "ddp") == (18, 3, 0)
    epochs = [json.loads(line) for line in (folder / "ddp" / "metrics.jsonl").read_text().splitlines()]
    assert [record["accuracy"] > 0 for record in epochs if record["kind"] == "epoch"] == [True] * 3
    assert json.loads((folder / "ddp" / "status.json").read_text())["state"] == "finished"


def test_killed_or_stopped_inside_an_epoch_it_resumes_to_the_same_bits(folder, tmp_path):
    killed = trained("mpi", 2, tmp_path, {"killed": KILLED})
    assert killed.code != 0
    assert any("rank 1 on " in line and "ended without a message" in line for line in killed.lines), killed.err
    assert position(tmp_path / "killed") == (8, 1, 16)
    stopped = trained("mpi", 2, tmp_path, {"stopped": STOPPED}, **held(9))
    assert stopped.code == 128 + signal.SIGTERM
    assert any("SIGTERM: stopped after step" in line for line in stopped.lines), stopped.err
    assert position(tmp_path / "stopped") == (11, 1, 40)
    assert json.loads((tmp_path / "stopped" / "status.json").read_text())["state"] == "stopped"
    resumed = {"killed": {"strategy": "horovod", **DROPPING}, "stopped": {"strategy": "ddp", **DROPPING}}
    assert "resuming from step 8" in trained("mpi", 2, tmp_path, resumed).good().out
    for found, expected in zip(digests(tmp_path, 2), digests(folder, 2), strict=True):
        assert found[str(tmp_path / "killed")] == expected[str(folder / "horovod dropping")]
        assert found[str(tmp_path / "stopped")] == expected[str(folder / "ddp dropping")]
    assert len(losses(tmp_path / "killed")) == 18


def test_a_rank_that_hangs_is_named(tmp_path):
    hung = trained("mpi", 2, tmp_path, {"hung": HUNG})
    assert hung.code != 0
    assert any("no heartbeat from rank 1 on " in line for line in hung.lines), hung.err
