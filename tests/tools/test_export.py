"""`python -m hvdtrain export`: in every format the file of any run computes what the run computed, without hvdtrain."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import warm
from marks import marked
from paths import REPOSITORY
from ranks import clean_environ, needs_lightning, needs_tensorflow, needs_torch
from refusals import refusal
from safetensors import safe_open

from hvdtrain.errors import CheckpointError, EngineUnavailable, OutputError, RecipeError
from hvdtrain.record import checkpoint, reader
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.folder import hold
from hvdtrain.tools import export, proof
from hvdtrain.tools.report import origin

NETWORK = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again.weight = self.first.weight  # tied: the state_dict has it twice
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("twice", torch.full((), 2.0), persistent=False)  # the state_dict does not have it

    def forward(self, x):
        return self.last(self.norm(self.twice * self.again(self.first(x).tanh())))

    def get_extra_state(self):
        return {"classes": ("a", "b", "c")}

    def set_extra_state(self, state):
        assert state == {"classes": ("a", "b", "c")}
"""
KERAS_NETWORK = """
import keras
import numpy as np
import tensorflow as tf

def Net(norm=keras.layers.BatchNormalization):
    layers = keras.layers
    return keras.Sequential([layers.Input((8,)), layers.Dense(8, "tanh"), norm(), layers.Dense(3)])
"""
DATA = """
draw = np.random.default_rng(0)
X, Y = draw.normal(size=(44, 8)).astype("float32"), draw.integers(3, size=44)

def data():
    return (X[:32], Y[:32]), (X[32:], Y[32:])
"""
SHOWN = """
def shown(out, y):  # a metric that keeps the outputs of validation, which has 12 examples
    if len(y) == 12:
        np.save("logits.npy", out.detach().numpy())
    return out.argmax(-1) == y
"""
KERAS_SHOWN = """
def save(out):
    if len(out) == 12:
        np.save("logits.npy", out)
    return np.float32(0)

def shown(out, y):
    return tf.cast(tf.argmax(out, -1) == tf.cast(y, tf.int64), tf.float32) + tf.numpy_function(save, [out], tf.float32)
"""
RECIPE = """
default:
  {model: tiny:Net, dataset: tiny:data, loss: cross_entropy, metrics: {shown: tiny:shown}, optimizer: adamw,
   batch_size: 16, epochs: 3, base_lr: 0.05, ema_decay: 0.5, batch_norm: sync}
"""
LOOP = """
import hvdtrain.torch as ht
from tiny import *

with ht.join(device="cpu") as world:
    train, (x, _) = data()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = world.run("run", model, optimizer, highest="quality")
    for epoch in run.epochs(3):
        model.train()
        for inputs, targets in run.batches(tuple(map(torch.from_numpy, train)), batch_size=16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        model.eval()
        np.save(f"logits{epoch or ''}.npy", model(torch.from_numpy(x)).detach().numpy())
        run.report(quality=-epoch)
"""
LIGHTNING = """
import hvdtrain.lightning as hl
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from tiny import *

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("quality", -float(self.current_epoch), sync_dist=True)
        if not self.trainer.sanity_checking:
            np.save("logits.npy", self.model(batch[0]).detach().numpy())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
torch.manual_seed(0)
parts = [tuple(map(torch.from_numpy, part)) for part in data()]
callbacks = [hl.FaultTolerance("run", highest="quality"), EMAWeightAveraging(decay=0.5)]
Trainer(max_epochs=3, accelerator="cpu", callbacks=callbacks, **dict.fromkeys(names, False)).fit(
    Module(), hl.GlobalBatches(*parts, batch_size=16)
)
"""
FIT = """
import hvdtrain.keras as hvd
from tiny import *

hvd.init()
keras.utils.set_random_seed(0)
(train, valid), model = data(), Net(hvd.SyncBatchNormalization)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss, metrics=["accuracy"])
batches = hvd.GlobalBatches(train, batch_size=16)
run = hvd.FaultTolerance("run", batches, highest="val_accuracy")
model.fit(batches, epochs=3, validation_data=valid, callbacks=[run, hvd.MetricAverageCallback()], verbose=0)
np.save("logits.npy", model(valid[0]).numpy())
"""
OWN = """
import keras

class Scale(keras.layers.Layer):
    def call(self, x):
        return 2 * x

@keras.saving.register_keras_serializable("own")
def square(x):
    return x * x
"""
ADAPTED = """
import json
import hvdtrain.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from own import Scale, square

class Mine(Scale):
    pass

hvd.init()
keras.utils.set_random_seed(0)
draw, layers = np.random.default_rng(0), keras.layers
x = {
    "text": np.array([[" ".join(draw.choice(["good", "schön", "bad day"], 4))] for _ in range(32)]),
    "colour": draw.choice(["red", "grün", "blue"], (32, 1)),
    "code": draw.choice([7, 18, 1000], (32, 1)),
    "age": draw.integers(18, 90, (32, 1)).astype("float32"),
}
kinds = {
    "text": layers.TextVectorization(output_sequence_length=4),
    "colour": layers.StringLookup(output_mode="tf_idf"),
    "code": layers.IntegerLookup(output_mode="multi_hot"),
    "age": layers.Discretization(num_bins=4, output_mode="one_hot"),
}
for name, layer in kinds.items():
    layer.adapt(x[name])
types = {name: "string" if each.dtype.kind == "U" else each.dtype.name for name, each in x.items()}
inputs = {name: keras.Input((1,), name=name, dtype=each) for name, each in types.items()}
text, *others = [layer(inputs[name]) for name, layer in kinds.items()]
found = layers.Concatenate()([layers.Flatten()(layers.Embedding(9, 2)(text)), *others])
tensors = {name: tf.constant(each.tolist(), types[name]) for name, each in x.items()}
for name, scale in {"run": Scale, "of_program": Mine}.items():
    model = keras.Model(inputs, layers.Dense(3, activation=square)(scale()(found)))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    data = tf.data.Dataset.from_tensor_slices((tensors, np.ones((32, 3)))).batch(16)
    model.fit(data, epochs=1, callbacks=[hvd.FaultTolerance(name)], verbose=0)
    if name == "run":
        np.savez("inputs.npz", **x)
        np.save("logits.npy", model(tensors))
"""
PAGE = re.findall(r"^```python\n(.*?)```", (REPOSITORY / "docs" / "keras.md").read_text(), re.DOTALL | re.MULTILINE)
TORCH_NET, KERAS_NET = NETWORK + DATA + SHOWN, KERAS_NETWORK + DATA + KERAS_SHOWN
RUNS = {  # the kind of process, tiny.py, and its program or, for a recipe, none
    "recipe": ("torch", TORCH_NET, ""),
    "loop": ("torch", TORCH_NET, LOOP),
    "lightning": ("lightning", TORCH_NET, LIGHTNING),
    "keras recipe": ("tensorflow", KERAS_NET, ""),
    "fit": ("tensorflow", KERAS_NET, FIT),
    "page": ("tensorflow", "", PAGE[1]),
    "adapted": ("tensorflow", "", ADAPTED),
}
NEEDED = {"torch": needs_torch, "lightning": needs_lightning, "tensorflow": needs_tensorflow}
LOAD = {  # reads `path` without hvdtrain; gives the outputs of x
    "pt": """
import torch
state = torch.load(path, weights_only=True)
net = tiny.Net()
if any(name.startswith("model.") for name in state):
    net = torch.nn.ModuleDict({"model": net})
net.load_state_dict(state, strict=True)
out = net["model"] if isinstance(net, torch.nn.ModuleDict) else net
out = out.eval()(torch.from_numpy(x)).detach().numpy()
""",
    "keras": "import keras; out = keras.saving.load_model(path)(x).numpy()",
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(path)
out = session.run(None, {session.get_inputs()[0].name: x})[0]
""",
}
LACKS_ONNX = next(
    (
        f"needs {name}: pip install onnx onnxscript onnxruntime"
        for name in ("onnx", "onnxscript", "onnxruntime")
        if not importlib.util.find_spec(name)
    ),
    "",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained("loop")`: the folder of that program or recipe, whose run is in `run`; each is trained once."""
    made = {}

    def of(name):
        if name not in made:
            kind, tiny, program = RUNS[name]
            made[name] = folder = tmp_path_factory.mktemp("made")
            (folder / "tiny.py").write_text(tiny)
            (folder / "own.py").write_text(OWN)
            (folder / "tiny.yaml").write_text(RECIPE)
            (folder / "mine.py").write_text(program)
            argv = ["mine.py"] if program else ["-m", f"hvdtrain.{kind}", "tiny.yaml", "--output", "run"]
            done = call(folder, kind, *argv)
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        return made[name]

    return of


def call(folder, kind, *argv):
    command, environ = warm.command(kind, *argv), {**clean_environ(), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=280)


PROVED = [("loop", "pt"), ("recipe", "onnx"), ("keras recipe", "onnx")]
"""The others start no process of the export's, as the test's own one shows the same."""
CASES = [
    pytest.param(run, to, best, marks=NEEDED[RUNS[run][0]], id=f"{run}-{to}{'-best' * best}")
    for run, to, best in [
        ("recipe", "pt", False),
        ("recipe", "onnx", False),
        ("loop", "pt", True),
        ("loop", "pt", False),
        ("lightning", "pt", False),
        ("keras recipe", "keras", False),
        ("keras recipe", "onnx", False),
        ("fit", "keras", False),
        ("fit", "onnx", False),
    ]
]


@pytest.mark.parametrize(
    ("run", "to", "best"), marked(CASES, slow={"loop-pt", "lightning-pt", "keras recipe-keras"}, only_ci={"fit-keras"})
)
def test_a_fresh_process_computes_what_the_run_did(run, to, best, trained):
    if to == "onnx" and LACKS_ONNX:
        pytest.skip(LACKS_ONNX)
    folder, kind = trained(run), RUNS[run][0]
    flags = ["--best"] * best + ["--no-proof"] * (best or (run, to) not in PROVED)
    exported = call(folder, kind, "-m", "hvdtrain", "export", "run", "--to", to, *flags, "--output", f"{best}.{to}")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    kept = {True: "logits.npy", False: "logits2.npy" if run == "loop" else "logits.npy"}[best]
    fresh = f"""
import sys
sys.path += [".", *{[each for each in sys.path if "onnx" in each]!r}]
import numpy as np
path, logits = "{best}.{to}", np.load("{kept}")
x = np.random.default_rng(0).normal(size=(44, 8)).astype("float32")[32:]
{"import tiny" if to == "pt" else ""}
{LOAD[to]}
assert "hvdtrain" not in sys.modules
assert out.shape == (12, 3)
print(abs(out - logits).max())
"""
    done = subprocess.run([sys.executable, "-I", "-c", fresh], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) <= 1e-6


def exported(folder, *flags):
    return call(folder, "tensorflow", "-m", "hvdtrain", "export", *flags, "--to", "keras")


@pytest.mark.only_ci
@needs_tensorflow
def test_the_printed_line_loads_vocabularies_and_code_of_the_users(trained):
    """Texts, whole numbers and ages by adapted layers, then a layer and a function of a module beside the program."""
    done = exported(folder := trained("adapted"), "run")
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1].removeprefix("load it: ")
    assert line == (
        "import keras; from own import Scale; from own import square; keras.saving.load_model('run.keras', "
        "custom_objects={'Scale': Scale, 'own>square': square})"
    )
    *imports, load = line.split("; ")
    fresh = f"""
import sys
sys.path.append(".")
import numpy as np
{"; ".join(imports)}
out = {load}(dict(np.load("inputs.npz")))
assert "hvdtrain" not in sys.modules
print(abs(np.asarray(out) - np.load("logits.npy")).max())
"""
    done = subprocess.run([sys.executable, "-I", "-c", fresh], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) <= 1e-6


