"""`python tests/benchmarks/ladder.py`: its rungs are the shipped recipes, and it climbs them with few packages."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ladder
import pytest
from cifar100_files import batch, write
from paths import REPOSITORY
from ranks import clean_environ, needs_torch

from hvdtrain.core import recipe
from hvdtrain.datasets import cifar100
from hvdtrain.errors import RecipeError

LACKING = ("torchvision", "sklearn", "scipy", "tensorboardX", "PIL", "packaging", "horovod", "mpi4py", "matplotlib")
MACHINE = {"matmul_flops": 8e14, "gpu": "a GPU"}
RATES = {"images_per_second": [9000.0, 11000.0, 10000.0], "flops_per_image": 8e9, "peak_gib": 3.25}

# The recipes' settings, rung by rung.
BASE = {
    "model": "resnet50", "stem": "cifar", "dataset": "cifar100", "seed": 0, "workers": 0, "batch_norm": "local",
    "accumulation_steps": 1, "clip_norm": None, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": False,
    "label_smoothing": 0.0, "precision": "float32", "channels_last": False, "fused_optimizer": False,
    "cudnn_benchmark": False, "compile": False, "data_on_device": False, "batch_size": 256, "base_lr": 0.14,
    "base_batch_size": None, "lr_rule": "none", "warmup_epochs": 0.0, "lr_schedule": "plateau", "epochs": 100,
}  # fmt: skip
AMP = {"precision": "float16"}
NHWC = AMP | {"channels_last": True}
EXTRA = NHWC | {"fused_optimizer": True, "cudnn_benchmark": True}
BF16 = EXTRA | {"precision": "bfloat16"}
COMPILE = BF16 | {"compile": True}
RESIDENT = COMPILE | {"data_on_device": True}
FAST = RESIDENT | {
    "batch_size": 1024, "base_lr": 0.1, "base_batch_size": 128, "lr_rule": "linear", "warmup_epochs": 5.0,
    "lr_schedule": "cosine", "nesterov": True, "label_smoothing": 0.1, "epochs": 40,
}  # fmt: skip
CHANGES = ({}, AMP, NHWC, EXTRA, BF16, COMPILE, RESIDENT, FAST)


def test_the_rungs_are_the_recipes():
    for name, changes in zip(ladder.RUNGS, CHANGES, strict=True):
        keys = recipe.load(f"cifar100:{name}").model_dump()
        assert {key: keys[key] for key in BASE} == BASE | changes, name


@pytest.fixture
def bare(tmp_path):
    """An environment in which the packages that need not be carried to a bare machine cannot be imported."""
    for name in LACKING:
        (tmp_path / "lacking" / name).mkdir(parents=True)
        (tmp_path / "lacking" / name / "__init__.py").write_text(f"raise ImportError('no {name} here')\n")
    return {**clean_environ(), "PYTHONPATH": f"{tmp_path / 'lacking'}:{REPOSITORY}", "CXX": "no-compiler"}


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_climbs_on_a_bare_machine(bare, tmp_path):
    write(tmp_path / cifar100.FOLDER, *(pickle.dumps(batch(n)) for n in (40, 24)))
    output, rungs = tmp_path / "ladder.json", ["bs256", "fast"]
    argv = ["--data", tmp_path, "--device", "cpu", "--json", output, "--rungs", ",".join(rungs)]
    ended = subprocess.run(
        [sys.executable, ladder.__file__, *argv],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(output.read_text())
    assert found["machine"]["matmul_flops"] > 0
    plain, fast = (found["rungs"][name] for name in rungs)
    assert len(plain["images_per_second"]) == 2 and plain["one_batch"] > 0
    assert fast["settings"]["label_smoothing"] == 0.1
    assert len(fast["epochs"]) == 2 and fast["without"] == ["compile"]
    refused = "compile needs a compiler, and no-compiler is not in PATH; apt-get install g++, or set CXX, or drop "
    refused += "compile."
    assert " ".join(ended.stdout.split()).count(f"failed: hvdtrain.errors.EngineUnavailable: {refused}") == 2
    assert "\nfast (without compile) " in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "trained 2 epochs: validation accuracy " in ended.stdout


def test_a_rungs_lines():
    (line,) = ladder.row("bs256", {**RATES, "one_batch": 12000.0}, MACHINE)
    assert line.split() == ["bs256", "10,000", "±10%", "12,000", "3.2", "10.0%"]
    label = ladder.labelled(ladder.RUNGS[-2], ["compile", "graph"])
    above, line = ladder.row(label, {**RATES, "one_batch": 12000.0}, MACHINE)
    assert above == f"{ladder.RUNGS[-2]} (without compile and graph)"
    assert max(map(len, (above, line, ladder.ROW.format(*ladder.TITLES)))) <= 80
    found = {"error": "torch.OutOfMemoryError: CUDA out of memory."}
    (line,) = ladder.row(ladder.labelled("bs256", ["graph"]), found, MACHINE)
    assert line == "bs256 (without graph) failed: torch.OutOfMemoryError: CUDA out of memory."


EPOCHS = [{"seconds": s, "accuracy": accuracy} for s, accuracy in ((60.0, 0.5), (90.0, 0.751), (120.0, 0.75))]
TRAININGS = {
    "reached": (EPOCHS, {}, "75% after 90.0 s, 50.0 s without the first steps"),
    "not reached": (EPOCHS[:1], {}, "75% was not reached"),
    "out of time": (EPOCHS[:1], {"error": "not done after 60 s"}, "75% was not reached: not done after 60 s"),
}


@pytest.mark.parametrize(("epochs", "more", "last"), TRAININGS.values(), ids=TRAININGS)
def test_a_trainings_lines(epochs, more, last):
    found = {**RATES, "epochs": epochs, "target": 0.75, "first_steps_seconds": 40.0, **more}
    assert ladder.answer({"rungs": {"bs256": RATES, "fast": found}}).table[-1] == last


def climbed(monkeypatch, results_of, seconds=470.0, rungs=ladder.RUNGS):
    """The rungs that were started, and what each was to do without; they find what `results_of` gives."""
    requested = []

    def started(options, name, without, limit):
        requested.append((name, without))
        return MACHINE if name == "machine" else dict(results_of(name, without, limit))

    monkeypatch.setattr(ladder, "started", started)
    ladder.climb(SimpleNamespace(rungs=",".join(rungs), seconds=seconds))
    return requested[1:]


def test_a_rung_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    def results_of(name, without, limit):
        return {"error": "out of memory"} if name == "bs256-amp" else RATES

    assert climbed(monkeypatch, results_of) == [(name, []) for name in ladder.RUNGS]


def test_what_does_not_work_is_left_out_once_and_for_all(monkeypatch, capsys):
    def results_of(name, without, limit):
        return RATES if "graph" in without or not recipe.load(f"cifar100:{name}").compile else {"error": "no graph"}

    last = ladder.RUNGS[-3:]
    requested = climbed(monkeypatch, results_of, rungs=last)
    assert requested == [(last[0], []), (last[0], ["graph"]), (last[1], ["graph"]), (last[2], ["graph"])]


def test_a_compiler_that_never_ends_is_left_out_of_the_training(monkeypatch, capsys):
    def results_of(name, without, limit):
        return RATES if name == "fast" else {"error": "not done after 130 s"}

    requested = climbed(monkeypatch, results_of, rungs=ladder.RUNGS[-3:])
    assert requested[-1] == ("fast", ["compile"])


def test_the_training_has_its_time_kept(monkeypatch, capsys):
    limits = {}

    def results_of(name, without, limit):
        limits[name] = limit
        return RATES

    monkeypatch.setattr(ladder, "time", SimpleNamespace(monotonic=lambda: 7.0))
    climbed(monkeypatch, results_of, seconds=ladder.TRAIN_RESERVE + 20.0)
    assert (limits["bs256"], limits["fast"]) == (20, ladder.TRAIN_RESERVE + 20)


def test_what_a_process_beyond_its_limit_found_stays(monkeypatch):
    def run(command, timeout, **more):
        Path(command[-1]).write_text('{"epochs": [1]}')
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(ladder.subprocess, "run", run)
    options = SimpleNamespace(data="d", device="cpu")
    assert ladder.started(options, "fast", [], 5.0) == {"epochs": [1], "error": "not done after 5 s"}
    assert ladder.started(options, "fast", [], 4.9) == {"error": "left out, as the time is over"}


def test_an_unknown_rung_is_refused():
    with pytest.raises(RecipeError, match=r"^--rungs must be some of bs256, bs256-amp, .*; got 'bs1'.$") as refused:
        ladder.main(["--data", ".", "--rungs", "bs1"])
    assert refused.value.exit_code == 2
