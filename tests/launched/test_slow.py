"""Slow ranks of a real run are named, with the cause."""

import re

import pytest
import warm
from marks import marked
from ranks import NEEDS, run, train

pytestmark = pytest.mark.launched
RANKS = """
import os
import time

from hvdtrain.ranks import timeouts

timeouts.TIMES = 0.2  # 40 steps of 35 ms are enough
STEPS, BATCH, NAP = 65, 8, 0.032
rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))))
reads, steps = 0, 0


def read():
    \"\"\"Rank 0 is slow in it later.\"\"\"
    global reads
    reads += 1
    if rank == 0 and reads > STEPS * BATCH:
        time.sleep(NAP / BATCH)


def compute():
    \"\"\"Rank 1 is slow in it at first.\"\"\"
    global steps
    steps += 1
    if rank == 1 and steps < STEPS:
        time.sleep(NAP)


class Data:
    def __len__(self):
        return 2 * 2 * STEPS * BATCH

    def __getitem__(self, index):
        read()
        return ones(3), index % 2


class Few(Data):
    def __len__(self):
        return 2
"""
TORCH = """
import torch
from torch import ones

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        if self.training:
            compute()
        return self.layer(x)


def data():
    return Data(), Few()
"""
KERAS = """
import keras
import numpy as np
import tensorflow as tf


def ones(size):
    return np.ones(size, np.float32)


def napped():
    compute()
    return np.float32(0)


@keras.saving.register_keras_serializable()
class Slowed(keras.layers.Layer):
    def call(self, x, training=None):
        return x + tf.ensure_shape(tf.numpy_function(napped, [], tf.float32), ()) if training else x


def net():
    return keras.Sequential([keras.layers.Input((3,)), Slowed(), keras.layers.Dense(2)])


def data():
    return Data(), Few()
"""
RECIPE = """
default: {model: "slowed:MODEL", dataset: "slowed:data", loss: cross_entropy, batch_size: 16, epochs: 1, base_lr: 0.1}
"""
OF = {
    "torch": (RANKS + TORCH, RECIPE.replace("MODEL", "Net")),
    "tensorflow": (RANKS + KERAS, RECIPE.replace("MODEL", "net")),
}
NAMED = [("1", "computing"), ("0", "reading")]


def check(ended, expected):
    slow = re.findall(
        r"rank (\d) on \S+ is slow in ([\w ]+): (\d+) ms of each step, where the others take (\d+)", ended.good().err
    )
    assert [found[:2] for found in slow] == expected, ended.err
    for *_, own, others in slow:
        assert int(own) > int(others)


@pytest.mark.parametrize(
    ("adapter", "engine"),
    marked(
        [
            pytest.param("torch", "horovod", marks=NEEDS["torch"]),
            pytest.param("tensorflow", "horovod", marks=NEEDS["tensorflow"]),
            pytest.param("tensorflow", "multiworker", marks=NEEDS["tensorflow"]),
        ],
        slow={"tensorflow"},
    ),
)
def test_a_slow_rank_of_a_recipe_is_named_with_its_cause(adapter, engine, tmp_path):
    program, recipe = OF[adapter]
    (tmp_path / "slowed.py").write_text(program)
    (tmp_path / "slowed.yaml").write_text(recipe)
    check(train(adapter, "mpi", 2, "slowed.yaml", "--engine", engine, "--output", "run", cwd=tmp_path), NAMED)


LIGHTNING_LOOP = """
from lightning.pytorch import LightningModule, Trainer

import hvdtrain.lightning as hl
from hvdtrain.lightning.recipe import quiet


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


with quiet():
    Trainer(
        strategy=hl.RankDDPStrategy(),
        max_epochs=1,
        callbacks=[hl.FaultTolerance("run")],
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), hl.GlobalBatches(Data(), batch_size=2 * BATCH))
"""
KERAS_LOOP = """
import hvdtrain.keras as hvd

vars(timeouts).update(TICK=0.1, STALLED=0.4, STACKS=0.3, STUCK=0.7)


def loop():
    \"\"\"As an endless one would, for a while.\"\"\"
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        pass


class Stuck(Data):
    \"\"\"On rank 0.\"\"\"
    def __getitem__(self, index):
        if rank == 0 and reads == (2 * STEPS - 20) * BATCH:
            loop()
        return super().__getitem__(index)


def napped():
    \"\"\"Of the graph; stuck on rank 1.\"\"\"
    if rank == 1 and steps == 2 * STEPS - 5:
        loop()
    compute()
    return np.float32(0)


hvd.init()
model = net()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
data = hvd.GlobalBatches(Stuck(), batch_size=2 * BATCH)
model.fit(data, epochs=1, callbacks=[hvd.FaultTolerance("run", data)], verbose=0)
"""


@pytest.mark.slow
@NEEDS["torch"]
def test_a_slow_rank_under_lightning_is_named_with_its_cause(tmp_path):
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e .[lightning]")
    (tmp_path / "own.py").write_text(RANKS + TORCH + LIGHTNING_LOOP)
    check(run("mpi", 2, warm.command("lightning", tmp_path / "own.py"), cwd=tmp_path), NAMED)


@pytest.mark.slow
@NEEDS["tensorflow"]
def test_a_slow_rank_under_keras_is_named_and_so_is_one_that_is_stuck(tmp_path):
    """Keras's `fit` reads inside TensorFlow's function, so reading and computing are one cause."""
    (tmp_path / "own.py").write_text(RANKS + KERAS + KERAS_LOOP)
    ended = run("mpi", 2, warm.command("tensorflow", tmp_path / "own.py"), cwd=tmp_path)
    check(ended, [("1", "computing or reading"), ("0", "computing or reading")])
    stuck = (
        r"rank (\d) on \S+ keeps the others waiting: .* stands in \S+own.py:\d+, in loop, for which TensorFlow waits"
    )
    assert re.findall(stuck, ended.err) == ["0", "1"], ended.err
