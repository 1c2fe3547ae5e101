"""`python -m hvdtrain bench scaling`: its arithmetic, what it starts, what it refuses, and that it measures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import clean_environ, needs_horovod, needs_torch

from hvdtrain.errors import HvdtrainError
from hvdtrain.terminal import hidden
from hvdtrain.tools.bench import scaling
from hvdtrain.tools.bench.scaling import Allocation, Options
from hvdtrain.tools.slurm import job_check
from hvdtrain.tools.slurm.sites import SITES

ONE = {"SLURM_JOB_ID": "7"}
NODE = {**ONE, "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}
STARTS = {
    "no allocation": ({}, 4, None, None),
    "a rank of CPUs": (ONE, 1, None, "srun --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1"),
    "a node a rank": (ONE, 4, "pmix", "srun --kill-on-bad-exit=1 --nodes=4 --ntasks=4 --ntasks-per-node=1 --mpi=pmix"),
    "part of a node": (
        NODE,
        2,
        None,
        "srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 --ntasks-per-node=2 --gres=gpu:2",
    ),
    "whole nodes": (NODE, 8, None, "srun --kill-on-bad-exit=1 --nodes=2 --ntasks=8 --ntasks-per-node=4 --gres=gpu:4"),
}


@pytest.mark.parametrize(("environ", "ranks", "plugin", "command"), STARTS.values(), ids=STARTS)
def test_the_srun_of_an_allocation(environ, ranks, plugin, command):
    allocation = Allocation.from_environ(environ)
    assert (allocation.srun(ranks, plugin) if allocation else None) == (command.split() if command else None)


def test_efficiency_is_of_each_round():
    times = {1: [1.0, 2.0], 2: [1.0, 2.5], 4: [0.5, 0.5]}
    assert scaling.efficiencies("weak", times) == {1: [1, 1], 2: [1, 0.8], 4: [2, 4]}
    assert scaling.efficiencies("strong", times) == {1: [1, 1], 2: [0.5, 0.4], 4: [0.5, 1]}
    assert scaling.efficiencies("strong", {2: [1.0], 4: [0.5]}) == {2: [1], 4: [1]}


def test_a_rank_alone_is_measured_once_for_both_modes(monkeypatch):
    runs = []

    def run(options, waiting, name, ranks, batch):
        runs.append((name, ranks, batch))
        if ranks == 2:
            waiting.setdefault(name, []).append(0.5)
        return ranks

    monkeypatch.setattr(scaling, "_run", run)
    known = []
    scaling._measure(Options(rounds=2), ["weak", "strong"], [1, 2], 8, hidden, known.append)
    found, waiting = known[-1]
    first = [("1 rank, batch 8", 1, 8), ("2 ranks, batch 16", 2, 16), ("2 ranks, batch 8", 2, 8)]
    assert runs == first + first[::-1]
    assert found == {"weak": {1: [1, 1], 2: [2, 2]}, "strong": {1: [1, 1], 2: [2, 2]}}
    assert waiting == {"weak": {2: [0.5, 0.5]}, "strong": {2: [0.5, 0.5]}}


BOTH = {"weak": {1: [1.0], 2: [1.25]}, "strong": {1: [1.0], 2: [0.625]}}


def test_the_table():
    assert scaling.table(BOTH, 16) == [
        "weak scaling, batch 16 a rank",
        "ranks             step, ms  examples/s              efficiency",
        "    1  1000 (1000 to 1000)        16.0  1.000 (1.000 to 1.000)",
        "    2  1250 (1250 to 1250)        25.6  0.800 (0.800 to 0.800)",
        "",
        "strong scaling, batch 16 in all",
        "ranks                step, ms  examples/s              efficiency",
        "    1     1000 (1000 to 1000)        16.0  1.000 (1.000 to 1.000)",
        "    2  625.0 (625.0 to 625.0)        25.6  0.800 (0.800 to 0.800)",
    ]


def test_the_sentence():
    one, two = {"weak": {2: [1.0]}}, {"weak": {2: [1.0], 4: [2.0]}}
    assert scaling.sentence(BOTH) == (
        "On 2 ranks each works at 80% (weak scaling) and 80% (strong scaling) of a rank's speed on 1 rank."
    )
    assert scaling.sentence(two).startswith("On 4 ranks each works at 50% (weak scaling) of ")
    assert scaling.sentence({**BOTH, "strong": {1: [1.0]}}).startswith(
        "On 2 ranks each works at 80% (weak scaling) of "
    )
    assert scaling.sentence(one) == "Only 2 ranks measured: give more --ranks to see how it scales."


SHARED = "2 ranks share 1 core: each has less to compute with than on fewer ranks,"


@pytest.mark.parametrize(("cores", "begin"), [(1, SHARED), (2, ""), (None, ""), (float("inf"), "")])
def test_ranks_that_share_cores_are_named(cores, begin):
    assert scaling.sharing(2, cores)[: len(SHARED)] == begin


def test_an_answer_says_what_was_measured_and_where(monkeypatch):
    monkeypatch.setattr(scaling.processors, "count", lambda: 1)
    monkeypatch.setattr(scaling, "visible_gpus", lambda _: 0)
    found = scaling.answer(Options(), 16, BOTH, {})
    host = found.table[0] + " " + found.table[1]
    assert host.startswith("synthetic (resnet50), torch, horovod, on ") and host.endswith(", 1 core) ")
    assert (found.results["model"], found.results["cores"]) == ("resnet50", 1)
    assert found.results["global_batch"] == {"weak": {1: 16, 2: 32}, "strong": {1: 16, 2: 16}}
    assert SHARED in found.sentence


def test_the_figure():
    figure = scaling.figure({"weak": {1: [1.0, 1.0], 2: [1.25, 2.0]}, "strong": {1: [1.0], 2: [0.5]}})
    assert figure.y_label == "% of a rank's speed on 1 rank"
    assert figure.lines == {"weak": {1: [100, 100], 2: [80, 50]}, "strong": {1: [100], 2: [100]}}


REFUSALS = {  # the flags: what the message says
    "ranks 2,1": ("--ranks 2,1", "--ranks must be growing whole numbers in [1, 16384], as in 1,2,4; got '2,1'."),
    "ranks few": ("--ranks few", "got 'few'."),
    "no rounds": ("--rounds 0", "--rounds must be at least 1, got '0'"),
    "too small a batch": (
        "--ranks 1,4 --mode strong --batch 2",
        "--batch must be at least the 4 ranks that share it, got 2.",
    ),
    "ddp without PyTorch": (
        "--engine ddp --framework tensorflow",
        "--engine ddp does not go with --framework tensorflow;",
    ),
    "a plugin": ("--mpi lam", "--mpi must be pmix, pmi2, cray_shasta, pspmi or none, got 'lam';"),
    "nodes here": ("--nodes 1,2", "--nodes belongs to a job script; give --site, too."),
    "ranks there": ("--site capella --ranks 1,2", "--ranks follow from --nodes at a site;"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(argv, message):
    with pytest.raises(HvdtrainError) as refused:
        scaling.main(argv.split())
    assert message in str(refused.value) and refused.value.exit_code == 2


def test_a_rank_does_not_start_ranks(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for name, value in {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(HvdtrainError, match="starts its ranks itself; call it once, without srun, mpirun or torchrun"):
        scaling.main([])


@pytest.mark.parametrize("site", SITES)
def test_a_job_script_sweeps_in_one_allocation(site, capsys):
    assert scaling.main(["--site", site, "--nodes", "1,2", "--mode", "both"]) == 0
    script = capsys.readouterr().out
    gpus = SITES[site].gpus
    ranks = ",".join(map(str, sorted({1, gpus, 2 * gpus})))
    plugin = f" --mpi {SITES[site].mpi}" if SITES[site].mpi else ""
    assert script.splitlines()[-1] == (
        f"python -m hvdtrain bench scaling --ranks {ranks} --mode both --framework torch --engine horovod "
        f'--recipe synthetic --rounds 3 --steps 10{plugin} --output "scaling-$SLURM_JOB_ID"'
    )
    assert "#SBATCH --nodes=2\n" in script
    assert "--requeue" not in script
    assert not [finding for finding in job_check.check_script(script, SITES[site]) if "srun" not in finding.wrong]


@pytest.mark.launched
@pytest.mark.slow
@needs_torch
@needs_horovod
def test_it_measures(tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "bench", "scaling", "--recipe", "linear", "--batch", "4"]
    command += ["--mode", "both", "--rounds", "1", "--steps", "3", "--output", str(tmp_path)]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=clean_environ())
    results = json.loads(Path(tmp_path, "scaling.json").read_text())
    assert (results["bench"], results["batch"], results["threads"], results["ranks_per_node"]) == ("scaling", 4, 1, 1)
    for mode in ("weak", "strong"):
        assert all(seconds > 0 for times in results[mode].values() for seconds in times)
        assert list(results[mode]) == ["1", "2"]
        assert results["efficiency"][mode]["1"] == [1]
    assert "<svg" in Path(tmp_path, "scaling.html").read_text()


@pytest.mark.slow
@needs_torch
def test_a_run_that_fails_says_why(tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "bench", "scaling", "--recipe", "imagenet", "--ranks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ(), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("TrainingError: the run with 1 rank, batch 16 failed: DataError: ")