@pytest.mark.only_ci
@needs_tensorflow
def test_a_layer_of_the_program_itself_is_named_with_the_line_that_loads_it(trained):
    done = exported(folder := trained("adapted"), "of_program")
    assert done.returncode == 2
    assert "it has classes or functions of the program itself" in done.stderr
    assert done.stderr.endswith(
        "load that by keras.saving.load_model('model.keras', custom_objects={'Mine': Mine, 'own>square': square}).\n"
    )
    assert not (folder / "of_program.keras").exists()


@pytest.mark.only_ci
@needs_tensorflow
def test_another_vocabulary_than_the_checkpoints_is_refused(trained):
    path = (folder := trained("adapted")) / "run" / "model.json"
    text = path.read_text()
    path.write_text(text.replace(json.dumps("schön")[1:-1], "schon"))
    done = exported(folder, "run", "--output", "another.keras")
    path.write_text(text)
    assert "(it holds another string_lookup/vocabulary than the checkpoint's model did)" in done.stderr
    assert not (folder / "another.keras").exists()


@pytest.mark.only_ci
@needs_tensorflow
def test_the_config_of_another_user_runs_no_code(trained):
    other = "from hvdtrain import files\nfrom hvdtrain.tools import export\nfiles.is_own = lambda status: False\n"
    folder = trained("adapted")
    (folder / "other.py").write_text(f"{other}export.main(['run', '--to', 'keras', '--output', 'other.keras'])\n")
    done = call(folder, "tensorflow", "other.py")
    assert "run/model.json is another user's and names code, Scale own:Scale, which would run as yours" in done.stderr
    assert not (folder / "other.keras").exists()


