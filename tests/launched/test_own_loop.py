"""A user's own loop on real ranks: the same numbers on any number of them, resumed to the bit, and ended in order."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm
from marks import marked, rows
from paths import SUPPORT
from ranks import clean_environ, held, needs_horovod, needs_torch, once, run, started, wait_for_step, wait_until
from worlds import arrays, losses, of_kind

from hvdtrain.record.checkpoint import newest

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600), needs_torch, needs_horovod]

PROGRAM = SUPPORT / "own_loop.py"
CASES = ["momentum", "accumulated", "bfloat16", "early", "short", "cut", "contrastive"]
STEPS = {"early": 9, "short": 6}
TOLERANCE = {"momentum": 1e-6, "bfloat16": 5e-3}
"""Of cases whose numbers are narrower than float64."""


def program(folder, *cases):
    return warm.command("torch", PROGRAM, "hvdtrain.torch", folder, *cases)


def weights(folder):
    """The weights, the optimizer's state and what else is kept in the newest checkpoint."""
    from torch.utils._pytree import tree_leaves

    from hvdtrain.torch import codec

    found, _ = newest(folder / "checkpoints")
    arrays = [np.ravel(each) for name, each in sorted(found.arrays.items()) if name != "kept"]
    kept = tree_leaves(codec.restored(found.arrays["kept"]) if "kept" in found.arrays else ())  # bytes differ more
    return np.concatenate([*arrays, *(np.ravel(each) for each in kept if not isinstance(each, str))])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of all cases, trained by one process."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run("alone", 1, program(folder, *CASES)).good()
    assert ended.out.endswith("behind the block\n")
    assert "BatchNorm" not in ended.out
    return folder


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """`of_ranks("gloo", 2, "auto")`: the folder of all cases, trained by these ranks with this engine, and how they
    ended."""

    @once
    def train(launcher, size, engine):
        folder = tmp_path_factory.mktemp(launcher)
        return folder, run(launcher, size, program(folder, *CASES), HVDTRAIN_ENGINE=engine).good()

    return train


PAIR = "gloo", 2, "auto"


@pytest.mark.parametrize(
    ("launcher", "size", "engine"), marked([PAIR, ("mpi", 4, "ddp")], slow={"ddp"}), ids=["horovod-2", "ddp-4"]
)
def test_any_number_of_ranks_trains_alike(alone, of_ranks, launcher, size, engine):
    folder, ended = of_ranks(launcher, size, engine)
    assert ended.out.count("the block has ended") == 1
    assert ended.out.count("behind the block") == size
    assert "backward reached none of never" in ended.out
    assert "no mean over examples" not in ended.out
    early = "INFO - epoch 0 was left after 3 of 4 steps; a run that resumes inside such an epoch continues with the "
    assert ended.out.count(early) == ended.out.count(" was left after ") == 1
    curve = (
        "INFO - the curve depends on the number of ranks: BatchNorm (norm) normalises by each rank's part of the batch "
    )
    assert ended.out.count(f"{curve}(world.sync_batch_norm before the optimizer is made makes it equal)\n") == 1
    for case in CASES:
        ours, theirs = losses(folder / case), losses(alone / case)
        assert len(ours) == len(theirs) == STEPS.get(case, 12), case
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE.get(case, 1e-12), err_msg=case)
        for own, other in zip(*(of_kind("epoch", where / case) for where in (folder, alone)), strict=True):
            assert own["seen"] == 96, case
            assert own["train_even"] == other["train_even"], case
            if case not in TOLERANCE:
                assert own["accuracy"] == other["accuracy"], case
        if case not in TOLERANCE:
            close = weights(folder / case), weights(alone / case)
            np.testing.assert_allclose(*close, rtol=0, atol=1e-12, err_msg=case)


