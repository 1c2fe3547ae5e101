"""The programs and the recipe in docs/bring.md, model.md and loop.md train alike on one process and on two ranks."""

import copy
import importlib
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

import bring_pages
import numpy as np
import pytest
import warm
from marks import marked
from ranks import command, needs_horovod, needs_torch, run, started, train
from worlds import furthest, losses, of_kind

from hvdtrain.record.checkpoint import newest

pytestmark = [pytest.mark.launched, needs_torch]
PAGE = bring_pages.text()
BRING_LOOPS = Path(__file__).parents[1] / "support" / "bring_loops.py"


METRICS_YAML, METRICS, METRICS_LOOP = (
    textwrap.dedent(block)
    for block in re.findall(r"^  ```(?:python|yaml)\n(.*?)^  ```", PAGE, re.DOTALL | re.MULTILINE)
    if "perplexity" in block
)
OF_LOOPS = PAGE.partition("## Keep your loop")[2]
PROGRAM, RECIPE, _, STEP, CONTRASTIVE, BEFORE, OWN_LOOP, ACCUMULATED, WORDS, WORDS_LOOP, WORDS_STEP = re.findall(
    r"^```(?:python|yaml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)
_, PARTS, _, PAIRED, _ = (
    textwrap.dedent(block) for block in re.findall(r"^  ```python\n(.*?)^  ```", OF_LOOPS, re.DOTALL | re.MULTILINE)
)
FEATURES = dict(
    re.findall(r"^\| ([^|]+) \| `([^`]+)` \| [^|]+ \|$", PAGE.partition("## Features, line")[2], re.MULTILINE)
)

WORDS_KEYS = """
default:
  model: words:Model
  dataset: words:data
  collate: words:collate
  step: words:step
  optimizer: adamw
  base_lr: 0.003
  clip_norm: 1.0
  batch_size: 16
  epochs: 1
  precision: float64
"""

LOSSES = ("train_loss", "valid_loss")
# In float32 a pixel whose output lies within rounding of 0 may count for the IoU on two ranks and not on one.
ALIKE = {"float32": (LOSSES, 1e-5), "float64": ((*LOSSES, "train_iou", "valid_iou"), 1e-12)}


@needs_horovod
@pytest.mark.parametrize(("precision", "alike"), marked(ALIKE.items(), slow={"float64"}), ids=ALIKE)
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


@pytest.mark.slow
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
        launch = json.loads((tmp_path / "runs/cells/launches.jsonl").read_text().partition("\n")[0])
        assert launch["typed"] == ("horovodrun" if ranks == 2 else "")
    assert len(epochs[0]) == 3
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-5)


@needs_horovod
@pytest.mark.parametrize("way", marked(["own loop", "step"], slow={"step"}))
def test_a_model_as_hugging_faces_and_padded_batches(way, tmp_path):
    """The loss is that of all tokens, whichever rank has them, to the rounding of float64."""
    (tmp_path / "words.py").write_text(WORDS + WORDS_STEP)
    (tmp_path / "words.yaml").write_text(WORDS_KEYS)
    loop = WORDS_LOOP.replace("with ht.join", "torch.set_default_dtype(torch.float64)\nwith ht.join")
    (tmp_path / "loop.py").write_text(loop.replace("run.epochs(3)", "run.epochs(1)"))
    epochs = []
    for launcher, ranks in (("alone", 1), ("gloo", 2)):
        folder = tmp_path / "runs" / "words"
        shutil.rmtree(folder, ignore_errors=True)
        if way == "step":
            train("torch", launcher, ranks, "words.yaml", "--output", folder, cwd=tmp_path).good()
        else:
            run(launcher, ranks, warm.command("torch", tmp_path / "loop.py"), cwd=tmp_path).good()
        epochs.append([line[name] for line in of_kind("epoch", folder) for name in LOSSES])
    assert len(epochs[0]) == 2
    assert epochs[0][1] < epochs[0][0] < 5
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-12)


