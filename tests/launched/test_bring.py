"""The programs and the recipe in docs/bring.md train alike on one process and on two ranks."""

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import warm
from ranks import command, needs_horovod, needs_torch, run, started, train
from worlds import furthest, losses, of_kind

from hvdtrain.record.checkpoint import newest

SLOW = ("the_loop_of_ones_own", "ones_own[ddp-1]", "recipe[float64]", "by_hand_train_as_one[ddp]")
ONLY_CI = ("whole_set[1]", "whole_set[4]")  # as on two ranks

pytestmark = [pytest.mark.launched, needs_torch]
PAGE = Path(__file__).parents[2] / "docs" / "bring.md"


METRICS_YAML, METRICS, METRICS_LOOP = (
    textwrap.dedent(block)
    for block in re.findall(r"^  ```(?:python|yaml)\n(.*?)^  ```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if "perplexity" in block
)
PROGRAM, RECIPE, _, STEP, BEFORE, OWN_LOOP = re.findall(
    r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
)


LOSSES = ("train_loss", "valid_loss")
# In float32 a pixel whose output lies within rounding of 0 may count for the IoU on two ranks and not on one.
ALIKE = {"float32": (LOSSES, 1e-5), "float64": ((*LOSSES, "train_iou", "valid_iou"), 1e-12)}


@needs_horovod
@pytest.mark.parametrize(("precision", "alike"), ALIKE.items(), ids=ALIKE)
def test_the_recipe(precision, alike, tmp_path):
    (tmp_path / "cells.py").write_text(PROGRAM)
    (tmp_path / "cells.yaml").write_text(RECIPE)
    (names, limit), epochs = alike, []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        flags = ("--precision", precision, "--output", f"on-{ranks}")
        train("torch", launcher, ranks, "cells.yaml", *flags, cwd=tmp_path).good()
        of_run = of_kind("epoch", tmp_path / f"on-{ranks}")
        assert [(line["step"], line["epoch"]) for line in of_run] == [(8, 1), (16, 2), (24, 3)]
        measured = {f"{split}_{name}" for split in ("train", "valid") for name in ("loss", "iou")}
        assert all(line.keys() > measured for line in of_run)
        epochs.append([line[name] for line in of_run for name in names])
    assert epochs[0] == pytest.approx(epochs[1], rel=limit)


@needs_horovod
def test_the_loop_of_ones_own(tmp_path):
    before, after = ([line.partition("  #")[0].strip() for line in text.splitlines()] for text in (BEFORE, OWN_LOOP))
    assert 5 < len([line for line in after if line and line not in before]) <= 10
    (tmp_path / "cells.py").write_text(PROGRAM)
    (tmp_path / "own_loop.py").write_text(OWN_LOOP)
    epochs = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        run(launcher, ranks, [sys.executable, "own_loop.py"], cwd=tmp_path).good()
        epochs.append([line["iou"] for line in of_kind("epoch", tmp_path / "runs" / "cells")])
    assert len(epochs[0]) == 3
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-5)


@needs_horovod
@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_ranks_that_are_numbered_by_hand_train_as_one(tmp_path, engine):
    """An operator of Kubernetes sets these variables in its pods, and no others."""
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    argv = ["linear", "--epochs", "2", "--engine", engine, "--output", tmp_path / "run"]
    with started("alone", 1, command("torch", *argv), RANK="1", **given) as other:
        ended = run("alone", 1, command("torch", *argv), RANK="0", **given).good()
        assert other.wait().good().left == []
    assert "2 ranks, env://" in ended.out
    train("torch", "alone", 1, "linear", "--epochs", "2", "--output", tmp_path / "alone").good()
    assert furthest(losses(tmp_path / "run"), losses(tmp_path / "alone")) < 1e-6