@pytest.mark.slow
def test_torchruns_ranks_train_alike(alone, tmp_path):
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2"]
    ended = run("alone", 2, [*map(str, torchrun), str(PROGRAM), "hvdtrain.torch", str(tmp_path), "cut"],
                HVDTRAIN_ENGINE="ddp").good()  # fmt: skip
    assert "2 ranks, torchrun, ddp on cpu (torch)" in ended.out
    np.testing.assert_allclose(losses(tmp_path / "cut"), losses(alone / "cut"), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """The folder of a program that was killed after step 7 of its first case, and how it ended when it was started
    again: by a SIGTERM to horovodrun in its second case."""
    folder = tmp_path_factory.mktemp("again")
    with started("gloo", 2, program(folder, "cut"), **held(7)) as ranks:
        wait_for_step(ranks, folder / "cut", 7)
        wait_until((folder / "cut" / "checkpoints" / "step-00000006").exists)
        ranks.kill()
    command = program(folder, "cut", "endless")
    with started("gloo", 2, command, OWN_LOOP_LR="0.02", OWN_LOOP_PAUSE="0.02") as ranks:
        return folder, signalled(ranks, folder)


def signalled(ranks, folder):
    """How a run ended whose launcher got a SIGTERM in the endless case."""
    wait_for_step(ranks, folder / "endless", 7)
    ranks.process.send_signal(signal.SIGTERM)
    return ranks.wait()


def test_a_killed_program_resumes_to_the_same_bits(of_ranks, again):
    (whole, _), (folder, ended) = of_ranks(*PAIR), again
    assert "resuming from step 6 " in ended.out
    gives = (
        "INFO - optimizer: the program gives group 0 lr=0.02, this run began with group 0 lr=0.01 and keeps its own; "
    )
    assert ended.out.count(gives) == 1
    assert arrays(folder / "cut") == arrays(whole / "cut")
    assert losses(folder / "cut").tolist() == losses(whole / "cut").tolist()
    resumed, undisturbed = ([own["train_loss"] for own in of_kind("epoch", of / "cut")] for of in (folder, whole))
    assert resumed == undisturbed
    assert [record["lr"] for record in of_kind("step", folder / "cut")] == [0.01] * 8 + [0.005] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_a_program_with_a_checkpoint(number, code, tmp_path):
    with started("alone", 1, program(tmp_path, "endless"), OWN_LOOP_PAUSE="0.02") as ranks:
        wait_for_step(ranks, tmp_path / "endless", 7)
        os.kill(ranks.process.pid, number)
        ended = ranks.wait()
    assert ended.code == code
    assert ended.lines[-1].startswith(f"StoppedError: {signal.Signals(number).name}: stopped after step ")
    status = json.loads((tmp_path / "endless" / "status.json").read_text())
    assert status["state"] == "stopped"
    assert "behind the block" not in ended.out


def check_stopped(folder, ended, by="SIGTERM"):
    """All ranks of the endless case ended with a checkpoint."""
    assert ended.left == []
    assert "behind the block" not in ended.out
    status = json.loads((folder / "endless" / "status.json").read_text())
    assert status["state"] == "stopped"
    step = newest(folder / "endless" / "checkpoints")[0].meta["step"]
    assert status["error"].startswith(f"{by}: stopped after step {step}, with a checkpoint; ")


def test_a_signal_to_horovodrun_ends_its_ranks_with_a_checkpoint(again):
    folder, ended = again
    assert ended.code in {143, 137}  # 137 on a slow machine: horovodrun kills ranks that live after ten seconds
    check_stopped(folder, ended)


@pytest.mark.slow
def test_a_signal_to_mpirun_ends_its_ranks_with_a_checkpoint(tmp_path):
    # Not forked: below the warm server no rank finds its launcher.
    command = [sys.executable, *program(tmp_path, "endless")[-4:]]
    with started("mpi", 2, command, OWN_LOOP_PAUSE="0.02") as ranks:
        ended = signalled(ranks, tmp_path)
    assert ended.code in {-signal.SIGTERM, 143}  # mpirun's own end, or that of its ranks, which may come first
    check_stopped(tmp_path, ended, by="SIGTERM (the launcher was ended by a signal)")


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path):
    with started("gloo", 2, program(tmp_path, "endless"), OWN_LOOP_PAUSE="0.02", HVDTRAIN_ENGINE="ddp") as ranks:
        wait_for_step(ranks, tmp_path / "endless", 7)
        ranks.kill_rank(1)
        ended = ranks.wait()
    assert ended.code != 0
    assert "rank 1 on " in ended.lines[0]
    assert "ended without a message: killed, out of memory, or crashed" in ended.lines[0]
    assert ended.left == []


@pytest.mark.parametrize("engine", marked(["horovod", "ddp"], slow={"horovod"}))
def test_a_fault_of_one_rank_ends_all_with_its_reason(engine, tmp_path):
    ended = run("gloo", 2, program(tmp_path, "broken"), HVDTRAIN_ENGINE=engine)
    assert ended.code != 0
    assert ended.err.count("RuntimeError: a fault of the user's\n") == 1, ended.err
    assert "Traceback" in ended.err
    assert any("failed: RuntimeError: a fault of the user's" in line for line in ended.lines), ended.err
    assert json.loads((tmp_path / "broken" / "status.json").read_text())["state"] == "failed"


