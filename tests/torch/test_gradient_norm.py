"""The norm of the averaged gradients, before they are clipped, in every precision."""

import pytest
from ranks import needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from hvdtrain.core.recipe import load  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402
from hvdtrain.torch.step import Step  # noqa: E402

CASES = {
    "plain": {},
    "clipped": {"clip_norm": 0.01},
    "two micro-batches": {"accumulation_steps": 2},
    "float16": {"precision": "float16"},
    "float16, an optimizer that takes the scale": {"precision": "float16", "fused_optimizer": True},
    "float16, clipped": {"precision": "float16", "clip_norm": 0.01},
}


@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_that_of_the_losss_gradient(case):
    recipe = load("linear", {"momentum": 0.5, **CASES[case]})
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    step = Step(recipe, LocalEngine(torch.device("cpu")), model, lr=0.1)
    assert step.gradient_norm() is None
    x = torch.full((8, 1), 0.25)  # float16 overflows with more
    step([(x, 0 * x)] * recipe.accumulation_steps, lr=0.1)  # the loss (w x + b)^2 / 2 or (w x + b)^2
    factor = step.gradient_norm() / (0.25 * 1.0625**0.5)
    assert factor == pytest.approx(round(factor), rel=2e-3)
    assert round(factor) in {1, 2}