HUGE = """
from pathlib import Path
import json, keras, numpy as np, resource
from hvdtrain import files
from hvdtrain.record import checkpoint
from hvdtrain.tools import export
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="d")])
arrays = {"model.d.kernel": np.zeros((8, 1), "f4"), "model.d.bias": np.zeros(1, "f4")}
checkpoint.commit(Path("run/checkpoints"), checkpoint.Checkpoint(arrays, {"step": 1, "framework": "tensorflow"}), 1)
Path("run/run.json").write_text("{}")
config = json.dumps(keras.saving.serialize_keras_object(model)).replace('"units": 1,', '"units": 2147483647,')
Path("run/model.json").write_text(json.dumps({"model": json.loads(config), "weights": [*arrays]}))
files.is_own = lambda status: False
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
try:
    export.main(["run", "--to", "keras", "--output", "huge.keras"])
except export.CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@needs_tensorflow
def test_sizes_of_another_users_model_are_compared_before_it_is_built(tmp_path):
    (tmp_path / "huge.py").write_text(HUGE)
    done = call(tmp_path, "tensorflow", "huge.py")
    assert "has float32 [8, 1] as model.d.kernel, the model needs numbers of shape [8, 2147483647]" in done.stdout


HIGHEST = {"loop": "quality", "lightning": "quality", "fit": "val_accuracy", "page": "val_accuracy"}


@pytest.mark.parametrize(
    "run",
    marked(
        [pytest.param(run, marks=NEEDED[RUNS[run][0]]) for run in RUNS if run != "adapted"], fast={"recipe", "loop"}
    ),
)
def test_the_report_shows_the_command(run, trained):
    """With --best, as each of these runs has marked its best checkpoint; without it where none is marked."""
    kind, folder = RUNS[run][0], trained(run)
    (path,) = [each.parent for each in folder.rglob("status.json")]
    framework = "tensorflow" if kind == "tensorflow" else "torch"
    found = reader.read(path)
    assert origin.export(found) == f"python -m hvdtrain export {path} --best --to {export.FORMATS[framework][0]}"
    assert checkpoint.chosen(path, best=True)[0].meta["framework"] == framework
    assert found.program.get("highest") == HIGHEST.get(run)
    (path / "best.json").rename(path / "best.kept")
    assert origin.export(found) == f"python -m hvdtrain export {path} --to {export.FORMATS[framework][0]}"
    (path / "best.kept").rename(path / "best.json")


def made(folder, *scores, framework="torch", **more):
    """A run folder with a checkpoint of each score."""
    for step, score in enumerate(scores, 1):
        meta = {"step": step, "model": "m", "framework": framework, "recipe": "digits", "valid_score": score}
        checkpoint.commit(folder / "checkpoints", Checkpoint({"model.a": np.ones(1)}, meta), keep=9)
    for name, text in more.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def refused(error, *argv):
    return refusal(error, export.main, [str(argument) for argument in argv])


def test_refusals_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = made(tmp_path / "run", None)
    assert refused(OutputError, run, "--to", "pt", "--output", "a.h5") == (
        "--output of --to pt must end in .pt, got a.h5."
    )
    assert refused(CheckpointError, "nowhere", "--to", "pt") == (
        "nowhere holds no whole checkpoint; give the folder of a run that wrote one."
    )
    assert refused(CheckpointError, run, "--to", "pt", "--best") == (
        f"{run} holds no checkpoint that was validated; leave out --best."
    )
    assert refused(RecipeError, run, "--to", "keras") == (
        "--to must be one of pt, safetensors, onnx for a run of torch, got keras; or convert it first: "
        f"python -m hvdtrain convert {run} --to tensorflow"
    )
    of_none = made(tmp_path / "other", None, framework=None)
    assert refused(RecipeError, of_none, "--to", "pt").endswith("for a run of None, got pt; give another run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


THERE = {  # what is at the path already
    "a file": lambda path: path.write_text("mine"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@needs_tensorflow
@pytest.mark.parametrize("put", THERE.values(), ids=THERE)
def test_nothing_is_overwritten(put, tmp_path):
    run, target = made(tmp_path / "run", 0.5, framework="tensorflow"), tmp_path / "a.safetensors"
    put(target)
    before = target.lstat()
    message = refused(OutputError, run, "--to", "safetensors", "--output", target, "--no-proof")
    assert message == f"cannot write {target}: it is there already; give another --output."
    assert target.lstat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "run"]


@needs_tensorflow
def test_safetensors_hold_the_model_alone_and_say_of_what_it_is(tmp_path):
    run = made(tmp_path / "run", 0.5, 0.25, framework="tensorflow")
    (run / "metrics.jsonl").write_text('{"kind": "epoch", "step": 1, "epoch": 1, "valid_acc1": 0.5}\n')
    export.main([str(run), "--to", "safetensors", "--best", "--output", str(tmp_path / "a.safetensors")])
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert list(file.keys()) == ["a"]
        about = file.metadata()
    assert (about["framework"], about["step"], about["weights"]) == ("tensorflow", "1", "weights")
    assert json.loads(about["metrics"])["valid_acc1"] == 0.5


WRONG = {  # what is written in place of the run's weights, and the reason
    "other bytes": ({"a": np.zeros(1)}, "Mismatched elements: 1 / 2 (50%)"),
    "another type": ({"a": np.ones(1, "f")}, "Mismatched elements: 2 / 2 (100%)"),
    "another name": ({"b": np.ones(1)}, "Mismatched elements: 1 / 2 (50%)"),
    "more": ({"a": np.ones(1), "b": np.ones(1)}, "(shapes (2, 2), (1, 2) mismatch)"),
    "no such file": (None, "SafetensorError: Error while deserializing header"),
}


@needs_tensorflow
@pytest.mark.parametrize(("written", "reason"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_not_proved_is_not_left(written, reason, tmp_path, monkeypatch):
    import safetensors.numpy

    save = safetensors.numpy.save_file
    run, target = made(tmp_path / "run", 0.5, framework="tensorflow"), tmp_path / "a.safetensors"
    other = (
        (lambda _, path, about: save(written, path, about)) if written else lambda _, path, __: path.write_text("no")
    )
    monkeypatch.setattr(safetensors.numpy, "save_file", other)
    message = refused(OutputError, run, "--to", "safetensors", "--output", target)
    assert message.startswith(f"{target} is not written, as a fresh process cannot use it, or finds something else: ")
    assert reason in message and message.endswith("; see --no-proof.")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export.main([str(run), "--to", "safetensors", "--output", str(target), "--no-proof"])
    assert target.exists()


@needs_tensorflow
def test_the_proof_comes_before_the_name(tmp_path, monkeypatch):
    run, target, there = made(tmp_path / "run", 0.5, framework="tensorflow"), tmp_path / "a.safetensors", []

    def interrupted(*argv, cwd, **options):
        there.extend([target.exists(), *sorted(path.name for path in cwd.iterdir())])
        raise KeyboardInterrupt

    monkeypatch.setattr(export.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.main([str(run), "--to", "safetensors", "--output", str(target)])
    assert there == [False, "a.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@needs_torch
def test_weights_are_compared_by_name_type_shape_and_bytes():
    import torch

    def of(**tensors):
        return proof.of_weights(tensors)[0].tolist()

    row = torch.arange(6).reshape(2, 3)
    for dtype in (torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64):
        each = row.to(dtype)
        same = each.t().contiguous().t()  # other strides
        assert of(a=each, more={"classes": ("a",)}) == of(more={"classes": ("a",)}, a=same)
        others = of(b=each), of(a=each.t()), of(a=each.flatten()), of(a=each.flip(0)), of(a=row.to(torch.float64))
        assert of(a=each) not in others
    assert of(more={"classes": ("a",)}) != of(more={"classes": ["a"]})
    assert of(a=torch.tensor(1.0)) != of(a=torch.tensor(-1.0))


@pytest.mark.parametrize(
    ("framework", "to"), [("torch", "pt"), pytest.param("tensorflow", "safetensors", marks=needs_tensorflow)]
)
def test_a_full_disk_leaves_no_part(framework, to, tmp_path, tiny_disk):
    run = made(tmp_path / "run", 0.5, framework=framework)
    (tiny_disk / "filler").write_bytes(bytes(os.statvfs(tiny_disk).f_bavail * 4096))
    message = refused(OutputError, run, "--to", to, "--output", tiny_disk / f"a.{to}")
    assert message.startswith(f"cannot write {tiny_disk}/a.{to}: ") and "No space left" in message
    assert [path.name for path in tiny_disk.iterdir()] == ["filler"]


def test_the_recipe_of_another_user_runs_no_code(tmp_path, monkeypatch):
    run = made(tmp_path / "run", 0.5, recipe_yaml=RECIPE, plan_json="{}")
    monkeypatch.setattr(export.files, "is_own", lambda status: False)
    options = export.Options(run=run, to="onnx")
    state, _ = checkpoint.newest(run / "checkpoints")
    assert refusal(RecipeError, export._recipe, options, state) == (
        f"{run}/recipe.yaml is another user's and names code, model tiny:Net, which would run as yours; read it, and "
        "copy the folder if you trust it."
    )


def test_a_program_names_no_network(tmp_path):
    run = made(tmp_path / "run", 0.5, run_json="{}")
    options = export.Options(run=run, to="onnx")
    state, _ = checkpoint.newest(run / "checkpoints")
    assert refusal(RecipeError, export._recipe, options, state).startswith("--to onnx needs the network's code, which")


def test_what_onnx_needs_is_named(monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    assert refusal(EngineUnavailable, export._need, "onnx", "onnxscript") == (
        f"--to onnx needs onnx and onnxscript; install: {sys.executable} -m pip install onnx onnxscript"
    )


def test_the_best_checkpoint_is_named_in_the_run_folder(tmp_path):
    folder = hold(tmp_path / "run")
    with folder.lock:
        for step, score in enumerate((0.1, 0.9, 0.5), 1):
            made_now = Checkpoint({"x": np.ones(1)}, {"step": step, "valid_score": score})
            checkpoint.commit(folder.checkpoints, made_now, keep=1)
            folder.mark_best()
        assert json.loads((tmp_path / "run" / "best.json").read_text()) == {"checkpoint": "checkpoints/step-00000002"}


CELLS = """
from tiny import *
UNet = Net
def data():
    return None, [(torch.from_numpy(X[32]), Y[32])]
