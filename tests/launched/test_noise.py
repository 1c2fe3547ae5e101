"""The gradients' noise scale on real ranks: what it estimates is that of all examples' own gradients."""

import json

import numpy as np
import pytest
from marks import marked
from ranks import needs_lightning, needs_tensorflow, needs_torch, train

from hvdtrain.core.recipe.noise import estimated
from hvdtrain.datasets.small import linear
from hvdtrain.record.checkpoint import newest
from hvdtrain.tools.report.assemble import run_report

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]

STILL = ("linear", "--gradient-noise", "--precision", "float64", "--lr", 1e-30, "--epochs", 100)
CASES = [
    pytest.param("torch", 2, 1, 0.1, marks=needs_torch),
    pytest.param("torch", 4, 5, None, marks=needs_torch),
    pytest.param("torch", 1, 5, 0.1, marks=needs_torch),
    pytest.param("lightning", 2, 1, None, marks=needs_lightning),
    pytest.param("tensorflow", 2, 1, 0.1, marks=needs_tensorflow),
    pytest.param("tensorflow", 2, 2, None, marks=needs_tensorflow),
]


def test_it_is_estimated_without_a_bias():
    random, mean, dimensions = np.random.default_rng(0), 0.3, 8
    sums = np.zeros(5)
    for _ in range(20000):
        parts = random.normal(mean, 2.0, (4, 10, dimensions)).mean(1)  # of 4 ranks with 10 examples each
        sums += [(parts**2).sum(1).mean(), (parts.mean(0) ** 2).sum(), 1 / 10, 1 / 40, 1]
    found = estimated(sums)
    assert found["gradient_trace"] == pytest.approx(4 * dimensions, rel=0.02)
    assert found["gradient_square"] == pytest.approx(mean**2 * dimensions, rel=0.02)
    assert found["noise_scale"] == found["gradient_trace"] / found["gradient_square"]
    assert estimated(np.zeros(5)) == {}


@pytest.mark.parametrize(("adapter", "ranks", "parts", "clip"), marked(CASES, fast={("torch", 2)}))
def test_it_is_that_of_the_examples_gradients(adapter, ranks, parts, clip, tmp_path):
    more = ["--accumulation-steps", parts, *(["--clip-norm", clip] if clip else [])]
    launcher = "mpi" if ranks > 1 else "alone"
    train(adapter, launcher, ranks, *STILL, "--checkpoint-every-epochs", 100, "--output", tmp_path / "x", *more).good()
    records = map(json.loads, (tmp_path / "x" / "metrics.jsonl").read_text().splitlines())
    steps = [each for each in records if each["kind"] == "step"]
    found = {name: np.mean([each[name] for each in steps]) for name in ("gradient_trace", "gradient_square")}

    arrays = newest(tmp_path / "x" / "checkpoints")[0].arrays
    slope, intercept = (float(each.item()) for name, each in arrays.items() if name.startswith("model."))
    split = linear().train
    x, y = (np.asarray(each, np.float64).ravel() for each in (split.x, split.y))
    off = 2 * (slope * x + intercept - y)
    gradients = np.stack([off * x, off])
    square = (gradients.mean(1) ** 2).sum()
    trace = gradients.var(1).sum()
    assert found["gradient_trace"] == pytest.approx(trace, rel=0.1)
    assert found["gradient_square"] == pytest.approx(square, rel=0.1)
    (sentence,) = [each for each in run_report(tmp_path / "x").verdict.details if "noise" in each]
    scale = float(sentence.split("about ")[1].split(" ")[0].replace(",", ""))
    assert scale == pytest.approx(trace / square, rel=0.2, abs=1)
    assert f"of {100 / ranks:g}; this run's has 100." in sentence


@pytest.mark.parametrize(("framework", "argv"), [pytest.param("torch", [], marks=needs_torch)])
def test_it_is_refused_where_a_batch_has_one_part(framework, argv, train_here, tmp_path):
    ended = train_here(framework, "linear", "--gradient-noise", "--output", tmp_path / "x", *argv)
    assert ended.code == 2 and "gradient_noise compares the gradients of a batch's parts, and one rank has" in ended.err
