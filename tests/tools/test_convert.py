"""`python -m hvdtrain convert`: names and layouts there and back, and its exact refusals."""

import contextlib
import json
import random
from types import SimpleNamespace

import numpy as np
import odd_json
import pytest
from refusals import refusal

from hvdtrain.core import network, recipe
from hvdtrain.errors import CheckpointError, OutputError, RecipeError
from hvdtrain.record import checkpoint
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.folder import hold
from hvdtrain.tools import convert

DRAW = np.random.default_rng(0)
META = {"step": 7, "model": "resnet50, …", "recipe": "digits:x", "framework": "torch", "scaler": {}}
# PyTorch's name and shape, TensorFlow's name and shape.
NAMES = [
    ("conv1.weight", (4, 3, 7, 5), "conv1.kernel", (7, 5, 3, 4)),
    ("bn1.weight", (4,), "bn1.gamma", (4,)),
    ("bn1.bias", (4,), "bn1.beta", (4,)),
    ("bn1.running_mean", (4,), "bn1.moving_mean", (4,)),
    ("bn1.running_var", (4,), "bn1.moving_variance", (4,)),
    ("layer1.0.downsample.1.weight", (2,), "layer1.0.downsample.1.gamma", (2,)),
    ("layer1.0.downsample.1.running_mean", (2,), "layer1.0.downsample.1.moving_mean", (2,)),
    ("fc.weight", (10, 4), "fc.kernel", (4, 10)),
    ("fc.bias", (10,), "fc.bias", (10,)),
]
TRAINED = [row for row in NAMES if "running" not in row[0]]


def resnet():
    """Arrays as PyTorch names them, momentum too."""
    arrays = {f"model.{name}": DRAW.normal(size=shape).astype(np.float32) for name, shape, _, _ in NAMES}
    arrays |= {f"momentum_buffer.{name}": DRAW.normal(size=shape).astype(np.float32) for name, shape, _, _ in TRAINED}
    counted = {f"model.{name}.num_batches_tracked": np.array(7) for name in ("bn1", "layer1.0.downsample.1")}
    return Checkpoint({**arrays, **counted}, META)


def there_and_back(ours):
    """The state in TensorFlow's form, whose form in PyTorch again has the same bits."""
    theirs = convert.converted(ours, "tensorflow")
    back = convert.converted(theirs, "torch")
    assert back.arrays.keys() == ours.arrays.keys()
    for name, array in ours.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array, err_msg=name)
    assert back.meta == META
    return theirs


def test_names_and_layouts():
    ours = resnet()
    theirs = there_and_back(ours)
    expected = {f"model.{name}": shape for _, _, name, shape in NAMES}
    expected |= {f"momentum_buffer.{name}": shape for _, _, name, shape in TRAINED}
    assert {name: array.shape for name, array in theirs.arrays.items()} == expected
    kernel, weight = theirs.arrays["model.conv1.kernel"], ours.arrays["model.conv1.weight"]
    assert kernel[6, 4, 2, 3] == weight[3, 2, 6, 4]
    assert theirs.arrays["momentum_buffer.fc.kernel"][1, 2] == ours.arrays["momentum_buffer.fc.weight"][2, 1]


def adam():
    """Arrays as PyTorch names them under Adam or LAMB, with averaged weights."""
    kept = {name: array for name, array in resnet().arrays.items() if name.startswith("model.")}
    for slot in ("exp_avg", "exp_avg_sq", "ema"):
        kept |= {f"{slot}.{name}": DRAW.normal(size=shape).astype(np.float32) for name, shape, _, _ in TRAINED}
    kept |= {f"step.{name}": np.array(7, np.float32) for name, *_ in TRAINED}
    return Checkpoint(kept, META)


