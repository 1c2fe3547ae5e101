"""Which weights a recipe starts from, what of a file is refused, and what of a network learns."""

import json
import os
import pickle
import struct
import zipfile

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")

from marks import marked  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from hvdtrain.core import recipe as recipes  # noqa: E402
from hvdtrain.core.recipe import finetuning  # noqa: E402
from hvdtrain.engines import frameworks  # noqa: E402
from hvdtrain.errors import CheckpointError, HvdtrainError, RecipeError  # noqa: E402
from hvdtrain.torch import networks, optimizers  # noqa: E402
from hvdtrain.torch.engines.buckets import Messages  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402
from hvdtrain.torch.finetuning import parts, weights  # noqa: E402

KEYS = {
    "name": "own", "model": "own:Net", "dataset": "own:data", "loss": "mse", "epochs": 4, "batch_size": 4,
    "base_lr": 0.1,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.fc = nn.Linear(6, classes)


def made(**keys):
    return recipes.validate({**KEYS, **keys})


def net(seed=0, **arguments):
    torch.manual_seed(seed)
    return Net(**arguments)


def tensors(model, prefix=""):
    return {f"{prefix}{name}": each.clone() for name, each in model.state_dict().items()}


@pytest.fixture
def given(tmp_path):
    """`given(what)`: the path of a file of torch.save."""

    def of(what, name="given.pt", **more):
        torch.save(what, tmp_path / name, **more)
        return str(tmp_path / name)

    return of


@pytest.mark.parametrize("within", ["", "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "model._orig_mod."])
def test_prefixes_are_stripped(within, prefix, given):
    theirs, ours = net(1), net(2)
    state = tensors(theirs, prefix)
    line = weights.start(made(init_from=given({within: state, "epoch": 3} if within else state)), ours)
    assert line.startswith("init        11 of 11 tensors are from ")
    for name, each in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], each)


def test_old_files_and_safetensors_are_read(given, tmp_path):
    save_file(tensors(net(1)), tmp_path / "given.safetensors")
    old = given(tensors(net(1)), _use_new_zipfile_serialization=False)
    half = given(
        {name: each.half() if each.is_floating_point() else each for name, each in tensors(net(1)).items()}, "h.pt"
    )
    for path in (old, tmp_path / "given.safetensors", half):
        ours = net(2)
        weights.start(made(init_from=str(path)), ours)
        torch.testing.assert_close(ours.state_dict(), net(1).state_dict(), atol=1e-3, rtol=1e-3)


def test_a_part_is_renamed_and_a_head_left_out(given):
    theirs, ours = net(1, classes=10), net(2)
    state = {name.replace("encoder", "backbone"): each for name, each in tensors(theirs).items()}
    keys = {"init_rename": {"backbone": "encoder"}, "init_skip": ["fc"]}
    line = weights.start(made(init_from=given(state), **keys), ours)
    assert line.endswith("; new: fc.weight, fc.bias")
    assert torch.equal(ours.encoder[2].weight, theirs.encoder[2].weight)
    assert torch.equal(ours.fc.weight, net(2).fc.weight)
    inner = {name.removeprefix("encoder."): each for name, each in tensors(theirs).items() if "encoder" in name}
    keys = {"init_rename": {"": "encoder"}, "init_skip": ["fc"]}
    assert "9 of 11" in weights.start(made(init_from=given(inner), **keys), net(3))


def test_tied_weights_are_one(given):
    def tied(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    for names in (("0.weight",), ("1.weight",), ("1.weight", "0.weight")):  # one name, as safetensors has it
        ours, recipe = tied(2), made(init_from=given(dict.fromkeys(names, tied(1)[0].weight.detach())))
        assert "1 of 1 tensor " in weights.start(recipe, ours)
        assert torch.equal(ours[1].weight, tied(1)[0].weight) and ours[0].weight is ours[1].weight


UNFIT = {  # keys, what the file lacks, what it has more, and words of the line
    "another head": (
        {}, (), {"fc.weight": torch.ones(10, 6)},
        ["fc.weight is float [10, 6], here float [3, 6]", "init_skip: [fc]"],
    ),
    "missing": ({}, ("fc.bias",), {}, ["missing: fc.bias", "init_skip: [fc]"]),
    "left over": ({}, (), {"head.weight": torch.ones(1)}, ["left over: head.weight", "init_skip: [head]"]),
    "left over beside a skip": ({"init_skip": ["fc"]}, (), {"head.weight": torch.ones(1)}, ["init_skip: [fc, head]"]),
    "twice": ({}, (), {"module.fc.bias": torch.ones(3)}, ["left over: module.fc.bias."]),
    "integers": ({}, (), {"fc.bias": torch.ones(3, dtype=torch.int8)}, ["fc.bias is int8 [3], here float [3]"]),
    "sparse": ({}, (), {"fc.weight": torch.ones(3, 6).to_sparse()}, ["torch.float32 torch.sparse_coo [3, 6]"]),
    "a skip of nothing": ({"init_skip": ["encodr"]}, (), {}, ["init_skip 'encodr' matches no name. Did you mean enc"]),
    "a rename of nothing": ({"init_rename": {"encode": "x"}}, (), {}, ["init_rename 'encode' matches no name. Did"]),
    "all skipped": ({"init_skip": ["*"]}, (), {}, ["init_skip leaves nothing to take"]),
    "names without end": ({}, (), {"x" * 3000: torch.ones(1)}, ["it has a name of 3,000 characters"]),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_listed(case, given):
    keys, without, more, words = case
    state = {name: each for name, each in tensors(net(1)).items() if name not in without} | more
    ours, before = net(2), tensors(net(2))
    with pytest.raises(HvdtrainError) as caught:
        weights.start(made(init_from=given(state), **keys), ours)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [] and "\n" not in text and len(text) < 1500
    assert all(torch.equal(each, before[name]) for name, each in ours.state_dict().items())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def zipped(path, entries, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def hostile(kind, path):
    """Writes a hostile file at that path, or beside it. Returns which to read."""
    beside = path.with_suffix(".safetensors")
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    of_header = {
        "header bomb": struct.pack("<Q", 2**62) + b"{}",
        "long header": struct.pack("<Q", 90 << 20) + b" " * (90 << 20),
        "tensor bomb": struct.pack("<Q", len(header)) + header,
    }
    if kind in of_header:
        beside.write_bytes(of_header[kind])
        return beside
    match kind:
        case "code":
            path.write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
        case "code in an archive":
            torch.save({"fc.weight": Evil()}, path)
        case "zip bomb":
            entries = {"archive/data.pkl": pickle.dumps({}), "archive/data/0": bytes(200 << 20)}
            zipped(path, entries, zipfile.ZIP_DEFLATED)
        case "truncated":
            torch.save(tensors(net(1)), path)
            os.truncate(path, path.stat().st_size - 500)
        case "no weights":
            torch.save([1, 2], path)
        case "text":
            path.write_text("weights")
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "expanded tensor":
            torch.save({"fc.weight": torch.ones(1).expand(10**12)}, path)
        case "larger than memory":
            path.touch()
            os.truncate(path, 1 << 43)
    return path


HOSTILE = {  # words of the line
    "code": " names code, posix.mkdir, which is not run",
    "code in an archive": " names code, posix.mkdir, which is not run",
    "zip bomb": "its archive is compressed",
    "truncated": "cannot be read (",
    "no weights": "state_dict, model_state_dict, model, but a list; write the state_dict alone: torch.save(",
    "text": "cannot be read (",
    "pipe": "it is not a regular file",
    "device": "it is not a regular file",
    "header bomb": "it has a header of more than 64 MiB",
    "long header": "it has a header of more than 64 MiB",
    "tensor bomb": "cannot be read (",
    "expanded tensor": "fc.weight is float [1000000000000], here float [3, 6]",
    "larger than memory": "it is larger than this host's memory",
}


@pytest.mark.parametrize("kind", marked(HOSTILE, slow={"long header"}))
def test_a_hostile_file_is_refused_in_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = hostile(kind, tmp_path / "given.pt")
    with pytest.raises(CheckpointError) as caught:
        weights.start(made(init_from=str(path)), net(2))
    assert HOSTILE[kind] in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1500
    assert not (tmp_path / "executed").exists()


def test_published_weights_come_from_a_local_folder(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    model = torchvision.models.resnet18()
    with pytest.raises(
        CheckpointError, match=r"is not on this host: .*resnet18-f37072fd.pth is missing, and a run downloads"
    ):
        weights.start(made(init_from="torchvision:resnet18"), model)
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(tensors(model), tmp_path / "hub/checkpoints" / url.rpartition("/")[2])
    for name in ("resnet18", "ResNet18_Weights.IMAGENET1K_V1"):
        assert " of 122 tensors " in weights.start(made(init_from=f"torchvision:{name}"), torchvision.models.resnet18())
    with pytest.raises(CheckpointError, match="torchvision:resnet0"):
        weights.start(made(init_from="torchvision:resnet0"), model)


def test_timms_weights_come_from_the_hubs_cache(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = timm.create_model("resnet18.a1_in1k")
    with pytest.raises(CheckpointError, match=r"timm--resnet18.a1_in1k/snapshots/\*/model.safetensors is missing"):
        weights.start(made(init_from="timm:resnet18.a1_in1k"), model)
    snapshot = tmp_path / "models--timm--resnet18.a1_in1k/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    save_file(tensors(model), snapshot / "model.safetensors")
    assert " of 122 tensors " in weights.start(made(init_from="timm:resnet18.a1_in1k"), model)


PARTS = {
    "freeze": ["encoder"],
    "lr_scale": {"encoder.2": 0.5},
    "no_weight_decay": ["bias", "norm"],
    "weight_decay": 0.1,
}


def groups(optimizer):
    return [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]


def test_frozen_parameters_have_no_state_and_others_their_groups():
    recipe, model = made(**PARTS, momentum=0.9), net()
    freezing = parts.Freezing(recipe, model)
    optimizer = optimizers.make(recipe, model, 0.1, fused=False)
    assert groups(optimizer) == [(0.1, 0.1, 1), (0.1, 0.0, 1)]
    assert {*optimizer.state} == {model.fc.weight, model.fc.bias}
    engine, named = LocalEngine(torch.device("cpu")), dict(model.named_parameters())
    messages = Messages(engine, 1 << 20, None, named, keeps=False, slots=0)
    assert [*messages.names.values()] == ["fc.weight", "fc.bias"]  # which alone are communicated
    model.train()
    freezing.enter(3)
    assert not model.encoder[1].training and not model.encoder[0].weight.requires_grad


def test_thawed_parameters_get_their_state_then():
    recipe, model = made(**PARTS, momentum=0.9, freeze_until_epoch=2), net()
    freezing = parts.Freezing(recipe, model)
    optimizer = optimizers.make(recipe, model, 0.1, fused=False)
    assert groups(optimizer) == [(0.1, 0.1, 2), (0.1, 0.0, 4), (0.05, 0.1, 1), (0.05, 0.0, 1)]
    assert {*optimizer.state} == {model.fc.weight, model.fc.bias}
    kept = optimizer.state[model.fc.weight]["momentum_buffer"]
    freezing.enter(2)
    optimizers.start(recipe, optimizer)
    assert {*optimizer.state} == {*model.parameters()} and all(each.requires_grad for each in model.parameters())
    assert optimizer.state[model.fc.weight]["momentum_buffer"] is kept


class ByName(torch.optim.SGD):
    def __init__(self, named_parameters, lr):
        self.names = [name for name, _ in named_parameters]
        super().__init__([each for _, each in named_parameters], lr=lr)


def test_an_optimizer_that_asks_for_names_gets_them():
    recipe = made(optimizer=f"{__name__}:ByName", freeze=["encoder"])
    assert optimizers.make(recipe, net(), 0.1, fused=False).names == ["fc.weight", "fc.bias"]
    recipe = made(optimizer=f"{__name__}:ByName", lr_scale={"fc": 0.5})
    with pytest.raises(RecipeError, match=r"lr_scale and no_weight_decay do not go with optimizer .*, which makes"):
        optimizers.make(recipe, net(), 0.1, fused=False)


def test_the_network_is_made_once(monkeypatch, tmp_path):
    (tmp_path / "counted.py").write_text(
        "from torch import nn\nmade = []\ndef net():\n    made.append(1)\n    return nn.Linear(4, 3)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = made(model="counted:net")
    dataset = type("Data", (), {"classes": None, "sample_shape": ()})
    assert frameworks.network_of(recipe, "torch", dataset, keeps=True).sizes == {"weight": 12, "bias": 3}
    networks.build(recipe, None)
    import counted

    assert len(counted.made) == 1
    networks.build(recipe, None)
    assert len(counted.made) == 2


REFUSED = {
    "a pattern of nothing": ({"freeze": ["encodr"]}, "freeze 'encodr' matches no name. Did you mean encoder?"),
    "another pattern of nothing": ({"lr_scale": {"q*": 2.0}}, "lr_scale 'q*' matches no name. There are encoder, fc, "),
    "all frozen": ({"freeze": ["*"]}, "leaves nothing to learn"),
}
PLAIN_RULES = {
    "until without freeze": ({"freeze_until_epoch": 1}, "freeze_until_epoch goes with freeze"),
    "until the end": ({"freeze": ["fc"], "freeze_until_epoch": 4}, "must be less than epochs=4, got 4"),
    "names without weights": ({"init_skip": ["fc"]}, "init_rename and init_skip go with init_from"),
    "no decay": ({"no_weight_decay": ["bias"]}, "no_weight_decay needs a weight_decay above 0"),
    "an LR of 0": ({"lr_scale": {"fc": 0.0}}, "lr_scale must be greater than 0"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_patterns_are_checked_by_the_plan(case):
    keys, line = case
    names = dict(net().named_parameters())
    with pytest.raises(RecipeError) as caught:
        finetuning.parts(made(**keys), names, ())
    assert line in str(caught.value)


@pytest.mark.parametrize("case", PLAIN_RULES.values(), ids=PLAIN_RULES)
def test_keys_that_do_not_go_together(case):
    keys, line = case
    with pytest.raises(RecipeError) as caught:
        made(**keys)
    assert line in str(caught.value)


def test_a_pattern_takes_back_what_was_chosen():
    found = finetuning.parts(made(freeze=["*", "!fc"]), dict(net().named_parameters()), ())
    assert {name for name, part in found.items() if not part.is_frozen} == {"fc.weight", "fc.bias"}
