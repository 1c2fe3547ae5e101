"""Parameters and FLOPs: of ResNet50 by arithmetic, of every other network counted by PyTorch."""

import re
import sys
import warnings

import pytest
from ranks import needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from hvdtrain import datasets  # noqa: E402
from hvdtrain.core import network, recipe  # noqa: E402
from hvdtrain.engines import frameworks  # noqa: E402
from hvdtrain.errors import PlanError, RecipeError  # noqa: E402
from hvdtrain.run.setup import load_dataset  # noqa: E402
from hvdtrain.torch import flops, models, networks  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402

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

class Loaded(Linear):
    def __init__(self, file, assign):
        super().__init__()
        self.load_state_dict(torch.load(file), assign=assign)

class MadeOfNumbers(Linear):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, int(self.layer.bias.abs().sum().item() * 0) + 12)

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


@pytest.mark.parametrize("model", network.RESNETS)
@pytest.mark.parametrize(("stem", "side"), [("cifar", 8), ("cifar", 33), ("imagenet", 224), ("imagenet", 75)])
def test_resnets_by_arithmetic_are_what_pytorch_counts(model, stem, side):
    chosen, meta = recipe.load("cifar100", {"model": model, "stem": stem}), torch.device("meta")
    with meta:
        built, images = models.build(chosen, 100, LocalEngine(meta)).eval(), torch.zeros(1, 3, side, side)
    with FlopCounterMode(display=False) as counter:
        built(images)
    assert network.resnet_flops(model, stem, side, 100) == counter.get_total_flops()


PUBLISHED = {  # parameters; FLOPs: twice the multiply-adds of torchvision's documentation, which leaves out Inception's
    "resnet101-synthetic": (44_549_160, 2 * 7.80e9),  # auxiliary classifier
    "inception_v3-synthetic": (27_161_264, 2 * 5.71e9),
    "vgg16-synthetic": (138_357_544, 2 * 15.47e9),
}


@pytest.mark.parametrize(("entry", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_cscs_networks(entry, expected):
    chosen = recipe.load(f"cscs:{entry}", {"examples": 64})
    dataset = load_dataset(chosen)
    counted = frameworks.with_flops(frameworks.network_of(chosen, "torch", dataset), chosen, "torch", dataset)
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


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_a_model_loads_are_counted_without_a_warning_and_loaded(assign, own, tmp_path):
    weights = torch.nn.Linear(192, 10).state_dict()
    torch.save({f"layer.{name}": each for name, each in weights.items()}, tmp_path / "w.pt")
    chosen = own("Loaded", model_args={"file": str(tmp_path / "w.pt"), "assign": assign})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counted = frameworks.network_of(chosen, "torch", datasets.load("digits"))
        assert frameworks.with_flops(counted, chosen, "torch", datasets.load("digits")).flops == LINEAR
    assert counted.parameters == 193 * 10
    assert torch.equal(networks.build(chosen, 10).layer.weight, weights["weight"])


def test_a_network_that_is_made_of_numbers_is_counted(own):
    assert frameworks.network_of(own("MadeOfNumbers"), "torch", datasets.load("digits")).parameters == 193 * 12


def test_fewer_outputs_than_classes_are_refused_by_the_plan(own):
    chosen = own("Linear", dataset="synthetic", classes=11, image_size=8)
    with pytest.raises(RecipeError) as refused:
        flops.count(chosen, load_dataset(chosen))
    assert str(refused.value) == (
        f"model {MODULE}:Linear gives 10 outputs, dataset synthetic has 11 classes: labels must be 0 to 9 (PyTorch "
        "leaves out -100); change them, or give it 11 outputs."
    )


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
