"""Plans: the derived numbers, what the dry run prints, and the full text of every refusal."""

import dataclasses
import json

import pytest
from refusals import refusal

from hvdtrain.core import plan as plans
from hvdtrain.core import recipe
from hvdtrain.core.network import Network
from hvdtrain.errors import PlanError
from hvdtrain.run.setup import load_dataset

CASES = {  # recipe, ranks, overrides: global batch, of a rank, of a micro-batch, steps an epoch, steps in all, peak LR
    "linear alone": ("linear", 1, {}, (100, 100, 100, 10, 1500, 0.5)),
    "linear on 4": ("linear", 4, {}, (100, 25, 25, 10, 1500, 0.5)),
    "as many ranks as examples": ("linear:full-batch", 1000, {}, (1000, 1, 1, 1, 150, 0.5)),
    "digits on 2": ("digits", 2, {"batch_size": 128, "base_lr": 0.01}, (128, 64, 64, 11, 110, 0.02)),
    "per rank, linear rule": ("synthetic:tiny", 4, {}, (64, 16, 16, 10, 10, 0.025)),
    "per rank, square root": ("synthetic:tiny", 4, {"lr_rule": "sqrt"}, (64, 16, 16, 10, 10, 0.05)),
    "in micro-batches": ("linear", 2, {"accumulation_steps": 5}, (100, 50, 10, 10, 1500, 0.5)),
    "stopped early": ("linear", 1, {"max_steps": 7}, (100, 100, 100, 10, 7, 0.5)),
    "stopped after its end": ("linear", 1, {"max_steps": 10**6}, (100, 100, 100, 10, 1500, 0.5)),
    "a rest that sits out": ("linear", 1, {"batch_size": 300}, (300, 300, 300, 3, 450, 0.5)),
}


@pytest.mark.parametrize(("name", "size", "overrides", "expected"), CASES.values(), ids=CASES)
def test_numbers(name, size, overrides, expected, make_plan):
    plan = make_plan(name, size, **overrides)
    numbers = (plan.global_batch, plan.worker_batch, plan.micro_batch, plan.steps_per_epoch, plan.total_steps)
    assert (*numbers, plan.schedule.peak_lr) == pytest.approx(expected, rel=1e-15)


LARGE = (
    "the global batch must be at most the {} training examples, got {}; give a smaller batch or fewer ranks than {}."
)
SMALL = "model inception_v3 needs training images of at least 299 pixels, "
REFUSED = [
    ("digits", 3, {}, "batch_size must be a multiple of 3 ranks, got 64; take 63 or 66."),
    ("linear", 128, {}, "batch_size must be a multiple of 128 ranks, got 100; take 128."),
    (
        "linear",
        1,
        {"accumulation_steps": 3},
        "batch_size must be a multiple of 3 accumulation steps, got 100; take 99 or 102.",
    ),
    (
        "linear",
        4,
        {"accumulation_steps": 3},
        "batch_size must be a multiple of 4 ranks x 3 accumulation steps, got 100; take 96 or 108.",
    ),
    (
        "synthetic:tiny",
        4,
        {"accumulation_steps": 3},
        "batch_size_per_rank must be a multiple of 3 accumulation steps, got 16; take 15 or 18.",
    ),
    ("linear", 1, {"batch_size": 1001}, LARGE.format(1000, 1001, 1)),
    ("synthetic:tiny", 41, {}, LARGE.format(640, 656, 41)),
    ("synthetic:tiny", 10**30, {}, LARGE.format(640, 16 * 10**30, 10**30)),
    (
        "synthetic:tiny",
        1,
        {"model": "inception_v3", "image_size": 298},
        f"{SMALL}synthetic gives 298; give image_size 299.",
    ),
    ("digits", 1, {"model": "inception_v3"}, f"{SMALL}digits gives 8; take another data set."),
    (  # in the auxiliary classifier
        "cscs:inception_v3-synthetic",
        1,
        {"batch_size": 1},
        "BatchNorm needs at least 2 examples in a micro-batch, got 1 (batch 1 over 1 rank in 1 micro-batch); take a "
        "larger batch or batch_norm frozen.",
    ),
]


