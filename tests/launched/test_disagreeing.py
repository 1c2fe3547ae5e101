"""Whatever one of three ranks has otherwise is named, with its rank and host: in a loop, a recipe, Lightning, Keras."""

import json
import os
import re
import shutil

import pytest
import warm
from images import write_tree
from marks import marked
from paths import SUPPORT
from ranks import NEEDS, left_by, needs_lightning, run

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600), NEEDS["torch"]]

TAKEN = {"sample rounded", "sample alone"}
"""Examples that are the same but for rounding and the folder of a file; other ones that rank 0 alone validates."""
PROGRAM = SUPPORT / "disagreeing.py"
WAYS = {
    "join": ("torch", []),
    "recipe": ("torch", []),
    "lightning": ("lightning", [needs_lightning]),
    "lightning_ddp": ("lightning", [needs_lightning]),
    "keras": ("tensorflow", [NEEDS["tensorflow"]]),
}


def prepare(folder):
    """Images, and three sets that differ: one image less, one renamed, a class renamed."""
    write_tree(folder / "data", train=6)
    for other in ("training examples", "training list", "class names"):
        shutil.copytree(folder / "data", folder / other)
    (folder / "training examples" / "train" / "n01" / "n01_0.JPEG").unlink()
    first = folder / "training list" / "train" / "n01" / "n01_0.JPEG"
    first.rename(first.with_name("n01_00.JPEG"))
    for split in ("train", "val"):
        (folder / "class names" / split / "n01").rename(folder / "class names" / split / "n00")
    (folder / "tiny.yaml").write_text(TINY)


TINY = """default:
  model: torchvision:squeezenet1_1
  model_args: {num_classes: 2}
  dataset: imagenet
  train_crop: 32
  valid_resize: 36
  valid_crop: 32
  batch_size: 6
  epochs: 1
  max_steps: 1
  base_lr: 0.01
  device: cpu
"""


@pytest.mark.parametrize(
    "way",
    marked(
        [pytest.param(way, marks=marks) for way, (_, marks) in WAYS.items()],
        slow={"lightning_ddp"},
        only_ci={"recipe", "lightning", "keras"},
    ),
)
def test_each_thing_that_one_rank_has_otherwise_is_named(way, tmp_path):
    if way == "recipe":
        prepare(tmp_path)
    run("gloo", 3, warm.command(WAYS[way][0], PROGRAM, way, tmp_path), 400, cwd=tmp_path).good()
    ranks, host = left_by(3, tmp_path), os.uname().nodename
    assert len(ranks[0]) > 4
    for index, case in enumerate(ranks[0]):
        text = ranks[0][case]
        if case in TAKEN:
            assert text == "taken"
            continue
        name = case.partition(" at step")[0].partition(" after")[0]
        other = 1 if case == "sample numbered" else index % 3 or 1
        named = f"example [0-9]+ differs: rank 0 on {host} and rank {other} on {host} have other data"
        assert re.search(named, text) if "sample" in case else f"{name}: rank {index % 3} on {host} has " in text, (
            case,
            text,
        )
        assert "\n" not in text
        if way != "recipe":  # which prints it on rank 0
            assert ranks[1][case] == ranks[2][case] == text
    if way == "join":  # that of step 4 would have been of rank 0 alone
        assert [one.name for one in (tmp_path / "lr at step 3" / "checkpoints").glob("step-*")] == ["step-00000002"]


UNEQUAL = {
    "unequal_keras": "the ranks differ in steps of this epoch: rank 1 on HOST has 6, the others 10: ",
    "unequal_lightning": "the training data of rank 1 ended after 5 of 10 batches, for more of which other ranks would",
}


@pytest.mark.parametrize(
    ("way", "kind"),
    marked(
        [
            pytest.param("unequal_keras", "tensorflow", marks=NEEDS["tensorflow"]),
            pytest.param("unequal_lightning", "lightning", marks=needs_lightning),
        ],
        only_ci={"unequal_lightning"},
    ),
)
def test_unequal_numbers_of_steps_end_all_ranks_by_name(way, kind, tmp_path):
    ended = run("gloo", 3, warm.command(kind, PROGRAM, way, tmp_path), 120)
    line = UNEQUAL[way].replace("HOST", os.uname().nodename)
    assert ended.code != 0
    assert ended.left == []
    assert any(line in each for each in ended.lines), ended.err
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert line in status["error"]
