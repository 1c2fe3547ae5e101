"""The networks, their fingerprint, BatchNorm over the global batch, and what of a model a checkpoint holds."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from networks import CLASSES, ENTRIES
from ranks import needs_torch
from refusals import refusal

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from hvdtrain.core import network, recipe, user_code  # noqa: E402
from hvdtrain.core.values import known  # noqa: E402
from hvdtrain.engines import frameworks  # noqa: E402
from hvdtrain.errors import CheckpointError, RecipeError  # noqa: E402
from hvdtrain.record.checkpoint import Checkpoint, commit, read  # noqa: E402
from hvdtrain.tools import convert  # noqa: E402
from hvdtrain.torch import models, optimizers, resumable, state  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402

CPU, META = (LocalEngine(torch.device(name)) for name in ("cpu", "meta"))


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_plan_counts_the_models_parameters(entry):
    chosen = recipe.load(entry)
    classes = CLASSES.get(chosen.dataset, chosen.classes)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1) if classes is None else models.resnet50(classes, chosen.stem)
    dataset = SimpleNamespace(classes=classes, sample_shape=())
    parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert frameworks.network_of(chosen, "torch", dataset).parameters == parameters


PLAIN = {"momentum": 0.9, "nesterov": False, "fused_optimizer": False, "batch_norm": "local"}
OPTIMIZERS = {"sgd": {}, "lars": {}, "adamw": {"momentum": 0.0}, "lamb": {"momentum": 0.0}}


def state_of(model, optimizer):
    return state.State(model, [optimizer], torch.amp.GradScaler(enabled=False))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", user_code.MODELS)
def test_convert_expects_what_a_checkpoint_holds(model, optimizer):
    keys = {**PLAIN, **OPTIMIZERS[optimizer], "optimizer": optimizer}
    name, classes = {"linear": ("linear", None), "gpt": ("text", 257)}.get(model, ("digits", 10))
    keys |= {"optimizer_args": {}} if model == "gpt" else {}
    chosen = recipe.load(name, {**keys, "model": model})
    with META.device:
        made = models.build(chosen, classes, META)
        held = state_of(made, optimizers.make(chosen, made, 0.1, fused=False)).tensors
    convert._check_arrays({name: np.broadcast_to(np.float32(0), tensor.shape) for name, tensor in held.items()}, chosen)


@pytest.mark.parametrize("model", network.RESNETS)
def test_resnets_have_torchvisions_names_and_shapes(model):
    torchvision = pytest.importorskip("torchvision", reason="the reference: pip install torchvision")
    chosen = recipe.load("imagenet", {"model": model})
    with META.device:
        ours, theirs = models.build(chosen, 1000, META), getattr(torchvision.models, model)()
    shapes = [[(name, each.shape) for name, each in model.state_dict().items()] for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_every_shipped_recipe_is_in_that_table_or_in_test_flops_or_test_gpt():
    assert {entry.partition(":")[0] for entry in ENTRIES} | {"cscs", "text"} == set(known())


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


@pytest.mark.parametrize("digest", [models.digest, models.digest_on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_fingerprint_shows_every_flipped_bit_and_swap(dtype, digest, monkeypatch):
    monkeypatch.setattr(models, "digest", digest)
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
    state.start(started, ["momentum"] if options["momentum"] else [], has_step=False)
    for _ in range(4):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, started), (theirs, plain)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    named = state_of(ours, started).tensors
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


class Gated(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class OwnMean(torch.nn.BatchNorm1d):
    def forward(self, x):
        return x - x.mean(0)


def test_a_synchronised_layer_stays_what_it_is_in_all_else():
    shared = Gated(3, momentum=None)
    shared.weight.requires_grad_(False)
    seen = []
    shared.register_forward_hook(lambda *given: seen.append(given))
    model = torch.nn.Sequential(
        shared, torch.nn.BatchNorm1d(3, track_running_stats=False), shared, torch.nn.BatchNorm1d(3).eval()
    )
    plain = copy.deepcopy(model)
    names, x = list(model.state_dict()), torch.randn(8, 3)
    synced = models.with_sync_batch_norm(model, LocalEngine(torch.device("cpu")))
    assert synced is model and model[0] is model[2] is shared
    assert all(isinstance(each, models.SyncBatchNorm) for each in model) and isinstance(shared, Gated)
    assert list(model.state_dict()) == names
    assert [each.training for each in model] == [True, True, True, False]
    assert not shared.weight.requires_grad
    torch.testing.assert_close(model(x), plain(x))
    assert len(seen) == 4  # twice by each
    assert shared.num_batches_tracked == 2
    torch.testing.assert_close(shared.running_mean, plain[0].running_mean)


def test_pickled_it_is_of_its_own_class_again():
    layer = models.with_sync_batch_norm(torch.nn.BatchNorm2d(3, eps=0.5), LocalEngine(torch.device("cpu")))
    again = pickle.loads(pickle.dumps(layer))
    assert (type(again), again.eps) == (torch.nn.BatchNorm2d, 0.5)
    assert isinstance(copy.deepcopy(layer), models.SyncBatchNorm)


def test_layers_that_cannot_be_synchronised_are_refused_by_name():
    engine = LocalEngine(torch.device("cpu"))
    own = models.with_sync_batch_norm(OwnMean(3), engine)
    message = refusal(RecipeError, own, torch.randn(4, 3))
    assert message.startswith("OwnMean takes its statistics without torch.nn.functional.batch_norm, so they would stay")
    scripted = torch.nn.Sequential(torch.jit.script(torch.nn.BatchNorm1d(3)))
    message = refusal(RecipeError, models.with_sync_batch_norm, scripted, engine)
    assert message == "0 is TorchScript, whose BatchNorm stays local; give it unscripted."


@pytest.mark.parametrize(
    ("of", "what"),
    [
        (lambda: buffered(torch.eye(3).to_sparse()), "b of the model is sparse_coo, which no checkpoint holds; "),
        (lambda: Kept(torch.ones(3)), "get_extra_state() of the model is a tensor, which no checkpoint holds; "),
    ],
    ids=["sparse", "extra state"],
)
def test_what_no_checkpoint_could_hold_is_refused_by_name(of, what):
    assert refusal(RecipeError, resumable.check_kept, of()).startswith(what)


def buffered(tensor):
    model = torch.nn.Module()
    model.register_buffer("b", tensor)
    return model


class Kept(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra


@pytest.mark.parametrize("name", ["load", "no_such", "nn"])
def test_a_checkpoint_that_names_no_dtype_is_refused(name):
    model = buffered(torch.empty(0))
    model.w = torch.nn.Parameter(torch.ones(1))
    own = state_of(model, torch.optim.SGD(model.parameters(), lr=1))
    message = refusal(CheckpointError, own.start, {f"model.b:{name}": ("uint8", [3])}, {})
    assert message == f"the checkpoint holds model.b:{name}, and {name} is no dtype; give another --output."
    message = refusal(CheckpointError, own.start, {"model.other": ("uint8", [3])}, {})
    remedy = resumable.EARLIER.format(folder="--output")
    assert message == f"the checkpoint holds model.other, but the model has no other; {remedy}."


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "bfloat16", "float8_e4m3fn", "int8", "bool", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_a_checkpoint_holds_every_dtype_to_the_bit(tmp_path, dtype, shape):
    def of(seed):
        model = torch.nn.Linear(2, 1)
        drawn = torch.randn((*shape, 2), generator=torch.Generator().manual_seed(seed)) * 3
        whole = torch.view_as_complex(drawn) if dtype.startswith("complex") else drawn[..., 0]
        model.register_buffer("b", whole.to(getattr(torch, dtype)))
        return model, state.State(
            model, [torch.optim.SGD(model.parameters(), lr=1)], torch.amp.GradScaler(enabled=False)
        )

    (model, ours), (other, theirs) = of(0), of(1)
    path = commit(tmp_path, Checkpoint(ours.snapshot(), {"step": 1, "model": "m"}), 1)
    theirs.load(read(path))
    assert other.b.dtype == model.b.dtype and other.b.shape == model.b.shape
    torch.testing.assert_close(other.b.to(torch.complex128), model.b.to(torch.complex128), rtol=0, atol=0)
