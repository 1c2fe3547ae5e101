"""Keras's gpt beside PyTorch's: the same first weights, losses and gradients."""

import json
import subprocess
import sys

import numpy as np
import pytest
from paths import SUPPORT
from ranks import clean_environ, needs_tensorflow

torch = pytest.importorskip("torch", reason="the reference is PyTorch's: pip install -e .[torch]")
pytestmark = needs_tensorflow

from hvdtrain.core import recipe  # noqa: E402
from hvdtrain.record.checkpoint import Checkpoint  # noqa: E402
from hvdtrain.tools import convert  # noqa: E402
from hvdtrain.torch import models  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402
from hvdtrain.torch.objective import Objective  # noqa: E402

VOCABULARY, LENGTH = 11, 8
SIZES = {"model_args": {"layers": 2, "heads": 3, "width": 24}, "sequence_length": LENGTH}
CASES = {  # keys, and the largest relative difference
    "packed": ({"precision": "float64"}, 1e-9),
    "separate": ({"precision": "float64", "sequences": "separate"}, 1e-9),
    "in float32": ({}, 1e-6),
}


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(0)
    x = draw.integers(VOCABULARY, size=(5, LENGTH))
    y = np.where(draw.random(x.shape) < 0.2, -100, draw.integers(VOCABULARY, size=x.shape))
    return x, y


@pytest.fixture(scope="module")
def of_keras(batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    np.savez(folder / "batch.npz", *batch)
    cases = {name: ({**SIZES, **keys}, VOCABULARY) for name, (keys, _) in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, SUPPORT / "tensorflow_gpt.py", folder]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: dict(np.load(folder / f"{name}.npz")) for name in cases}


@pytest.mark.parametrize(("name", "keys", "limit"), [(name, *case) for name, case in CASES.items()], ids=CASES)
def test_losses_and_gradients_are_those_of_pytorch(name, keys, limit, batch, of_keras):
    chosen, engine = recipe.load("text", {**SIZES, **keys}), LocalEngine(torch.device("cpu"))
    model = models.build(chosen, VOCABULARY, engine, VOCABULARY - 1 if name == "separate" else None)
    objective = Objective(chosen, engine)
    data = [torch.from_numpy(each) for each in batch]
    loss, seen = objective.measure(objective.forward(model, data[0]), data, training=True)
    loss.backward()
    theirs = of_keras[name]
    total, count = seen.metrics["loss"]
    assert count == theirs["count"] == (batch[1] != -100).sum()
    assert theirs["loss"] == pytest.approx(total.item(), rel=limit)
    arrays = {name: array for name, array in theirs.items() if name.startswith(("gradient.", "model."))}
    made = convert.converted(Checkpoint(arrays, {"step": 0, "framework": "tensorflow"}), "torch").arrays
    for key, weight in model.named_parameters():
        np.testing.assert_array_equal(made.pop(f"model.{key}"), weight.detach())
        most = limit * max(1.0, 10 * weight.grad.abs().max().item())
        np.testing.assert_allclose(made.pop(f"gradient.{key}"), weight.grad, 0, most, err_msg=key)
    assert not made