def Cells(name):
    return data()[1]
"""
PAGES = {  # the run, and the command's --to
    "bring": ("loop", "pt"),
    "lightning": ("lightning", "pt"),
    "keras": ("page", "keras"),
}


@pytest.mark.parametrize(
    "page",
    marked(
        [pytest.param(page, marks=NEEDED[RUNS[run][0]]) for page, (run, _) in PAGES.items()],
        slow={"lightning", "keras"},
    ),
)
def test_the_pages_snippets_predict(page, trained):
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    section = text[text.index("## Take the model away") :]
    name, to = re.search(r"export runs/(\w+) --best --to (\w+)", section).groups()
    folder = trained(PAGES[page][0])
    (folder / "cells.py").write_text(CELLS)
    run = f"runs/{name}" if page == "keras" else "run"
    flags = ("--to", to, "--no-proof", *(() if page == "keras" else ("--output", f"{name}-best.pt")))
    exported = call(folder, RUNS[PAGES[page][0]][0], "-m", "hvdtrain", "export", run, "--best", *flags)
    assert exported.returncode == 0, exported.stderr
    snippet = textwrap.dedent(re.search(r"^  ```python\n(.*?)^  ```", section, re.DOTALL | re.MULTILINE)[1])
    program = f"import sys\nsys.path.append('.')\n{snippet}\nassert 'hvdtrain' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
