"""Slow ranks of a real run are named, with the cause."""

import re

import pytest
from ranks import needs_horovod, needs_torch, train

pytestmark = [pytest.mark.launched, needs_torch, needs_horovod]
PROGRAM = """
import os
import time

import torch

from hvdtrain.run import timeouts

timeouts.TIMES = 0.2  # 40 steps of 35 ms are enough
STEPS, BATCH = 65, 8
rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))))


class Data(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return 2 * 2 * STEPS * BATCH

    def __getitem__(self, index):
        Data.read += 1
        if rank == 0 and Data.read > STEPS * BATCH:
            time.sleep(0.032 / BATCH)
        return torch.ones(3), torch.tensor(index % 2)


class Net(torch.nn.Module):
    steps = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        Net.steps += self.training
        if rank == 1 and Net.steps < STEPS and self.training:
            time.sleep(0.032)
        return self.layer(x)


def data():
    return Data(), torch.utils.data.Subset(Data(), range(2))
"""
RECIPE = """
default: {model: "slow:Net", dataset: "slow:data", loss: "torch.nn.functional:cross_entropy", batch_size: 16, epochs: 1,
  base_lr: 0.1}
"""


@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_a_slow_rank_is_named_with_its_cause(engine, tmp_path):
    (tmp_path / "slow.py").write_text(PROGRAM)
    (tmp_path / "slow.yaml").write_text(RECIPE)
    ended = train("torch", "mpi", 2, "slow.yaml", "--engine", engine, "--output", "run", cwd=tmp_path).good()
    slow = re.findall(
        r"rank (\d) on \S+ is slow in (\w+): (\d+) ms of each step, where the others take (\d+)", ended.err
    )
    assert [found[:2] for found in slow] == [("1", "computing"), ("0", "reading")], ended.err
    for *_, own, others in slow:
        assert int(own) >= 32
        assert int(others) < 20
