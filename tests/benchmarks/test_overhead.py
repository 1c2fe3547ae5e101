"""`python tests/benchmarks/overhead.py`: what it refuses, and that it measures."""

import json
import subprocess
import sys

import overhead
import pytest
from ranks import needs_horovod, needs_tensorflow, needs_torch

from hvdtrain.errors import RecipeError
from hvdtrain.tools.bench.measure import Kept


def run(*argv, cwd):
    command = [sys.executable, overhead.__file__, *argv]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rounds 1", "--rounds must be at least 2, got '1'; --help lists the flags."),
        ("--engine ddp --framework tensorflow", "--engine ddp is PyTorch's; drop --framework tensorflow."),
        (
            "--recipe synthetic:amp",
            "--recipe must have precision float32, as the hand-written loop has, got bfloat16.",
        ),
        (
            "--recipe imagenet",
            "--recipe must have a data set in memory or one of your own, got imagenet; take synthetic.",
        ),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(RecipeError) as refused:
        overhead.main(argv.split())
    assert str(refused.value) == message


def test_its_answer_fits_80_columns_and_ends_with_a_sentence(capsys):
    long = [1234.5678, 1201.1234, 1340.9876]  # seconds
    steps = dict.fromkeys(("hvdtrain", "hand-written", "Lightning"), long)
    overhead.answer({"step_seconds": steps, "ratios": {"hvdtrain": [1.01, 0.99], "Lightning": [1.2, 1.1]}}).conclude(
        Kept()
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    blank = lines.index("")
    sentence = " ".join(lines[blank + 1 :])
    assert blank >= 3 and sentence[0].isupper() and sentence.endswith(".")


OWN = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden, self.norm, self.top = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)

    def forward(self, x):
        return self.top(torch.relu(self.norm(self.hidden(x))))

class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.linspace(0, 1, 4 * count, dtype=torch.float64).view(count, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + random.random(), self.x[index].sum(0, keepdim=True)

def points():
    return Points(32), Points(8)

def step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean(), {}
"""
OWN_RECIPE = """
default:
  model: own_of_bench:Net
  model_args: {width: 8}
  dataset: own_of_bench:points
  loss: mse
  optimizer: adam
  batch_size: 8
  base_lr: 0.001
  epochs: 1
step:
  extends: own.yaml:default
  loss: null
  step: own_of_bench:step
"""


@pytest.mark.launched
@needs_torch
@needs_horovod
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("own.yaml", ["--ranks", "2", "--engine", "ddp"], id="a loss"),
        pytest.param("own.yaml:step", ["--ranks", "1"], id="a step", marks=pytest.mark.slow),
    ],
)
def test_overhead_of_the_users_own_network_and_data(recipe, more, tmp_path):
    (tmp_path / "own_of_bench.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(OWN_RECIPE)
    done = run("--json", "-", "--recipe", recipe, "--rounds", "2", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert {"hvdtrain", "hand-written"} <= set(result["step_seconds"])
    assert all(ratio > 0 for ratio in result["ratios"]["hvdtrain"])


# synthetic:tiny with a tenth of its examples.
SHORT = """
default:
  model: resnet50
  stem: cifar
  dataset: synthetic
  image_size: 8
  classes: 10
  examples: 64
  batch_size_per_rank: 16
  base_lr: 0.1
  base_batch_size: 256
  lr_rule: linear
  momentum: 0.9
  weight_decay: 5e-5
  epochs: 1
"""


@pytest.mark.launched
@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize(
    "framework", [pytest.param("torch", marks=needs_torch), pytest.param("tensorflow", marks=needs_tensorflow)]
)
def test_overhead_measures_both_loops(framework, tmp_path):
    (tmp_path / "short.yaml").write_text(SHORT)
    ranks = {"torch": "2", "tensorflow": "1"}[framework]  # two of TensorFlow's take half a minute longer
    given = ["--recipe", "short.yaml", "--rounds", "2", "--framework", framework, "--ranks", ranks]
    done = run(*given, "--output", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "overhead.json").read_text())
    header, ours, hand_written, _, sentence, *_ = done.stdout.splitlines()
    assert [line.split()[0] for line in (header, ours, hand_written)] == ["loop", "hvdtrain", "hand-written"]
    assert sentence.startswith("A step of hvdtrain takes ")
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert result["framework"] == framework
    assert result["ratio"]["hvdtrain"] > 0
    assert all(seconds > 0 for times in result["step_seconds"].values() for seconds in times)
