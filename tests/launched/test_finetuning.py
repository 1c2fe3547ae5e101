"""Fine-tuning by a recipe: as a plain loop of PyTorch's and of Keras's, alike on 1, 2 and 4 ranks, and resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm
from marks import marked
from ranks import (
    clean_environ,
    command,
    held,
    needs_horovod,
    needs_lightning,
    needs_tensorflow,
    needs_torch,
    run,
    started,
    stopped_at,
    train,
)
from worlds import arrays, losses, of_kind

from hvdtrain.record.checkpoint import best_of, committed, newest, read

pytestmark = [pytest.mark.launched, needs_horovod]
TORCH = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        return self.fc(self.norm(self.body(x)))


def data():
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(48, 4, generator=draw), torch.randint(3, (48,), generator=draw)
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])
"""
KERAS = """
import keras
import numpy as np


def net(classes=3):
    return keras.Sequential([
        keras.layers.Input((4,)), keras.layers.Dense(6, use_bias=False, name="body"),
        keras.layers.BatchNormalization(name="bn"),
        keras.layers.Activation("tanh"), keras.layers.Dense(6, name="body2"),
        keras.layers.LayerNormalization(name="norm"), keras.layers.Dense(classes, name="fc"),
    ])


class Pairs:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def data():
    draw = np.random.default_rng(3)
    x, y = draw.standard_normal((48, 4)), draw.integers(3, size=48)
    return Pairs(x, y), Pairs(x[:8], y[:8])
""".replace("import torch_free\n", "")
RECIPE = """
default:
  model: {model}
  dataset: nets:data
  loss: cross_entropy
  epochs: 3
  batch_size: 12
  base_lr: 0.01
  optimizer: adamw
  weight_decay: 0.1
  precision: float64
  batch_norm: sync
  log_every_steps: 1
  init_from: {file}
  init_skip: [fc]
  freeze: [{freeze}]
  freeze_until_epoch: 1
  lr_scale: {{body*: 0.1}}
  no_weight_decay: [bias, norm]
"""
FILES = {
    "torch": (TORCH, {"model": "nets:Net", "file": "given.pt", "freeze": "body"}),
    "tensorflow": (KERAS, {"model": "nets:net", "file": "given.keras", "freeze": "body, bn"}),
}
GIVEN = {
    "torch": "torch.manual_seed(5); torch.save({'state_dict': {f'module.{n}': t for n, t in "
    "nets.Net(7).state_dict().items()}}, 'given.pt')",
    "tensorflow": "keras.utils.set_random_seed(5); nets.net(7).save('given.keras')",
}
SECOND = [
    pytest.param("torch", marks=needs_torch),
    pytest.param("tensorflow", marks=[needs_tensorflow, pytest.mark.only_ci]),
]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory):
    """`beginning("torch")`: a folder with the network, the recipe and weights of another head."""
    made = {}

    def of(framework):
        if framework not in made:
            folder = made[framework] = tmp_path_factory.mktemp(framework)
            code, given = FILES[framework]
            (folder / "nets.py").write_text(code)
            (folder / "tune.yaml").write_text(RECIPE.format(**given))
            library = {"torch": "torch", "tensorflow": "keras"}[framework]
            (folder / "give.py").write_text(f"import {library}, nets\n{GIVEN[framework]}\n")
            run("alone", 1, warm.command(framework, folder / "give.py"), cwd=folder, PYTHONPATH=str(folder)).good()
            on(1, framework, folder)
        return made[framework]

    return of


def on(ranks, framework, folder, output=None, *flags):
    launcher = "alone" if ranks == 1 else "gloo"
    argv = ("tune.yaml", "--output", output or f"on-{ranks}", *flags)
    return train(framework, launcher, ranks, *argv, cwd=folder).good()


@pytest.mark.parametrize("framework", SECOND)
@pytest.mark.parametrize("ranks", marked([2, 4], only_ci={4}))
def test_two_and_four_ranks_train_as_one(framework, ranks, beginning):
    folder = beginning(framework)
    one = newest(folder / "on-1" / "checkpoints")[0].arrays
    ended = on(ranks, framework, folder)
    assert "tensors are from given" in ended.out and "; new: fc." in ended.out
    np.testing.assert_allclose(losses(folder / f"on-{ranks}"), losses(folder / "on-1"), 1e-12)
    for name, array in newest(folder / f"on-{ranks}" / "checkpoints")[0].arrays.items():
        np.testing.assert_allclose(array, one[name], 1e-9, 1e-12, err_msg=name)