@needs_horovod
@pytest.mark.parametrize("engine", marked(["horovod", "ddp"], slow={"ddp"}))
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
GATHERS = """
import numpy as np
import torch

import hvdtrain.torch as ht


def wrong_gathers(world):
    rank, wrong = world.rank, world.rank == 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        own = torch.arange(6.0 * (1 + rank)).view(3, -1).t().to(dtype).requires_grad_()
        joined = world.gather(own)
        factors = torch.arange(18.0).view(6, 3).to(dtype)
        (joined * factors * (1 + rank)).sum().real.backward()
        assert joined.dtype == dtype and torch.equal(joined[2 * rank : 2 + 4 * rank], own)
        assert torch.equal(own.grad, 3 * factors[2 * rank : 2 + 4 * rank]), dtype
    for empty in (torch.ones(0, 3, requires_grad=True), torch.empty(0)):
        own = torch.ones(2, 3, requires_grad=True) if wrong else empty
        world.gather(own).square().sum().backward()
        assert (own.grad is None) if own is empty and not own.requires_grad else (own.grad == 4).all()
    world.gather(torch.ones(0, 3, requires_grad=True)).sum().backward()
    own = torch.arange(1.0 + rank, 4.0, dtype=torch.float64).requires_grad_()
    (first,) = torch.autograd.grad((world.gather(own) ** 3).sum() * (1 + rank), own, create_graph=True)
    first.square().sum().backward()  # of (9 own ** 2) ** 2, which both losses reach, one of them twice
    assert torch.allclose(first, 9 * own**2) and torch.allclose(own.grad, 2 * 9 * own**2 * 18 * own)
    complexes = torch.ones(2, dtype=torch.complex128, requires_grad=True)
    world.gather(complexes.conj()).real.sum().backward()
    assert complexes.grad.tolist() == [2, 2]
    assert not world.gather(torch.arange(2)).requires_grad
    with torch.no_grad():
        assert not world.gather(torch.ones(2, requires_grad=True)).requires_grad
    own = torch.ones(2, requires_grad=True)
    (world.sum(own * own) * (1 + rank)).sum().backward()
    assert own.grad.tolist() == [6, 6]
    for value in ("é", None, [1, (2, {3: None})], {}, float("inf"), 2**60, True):
        assert world.gather(value) == ht.gather(value) == [value] * 2
    found = world.gather({"names": ["a"] * rank, "x": torch.tensor(rank), "y": (np.arange(rank), rank)})
    assert str(found) == "{'names': [[], ['a']], 'x': tensor([0, 1]), 'y': (array([0]), [0, 1])}", found
    for value in (len, lambda: len if wrong else 1, {"x": torch.ones(1), "y": [open]}, torch.eye(2).to_sparse(),
                  {1}, b"", np.array(["a"])):
        yield lambda value=value: world.gather(value)
    yield lambda: world.gather({f"x{rank}": torch.ones(1)})
    yield lambda: world.gather((own, 1) if wrong else (1, own))
    yield lambda: world.gather(torch.ones(2, requires_grad=wrong))
    yield lambda: world.sum(torch.ones(2, requires_grad=wrong))
"""
"""On two ranks, of which the second has more examples; gives what is refused."""
LOOP = """
import sys

import torch
from cells import data, net
from gathers import wrong_gathers
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
                  lambda: world.gather(torch.ones(2, 1 + world.rank)), lambda: world.metric(len),
                  *wrong_gathers(world)):
        try:
            wrong()
            raise SystemExit(f"not refused: {{wrong}}")
        except LoopError as error:
            world.print(error)
"""
WRONG = (
    "world.sum adds numbers of one dtype and shape on all ranks, got [['torch.float32', [1]], ['torch.float32', [2]]]",
    "world.sum adds numbers of one dtype and shape on all ranks, got [['torch.bool', [1]], ['torch.bool', [1]]]",
    "world.sum: the sum is too large for torch.uint8; convert to int64 before.",
    "world.gather joins arrays of one dtype and shape behind the first axis, got [['torch.float32', [1]], ['torch.",
    *(
        "world.gather takes dense tensors, arrays, numbers, texts, None, and lists and dictionaries of them, alike on "
        f"all ranks, got [{kinds}]"
        for kinds in (
            "'a function', 'a function'",
            "'a builtin_function_or_method', 'a builtin_function_or_method'",
            "'a Tensor', 'a Tensor'",
            "'a set', 'a set'",
            "'a bytes', 'a bytes'",
            "'a ndarray', 'a ndarray'",
            """"TreeSpec(dict, ['x0'], [*])", "TreeSpec(dict, ['x1'], [*])\"""",
        )
    ),
    "behind the first axis, got [['no array', []], ['torch.float32', [], 'with a gradient']].",
    "behind the first axis, got [['torch.float32', []], ['torch.float32', [], 'with a gradient']].",
    "on all ranks, got [['torch.float32', [2]], ['torch.float32', [2], 'with a gradient']]; convert them before.",
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
@pytest.mark.parametrize("ranks", marked([1, 2, 4], only_ci={2}, slow={1, 4}))
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


PAIRS = """
def data():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    return [TensorDataset(x, x.flip(1) + 0.1)] * 2
"""


@needs_horovod
def test_a_step_that_gathers(tmp_path):
    (tmp_path / "cells.py").write_text(CLASSES + PAIRS + CONTRASTIVE)
    keys = KEYS.replace("loss: cross_entropy", "step: cells:step").replace("0.5", "0.02")
    (tmp_path / "cells.yaml").write_text(f"{keys}  precision: float64\n")
    for launcher, ranks in (("alone", 1), ("gloo", 2)):
        train("torch", launcher, ranks, "cells.yaml", "--output", f"on-{ranks}", cwd=tmp_path).good()
    assert furthest(losses(tmp_path / "on-2"), losses(tmp_path / "on-1")) < 1e-12
    close = (newest(tmp_path / f"on-{ranks}" / "checkpoints")[0].arrays["model.weight"] for ranks in (1, 2))
    np.testing.assert_allclose(*close, rtol=0, atol=1e-12)


@needs_horovod
@pytest.mark.parametrize(("engine", "valid"), marked([("auto", 37), ("ddp", 1)], slow={"ddp"}))
def test_metrics_arrays_and_tensors_in_a_loop_of_ones_own(engine, valid, tmp_path):
    """Also where a rank has no example to validate."""
    (tmp_path / "scores.py").write_text(METRICS)
    (tmp_path / "cells.py").write_text(CLASSES)
    (tmp_path / "gathers.py").write_text(GATHERS)
    (tmp_path / "loop.py").write_text(LOOP.format(loop=textwrap.indent(METRICS_LOOP, "    ")))
    program = warm.command("torch", tmp_path / "loop.py", valid, "run")
    ended = run("gloo", 2, program, cwd=tmp_path, HVDTRAIN_ENGINE=engine).good()
    last, wanted = of_kind("epoch", tmp_path / "run")[-1], by_hand(tmp_path / "run", valid)
    names = ("f1", "perplexity") if valid > 1 else ("perplexity",)
    assert [last[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-6)
    assert [line for line in WRONG if line not in ended.out] == []


SMALL_LOOP = """
import torch
from torch.nn import functional as F
from scores import perplexity
from torchmetrics.classification import MulticlassF1Score

import hvdtrain.torch as ht

with ht.join() as world:
    draw = torch.Generator().manual_seed(3)
    x_train, unlabelled = torch.randn(24, 4, generator=draw), torch.randn(48, 4, generator=draw)
    y_train = torch.randint(3, (24,), generator=draw)
    train = valid = torch.utils.data.TensorDataset(x_train, y_train)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = world.run("runs/NAME", model, optimizer)
"""
IN_PARTS = """\
    for x, y in run.batches(train, batch_size=12):
        y = y.where(x[:, 0] < 0.5, -100)
        parts = [*zip(x.split(2), y.split(2))]
"""
WITH_FEATURES = """
import torch
from cells import Net, data, dice, without_norm
from torch.optim import swa_utils

import hvdtrain.torch as ht


class Kept(Net):
    def forward(self, x):
        {activation checkpointing}
        return x


def per_example(out, y):
    return (out.sigmoid() - y).square().mean((1, 2, 3))


with ht.join() as world:
    train, valid = data()
    torch.manual_seed(0)
    model = without_norm(Kept()).to(world.device)
    {PyTorch's compiler}
    {averaged weights}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = world.run("runs/features", model, optimizer, {their checkpoints}, log_every_steps=1)
    {early stopping, with its count in each checkpoint}
    for epoch in run.epochs(3):
        for x, y in run.batches(train, batch_size=32):
            {mixed precision}
                out = model(x)
                main, other = dice(out, y), out.square().mean()
                {several losses}
            loss.backward()
            {clipping}
            optimizer.step()
            optimizer.zero_grad()
            {their update}
            {each of them in the log}
        total = count = 0
        with torch.no_grad():
            {evaluation}
                total += per_example(average(x), y).sum()
                count += len(y)
        run.report(valid_loss=world.mean(total, count) + (epoch == 2))
    outputs = []
    {the best weights at the end}
    {profiling}
        with torch.no_grad():
            {evaluation}
                outputs.append(per_example(average(x), y))
    profile.export_chrome_trace(f"trace-{world.rank}.json")
    {gathered predictions}
    torch.save(predictions, f"predictions-{world.rank}.pt")
"""
"""A program with each line of the page's table in the place of its feature's name."""


def small(name, loop):
    return f"{SMALL_LOOP.replace('NAME', name)}{textwrap.indent(loop, '    ')}"


def over_ranks(batches):
    """The global batch of those of all ranks."""
    import torch

    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def of_cells(model, batches):
    from cells import dice

    x, y = over_ranks(batches)
    return dice(model(x), y), 1


def of_features(model, batches):
    return of_cells(model, batches)[0] + 0.1 * model(over_ranks(batches)[0]).square().mean(), 1


def of_words(model, batches):
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
    return sum(model(**batch)["loss"] * count for batch, count in zip(batches, counts, strict=True)), sum(counts)


def of_labels(model, batches):
    import torch

    x, y = over_ranks(batches)
    return torch.nn.functional.cross_entropy(model(x), y), 1


def of_parts(model, batches):
    import torch

    x, y = over_ranks(batches)
    y = y.where(x[:, 0] < 0.5, -100)
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum()


def of_pairs(model, batches, others):
    return of_labels(model, batches)[0] + model(over_ranks(others)[0]).square().mean(), 1


FEATURES_LOOP = WITH_FEATURES
for feature, line in FEATURES.items():
    FEATURES_LOOP = FEATURES_LOOP.replace(f"{{{feature}}}", line)
IN_EPOCHS = "for epoch in run.epochs(2):\n"
SGD, CELLS, WORD = ("torch.nn:Linear", "SGD", 0.1), ("cells:Net", "AdamW", 0.01), ("words:Model", "AdamW", 0.003)
LOOPS = {  # by name: the program; plain PyTorch's model, optimizer and LR; the loss of global batches, as sum and count
    "accumulated": (
        ACCUMULATED.replace("Net()", "without_norm(Net())").replace("data, ", "data, without_norm, "),
        CELLS,
        of_cells,
    ),
    "parts": (small("parts", IN_EPOCHS + IN_PARTS + textwrap.indent(PARTS, " " * 8)), SGD, of_parts),
    "paired": (small("paired", IN_EPOCHS + textwrap.indent(PAIRED, " " * 4)), SGD, of_pairs),
    "metrics": (small("metrics", METRICS_LOOP), SGD, of_labels),
    "words": (WORDS_LOOP, WORD, of_words),
    "cells": (OWN_LOOP, CELLS, of_cells),
    "features": (FEATURES_LOOP.replace("compile()", 'compile(backend="eager")'), CELLS, of_features),
}
WITHOUT_NORM = """

def without_norm(net):
    net.layers[1] = nn.Identity()
    return net
"""


def plain(name, read):
    """What plain PyTorch makes of what the ranks have read: the loss of each epoch, and the model after it."""
    import torch

    _, (path, kind, lr), loss_of = LOOPS[name]
    module, _, attribute = path.partition(":")
    torch.manual_seed(0)
    model = getattr(importlib.import_module(module), attribute)(*[4, 3] * (attribute == "Linear"))
    model = importlib.import_module("cells").without_norm(model) if name in {"accumulated", "features"} else model
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=lr)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    sets, found = 2 if name == "paired" else 1, []
    for first in range(0, len(read[0]), sets):
        losses = []
        for update in range(len(read[0][first])):
            given = [[of_rank[first + each][update] for of_rank in read] for each in range(sets)]
            total, count = loss_of(model, *given)
            (total / count).backward()
            if name in {"words", "features"}:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            losses.append((total.item(), int(count)))
        found.append((sum(total for total, _ in losses) / sum(count for _, count in losses), copy.deepcopy(average)))
    return found


@needs_horovod
@pytest.mark.parametrize(
    "names", marked(["accumulated parts paired", "metrics words cells features"], slow={"metrics words cells features"})
)
def test_each_loop_of_the_page_logs_plain_pytorchs_loss(names, tmp_path, monkeypatch):
    """On one process and on two ranks, to the rounding of float64."""
    import torch

    (tmp_path / "cells.py").write_text(PROGRAM.replace("count=512", "count=96").replace("101,", "37,") + WITHOUT_NORM)
    (tmp_path / "words.py").write_text(WORDS.replace("lines[64:], lines[:64]", "lines[64:192], lines[:64]"))
    (tmp_path / "scores.py").write_text(METRICS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cells", "words"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = names.split()
    for name in names:
        (tmp_path / f"loop_{name}.py").write_text(LOOPS[name][0])
    torch.set_default_dtype(torch.float64)
    try:
        for launcher, ranks in (("alone", 1), ("gloo", 2)):
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            ended = run(launcher, ranks, warm.command("torch", BRING_LOOPS, tmp_path, *names), cwd=tmp_path).good()
            for name in names:
                read = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in range(ranks)]
                found = [line["train_loss"] for line in of_kind("epoch", tmp_path / "runs" / name)]
                wanted = plain(name, read)
                assert found == pytest.approx([loss for loss, _ in wanted], rel=1e-10), name
                assert all(f"loss: {loss:.5g}" in ended.out for loss in found)
                if name == "features":
                    best = torch.load(tmp_path / f"predictions-{ranks - 1}.pt", weights_only=True)
                    valid = importlib.import_module("cells").data()[1]
                    x, y = map(torch.stack, zip(*(valid[index] for index in range(len(valid))), strict=True))
                    out = wanted[1][1](x).detach()
                    assert torch.allclose(best, (out.sigmoid() - y).square().mean((1, 2, 3)), rtol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)
