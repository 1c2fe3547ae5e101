"""The programs and the recipe in docs/bring.md train alike on one process and on two ranks."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from ranks import command, needs_horovod, needs_torch, run, started, train
from worlds import furthest, losses, of_kind

SLOW = ("loop_of_ones_own", "recipe[float64]", "by_hand_train_as_one[ddp]")

pytestmark = [pytest.mark.launched, needs_torch]
PAGE = Path(__file__).parents[2] / "docs" / "bring.md"


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
