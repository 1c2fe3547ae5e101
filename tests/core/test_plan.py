"""Plans: the derived numbers, what the dry run prints, and the full text of every refusal; learning rates against
tables worked out by hand, and the plateau rule against PyTorch's."""

import dataclasses
import importlib.util
import json
import math
import subprocess

import numpy as np
import pytest
import warm
from refusals import refusal

from hvdtrain.core import plan as plans
from hvdtrain.core import recipe
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import load
from hvdtrain.core.schedule import Plateau, Schedule, peak_lr
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
    numbers = (plan.global_batch, plan.local_batch, plan.micro_batch, plan.steps_per_epoch, plan.total_steps)
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
    assert make_plan("digits", 3, batch_norm="frozen").local_batch == 22
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
    plan = dataclasses.replace(make_plan(), notes=("1 of 9 files left out: 1 .gif",))
    assert plan.lines()[1] == "data        1 of 9 files left out: 1 .gif"
    assert "notes" not in plan.to_json()  # a stray file on one node is no other plan


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
    assert (numbers["size"], numbers["global_batch"], numbers["local_batch"]) == (2, 64, 32)
    assert (numbers["gradient_bytes"], numbers["checkpoint_bytes"]) == (94_114_088, 188_228_176)
    assert numbers["schedule"]["peak_lr"] == 0.05


def test_peak_lr():
    assert [peak_lr(0.1, base, 8192, "none") for base in (256, None)] == [0.1, 0.1]
    assert [peak_lr(0.1, 256, batch, "linear") for batch in (8192, 128, 256)] == pytest.approx([3.2, 0.05, 0.1])
    assert [peak_lr(0.1, 256, batch, "sqrt") for batch in (1024, 64)] == pytest.approx([0.2, 0.05])


# Four steps an epoch, ten epochs, peak 0.8: the LR of the update made after `epoch` epochs.
WARM_UP = {0.0: 0.1, 0.25: 0.2, 0.5: 0.3, 0.75: 0.4, 1.0: 0.5, 1.25: 0.6, 1.5: 0.7, 1.75: 0.8, 2.0: 0.8}
TABLES = {
    "constant": (Schedule(0.8, 4, 10), {0.0: 0.8, 5.0: 0.8, 9.75: 0.8}),
    "warm-up": (Schedule(0.8, 4, 10, 2), {**WARM_UP, 9.75: 0.8}),
    "warm-up of half an epoch": (Schedule(0.8, 4, 10, 0.5), {0.0: 0.4, 0.25: 0.8, 0.5: 0.8}),
    "warm-up shorter than a step": (Schedule(0.8, 4, 10, 0.1), {0.0: 0.8, 0.25: 0.8}),
    "warm-up to the end": (Schedule(0.8, 4, 2, 2, "cosine"), {0.0: 0.1, 1.75: 0.8}),
    "step": (
        Schedule(0.8, 4, 10, decay="step", milestones=(3, 6), factor=0.5),
        {0.0: 0.8, 2.75: 0.8, 3.0: 0.4, 5.75: 0.4, 6.0: 0.2, 9.75: 0.2},
    ),
    "warm-up, then step": (
        Schedule(0.8, 4, 10, 2, "step", (2, 6), 0.5),
        {**WARM_UP, 2.0: 0.4, 5.75: 0.4, 6.0: 0.2},
    ),
    "cosine": (
        Schedule(0.8, 4, 10, decay="cosine"),
        {0.0: 0.8, 2.5: 0.4 * (1 + math.sqrt(0.5)), 5.0: 0.4, 7.5: 0.4 * (1 - math.sqrt(0.5)), 10.0: 0.0},
    ),
    "warm-up, then cosine": (
        Schedule(0.8, 4, 10, 2, "cosine"),
        {**WARM_UP, 6.0: 0.4, 4.0: 0.4 * (1 + math.sqrt(0.5)), 10.0: 0.0},
    ),
    "cosine, not to 0": (
        Schedule(0.8, 4, 5.0, decay="cosine", floor=0.25),
        {0.0: 0.8, 2.5: 0.5, 5.0: 0.2, 9.0: 0.2},
    ),
    "plateau, not yet": (Schedule(0.8, 4, 10, 2, "plateau", factor=0.5), {**WARM_UP, 9.0: 0.8}),
}