CLASSES = """
import torch
from torch.utils.data import TensorDataset

def net():
    return torch.nn.Linear(4, 3)

def data(valid=37):
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(24 + valid, 4, generator=draw), torch.randint(3, (24 + valid,), generator=draw)
    return TensorDataset(x[:24], y[:24]), TensorDataset(x[24:], y[24:])
"""
KEYS = """
default:
  model: cells:net
  dataset: cells:data
  loss: cross_entropy
  epochs: 2
  batch_size: 12
  base_lr: 0.5
"""
LOOP = """
import sys

import torch
from cells import data, net
from scores import perplexity
from torchmetrics.classification import MulticlassF1Score

import hvdtrain.torch as ht
from hvdtrain.errors import LoopError

with ht.join(device="cpu") as world:
    model, (train, valid) = net(), data(int(sys.argv[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = world.run(sys.argv[2], model, optimizer)
{loop}
    mine = torch.arange(world.rank, dtype=torch.int16)
    assert world.gather(mine).tolist() == [each for rank in range(world.size) for each in range(rank)]
    assert world.gather(mine.numpy()).dtype == "int16" and world.gather(world.rank) == list(range(world.size))
    for value in (torch.tensor([1.5, 2]), torch.ones(2, 1).bfloat16(), torch.tensor(3, dtype=torch.uint8),
                  torch.tensor([1 + 2j]), torch.ones(2, 3)[:, ::2], torch.tensor([2**40])):
        total = world.sum(value)
        assert total.dtype == value.dtype and total.tolist() == (value * world.size).tolist(), total
        if value.dtype != torch.bfloat16:
            assert (world.sum(value.numpy()) == total.numpy()).all()
    assert world.sum(0.5) == 0.5 * world.size
    for wrong in (lambda: world.sum(torch.ones(1 + world.rank)), lambda: world.sum(torch.tensor([True])),
                  lambda: world.sum(torch.tensor(200, dtype=torch.uint8)),
                  lambda: world.gather(torch.ones(2, 1 + world.rank)), lambda: world.metric(len)):
        try:
            wrong()
        except LoopError as error:
            world.print(error)
"""
WRONG = (
    "world.sum adds numbers of one dtype and shape on all ranks, got [['torch.float32', [1]], ['torch.float32', [2]]]",
    "world.sum adds numbers of one dtype and shape on all ranks, got [['torch.bool', [1]], ['torch.bool', [1]]]",
    "world.sum: the sum is too large for torch.uint8; convert to int64 before.",
    "world.gather joins arrays of one dtype and shape behind the first axis, got [['torch.float32', [1]], ['torch.",
    "world.metric takes a pair (update, compute) or a metric of torchmetrics, got a builtin_function_or_method; for a",
)


def by_hand(run, valid):
    """The metrics of the run's last checkpoint on the whole validation set, by scikit-learn and NumPy."""
    import torch
    from sklearn.metrics import f1_score, jaccard_score, roc_auc_score

    arrays = newest(run / "checkpoints")[0].arrays
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(24 + valid, 4, generator=draw)[24:].numpy(), torch.randint(3, (24 + valid,), generator=draw)[24:]
    out = x.astype(float) @ arrays["model.weight"].T.astype(float) + arrays["model.bias"]
    p, best = np.exp(out) / np.exp(out).sum(1, keepdims=True), out.argmax(1)
    auc = roc_auc_score(y, p, multi_class="ovr", average="macro") if valid > 3 else None
    perplexity = np.exp(-np.log(p[range(valid), y]).mean())
    return {
        "f1": f1_score(y, best, average="macro"), "auc": auc, "perplexity": perplexity,
        "iou": jaccard_score(y, best, average="macro"),
    }  # fmt: skip


@needs_horovod
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_metrics_of_a_whole_set(ranks, tmp_path):
    """By the recipe and the loop of the page, on any number of ranks, and by --evaluate on another one."""
    (tmp_path / "scores.py").write_text(METRICS)
    (tmp_path / "cells.py").write_text(CLASSES)
    (tmp_path / "cells.yaml").write_text(f"{KEYS}{textwrap.indent(METRICS_YAML, '  ')}")
    launcher, engine = ("alone" if ranks == 1 else "gloo"), "ddp" if ranks == 4 else "auto"
    train("torch", launcher, ranks, "cells.yaml", "--output", "run", "--engine", engine, cwd=tmp_path).good()
    last, wanted = of_kind("epoch", tmp_path / "run")[-1], by_hand(tmp_path / "run", 37)
    assert {name: last[f"valid_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    for other in {1, ranks}:
        argv = ["--evaluate", "run", "--json"]
        ended = train("torch", "alone" if other == 1 else "gloo", other, *argv, cwd=tmp_path).good()
        found = json.loads(ended.out[ended.out.index("{") :])
        assert found == {**found, **{key: last[key] for key in found if other == ranks and engine == "auto"}}
        assert {name: found[f"valid_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-6)


@needs_horovod
@pytest.mark.parametrize(("engine", "valid"), [("auto", 37), ("ddp", 1)])
def test_metrics_arrays_and_tensors_in_a_loop_of_ones_own(engine, valid, tmp_path):
    """Also where a rank has no example to validate."""
    (tmp_path / "scores.py").write_text(METRICS)
    (tmp_path / "cells.py").write_text(CLASSES)
    (tmp_path / "loop.py").write_text(LOOP.format(loop=textwrap.indent(METRICS_LOOP, "    ")))
    program = warm.command("torch", tmp_path / "loop.py", valid, "run")
    ended = run("gloo", 2, program, cwd=tmp_path, HVDTRAIN_ENGINE=engine).good()
    last, wanted = of_kind("epoch", tmp_path / "run")[-1], by_hand(tmp_path / "run", valid)
    names = ("f1", "perplexity") if valid > 1 else ("perplexity",)
    assert [last[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-6)
    assert [line for line in WRONG if line not in ended.out] == []
