"""Lab 10: each program as the exercise has it, mended, and mended wrongly: the check names what it measures."""

import jupytext
import paths
import pytest
from fillings import by_gap, check_right, check_tried, check_wrong
from marks import marked

from labtools import Ranks
from labtools.exercises.hunt import Check
from labtools.hunt import LOADED, look, resumed

pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2, preload=LOADED)
    yield ranks
    ranks.close()


def source(kind, gap):
    (notebook,) = paths.LABS.glob(f"10-{kind}-*.ipynb")
    (cell,) = (cell.source for cell in jupytext.read(notebook).cells if cell.source.startswith(f"def {gap}("))
    return cell


IMPORTS = """
from pathlib import Path
import horovod.torch as hvd
import torch
import torch.distributed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from labtools import sharding
"""


def program(kind, gap, *changes):
    """The program of a notebook, with texts replaced."""
    code = source(kind, gap) + "\n"
    for old, new in changes:
        assert old in code, old
        code = code.replace(old, new)
    names = {"__name__": "__main__"}
    exec(IMPORTS + code, names)
    return names[gap]


NOTHING = ("    hvd.init()\n", "    hvd.init()\n    return\n")
UNTRAINED = ("    hvd.init()\n", "    hvd.init()\n    print('loss 0.1')\n    return task.network()\n")
READ_ALONE = ("            loss = ", "            loss = torch.tensor(0.0)\n            continue\n            loss = ")
UNWRAPPED = ("hvd.DistributedOptimizer(optimizer, model.named_parameters())", "optimizer")
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
BROADCAST = "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
HEAD = "    model.head = torch.nn.Linear(model.head.in_features, 3)\n"
SUM = 'cross_entropy(model(x), y, reduction="sum")'
REDUCED = (
    "    right, count = (hvd.allreduce(torch.tensor(float(each)), op=hvd.Sum).item() for each in (right, count))\n"
)
NOISE = "x + 0.3 * torch.randn(x.shape)"
EVERY_SIZETH = "range(hvd.rank(), len(task.valid), hvd.size())"
LOAD = '        optimizer.load_state_dict(state["optimizer"])\n'

