"""The interval between checkpoints: Daly's formula, and the minimum that it stands for."""

import numpy as np
import pytest
from refusals import refusal

from hvdtrain.core import recipe
from hvdtrain.errors import RecipeError
from hvdtrain.record.writer import daly

HOUR = 3600.0


def test_the_formula():
    # Young's 7200 s, times 1 + sqrt(1/576)/3 + (1/576)/9, less the cost
    assert daly(300, 24 * HOUR) == pytest.approx(7200 * (1 + 1 / 72 + 1 / 5184) - 300)
    assert daly(2 * HOUR, HOUR) == daly(9 * HOUR, HOUR) == HOUR
    assert daly(0, HOUR) == 0


@pytest.mark.parametrize("cost", [0.01, 1, 60, 900])
@pytest.mark.parametrize("mtbf", [HOUR, 24 * HOUR, 1000 * HOUR])
def test_it_loses_least(cost, mtbf):
    """Of the expected time of a run in which failures come at random, also while a checkpoint is written:
    MTBF x (exp((interval + cost) / MTBF) - 1) / interval, for each second of training."""
    intervals = np.geomspace(cost / 10 + 1e-3, 20 * mtbf, 200_000)
    with np.errstate(over="ignore"):
        lost = mtbf * np.expm1((intervals + cost) / mtbf) / intervals
    ours = daly(cost, mtbf)
    assert mtbf * np.expm1((ours + cost) / mtbf) / ours == pytest.approx(lost.min(), rel=1e-3)
    assert ours == pytest.approx(intervals[lost.argmin()], rel=0.05)


REFUSED = {
    "auto alone": (
        {"checkpoint_every_steps": "auto"},
        "checkpoint_every_steps auto needs mtbf_hours, the mean hours between failures of the whole job: those of one "
        "node divided by the job's nodes.",
    ),
    "text": (
        {"checkpoint_every_steps": "often"},
        "checkpoint_every_steps must be a whole number from 1 to 10^9, or auto, got 'often'.",
    ),
    "none": (
        {"checkpoint_every_steps": 0},
        "checkpoint_every_steps must be a whole number from 1 to 10^9, or auto, got 0.",
    ),
    "no time": (
        {"checkpoint_every_steps": "auto", "mtbf_hours": 0.0},
        "mtbf_hours must be greater than 0, got 0.0.",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(keys, message):
    assert refusal(RecipeError, recipe.load, "linear", keys) == message


def test_both_are_flags_and_keys_that_load_again(tmp_path):
    loaded = recipe.load("linear", {"checkpoint_every_steps": "auto", "mtbf_hours": 12.5})
    (tmp_path / "auto.yaml").write_text(recipe.dump(loaded))
    again = recipe.load(str(tmp_path / "auto.yaml"))
    assert (again.checkpoint_every_steps, again.mtbf_hours) == ("auto", 12.5)