@pytest.mark.parametrize(("name", "size", "overrides", "message"), REFUSED)
def test_refused(name, size, overrides, message):
    chosen = recipe.load(name, overrides)
    network = Network(10, has_batch_norm=chosen.model != "linear")  # counted by no framework
    assert refusal(PlanError, plans.make, chosen, size, load_dataset(chosen), network) == message


UNEVEN = {  # a batch of 100 on 8 ranks
    "linear": ({}, True),
    "adasum": ({"reduction": "adasum"}, False),
    "in micro-batches": ({"accumulation_steps": 2}, False),
    "fewer examples than ranks": ({"batch_size": 7}, False),
}


@pytest.mark.parametrize(("overrides", "allowed"), UNEVEN.values(), ids=UNEVEN)
def test_uneven_local_batches(overrides, allowed, make_plan):
    if not allowed:
        with pytest.raises(PlanError, match="batch_size must be a multiple of 8 ranks"):
            make_plan("linear", 8, **overrides)
        return
    plan = make_plan("linear", 8, **overrides)
    assert "batch       100 = 8 ranks x 12 or 13" in plan.lines()
    assert sum(plan.weight(examples) for examples in [12, 13] * 4) == pytest.approx(8)
    assert make_plan("linear", 4).weight(25) == 1


CURVES = {  # ranks, the network, batch_norm: what the line says after "curve"
    "one rank": (1, Network(10, True, has_dropout=True), "local", []),
    "neither": (2, Network(10, False), "local", []),
    "not known": (2, Network(0, True), "local", []),
    "batch norm": (
        2,
        Network(10, True),
        "local",
        ["BatchNorm normalises by each rank's part", "batch_norm: sync makes"],
    ),
    "synchronised": (2, Network(10, True), "sync", []),
    "both": (2, Network(10, True, has_dropout=True), "local", ["BatchNorm", "; dropout draws", "a model without it"]),
    "dropout": (2, Network(10, False, has_dropout=True), "sync", [": dropout draws"]),
}


@pytest.mark.parametrize(("size", "network", "batch_norm", "parts"), CURVES.values(), ids=CURVES)
def test_what_makes_the_curve_depend_on_the_ranks(size, network, batch_norm, parts):
    chosen = recipe.load("digits", {"batch_norm": batch_norm})
    plan = plans.make(chosen, size, load_dataset(chosen), network)
    lines = [line for line in plan.lines() if line.startswith("curve       depends on the number of ranks: ")]
    assert len(lines) == bool(parts) and all(part in lines[0] for part in parts)
    assert plan.to_json()["has_dropout"] == network.has_dropout  # from which the report has the line


def test_fewer_ranks_that_may_take_over_the_batches(make_plan):
    plan = make_plan("linear", 5, accumulation_steps=2)
    assert [size for size in range(1, 5) if plan.may_have(size)] == [1, 2]


def test_uneven_local_batches_need_a_frozen_batch_norm(make_plan):
    assert make_plan("digits", 3, batch_norm="frozen").worker_batch == 22
    for batch_norm in ("local", "sync"):
        with pytest.raises(PlanError):
            make_plan("digits", 3, batch_norm=batch_norm)


def test_parameters(make_plan):
    assert make_plan("digits").parameters == 23_528_522
    assert [make_plan("synthetic", classes=classes).parameters for classes in (1000, 100)] == [25_557_032, 23_712_932]


BYTES = {  # gradients of a step; checkpoint
    "plain": ({"compression": "none"}, (8, 8)),
    "momentum": ({"compression": "none", "momentum": 0.9}, (8, 16)),
    "float64": ({"compression": "none", "precision": "float64"}, (16, 16)),
    "mixed": ({"compression": "none", "precision": "float16"}, (8, 8)),
    "widened": ({"compression": "fp64", "momentum": 0.9}, (16, 16)),
    "compressed": ({"compression": "fp16", "momentum": 0.9}, (4, 16)),
}


@pytest.mark.parametrize(("overrides", "expected"), BYTES.values(), ids=BYTES)
def test_bytes(overrides, expected, make_plan):
    plan = make_plan("linear", **overrides)
    assert (plan.gradient_bytes, plan.checkpoint_bytes) == expected