EXITS = {  # the case, its ranks and their engine: state, and what is said
    "alone": ("exit alone", 2, "horovod", "failed", "rank 1 on {host} exited with code 3 after 5 of 12 steps, and not"),
    "alone, ddp": (
        "exit alone",
        2,
        "ddp",
        "failed",
        "rank 1 on {host} exited with code 3 after 5 of 12 steps, and not",
    ),
    "together": ("exit", 2, "horovod", "left", "the program exited after 5 of 12 steps; the same command continues"),
    "one process": ("exit", 1, "local", "left", "the program exited after 5 of 12 steps; the same command continues"),
}


@pytest.mark.parametrize(("case", "ranks", "engine", "state", "says"), marked(rows(EXITS), slow={"alone, ddp"}))
def test_an_exit_in_the_middle_is_no_good_end(case, ranks, engine, state, says, tmp_path):
    ended = run("gloo" if ranks > 1 else "alone", ranks, program(tmp_path, case), HVDTRAIN_ENGINE=engine)
    assert ended.code == 3
    assert says.format(host=os.uname().nodename) in ended.err
    assert ended.left == []
    assert json.loads((tmp_path / case / "status.json").read_text())["state"] == state


def test_an_exit_behind_the_last_epoch_is_a_good_end(tmp_path):
    run("alone", 1, program(tmp_path, "early"), EXITS="1").good()
    assert json.loads((tmp_path / "early" / "status.json").read_text())["state"] == "finished"


@pytest.mark.only_ci
def test_a_refusal_of_one_rank_ends_all_with_its_reason(tmp_path):
    ended = run("mpi", 2, program(tmp_path, "refused"))
    assert ended.code == 2
    line = f"AbortedError (rank 0 on {(host := os.uname().nodename)}): rank 1 on {host} failed: a reported number must "
    assert ended.lines[0].startswith(line), ended.err
    status = json.loads((tmp_path / "refused" / "status.json").read_text())
    assert status["state"] == "failed" and "a reported number must not be called epoch" in status["error"]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """How cases ended in which the two ranks do different things."""
    cases = ("parted", "parted forward", "parted gathers", "unlike", "left", "attacked", "beside", "unmatched")
    return run("gloo", 2, program(tmp_path_factory.mktemp("wrong"), *cases))


def test_what_ranks_do_differently_is_named_on_all_of_them(wrong):
    parted = (
        "rank 1 left run.batches() where rank 0 continued; every rank must make the same steps: end an epoch early by "
        "a number that all of them have, as of world.sum."
    )
    host = os.uname().nodename
    unlike = f"the ranks differ in last: rank 1 on {host} has 1.0, rank 0 on {host} 0.0: make the same steps and report"
    left = (
        f"the ranks differ in what follows epoch 0: rank 1 on {host} has a break out of run.epochs(), rank 0 on {host} "
        "the next epoch: make the same steps"
    )
    beside = "SGD updates parameters beside the model, which no rank averages and no checkpoint holds; give world.run "
    for rank in range(2):
        assert wrong.out.count(f"rank {rank}: {beside}") == 1
        assert wrong.out.count(f"rank {rank}: {parted}") == 3
        assert wrong.out.count(f"rank {rank}: {unlike}") == 1
        assert wrong.out.count(f"rank {rank}: {left}") == 1
        assert (
            wrong.out.count(f"rank {rank}: backward() in run.each_once(), which gives the ranks unequal parts, ") == 1
        )


def test_a_loss_that_is_no_mean_over_examples_is_named_once(wrong):
    line = (
        "INFO - the loss: cross_entropy with weights or labels that are left out is no mean over examples: the result "
    )
    assert wrong.out.count(line) == wrong.out.count("is no mean over examples") == 1


def test_what_does_not_match_in_a_collective_is_named_and_no_rank_is_called_lost(wrong):
    host = os.uname().nodename
    (line,) = wrong.lines
    assert line.startswith(f"AgreementError (rank 0 on {host}): the ranks differ in what they give to one collective: ")
    for rank, shape in ((1, "[2]"), (0, "[1]")):
        mine = line.partition(f"rank {rank} on {host}")[2]
        assert "Mismatched ALLREDUCE tensor shapes" in mine
        assert f"(a sum of float64 {shape}), called in {PROGRAM}:" in mine
    assert wrong.code == 2
    assert wrong.left == []


@pytest.mark.slow
def test_ranks_that_cannot_share_the_batch_are_refused(tmp_path):
    ended = run("gloo", 5, program(tmp_path, "cut"))
    rule = "batch_size counts the examples of all ranks: it must be a multiple of the 5 ranks, got 24."
    assert ended.lines == [f"LoopError (rank 0 on {os.uname().nodename}): {rule}"]
    assert ended.code != 0


def test_the_package_is_light():
    done = subprocess.run(
        [sys.executable, "-c", "import hvdtrain.torch, sys; print('torch' in sys.modules, hvdtrain.torch.__all__)"],
        env=clean_environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False ['gather', 'join']\n"
