"""benchmarks/gpu.py: its rungs are the shipped recipes, and it climbs them with PyTorch and NumPy alone."""

import importlib.util
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cifar100_files import batch, write
from paths import REPOSITORY
from ranks import clean_environ, needs_torch

from hvdtrain import recipe
from hvdtrain.datasets import cifar100

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"
LACKING = ("pydantic", "tyro", "ruamel", "rich", "safetensors", "torchvision", "sklearn", "tensorboardX", "PIL")
MACHINE = {"matmul_flops": 8e14, "gpu": "a GPU"}
RATES = {"images_per_second": [9000.0, 11000.0, 10000.0], "flops_per_image": 8e9, "peak_gib": 3.25}


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rungs_are_the_recipes(gpu):
    for name, changes in gpu.RUNGS.items():
        keys = recipe.load(f"cifar100:{name}").model_dump()
        assert {key: keys[key] for key in gpu.BASE} == gpu.BASE | changes, name


@pytest.fixture
def bare(tmp_path):
    """An environment in which the packages that a bare machine lacks cannot be imported."""
    for name in LACKING:
        (tmp_path / "lacking" / name).mkdir(parents=True)
        (tmp_path / "lacking" / name / "__init__.py").write_text(f"raise ImportError('no {name} here')\n")
    return {**clean_environ(), "PYTHONPATH": str(tmp_path / "lacking"), "CXX": "no-compiler"}


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_climbs_on_a_bare_machine(bare, tmp_path):
    write(tmp_path / cifar100.FOLDER, *(pickle.dumps(batch(n)) for n in (40, 24)))
    output, rungs = tmp_path / "gpu.json", ["bs256", "fast"]
    argv = ["--data", tmp_path, "--device", "cpu", "--output", output, "--rungs", ",".join(rungs)]
    ended = subprocess.run(
        [sys.executable, SCRIPT, *argv], env=bare, cwd=tmp_path, capture_output=True, text=True, check=False
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
    assert ended.stdout.count(f"failed: hvdtrain.errors.EngineUnavailable: {refused}") == 2
    assert "\nfast (without compile) " in ended.stdout
    assert "trained 2 epochs: validation accuracy " in ended.stdout


def told(gpu, capsys, name, facts, without=()):
    gpu.report(name, facts, list(without), MACHINE)
    return capsys.readouterr().out.splitlines()


def test_a_rungs_line(gpu, capsys):
    (line,) = told(gpu, capsys, "bs256", {**RATES, "one_batch": 12000.0})
    assert line.split() == ["bs256", "10,000", "9,000-11,000", "12,000", "3.2", "10.0%"]


def test_a_failed_rungs_line(gpu, capsys):
    (line,) = told(gpu, capsys, "bs256", {"error": "torch.OutOfMemoryError: CUDA out of memory."}, ["graph"])
    assert line.startswith("bs256 (without graph)   ")
    assert line.endswith("    failed: torch.OutOfMemoryError: CUDA out of memory.")


EPOCHS = [{"seconds": s, "accuracy": accuracy} for s, accuracy in ((60.0, 0.5), (90.0, 0.751), (120.0, 0.75))]
TRAININGS = {
    "reached": (EPOCHS, {}, "75% after 90.0 s, 50.0 s without the first steps"),
    "not reached": (EPOCHS[:1], {}, "75% was not reached"),
    "out of time": (EPOCHS[:1], {"error": "not done after 60 s"}, "75% was not reached: not done after 60 s"),
}


@pytest.mark.parametrize(("epochs", "more", "last"), TRAININGS.values(), ids=TRAININGS)
def test_a_trainings_lines(gpu, capsys, epochs, more, last):
    facts = {**RATES, "epochs": epochs, "target": 0.75, "first_steps_seconds": 40.0, **more}
    assert told(gpu, capsys, "fast", facts)[-1] == last


def children(answers):
    """Instead of a rung's process: what it would have found, by rung and by what it does without."""
    asked = []

    def started(options, name, without, limit):
        asked.append((name, without))
        if name == "machine":
            return MACHINE
        return dict(answers(name, without, limit))

    return asked, started


def climbed(gpu, monkeypatch, answers, seconds=470.0, rungs=None):
    asked, started = children(answers)
    monkeypatch.setattr(gpu, "started", started)
    gpu.climb(SimpleNamespace(rungs=",".join(rungs or gpu.RUNGS), seconds=seconds))
    return asked[1:]


def test_a_rung_that_fails_does_not_stop_the_others(gpu, monkeypatch, capsys):
    def answers(name, without, limit):
        return {"error": "out of memory"} if name == "bs256-amp" else RATES

    assert climbed(gpu, monkeypatch, answers) == [(name, []) for name in gpu.RUNGS]


def test_what_does_not_work_is_left_out_once_and_for_all(gpu, monkeypatch, capsys):
    def answers(name, without, limit):
        return RATES if "graph" in without or not gpu.RUNGS[name].get("compile") else {"error": "no graph"}

    last = [*gpu.RUNGS][-3:]
    asked = climbed(gpu, monkeypatch, answers, rungs=last)
    assert asked == [(last[0], []), (last[0], ["graph"]), (last[1], ["graph"]), (last[2], ["graph"])]


def test_a_compiler_that_never_ends_is_not_asked_by_the_training(gpu, monkeypatch, capsys):
    def answers(name, without, limit):
        return RATES if name == "fast" else {"error": "not done after 130 s"}

    asked = climbed(gpu, monkeypatch, answers, rungs=[*gpu.RUNGS][-3:])
    assert asked[-1] == ("fast", ["compile"])


def test_the_training_has_its_time_kept(gpu, monkeypatch, capsys):
    limits = {}

    def answers(name, without, limit):
        limits[name] = limit
        return RATES

    climbed(gpu, monkeypatch, answers, seconds=gpu.TRAIN_RESERVE + 20.0)
    assert limits["bs256"] == pytest.approx(20, abs=1)
    assert limits["fast"] == pytest.approx(gpu.TRAIN_RESERVE + 20, abs=1)


def test_a_process_beyond_its_limit_is_ended(gpu, monkeypatch, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import json, sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[-1]).write_text(json.dumps({'epochs': [1]}))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    options = SimpleNamespace(data="d", device="cpu")
    assert gpu.started(options, "fast", [], 5.0) == {"epochs": [1], "error": "not done after 5 s"}
    assert gpu.started(options, "fast", [], 4.9) == {"error": "left out, as the time is over"}


def test_an_unknown_rung_is_refused():
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--data", ".", "--rungs", "bs1"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "error: unknown rung 'bs1'; rungs: bs256, bs256-amp, " in ended.stderr