def test_adams_state():
    ours = adam()
    theirs = there_and_back(ours)
    assert theirs.arrays["step"] == 7
    assert [name for name in theirs.arrays if name.startswith("step")] == ["step"]
    assert theirs.arrays["exp_avg_sq.fc.kernel"][1, 2] == ours.arrays["exp_avg_sq.fc.weight"][2, 1]
    assert theirs.arrays["ema.bn1.gamma"][1] == ours.arrays["ema.bn1.weight"][1]
    others = Checkpoint({**ours.arrays, "step.fc.bias": np.array(6, np.float32)}, META)
    message = "the optimizer's steps differ between parameters, "
    assert refusal(CheckpointError, convert.converted, others, "tensorflow").startswith(message)


def test_a_slot_is_not_taken_for_adams_by_its_name():
    """Lion keeps exp_avg too, but no step."""
    arrays = adam().arrays.items()
    there_and_back(Checkpoint({n: a for n, a in arrays if not n.startswith(("step", "exp_avg_sq"))}, META))


def test_a_run_of_an_optimizer_of_yours_is_refused(trained):
    sgds = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "fused_optimizer": False}
    yours = recipe.load(str(trained / "recipe.yaml"), {**sgds, "optimizer": "torch.optim:RAdam"})
    (trained / "recipe.yaml").write_text(recipe.dump(yours))
    assert "optimizer torch.optim:RAdam is PyTorch code;" in refused(CheckpointError, trained, "--to", "tensorflow")


def test_a_model_of_one_layer():
    ours = Checkpoint(
        {"model.weight": np.ones((1, 1)), "model.bias": np.zeros(1), "momentum_buffer.bias": np.ones(1)}, META
    )
    theirs = there_and_back(ours)
    assert set(theirs.arrays) == {"model.linear.kernel", "model.linear.bias", "momentum_buffer.linear.bias"}


@pytest.fixture
def of_one_block(monkeypatch):
    """ResNets are of one block, whose arrays take no time."""
    monkeypatch.setattr(network, "RESNETS", dict.fromkeys(network.RESNETS, (1,)))


def whole(model="resnet50", slots=("momentum_buffer",), steps=False):
    """Every array of such a network, as PyTorch names them, and its slots'."""
    trained, statistics = network.weights(SimpleNamespace(model=model, model_args={}, sequence_length=256), 10)
    shapes = {f"{slot}.{name}": shape for slot in ("model", *slots) for name, shape in trained.items()}
    shapes |= {f"model.{name}": shape for name, shape in statistics.items()}
    shapes |= {f"step.{name}": () for name in trained if steps}
    return {name: np.full(shape, 7, np.float32) for name, shape in shapes.items()}


def make_run(folder, arrays, name="digits", framework="torch", steps=(3, 7), **keys):
    """A run folder of that framework with a checkpoint of each of those steps."""
    for step in steps:
        meta = {**META, "step": step, "framework": framework}
        checkpoint.commit(folder / "checkpoints", Checkpoint(arrays, meta), keep=2)
    (folder / "recipe.yaml").write_text(recipe.dump(recipe.load(name, {"epochs": 3, **keys})))
    (folder / "plan.json").write_text(json.dumps({"framework": framework, "size": 2}))
    return folder


@pytest.fixture
def trained(tmp_path, of_one_block):
    """A run folder of PyTorch's with two checkpoints."""
    return make_run(tmp_path / "run", whole())


