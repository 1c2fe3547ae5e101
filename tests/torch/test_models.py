"""The networks, their fingerprint, and SGD as the adapter starts it."""

from types import SimpleNamespace

import numpy as np
import pytest
from networks import CLASSES, ENTRIES
from ranks import needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from hvdtrain.core import network, recipe  # noqa: E402
from hvdtrain.torch import models, state  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402

CPU = LocalEngine(torch.device("cpu"))


def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_resnet50_at_1000_classes_has_torchvisions_parameters():
    assert trainable(models.resnet50(1000, "imagenet")) == 25_557_032


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_plan_counts_the_models_parameters(entry):
    chosen = recipe.load(entry)
    classes = CLASSES.get(chosen.dataset, chosen.classes)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1) if classes is None else models.resnet50(classes, chosen.stem)
    dataset = SimpleNamespace(classes=classes, sample_shape=())
    assert network.of(chosen, "torch", dataset).parameters == trainable(model)


def test_every_shipped_recipe_is_in_that_table_or_in_test_flops():
    assert {entry.partition(":")[0] for entry in ENTRIES} | {"cscs"} == set(recipe.known())


@pytest.mark.parametrize(
    ("stem", "side", "expected"),
    [("cifar", 8, (8, 1)), ("cifar", 32, (32, 4)), ("imagenet", 64, (16, 2))],
    ids=["CIFAR stem, 8 pixels", "CIFAR stem, 32 pixels", "ImageNet stem, 64 pixels"],
)
def test_a_stem_leaves_maps_of_a_size(stem, side, expected):
    model = models.resnet50(10, stem).eval()
    sides = {}
    for name in ("layer1", "layer4"):
        getattr(model, name).register_forward_pre_hook(lambda _, x, name=name: sides.update({name: x[0].shape[-1]}))
        getattr(model, name).register_forward_hook(
            lambda _, x, y, name=name: sides.update({name + " out": y.shape[-1]})
        )
    with torch.no_grad():
        assert model(torch.zeros(1, 3, side, side)).shape == (1, 10)
    assert (sides["layer1"], sides["layer4 out"]) == expected


def test_the_seed_alone_decides_the_first_weights():
    torch.manual_seed(77)
    a, b, c = (models.build(recipe.load("digits", {"seed": seed}), 10, CPU) for seed in (1, 1, 2))
    assert torch.equal(a.conv1.weight, b.conv1.weight)
    assert not torch.equal(a.conv1.weight, c.conv1.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_fingerprint_shows_every_flipped_bit_and_swap(dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    before = models.fingerprint(model, True)
    assert models.fingerprint(model, True) == before
    word = {8: torch.int64, 4: torch.int32, 2: torch.int16}[model.weight.element_size()]
    seen = {before}
    flips = 0
    for parameter in model.parameters():
        bits = parameter.data.view(-1).view(word)
        for index in range(bits.numel()):
            for bit in range(8 * parameter.element_size()):
                mask = np.array(1 << bit, f"u{parameter.element_size()}").view(f"i{parameter.element_size()}").item()
                bits[index] ^= mask
                seen.add(models.fingerprint(model, True))
                bits[index] ^= mask
                flips += 1
    assert len(seen) == flips + 1
    assert models.fingerprint(model, True) == before
    model.weight.data.copy_(torch.tensor([[1.0, -1.0, 2.0], [0.0, -0.0, -2.0]]))
    flat = model.weight.data.view(-1)
    unswapped = models.fingerprint(model, True)
    for i in range(6):
        for j in range(i):
            flat[[i, j]] = flat[[j, i]]
            assert models.fingerprint(model, True) != unswapped, (i, j)
            flat[[i, j]] = flat[[j, i]]


def test_a_fingerprint_has_the_statistics_where_requested():
    model = torch.nn.BatchNorm2d(4)
    without, with_them = (models.fingerprint(model, with_statistics) for with_statistics in (False, True))
    model.num_batches_tracked += 1
    assert models.fingerprint(model, False) == without
    assert models.fingerprint(model, True) != with_them


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        {"momentum": 0.9, "weight_decay": 5e-4, "fused": True},
    ],
    ids=["plain", "momentum", "nesterov", "fused"],
)
def test_momentum_of_zero_starts_as_torchs_sgd_does(options):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    started, plain = (torch.optim.SGD(m.parameters(), lr=0.1, **options) for m in (ours, theirs))
    state.start_momentum(started)
    for _ in range(4):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, started), (theirs, plain)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    named = state.tensors(ours, started)
    assert ("momentum.weight" in named) == bool(options["momentum"])


def test_frozen_statistics_stay_while_training():
    chosen = recipe.load("digits", {"batch_norm": "frozen"})
    model = models.build(chosen, 10, CPU)
    models.training_mode(model, chosen)
    model(torch.randn(2, 3, 8, 8))
    assert model.training
    assert torch.equal(model.bn1.running_mean, torch.zeros(64))
    assert model.bn1.num_batches_tracked == 0
    assert model.bn1.weight.requires_grad
