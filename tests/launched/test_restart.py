"""A run that is killed at any step and started again has the weights of the undisturbed run, to the bit."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from marks import marked
from ranks import FRAMEWORKS, command, held, started, train, wait_for_step, wait_until
from worlds import LINE, RUNS, arrays, losses, of_kind, records

pytestmark = [
    pytest.mark.launched,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("framework", marked(FRAMEWORKS, slow={"tensorflow"})),
]


def steps_recorded(folder):
    return [line["step"] for line in of_kind("step", folder)]


KILLS = {
    "torch": [("mpi", "rank 1"), ("gloo", "rank 0")],
    "tensorflow": [("mpi", "rank 0"), ("gloo", "rank 1"), ("gloo", "all")],
}


def test_a_line_killed_again_and_again(world, framework, tmp_path):
    folder = tmp_path / "killed"
    argv = [*LINE, "--checkpoint-every-steps", "3", "--output", folder]
    random.seed(0)
    kills = KILLS[framework]
    steps = sorted(random.sample(range(8, 180), len(kills)))
    for (launcher, victim), step in zip(kills, steps, strict=True):
        with started(launcher, 2, command(framework, *argv), **held(step, int(victim == "rank 1"))) as ranks:
            wait_for_step(ranks, folder, step)
            if victim == "all":
                ranks.kill()
                continue
            ranks.kill_rank(int(victim[-1]))
            ended = ranks.wait()
            assert ended.code != 0
            assert ended.left == [], (launcher, victim)
    assert json.loads((folder / "status.json").read_text())["state"] != "finished"
    ended = train(framework, "mpi", 2, *argv).good()
    assert "resuming from step" in ended.out
    undisturbed = world("mpi-2", framework)
    assert arrays(folder) == arrays(undisturbed.folder / "line")
    assert steps_recorded(folder) == list(range(1, 201))
    np.testing.assert_array_equal(losses(folder), undisturbed.losses("line"))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_resnet50_killed_inside_an_epoch(world, framework, tmp_path):
    # Each rank has its own statistics; every checkpoint averages them, so both runs must commit at the same steps.
    folder = tmp_path / "killed"
    argv = [*RUNS["inside"], "--output", folder]
    with started("gloo", 2, command(framework, *argv), **held(5)) as ranks:
        wait_for_step(ranks, folder, 5)
        wait_until((folder / "checkpoints" / "step-00000003").exists)
        ranks.kill()
    ended = train(framework, "mpi", 2, *argv).good()
    assert "resuming from step 3 " in ended.out  # an epoch has 4
    assert arrays(folder) == arrays(world("mpi-2-more", framework).folder / "inside")
    assert steps_recorded(folder) == list(range(1, 8))


@pytest.mark.slow
def test_on_another_number_of_ranks(world, framework, tmp_path):
    folder = tmp_path / "moved"
    for launcher, ranks, until in (("mpi", 2, 13), ("alone", 1, 27), ("gloo", 4, 40)):
        argv = [*RUNS["short"], "--max-steps", until, "--output", folder]
        train(framework, launcher, ranks, *argv).good()
        assert steps_recorded(folder) == list(range(1, until + 1))
    alone = world("alone-1", framework)
    np.testing.assert_allclose(losses(folder), alone.losses("short"), rtol=1e-5)
    epochs = [line["train_loss"] for line in of_kind("epoch", folder) if line["step"] % 10 == 0]
    whole = [line["train_loss"] for line in of_kind("epoch", alone.folder / "short")]
    np.testing.assert_allclose(epochs, whole, rtol=1e-5)  # a mean over the whole epoch, whoever began it


@pytest.mark.slow
def test_a_batch_given_per_rank_ends_with_the_epochs(framework, train_here, tmp_path):
    folder = tmp_path / "grown"
    argv = ["linear", "--batch-size-per-rank", "50", "--log-every-steps", "1", "--output", folder]
    train_here(framework, *argv, "--epochs", "1", "--max-steps", "10").good()  # half of an epoch of 20 steps
    train(framework, "gloo", 2, *argv, "--epochs", "2").good()  # then 5 of that one and 10 of the next
    assert steps_recorded(folder) == list(range(1, 26))
    assert records(folder)[-1]["epoch"] == 2


def test_checkpoints_at_the_end_of_an_epoch_are_due_too(framework, train_here, tmp_path):
    argv = ["linear", "--epochs", "5", "--checkpoint-every-steps", "10", "--keep-checkpoints", "9"]
    train_here(framework, *argv, "--output", tmp_path).good()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-{step:08d}" for step in (10, 20, 30, 40, 50)
    ]


def test_ranks_agree_on_an_interval_that_rank_0_has_measured(framework, tmp_path):
    argv = ["linear", "--epochs", "12", "--checkpoint-every-epochs", "99", "--keep-checkpoints", "99"]
    auto = ["--checkpoint-every-steps", "auto", "--mtbf-hours", "1e-6"]
    ended = train(framework, "gloo", 2, *argv, *auto, "--output", tmp_path).good()
    logged = re.search(r"a checkpoint every ([0-9]+) steps? \([0-9.]+ s\): one costs training [0-9]+ ms", ended.out)
    made = [int(path.name[5:]) for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert made[:3] == [20, 40, 60]
    assert made[3] == min(60 + int(logged[1]), 120)


@pytest.fixture
def finished(framework, train_here, tmp_path):
    """The folders of a finished run of 20 steps, with checkpoints of steps 10 and 20, and of its copy."""
    train_here(framework, *SMALL, "--output", tmp_path / "finished").good()
    return tmp_path / "finished", Path(shutil.copytree(tmp_path / "finished", tmp_path / "copy"))


SMALL = ["linear", "--epochs", "2", "--checkpoint-every-steps", "10", "--log-every-steps", "1"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished, framework, train_here):
    whole, folder = finished
    newest = folder / "checkpoints" / "step-00000020" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    ended = train_here(framework, *SMALL, "--output", folder).good()
    assert (
        f"{newest.parent} is damaged: its checksum differs. It is kept as damaged-step-00000020 and not used."
        in ended.out
    )
    assert f"resuming from step 10 of {folder}" in ended.out
    assert arrays(folder) == arrays(whole)
    assert steps_recorded(folder) == list(range(1, 21))


def test_a_finished_run_stays_finished(finished, framework, train_here):
    before, folder = finished
    train_here(framework, *SMALL, "--output", folder).good()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert arrays(folder) == arrays(before)
    assert [line["kind"] for line in records(folder)] == [line["kind"] for line in records(before)]


def test_another_precision_continues(finished, framework, train_here):
    _, folder = finished
    train_here(framework, *SMALL, "--epochs", "3", "--precision", "float16", "--output", folder).good()
    assert steps_recorded(folder)[-1] == 30