ADAM = {"optimizer": "adam", "momentum": 0.0, "nesterov": False, "fused_optimizer": False}
MOMENTS = ("exp_avg", "exp_avg_sq")
GPT = {**ADAM, "model": "gpt", "stem": "imagenet", "dataset": "tokens", "weight_decay": 0.0}
OURS = {  # what both frameworks have alike: arrays, and keys of the recipe
    "resnet50": (whole, {}),
    "resnet101": (lambda: whole("resnet101"), {"model": "resnet101", "stem": "imagenet"}),
    "without momentum": (lambda: whole(slots=()), {"momentum": 0.0, "nesterov": False}),
    "lars": (whole, {"optimizer": "lars", "nesterov": False, "fused_optimizer": False}),
    "adam": (lambda: whole(slots=MOMENTS, steps=True), ADAM),
    "lamb": (lambda: whole(slots=MOMENTS, steps=True), {**ADAM, "optimizer": "lamb"}),
    "averaged weights": (lambda: whole(slots=("momentum_buffer", "ema")), {"ema_decay": 0.9}),
    "linear": (lambda: whole("linear", slots=()), {"name": "linear"}),
    "gpt": (lambda: whole("gpt", slots=MOMENTS, steps=True), GPT),
}


@pytest.mark.parametrize(("arrays", "keys"), OURS.values(), ids=OURS)
def test_both_ways(arrays, keys, tmp_path, of_one_block):
    source = make_run(tmp_path / "run", arrays(), steps=(7,), **keys)
    convert.main([str(source), "--to", "tensorflow"])
    convert.main([f"{source}-tensorflow", "--to", "torch", "--output", str(tmp_path / "back")])
    back, _ = checkpoint.newest(tmp_path / "back" / "checkpoints")
    assert {name: array.shape for name, array in back.arrays.items()} == {n: a.shape for n, a in arrays().items()}


CODE = "; recipes with model linear, resnet50, resnet101, gpt and no code of your own can. Train on with hvdtrain."
UNLIKE = {  # what the other framework cannot train: keys of the recipe, what trained it, and what the line holds
    "a network of yours": ({"model": "tiny:Net"}, "torch", f"model tiny:Net is PyTorch code{CODE}torch, or anew"),
    "Keras's": ({"model": "tiny:net"}, "tensorflow", f"model tiny:net is TensorFlow code{CODE}tensorflow, or"),
    "torchvision's": ({"model": "torchvision:resnet50"}, "torch", "model torchvision:resnet50 is PyTorch code; "),
    "a step": ({"step": "tiny:step"}, "torch", "step tiny:step is PyTorch code; recipes"),
    "a loss": ({"loss": "tiny:loss"}, "torch", "loss tiny:loss is PyTorch code; recipes"),
    "a metric": ({"metrics": {"right": "tiny:right"}}, "torch", "metrics right tiny:right is PyTorch code; recipes"),
    "vgg16": ({"model": "vgg16"}, "torch", "cannot be converted: model vgg16 is another one in TensorFlow; recipes"),
    "inception_v3": ({"model": "inception_v3"}, "tensorflow", "model inception_v3 is another one in PyTorch; recipes"),
}


@pytest.mark.parametrize(("keys", "framework", "expected"), UNLIKE.values(), ids=UNLIKE)
def test_what_the_other_framework_cannot_train_is_refused_and_nothing_made(keys, framework, expected, tmp_path):
    source = make_run(tmp_path / "run", {"model.layers.0.weight": np.ones(1)}, framework=framework, steps=(7,), **keys)
    to = "tensorflow" if framework == "torch" else "torch"
    assert expected in refused(CheckpointError, source, "--to", to)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


OTHER_ARRAYS = {  # what is other in the checkpoint, and the refusal
    "one missing": ({"model.bn1.bias": None}, "model.bn1.bias of the checkpoint is missing, of model resnet50 with"),
    "of another shape": (
        {"model.conv1.weight": np.ones((64, 3, 3, 3))},
        "model.conv1.weight of the checkpoint is [64, 3, 3, 3], of model resnet50 with optimizer sgd [64, 3, 7, 7]; ",
    ),
    "one more": ({"model.conv2.weight": np.ones(2)}, "model.conv2.weight of the checkpoint is [2], of model resnet50 "),
    "a slot of another shape": (
        {"momentum_buffer.fc.bias": np.ones(9)},
        "momentum_buffer.fc.bias of the checkpoint is [9], of ",
    ),
    "averages that nothing takes": ({"ema.fc.bias": np.ones(10)}, "ema.fc.bias of the checkpoint is [10], of model "),
    "no classifier": ({"model.fc.bias": None}, "model.fc.weight of the checkpoint is [10, 256], of model resnet50 "),
}