MEMORY = (
    "a rank for weights, gradients and the optimizer's state; what the layers keep for the backward pass comes on top; "
    "rank 0's host holds one checkpoint more, "
)
LINES = {
    "linear": (
        ("linear", 4, {}),
        [
            "recipe      linear: linear (2 parameters) on linear, 1,000 examples to train, 1,000 to validate",
            "batch       100 = 4 ranks x 25",
            "steps       10 an epoch, 150 epochs, 1500 in all",
            "LR          0.5 (rule none: not scaled); cosine to 0 at epoch 150",
            "precision   float32; gradients of 0.0 MiB a step and rank; a checkpoint of 0.0 MiB",
            f"memory      0.0 MiB {MEMORY}0.0 MiB, from its first checkpoint on",
            "FLOPs       2 FLOPs an example forward, 600 FLOPs a step (x 3 for forward and backward, x 100 examples); "
            "a multiply-add is 2",
        ],
    ),
    "synthetic": (
        ("synthetic:tiny", 4, {"warmup_epochs": 0.5, "accumulation_steps": 2, "max_steps": 3, "examples": 650}),
        [
            "recipe      synthetic:tiny: resnet50 (23,528,522 parameters) on synthetic, 650 examples to train, "
            "65 to validate",
            "batch       64 = 4 ranks x 16 in 2 micro-batches of 8",
            "steps       10 an epoch (10 examples left out, others each epoch), 1 epoch, 3 in all (max_steps)",
            "LR          0.025 = 0.1 x 64/256 (rule linear); warm-up over 0.5 of 1 epoch, then constant",
            "curve       depends on the number of ranks: BatchNorm normalises by each rank's part of the batch "
            "(batch_norm: sync makes it equal)",
            "precision   float32; gradients of 89.8 MiB a step and rank; a checkpoint of 179.5 MiB",
            f"memory      269.3 MiB {MEMORY}179.5 MiB, from its first checkpoint on",
            "FLOPs       163.3 MFLOPs an example forward, 31.34 GFLOPs a step (x 3 for forward and backward, x 64 "
            "examples); a multiply-add is 2",
        ],
    ),
}


@pytest.mark.parametrize(("arguments", "lines"), LINES.values(), ids=LINES)
def test_lines(arguments, lines, make_plan):
    name, size, overrides = arguments
    assert make_plan(name, size, **overrides).lines() == lines


def test_files_that_are_not_read_are_in_the_second_line(make_plan):
    plan = dataclasses.replace(make_plan(), left_out="1 of 9 files left out: 1 .gif")
    assert plan.lines()[1] == "data        1 of 9 files left out: 1 .gif"
    assert "left_out" not in plan.to_json()  # a stray file on one node is no other plan


LRS = {
    "square root": (
        {"lr_rule": "sqrt", "base_batch_size": 25},
        "LR          1 = 0.5 x sqrt(100/25) (rule sqrt); cosine to 0 at epoch 150",
    ),
    "step": (
        {"lr_schedule": "step", "lr_milestones": (30, 60)},
        "LR          0.5 (rule none: not scaled); x0.1 at epochs 30, 60",
    ),
    "plateau": (
        {"lr_schedule": "plateau", "warmup_epochs": 8},
        "LR          0.5 (rule none: not scaled); warm-up over 8 of 150 epochs, then x0.1 after 10 epochs without "
        "a better validation loss",
    ),
    "a max_steps beyond the end": ({"max_steps": 9999}, "steps       10 an epoch, 150 epochs, 1500 in all"),
}


@pytest.mark.parametrize(("overrides", "line"), LRS.values(), ids=LRS)
def test_a_line_for_every_rule(overrides, line, make_plan):
    assert line in make_plan("linear", **overrides).lines()


def test_json_holds_the_derived_numbers(make_plan):
    numbers = json.loads(json.dumps(make_plan("digits", 2).to_json()))
    assert "recipe" not in numbers
    assert (numbers["size"], numbers["global_batch"], numbers["worker_batch"]) == (2, 64, 32)
    assert (numbers["gradient_bytes"], numbers["checkpoint_bytes"]) == (94_114_088, 188_228_176)
    assert numbers["schedule"]["peak_lr"] == 0.05
