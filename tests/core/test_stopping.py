"""Early stopping: the epoch that other libraries end with, and what a recipe says of it."""

import json
import math
import subprocess

import pytest
import stopping as series
import warm
from paths import SUPPORT
from ranks import clean_environ, needs_lightning, needs_tensorflow
from refusals import refusal

from hvdtrain.core import recipe
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe.stopping import Metric, Patience, Rule, chosen, lines
from hvdtrain.errors import RecipeError

LIBRARIES = {"keras": ("tensorflow", needs_tensorflow), "lightning": ("lightning", needs_lightning)}


def ended_by(rule, values):
    """The epoch, from 1, after which the run is over; 0 where it goes on."""
    progress = Progress()
    for value in values:
        progress = Progress(epoch=progress.epoch + 1, patience=progress.patience)
        progress.observe(rule, {"valid_f1": value})
        if progress.ended:
            return progress.epoch
        progress = Progress.from_metadata(json.loads(json.dumps(progress.metadata())))  # left and resumed
    return 0


@pytest.mark.launched
@pytest.mark.parametrize("library", [pytest.param(name, marks=mark) for name, (_, mark) in LIBRARIES.items()])
def test_it_ends_with_the_same_epoch_as(library):
    command = warm.command(LIBRARIES[library][0], SUPPORT / "stopping.py", library)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ())
    theirs = json.loads(done.stdout.splitlines()[-1])
    drawn = map(series.drawn, series.SEEDS)
    ours = [ended_by(Rule(metric=Metric("valid_f1", up), **rule), values) for rule, up, values in drawn]
    assert ours == theirs
    assert 30 < theirs.count(0) < 200 and len(set(theirs)) > 15


def test_the_line_says_what_it_waited_for():
    rule, progress = Rule(2, Metric("valid_f1", True), min_delta=0.01), Progress(epoch=6)
    for value in (math.nan, 0.8271, 0.83, 0.5):
        progress.epoch += 1
        progress.observe(rule, {"valid_f1": value})
    line = "stopped early at epoch 10: valid_f1 has not been above 0.8271 by more than 0.01 since epoch 8; best is kept"
    assert progress.ending == line
    rule = Rule(2, Metric("valid_loss", False))
    lost = rule.judged(Patience("lowest valid_loss", waited=2))
    assert rule.why(lost) == "valid_loss has been no number in 2 epochs"


@pytest.mark.parametrize(
    ("rule", "ended"),
    [
        (Rule(2, Metric("valid_f1", True)), "why"),
        (Rule(2, None), "why"),
        (Rule(3, Metric("valid_f1", True)), ""),
        (Rule(2, Metric("valid_f1", False)), ""),
        (None, ""),
    ],
)
def test_a_run_goes_on_where_the_rule_is_gone_or_waits_longer(rule, ended):
    progress = Progress(9, 3, ended="why", patience=Patience("highest valid_f1", 0.5, 1, 2, is_over=True))
    progress.judge_again(rule)
    assert (progress.ended, progress.patience.is_over, progress.patience.waited) == (ended, bool(ended), 2)
    stopped = Progress(9, 3, ended="by the program")
    stopped.judge_again(rule)
    assert stopped.ended == "by the program"


def test_without_a_name_it_is_the_accuracy_or_else_the_loss():
    assert str(chosen({"valid_loss": 1.0, "valid_acc1": 0.5}, None, "best")) == "highest valid_acc1"
    assert str(chosen({"valid_loss": 1.0}, None, "best")) == "lowest valid_loss"
    text = "best must be a metric of the validation (loss), got f1."
    assert refusal(RecipeError, chosen, {"valid_loss": 1.0}, Metric("valid_f1", True), "best") == text


REFUSED = {
    "no metric": ({"best": "f2"}, "best must be a metric of the recipe (loss, acc1, f1, cells), maybe after highest or "
    "lowest, got 'f2'. Another one is named below `metrics` first."),
    "no direction": ({"stop_metric": "cells", "stop_patience": 2}, "stop_metric must say whether higher or lower is "
    "better, got 'cells'; write highest or lowest before it."),
    "no patience": ({"stop_min_delta": 0.5}, "stop_min_delta 0.5 needs stop_patience, the epochs without a better "
    "value; give it."),
    "patience 0": ({"stop_patience": 0}, "stop_patience must be greater than 0, got 0."),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(keys, text):
    given = {"metrics": {"f1": "m:f1", "cells": "m:cells"}, **keys}
    assert refusal(RecipeError, recipe.load, "digits", given) == text


def test_the_plan_says_it():
    given = {"metrics": {"cells": "m:cells"}, "best": "lowest cells", "stop_patience": 4, "stop_after_epoch": 2}
    assert lines(recipe.load("digits", given)) == [
        "best        the checkpoint with the lowest valid_cells",
        "stop        early, after 4 epochs without a valid_cells below the best before; "
        "the first 2 epochs do not count",
    ]
    given = {"stop_patience": 1, "stop_metric": "valid_loss", "stop_min_delta": 0.1}
    assert lines(recipe.load("digits", given)) == [
        "stop        early, after 1 epoch without a valid_loss below the best before by more than 0.1"
    ]
    assert lines(recipe.load("digits")) == []