ROWS = {  # what is changed in the solution; None is the exercise as it is
    "program_1, untouched": (None, "on 2 ranks lets each read all 64 examples in an epoch"),
    "program_1, nothing": ([NOTHING], "gives back None, and not the trained network"),
    "program_1, a line that looks right": ([UNTRAINED], "reads no example: a program that does nothing"),
    "program_1, reads alone": ([READ_ALONE], "uses its network 0, 0, 0 times in training"),
    "program_1, one half": ([("hvd.size(), hvd.rank()", "hvd.size(), 0")], "reads 32 of 64 .*, and 32 not at all"),
    "program_1, whole batches": ([("task.batch // hvd.size()", "task.batch")], "uses its network 16, 8, 8 times"),
    "program_1, one order": ([(SET_EPOCH, "")], "in the same order in each epoch"),
    "program_1, alone": ([UNWRAPPED], "leaves the two ranks with different weights"),
    "program_1, only rank 0's": (
        [UNWRAPPED, ("    return model\n", f"{BROADCAST}    return model\n")],
        "but not those of one rank",
    ),
    "program_2, untouched": (None, "reads the examples in the same order in each epoch"),
    "program_2, always 0": ([("set_epoch(epoch)", "set_epoch(0)")], "in the same order in each epoch"),
    "program_2, by rank": ([("set_epoch(epoch)", "set_epoch(2 * epoch + hvd.rank())")], "more than once in an epoch"),
    "program_2, all": ([("sampler=sampler", "shuffle=True")], "on 2 ranks lets each read all 64"),
    "program_2, one order for all": ([("hvd.rank())", "hvd.rank(), shuffle=False)")], "in the same order in each"),
    "program_3, untouched": (None, "different weights, apart by .*: they begin with different weights"),
    "program_3, at the end": (
        [(BROADCAST, ""), ("    return model\n", f"{BROADCAST}    return model\n")],
        "with the same weights, but not those of one rank",
    ),
    "program_3, the body": ([("(model.state_dict()", "(model.body.state_dict()")], "begin with different weights"),
    "program_3, of nothing": ([("(model.state_dict()", "({}")], "begin with different weights"),
    "program_3, own roots": ([("root_rank=0", "root_rank=hvd.rank()")], "stopped:.*The ranks name different roots"),
    "program_4, untouched": (None, "leaves a part of the network as it was at the first update"),
    "program_4, old head": ([(HEAD, "")], "a network with 5 outputs, where the set has 3 classes"),
    "program_4, after the broadcast": (
        [(HEAD, ""), (BROADCAST, BROADCAST + HEAD)],
        "different weights, apart by .*: what is made after the broadcast",
    ),
    "program_4, after the optimizer": (
        [(HEAD, ""), ("    sampler = ", f"{HEAD}{BROADCAST}    sampler = ")],
        "leaves a part of the network as it was",
    ),
    "program_4, no broadcast": ([(BROADCAST, "")], "leaves the two ranks with different weights"),
    "program_5, untouched": (None, "different weights, apart by .*: each rank trains by the gradient of its own"),
    "program_5, never together": (
        [("            loss = cross", "            with model.no_sync():\n                loss = cross")],
        "each rank trains by the gradient of its own examples",
    ),
    "program_5, all": ([("size, rank)", "1, 0)"), ("// size", "// 1")], "on 2 ranks lets each read all 64 examples"),
    "program_5, another network": (
        [("SGD(model.parameters()", "SGD(task.network().parameters()")],
        "leaves a part of the network as it was",
    ),
    "program_5, only a copy": (
        [("return model.module", "return task.network()")],
        "gives back another network than the one that it trains",
    ),
    "program_6, untouched": (None, "different weights, apart by .*: the gradient is the same on both"),
    "program_6, never": (
        [("scheduler.step(hvd.allreduce(loss.detach()).item())", "pass")],
        "asks the scheduler 0 and 0 times on the two ranks, where there are 16 updates",
    ),
    "program_6, a constant": ([("hvd.allreduce(loss.detach()).item()", "1.0")], "the same number again"),
    "program_6, by rank": ([("hvd.allreduce(loss.detach()).item()", "float(hvd.rank())")], "different|the same n"),
    "program_6, rank 0 alone": (
        [("scheduler.step(hvd.allreduce(loss.detach()).item())",
          "mean = hvd.allreduce(loss.detach()).item()\n            hvd.rank() or scheduler.step(mean)")],
        "asks the scheduler 16 and 0 times",
    ),
    "program_7, untouched": (None, "but not those of one rank, apart by"),
    "program_7, never divided": ([(f"{SUM} / count", SUM)], "but not those of one rank|not learn|different"),
    "program_7, own count": ([(f"{SUM} / count", f"{SUM} / (y != -100).sum()")], "but not those of one rank"),
    "program_7, the sum": ([(".float())", ".float(), op=hvd.Sum)")], "but not those of one rank"),
    "program_7, all labels": ([("task.partly_labelled", "task.train")], "reads task.train, whose labels are all there"),
    "program_8, untouched": (None, "adds the same noise on both ranks"),
    "program_8, none": ([(NOISE, "x")], "adds no noise any more"),
    "program_8, little": ([(NOISE, "x + 0.1 * torch.randn(x.shape)")], "of 0.10 and 0.10, where 0.30 was wanted"),
    "program_8, rank 0 alone": ([(NOISE, "x + 0.3 * (hvd.rank() == 0) * torch.randn(x.shape)")], "of 0.29 and 0.00"),
    "program_8, again and again": (
        [("            loss = ", "            torch.manual_seed(hvd.rank())\n            loss = ")],
        "adds the same noise in each update",
    ),
    "program_8, other weights": (
        [("torch.manual_seed(task.seed)", "torch.manual_seed(hvd.rank())"), (BROADCAST, "")],
        "leaves the two ranks with different weights",
    ),
    "program_9, untouched": (None, "validates 22 examples, of 21 that there are"),
    "program_9, its own part": ([(REDUCED, "")], r"reports 0.\d+ on rank 0 and 0.\d+ on rank 1: it is one number"),
    "program_9, one left out": ([(EVERY_SIZETH, "range(hvd.rank(), 20, hvd.size())")], "reads 20 of 21 examples"),
    "program_9, a mean of means": (
        [(REDUCED, "    right, count = hvd.allreduce(torch.tensor(right / count)).item(), 1\n")],
        "reports an accuracy of 0.*, and the network has 0",
    ),
    "program_9, written": ([("return model, right / count", "return model, 0.7")], "reports an accuracy of 0.7, and"),
    "program_9, no number": ([("return model, right / count", "return model")], "gives back no accuracy"),
    "program_10, untouched": (None, "with a pause ends with other weights than without one .apart by .*not in the che"),
    "program_10, not read back": ([(LOAD, "")], "with a pause ends with other weights"),
    "program_10, not written": ([('"optimizer": optimizer.state_dict(), ', "")], "stopped:.*KeyError"),
    "program_10, from the beginning": (
        [("path.exists()", "False")],
        "reads 128 examples on a rank after a pause .*, where 64 are left",
    ),
    "program_10, once more": ([("epoch + 1", "epoch")], "reads 96 examples on a rank after a pause"),
}  # fmt: skip
FAST = {"program_1, a line that looks right", "program_5, untouched", "program_9, written", "program_10, untouched"}
RIGHT = {
    "program_1, halves": (
        "program_1",
        [("    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())\n",
          "    half = len(task.train) // hvd.size()\n"
          "    mine = torch.utils.data.Subset(task.train, range(half * hvd.rank(), half * (hvd.rank() + 1)))\n"),
         (SET_EPOCH, ""), ("sampler=sampler", "shuffle=True"), ("DataLoader(task.train", "DataLoader(mine")],
    ),
    "program_3, one seed": ("program_3", [("task.seed + hvd.rank()", "task.seed"), (BROADCAST, "")]),
    "program_6, the sum": ("program_6", [("loss.detach())", "loss.detach(), op=hvd.Sum)")]),
    "program_8, from the start": (
        "program_8",
        [("torch.manual_seed(task.seed)", "torch.manual_seed(task.seed + hvd.rank())"),
         ("    torch.manual_seed(1000 + hvd.rank())\n", "")],
    ),
    "program_9, each rank all": ("program_9", [(EVERY_SIZETH, "range(len(task.valid))")]),
}  # fmt: skip


