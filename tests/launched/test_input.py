"""Bad input to `python -m hvdtrain.FRAMEWORK`: exit code 2, one line, and no framework loaded for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from core_fixtures import mounted
from marks import marked
from ranks import (
    FRAMEWORKS,
    NEEDS,
    TITLES,
    clean_environ,
    command,
    needs_horovod,
    needs_torch,
    run,
    started,
    train,
)

pytestmark = pytest.mark.launched

SRUN = {
    "SLURM_JOB_ID": "22", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0",
}  # fmt: skip
# Runs the module as `python -m` does, and prints at the end which frameworks were loaded.
WATCHED = """
import atexit, runpy, sys
frameworks = {"torch", "torch._dynamo", "tensorflow", "keras", "horovod"}
atexit.register(lambda: print("loaded:", sorted(frameworks & set(sys.modules))))
framework = sys.argv.pop(1)
sys.argv[0] = f"hvdtrain.{framework}"
runpy.run_module(f"hvdtrain.{framework}", run_name="__main__", alter_sys=True)
"""

# One message of each place that refuses; tests/core and tests/datasets compare all of them.
CASES = {
    "unknown recipe": (["linaer"], "RecipeError: unknown recipe 'linaer'. Did you mean linear? "),
    "indivisible batch": (
        ["linear", "--accumulation-steps", "3"],
        "PlanError: batch_size must be a multiple of 3 accumulation steps, got 100; take 99 or 102.",
    ),
    "missing data": (["imagenet", "--data-dir", "nowhere"], "DataError: nowhere"),
    "output below a file": (
        ["linear", "--output", "a-file/run"],
        "OutputError: cannot write to the run folder a-file",
    ),
    "another model's checkpoint": (
        ["digits", "--output", "line"],
        "CheckpointError: line holds checkpoints of another",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A working folder with everything that the cases name."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "a-file").touch()
    (folder / "line" / "checkpoints" / "step-00000001").mkdir(parents=True)
    import numpy as np

    from hvdtrain.record import checkpoint

    checkpoint.commit(
        folder / "line" / "checkpoints",
        checkpoint.Checkpoint({"model.weight": np.zeros(1)}, {"step": 1, "model": "linear, 2 parameters"}),
        keep=2,
    )
    return folder


def watched(framework, argv, cwd, **environ):
    return subprocess.run(
        warm.command("hvdtrain", "-c", WATCHED, framework, *argv),
        cwd=cwd,
        env={**clean_environ(), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


either = pytest.mark.parametrize("framework", marked(TITLES, slow={"tensorflow"}))  # which need not be installed
on_both = pytest.mark.parametrize("framework", marked(FRAMEWORKS, slow={"tensorflow"}))


@either
@pytest.mark.parametrize("case", CASES)
def test_one_line_and_no_framework(framework, case, inputs):
    argv, expected = CASES[case]
    check_refused(watched(framework, argv, inputs), expected)


def test_pytorch_has_no_xla(inputs):
    expected = "RecipeError: xla compiles TensorFlow's steps, this run is PyTorch's; drop --xla.\n"
    check_refused(watched("torch", ["linear", "--xla"], inputs), expected)


NOTHING_LOADED = r"INFO - hvdtrain [^\n]+\nloaded: \[\]\n"


def check_refused(ended, expected):
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(expected)
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended.stderr
    assert re.fullmatch(NOTHING_LOADED, ended.stdout)


@pytest.mark.slow
@needs_torch
@needs_horovod
def test_torchruns_ranks_train_over_gloo(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    argv = [torchrun, "--nproc-per-node", "2", "-m", "hvdtrain.torch", "linear", "--epochs", "2"]
    ended = run("alone", 1, [*map(str, argv), "--output", str(tmp_path / "run")]).good()
    assert "2 ranks, torchrun, horovod on cpu (torch)" in ended.out
    assert "finished at step 20" in ended.out


@on_both
def test_a_step_of_four_tasks_in_which_horovod_is_alone(framework, tmp_path):
    ended = train(framework, "alone", 1, "linear", "--output", tmp_path / "run", **SRUN)
    assert ended.code == 2, ended.err
    (line,) = ended.lines
    assert re.fullmatch(
        r"WorldError \(rank 0 on \S+\): srun started 4 tasks with the plugin none, but this Horovod uses Open MPI .*; "
        r"start with: srun --mpi=pmix .*",
        line,
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


UNDER_RANKS = {
    "indivisible": ("mpi", ["linear", "--batch-size", "1"], "PlanError (rank 0 on "),
    "unknown recipe": ("gloo", ["linaer"], "RecipeError (rank 0 on "),
    "local engine": ("mpi", ["linear", "--engine", "local"], "WorldError (rank 0 on "),
    # The other rank is about to start Horovod and must not wait there.
    "output below a file, MPI": ("mpi", ["linear", "--output", "a-file/run"], "OutputError (rank 0 on "),
    "output below a file, Gloo": ("gloo", ["linear", "--output", "a-file/run"], "OutputError (rank 0 on "),
}


@pytest.mark.parametrize(
    ("framework", "case"),
    marked(
        [
            pytest.param(framework, case, id=f"{framework}-{case}", marks=NEEDS[framework])
            for framework in TITLES
            for case in UNDER_RANKS
            if framework == "torch" or "below a file" in case  # the others end before a framework is loaded
        ],
        slow={"output below a file, Gloo", "indivisible", "tensorflow"},
    ),
)
def test_ranks_print_it_once_and_end(framework, case, inputs):
    launcher, argv, expected = UNDER_RANKS[case]
    with started(launcher, 2, command(framework, *argv), inputs) as ranks:
        ended = ranks.wait()
    assert ended.code != 0
    assert ended.left == []
    (line,) = ended.lines
    assert line.startswith(expected)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    with mounted(tmp_path / "small", "2m") as folder:
        yield folder


@either
def test_a_disk_without_room_for_the_checkpoints(framework, small_disk):
    ended = watched(framework, ["digits", "--output", small_disk / "run"], small_disk)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert re.fullmatch(NOTHING_LOADED, ended.stdout)
    assert re.match(r"OutputError: the run folder \S+ has no room for [\d.,]+ MiB of checkpoints", ended.stderr)


@on_both
def test_a_disk_that_fills_while_training(framework, small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 160 * 1024))
    argv = ["linear", "--log-every-steps", "1", "--output", small_disk / "run"]
    ended = train(framework, "alone", 1, *argv)
    assert ended.code == 2
    (line,) = ended.lines
    assert re.match("OutputError: .*No space left on device; free space", line), ended.err
    filler.unlink()
    train(framework, "alone", 1, *argv).good()


@on_both
def test_a_loss_that_is_no_number(framework, train_here, tmp_path):
    ended = train_here(framework, "linear", "--lr", "1e30", "--log-every-steps", "1", "--output", tmp_path)
    assert ended.code == 1
    assert re.match(r"DivergedError: the training loss is (inf|nan) at step \d+; lower the LR", ended.err)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@on_both
def test_a_good_run_says_nothing_on_stderr_and_loads_no_compiler(framework, tmp_path):
    argv = [framework, "linear", "--epochs", "1", "--output", str(tmp_path)]
    ended = run("alone", 1, [sys.executable, "-c", WATCHED, *argv]).good()
    assert ended.err == ""
    assert "finished at step 10" in ended.out
    loaded = ended.out.splitlines()[-1]
    assert f"'{framework}'" in loaded and "torch._dynamo" not in loaded