@pytest.mark.parametrize(("schedule", "table"), TABLES.values(), ids=TABLES)
def test_lr(schedule, table):
    assert {epoch: schedule.lr(epoch) for epoch in table} == pytest.approx(table, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("steps", [1, 3, 7, 49, 5004])
def test_milestones_fall_on_the_first_step_of_their_epoch_however_positions_round(steps):
    schedule = Schedule(1.0, steps, 90, decay="step", milestones=(30, 60, 80), factor=0.1)
    batch = 256
    for milestone, before, after in [(30, 1.0, 0.1), (60, 0.1, 0.01), (80, 0.01, 0.001)]:
        last = milestone - 1 + (steps - 1) * batch / (steps * batch)
        summed = sum([1 / steps] * (steps * milestone)) if steps < 50 else float(milestone)
        assert schedule.lr(last) == pytest.approx(before)
        assert schedule.lr(milestone) == pytest.approx(after)
        assert schedule.lr(summed) == pytest.approx(after)


@pytest.mark.parametrize("steps", [1, 3, 7, 49, 5004])
def test_warm_up_ends_at_the_peak_and_never_exceeds_it(steps):
    schedule = Schedule(0.4, steps, 100, 16, "cosine")
    rates = [schedule.lr(step // steps + step % steps / steps) for step in range(17 * steps)]
    assert rates[16 * steps - 1] == pytest.approx(0.4, rel=1e-12)
    assert max(rates) <= 0.4 * (1 + 1e-12)
    assert (np.diff(rates[: 16 * steps]) > 0).all()


def test_the_shipped_imagenet_schedule():
    r = load("imagenet")
    schedule = Schedule(3.2, 156, r.epochs, r.warmup_epochs, r.lr_schedule, r.lr_milestones, r.lr_factor)
    table = {0: 3.2 / 780, 4: 2.564102564, 5: 3.2, 29 + 155 / 156: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032, 89.9: 0.0032}
    assert {epoch: schedule.lr(epoch) for epoch in table} == pytest.approx(table, rel=1e-9)


# Validation losses epoch by epoch, patience 2: how many drops there have been after each.
PLATEAUS = {
    "always better": ([5, 4, 3, 2, 1], [0, 0, 0, 0, 0]),
    "flat": ([1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2]),
    "better in time": ([3, 4, 4, 2, 4, 4, 4], [0, 0, 0, 0, 0, 0, 1]),
    "better by less than 1e-4": ([1, 0.99995, 0.99992, 0.9999], [0, 0, 0, 1]),
    "better by more than 1e-4": ([1, 0.9998, 0.9996, 0.9994], [0, 0, 0, 0]),
    "not a number": ([1, math.nan, math.nan, math.nan, 0.5], [0, 0, 0, 1, 1]),
}


@pytest.mark.parametrize(("losses", "drops"), PLATEAUS.values(), ids=PLATEAUS)
def test_plateau(losses, drops):
    plateau, seen = Plateau(), []
    for loss in losses:
        plateau = plateau.observe(loss, 2)
        seen.append(plateau.drops)
    assert seen == drops


def test_losses_of_the_warm_up_do_not_count():
    schedule = Schedule(1.0, 4, 10, 2, "plateau", patience=0)
    plateau = Plateau()
    for done, loss in [(1, 0.1), (2, 0.2), (3, 5.0), (4, 4.0)]:
        plateau = schedule.after_epoch(plateau, done, loss)
    assert plateau == Plateau(best=4.0, waited=0, drops=0)


def test_drops_multiply_the_peak_of_a_plateau_alone():
    assert Schedule(1.0, 4, 10, decay="cosine").after_epoch(Plateau(), 3, 1.0) == Plateau()
    schedule = Schedule(0.1, 4, 10, decay="plateau", factor=0.2)
    assert [schedule.lr(5.0, Plateau(drops=n)) for n in range(3)] == pytest.approx([0.1, 0.02, 0.004])


TORCHS = """
import json, sys, torch
rates = {}
for patience, losses in json.loads(sys.argv[1]).items():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=int(patience))
    rates[patience] = []
    for loss in losses:
        scheduler.step(loss)
        rates[patience].append(optimizer.param_groups[0]["lr"])
print(json.dumps(rates))
"""


@pytest.mark.xdist_group("torch")
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch: pip install -e .[torch]")
def test_plateau_is_pytorchs_rule():
    losses = {
        patience: (3 + np.cumsum(np.random.default_rng(patience).normal(-0.003, 0.05, 120))).round(2).tolist()
        for patience in (0, 3)
    }
    theirs = json.loads(subprocess.check_output(warm.command("torch", "-c", TORCHS, json.dumps(losses))))
    for patience, given in losses.items():
        schedule = Schedule(1.0, 1, 120, decay="plateau", factor=0.9, patience=patience)
        plateau, ours = Plateau(), []
        for epoch, loss in enumerate(given, 1):
            plateau = schedule.after_epoch(plateau, epoch, loss)
            ours.append(schedule.lr(epoch, plateau))
        assert ours == pytest.approx(theirs[str(patience)], rel=1e-12)
        assert 1e-5 < ours[-1] < 1
