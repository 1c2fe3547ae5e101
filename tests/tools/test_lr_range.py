"""`lr-range`: one curve on any number of ranks and in both frameworks, and what it says."""

import itertools
import json

import pytest
import warm
from marks import marked
from ranks import needs_tensorflow, needs_torch, run

from hvdtrain.core.plan import Schedule
from hvdtrain.tools.lr_range import Found, Sweep, _without_own

RATES = [10 ** (k / 10 - 4) for k in range(50)]
SHAPES = {
    "falls and explodes": (lambda k: 2.0 - 0.05 * min(k, 30) + (9.0 if k > 40 else 0.0), "is lowest at"),
    "falls to the end": (lambda k: 2.0 - 0.03 * k, "where the sweep ends: go on with a larger --high."),
    "does not fall": (lambda k: 2.0 + 0.01 * (-1) ** k, "The loss has not fallen by more than chance up to LR 7.94: "),
}


@pytest.mark.parametrize(("loss", "text"), SHAPES.values(), ids=SHAPES)
def test_what_it_says(loss, text):
    assert text in Found(RATES, [loss(k) for k in range(50)]).sentence(1.0)


def test_the_guess_is_a_tenth_of_the_lr_with_the_lowest_loss():
    found = Found(RATES, [2.0 - 0.05 * min(k, 30) + max(0, k - 30) for k in range(50)])
    assert found.smoothed[0] == found.losses[0]
    lowest = RATES[int(found.smoothed.argmin())]
    assert f"a tenth of that, {lowest / 10:.3g} (--lr {lowest / 80:.3g}), is" in found.sentence(8.0)
    assert found.has_exploded and not Found(RATES[:31], found.losses[:31]).has_exploded


def test_the_lr_rises_by_the_same_factor():
    sweep = Sweep(0.5, 7, 3, low=1e-3, high=1e1, steps=15)
    assert isinstance(sweep, Schedule)
    rates = [sweep.lr(step / 7) for step in range(15)]
    assert [rates[0], rates[-1]] == pytest.approx([1e-3, 1e1])
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([1e4 ** (1 / 14)] * 14)


def test_its_own_flags_are_no_flags_of_the_run():
    argv = ["digits", "--low", "1", "--high=2", "--lr", "3", "--steps", "40", "--framework", "torch", "--nesterov"]
    assert _without_own(argv) == ["digits", "--lr", "3", "--nesterov"]


@pytest.mark.launched
@pytest.mark.parametrize(
    ("framework", "ranks"),
    marked(
        [
            pytest.param("torch", 4, marks=needs_torch),
            pytest.param("tensorflow", 2, marks=needs_tensorflow),
        ],
        only_ci={"tensorflow"},
    ),
)
def test_the_curve_is_that_of_one_rank(framework, ranks, tmp_path):
    argv = ["-m", "hvdtrain", "lr-range", "linear", "--framework", framework, "--precision", "float64", "--high", 1e6]
    curves = []
    for launcher, count in (("alone", 1), ("mpi", ranks)):
        folder = tmp_path / launcher
        ended = run(launcher, count, warm.command(framework, *argv, "--steps=60", "--output", folder)).good()
        assert f"{folder}/lr-range.html" in ended.out and "is lowest at" in ended.out
        curves.append(json.loads((folder / "lr-range.json").read_text()))
        assert "smoothed" in (folder / "lr-range.html").read_text()
    one, many = curves
    assert one["lr"] == many["lr"] and 20 < len(one["lr"]) < 60  # it ended where the loss exploded
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-12)