@pytest.mark.parametrize("framework", SECOND)
def test_a_run_starts_from_the_best_of_another(framework, beginning):
    folder = beginning(framework)
    keys = (folder / "tune.yaml").read_text().replace("  init_skip: [fc]\n", "")
    (folder / "again.yaml").write_text(re.sub("init_from: .*", "init_from: on-1:best", keys))
    argv = ("again.yaml", "--max-steps", "1", "--base-lr", "1e-30", "--output", "again")
    ended = train(framework, "alone", 1, *argv, cwd=folder).good()
    assert re.search(r"init        (\d+) of \1 tensors are from the weights of step \d+, the best of on-1\n", ended.out)
    of_best = read(best_of(committed(folder / "on-1/checkpoints"))).arrays
    for name, array in newest(folder / "again/checkpoints")[0].arrays.items():
        if name.startswith("model.") and "running" not in name and "moving" not in name and "num_" not in name:
            np.testing.assert_allclose(array, of_best[name], 1e-12, err_msg=name)
    events = (folder / "again/launches.jsonl").read_text()
    assert '"event":"init"' in events and "loss of the first batch, by the weights of on-1:best: " in events


PLAIN = {
    "torch": """
torch.manual_seed(0)
model = nets.Net()
given = torch.load("given.pt", weights_only=True)["state_dict"]
given = {name.removeprefix("module."): each for name, each in given.items() if ".fc." not in name}
assert model.load_state_dict(given, strict=False).missing_keys == ["fc.weight", "fc.bias"]
model.double()
body = [*model.body.parameters()]
optimizer = torch.optim.AdamW([
    {"params": [model.body[0].weight, model.body[3].weight], "lr": 0.001},
    {"params": [model.body[3].bias, *model.body[1].parameters()], "lr": 0.001, "weight_decay": 0},
    {"params": [model.fc.weight]},
    {"params": [model.fc.bias, *model.norm.parameters()], "weight_decay": 0},
], lr=0.01, weight_decay=0.1)
x, y = nets.data()[0].tensors
for epoch in range(3):
    model.train()
    model.body.requires_grad_(epoch > 0)
    model.body[1].train(epoch > 0)
    for batch in np.random.default_rng([0, epoch, 0]).permutation(48).reshape(4, 12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch].double()), y[batch]).backward()
        optimizer.step()
found = {name: each.numpy() for name, each in model.state_dict().items()}
""",
    "tensorflow": """
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
model, given = nets.net(), nets.net(7)
given.load_weights("given.keras")
for layer, other in zip(model.layers[:-1], given.layers[:-1]):
    layer.set_weights(other.get_weights())
named = {layer.name: layer for layer in model.layers}
body = [*named["body"].weights, *named["bn"].trainable_weights, *named["body2"].weights]
head = [*named["norm"].weights, *named["fc"].weights]
of_body, of_head = (keras.optimizers.SGD(rate, momentum=0.9) for rate in (0.001, 0.01))
pairs = nets.data()[0]
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
for epoch in range(3):
    named["bn"].trainable = epoch > 0
    for batch in np.random.default_rng([0, epoch, 0]).permutation(48).reshape(4, 12):
        with tf.GradientTape() as tape:
            value = loss(pairs.y[batch], model(pairs.x[batch], training=True))
        gradients = tape.gradient(value, body + head)
        if epoch > 0:
            of_body.apply(gradients[: len(body)], body)
        of_head.apply(gradients[len(body) :], head)
found = {each.path.replace("/", "."): each.numpy() for each in model.weights}
""",
}
IMPORTS = {"torch": "import torch\nfrom torch import nn", "tensorflow": "import keras\nimport tensorflow as tf"}
SGD = "--optimizer sgd --momentum 0.9 --weight-decay 0 --batch-norm local --freeze body* bn --lr-scale body*=0.1 bn=0.1"


