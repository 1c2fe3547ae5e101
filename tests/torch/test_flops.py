"""Parameters and FLOPs: of ResNet50 by arithmetic, of every other network counted by PyTorch."""

import re
import sys

import pytest
from ranks import needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from hvdtrain import datasets  # noqa: E402
from hvdtrain.core import network, recipe  # noqa: E402
from hvdtrain.errors import PlanError  # noqa: E402
from hvdtrain.run.main import load_dataset  # noqa: E402
from hvdtrain.torch import flops, networks  # noqa: E402
from hvdtrain.torch.resnet import resnet50  # noqa: E402

MODULE = "flops_of_mine"
SOURCE = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.layer, self.breaks = nn.Linear(192, 10), breaks

    def forward(self, x):
        if self.breaks:
            raise ValueError("I am broken")
        return self.layer(x.flatten(1))

class NeedsNumbers(Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else x + 1)

def twice(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x) + model(x), y)
"""
LINEAR = 2 * 192 * 10


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A recipe on digits with names of the module above in it."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def load(model, **keys):
        return recipe.load("digits", {"model": f"{MODULE}:{model}", **keys})

    return load


@pytest.mark.parametrize(("stem", "side"), [("cifar", 8), ("cifar", 33), ("imagenet", 224), ("imagenet", 75)])
def test_resnet50_by_arithmetic_is_what_pytorch_counts(stem, side):
    with torch.device("meta"):
        model, images = resnet50(100, stem).eval(), torch.zeros(1, 3, side, side)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert network.resnet50_flops(stem, side, 100) == counter.get_total_flops()


PUBLISHED = {  # parameters; FLOPs: twice the multiply-adds of torchvision's documentation, which leaves out Inception's
    "resnet101-synthetic": (44_549_160, 2 * 7.80e9),  # auxiliary classifier
    "inception_v3-synthetic": (27_161_264, 2 * 5.71e9),
    "vgg16-synthetic": (138_357_544, 2 * 15.47e9),
}


@pytest.mark.parametrize(("entry", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_cscs_networks(entry, expected):
    chosen = recipe.load(f"cscs:{entry}", {"examples": 64})
    dataset = load_dataset(chosen)
    counted = network.with_flops(network.of(chosen, "torch", dataset), chosen, "torch", dataset)
    assert counted.parameters == expected[0]
    assert counted.flops == pytest.approx(expected[1], rel=3e-3)
    assert counted.has_batch_norm == (entry != "vgg16-synthetic")


COUNTED = {
    "a network": ("Linear", {}, LINEAR),
    "of float64": ("Linear", {"precision": "float64"}, LINEAR),
    "one that needs numbers": ("NeedsNumbers", {}, LINEAR),
    "a step's": ("Linear", {"step": f"{MODULE}:twice"}, 2 * LINEAR),
}


@pytest.mark.parametrize(("model", "keys", "expected"), COUNTED.values(), ids=COUNTED)
def test_own_networks(model, keys, expected, own):
    assert flops.count(own(model, **keys), datasets.load("digits")) == expected


def test_what_cannot_be_counted_says_why(own):
    with pytest.raises(PlanError) as refused:
        flops.count(own("Linear", model_args={"breaks": True}), datasets.load("digits"))
    text = rf"{MODULE}:Linear: /\S*/{MODULE}.py line 12: ValueError: I am broken\."
    assert re.fullmatch(text, str(refused.value))


def test_a_tensor_of_the_models_module_is_no_part_of_the_count(tmp_path, monkeypatch):
    (tmp_path / "weighted.py").write_text(
        "import torch\nW = torch.ones(10)\n\ndef net(): return torch.nn.Linear(192, 10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = recipe.load("digits", {"model": "weighted:net", "model_args": {}})
    assert networks.without_memory(mine, 10).weight.device.type == "meta"
    assert sys.modules["weighted"].W.device.type == "cpu"