@pytest.mark.parametrize(("gap", "changes", "message"), marked(by_gap(ROWS), fast=FAST))
def test_mistakes_of_lab_10(ranks, gap, changes, message):
    wrong = program("exercise", gap) if changes is None else program("solution", gap, *changes)
    check_wrong(Check(ranks), message, gap, wrong)


@pytest.mark.parametrize("gap", marked(list(Check.hints), fast={"program_1", "program_8"}))
def test_the_mended_programs(ranks, capsys, gap):
    check_right(Check(ranks), capsys, gap, program("solution", gap))


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "changes"), RIGHT.values(), ids=RIGHT)
def test_mended_in_another_way(ranks, capsys, gap, changes):
    check_right(Check(ranks), capsys, gap, program("solution", gap, *changes))


def test_every_program_is_mended_in_five_wrong_ways():
    check_tried(Check, ROWS)


def test_the_looks_show_a_mistake_and_that_it_is_gone(ranks, capsys):
    def rows(kind):
        look(ranks, program(kind, "program_9"))
        return {line[:26].strip(): line[26:].split() for line in capsys.readouterr().out.splitlines()}

    wrong, right = rows("exercise"), rows("solution")
    assert wrong["validated"] == ["21", "11", "11"]
    assert right["validated"] == ["21", "11", "10"]
    assert wrong["updates"] == right["updates"] == ["16"] * 3
    assert right["weights, ranks 0 and 1"] == ["apart", "by", "0"]
    resumed(ranks, program("exercise", "program_10"))
    assert float(capsys.readouterr().out.split()[-1]) > 0.01