@pytest.mark.parametrize("framework", SECOND)
def test_weights_are_those_of_a_plain_loop(framework, beginning):
    folder = beginning(framework)
    code = f"import numpy as np\n{IMPORTS[framework]}\nimport nets\n{PLAIN[framework]}"
    (folder / "plain.py").write_text(f"{code}\nnp.savez('plain.npz', **found)\n")
    run("alone", 1, warm.command(framework, folder / "plain.py"), cwd=folder, PYTHONPATH=str(folder)).good()
    output = "on-1"
    if framework == "tensorflow":  # whose own optimizers have no LR by part
        keys = (folder / "tune.yaml").read_text().replace("  no_weight_decay: [bias, norm]\n", "")
        (folder / "sgd.yaml").write_text(keys)
        output = "sgd"
        train(framework, "alone", 1, "sgd.yaml", "--output", output, *SGD.split(), cwd=folder).good()
    ours = newest(folder / output / "checkpoints")[0].arrays
    for name, array in np.load(folder / "plain.npz").items():
        np.testing.assert_allclose(ours[f"model.{name}"], array, 1e-6, 1e-9, err_msg=name)


@pytest.mark.parametrize("framework", SECOND)
@pytest.mark.parametrize("step", marked([2, 6], only_ci={6}))  # while its body is frozen, and after
def test_a_run_that_is_left_goes_on_alike_and_reads_no_weights_again(framework, step, beginning):
    folder = beginning(framework)
    if not (folder / "on-2").exists():
        on(2, framework, folder)
    output = f"left-{step}"
    argv = ("tune.yaml", "--output", output)
    with started("gloo", 2, command(framework, *argv), cwd=folder, **held(step)) as ranks:
        stopped_at(ranks, folder / output, step, lambda: ranks.members()[1], signal.SIGUSR2)
    shutil.copytree(folder / output, folder / f"{output}-alone")
    (folder / "given.pt").rename(folder / "kept") if framework == "torch" else None
    ended = on(2, framework, folder, output)
    assert "init_from   is not read: the run goes on from its checkpoint of step" in ended.out
    assert arrays(folder / output) == arrays(folder / "on-2")
    on(1, framework, folder, f"{output}-alone")
    (folder / "kept").rename(folder / "given.pt") if framework == "torch" else None
    one = newest(folder / "on-1" / "checkpoints")[0].arrays
    for name, array in newest(folder / f"{output}-alone" / "checkpoints")[0].arrays.items():
        np.testing.assert_allclose(array, one[name], 1e-9, 1e-12, err_msg=name)


@needs_torch
def test_a_file_that_only_rank_0_reads_ends_all_ranks(beginning):
    folder = beginning("torch")
    (folder / "damaged.pt").write_bytes(b"no weights")
    argv = ("tune.yaml", "--init-from", "damaged.pt", "--output", "damaged")
    ended = train("torch", "gloo", 2, *argv, cwd=folder)
    assert ended.code == 2 and ended.left == []
    assert "CheckpointError (rank 0" in ended.err and "init_from damaged.pt cannot be read (" in ended.err


@pytest.mark.only_ci
@needs_lightning
def test_lightning_trains_alike(beginning):
    folder = beginning("torch")
    train("lightning", "alone", 1, "tune.yaml", "--output", "lightning", cwd=folder).good()
    assert arrays(folder / "lightning") == arrays(folder / "on-1")


PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_torch
def test_the_page_as_it_is_typed(tmp_path):
    """Each program and command of docs/finetune.md, in order, in fewer epochs; the exported model is as good as the
    run's best epoch."""
    pytest.importorskip("torchvision")
    blocks = re.findall(r"^```(?:python|yaml|)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    _, given, recipe, plan, said, training, log, export, predict = blocks
    training, _, _ = training.partition("\n")  # the other line is the same on two ranks
    given, recipe = given.replace("range(4)", "range(1)"), recipe.replace("epochs: 5", "epochs: 2")
    for name, text in {"given.py": given, "finetune.yaml": recipe, "predict.py": predict}.items():
        (tmp_path / name).write_text(text)
    environ, out = clean_environ() | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}, []
    for line in ("python given.py", plan, training, export, "python predict.py"):
        words = [sys.executable if word == "python" else word for word in line.split()]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        out.append(done.stdout)
    assert all(line.rstrip(".") in out[1] for line in said.splitlines())
    assert log.splitlines()[0] in out[2] and log.splitlines()[1].rpartition(" ")[0] in out[2]
    right, _, files, *_ = map(str, out[4].split())
    best = max(line["valid_acc1"] for line in of_kind("epoch", tmp_path / "runs/tuned"))
    assert int(right) / int(files) == pytest.approx(best)
