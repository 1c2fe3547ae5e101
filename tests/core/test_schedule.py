"""Learning rates against tables worked out by hand, and the plateau rule against PyTorch's."""

import importlib.util
import json
import math
import subprocess

import numpy as np
import pytest
import warm

from hvdtrain.core.plan import Plateau, Schedule, peak_lr
from hvdtrain.core.recipe import load


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