@pytest.mark.parametrize(("changes", "expected"), OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_other_arrays_are_refused_by_name_and_both_shapes(changes, expected, framework, tmp_path, of_one_block):
    arrays = {name: array for name, array in {**whole(), **changes}.items() if array is not None}
    if framework == "tensorflow":
        arrays = convert.converted(Checkpoint(arrays, META), "tensorflow").arrays
    source = make_run(tmp_path / "run", arrays, framework=framework, steps=(7,))
    to = "tensorflow" if framework == "torch" else "torch"
    assert refused(CheckpointError, source, "--to", to).startswith(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_folder_is_made(trained, capsys):
    assert convert.main([str(trained), "--to", "tensorflow"]) == 0
    target = trained.with_name("run-tensorflow")
    state, damaged = checkpoint.newest(target / "checkpoints")
    assert not damaged
    assert (state.meta["step"], state.meta["framework"], state.meta["recipe"]) == (7, "tensorflow", "digits:x")
    assert recipe.load(str(target / "recipe.yaml")).epochs == 3
    assert json.loads((target / "plan.json").read_text()) == {"framework": "tensorflow", "size": 2}
    assert json.loads((target / "status.json").read_text())["state"] == "running"
    assert capsys.readouterr().out == (
        f"step 7 of {trained}, for tensorflow: {target}\n"
        f"continue with: python -m hvdtrain.tensorflow {target}/recipe.yaml --output {target}\n"
    )


@pytest.mark.parametrize("run", [".", "checkpoints/.."])
def test_a_run_may_be_named_from_inside(run, trained, monkeypatch):
    monkeypatch.chdir(trained)
    assert convert.main([run, "--to", "tensorflow"]) == 0
    assert checkpoint.newest(trained.with_name("run-tensorflow") / "checkpoints")[0].meta["step"] == 7


PYTORCHS = {"compile": True, "data_on_device": True, "compression": "bf16"}


def test_what_one_framework_alone_has_is_left_out_and_named(trained, capsys):
    target, back = trained.with_name("run-tensorflow"), trained.with_name("back")
    (trained / "recipe.yaml").write_text(recipe.dump(recipe.load("digits", PYTORCHS)))
    convert.main([str(trained), "--to", "tensorflow"])
    kept = recipe.load(str(target / "recipe.yaml"))
    assert (kept.compile, kept.data_on_device, kept.compression) == (False, False, "none")
    assert "left out, as tensorflow has none: compression bf16\n" in capsys.readouterr().out
    (target / "recipe.yaml").write_text(recipe.dump(recipe.load("digits", {"xla": True})))
    convert.main([str(target), "--to", "torch", "--output", str(back)])
    assert not recipe.load(str(back / "recipe.yaml")).xla
    assert "left out, as torch has none: xla True\n" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(trained, capsys):
    newest = trained / "checkpoints" / "step-00000007"
    (newest / "state.safetensors").write_bytes(b"")
    convert.main([str(trained), "--to", "tensorflow"])
    out = capsys.readouterr().out
    assert out.startswith(
        f"checkpoint {newest} is damaged: its checksum differs. The one before it is tried.\nstep 3 of {trained}"
    )


ODD_NAMES = (
    "",
    ".",
    "model",
    "model.",
    "model.x",
    "x.fc.weight",
    "model.fc.weight.",
    "model..weight",
    "model.linear.weight",
)


def test_fuzzed_arrays_are_converted_or_refused():
    draw, done = random.Random(odd_json.SEED), 0
    for _ in range(odd_json.COUNT):
        arrays = (
            dict(resnet().arrays) if draw.random() < 0.5 else dict(convert.converted(resnet(), "tensorflow").arrays)
        )
        for _ in range(draw.randrange(4)):
            array = arrays.pop(draw.choice(list(arrays)))
            name = draw.choice([*ODD_NAMES, *arrays, "\x1b" * draw.randrange(9), "x" * 5000])
            dtype = draw.choice([np.bool_, np.complex64, np.uint64, np.float16])
            arrays[name] = array if draw.random() < 0.5 else np.zeros((1,) * draw.randrange(9), dtype)
        keys = {
            "framework": draw.choice(["torch", "tensorflow", "jax", None, [], 1]),
            "recipe": draw.choice(["x", None, 3]),
        }
        with contextlib.suppress(CheckpointError):
            convert.converted(Checkpoint(arrays, {**META, **keys}), draw.choice(["torch", "tensorflow"]))
            done += 1
    assert done


FOREIGN = {  # what somebody else's run folder may hold, and the refusal
    "a plan that is a list": ("plan.json", b"[]", "{}: plan.json holds no object: the numbers of the plan are not "),
    "a deep plan": ("plan.json", b"[" * 10**5, "{}: plan.json is not JSON (it is nested too deeply): "),
    "a large plan": (
        "plan.json",
        b" " * 10**7,
        "{}: plan.json cannot be read (it must have at most 1,048,576 ",
    ),
    "no plan": ("plan.json", None, "{}: plan.json is not there: the numbers of the plan are not known; give another"),
    "no recipe": ("recipe.yaml", None, "{}: recipe.yaml is not there: the recipe is not known; give another run."),
    "an empty recipe": ("recipe.yaml", b"", "{}: recipe.yaml is empty: the recipe is not known; give another run."),
    "another recipe": ("recipe.yaml", b"a: 1", "{}/recipe.yaml must hold named entries, default among them; give"),
}


@pytest.mark.parametrize(("name", "content", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_strange_source_is_refused_and_nothing_made(name, content, message, trained):
    (trained / name).unlink()
    if content is not None:
        (trained / name).write_bytes(content)
    assert refused(RecipeError, trained, "--to", "tensorflow").startswith(message.format(trained))
    assert [path.name for path in trained.parent.iterdir()] == ["run"]


def test_the_source_is_left_as_it_is(trained):
    """It may be somebody else's, and running."""
    (trained / "checkpoints" / "step-00000007" / "state.safetensors").write_bytes(b"")
    (trained / "checkpoints" / ".step-00000009.1-0123456789abcdef.tmp").mkdir()
    before = sorted(trained.rglob("*"))
    convert.main([str(trained), "--to", "tensorflow"])
    assert sorted(trained.rglob("*")) == before


def test_a_target_in_use_is_refused(trained):
    target = trained.with_name("target")
    with hold(target).lock:
        assert refused(OutputError, trained, "--to", "tensorflow", "--output", target) == (
            f"{target} is being written by another run; wait for it, or give another --output."
        )


def refused(error, *argv):
    return refusal(error, convert.main, [str(argument) for argument in argv])


def test_refusals(trained, tmp_path):
    assert refused(CheckpointError, tmp_path / "nowhere", "--to", "torch") == (
        f"{tmp_path}/nowhere holds no whole checkpoint; give the folder of a run that wrote one."
    )
    assert refused(CheckpointError, trained, "--to", "torch") == (
        "the checkpoint of step 7 is torch's already: nothing to convert."
    )
    convert.main([str(trained), "--to", "tensorflow"])
    assert refused(OutputError, trained, "--to", "tensorflow") == (
        f"{trained}-tensorflow holds checkpoints already; give another --output."
    )
    (tmp_path / "file").write_text("")
    message = refused(OutputError, trained, "--to", "tensorflow", "--output", tmp_path / "file" / "run")
    assert message == f"cannot write to the run folder {tmp_path}/file/run: Not a directory; give a writable --output."
