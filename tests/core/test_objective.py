"""Shapes of outputs and targets: which axis is the classes, and the remedy where they do not fit."""

import pytest
from refusals import refusal

from hvdtrain.core import objective
from hvdtrain.core.recipe import load
from hvdtrain.errors import DataError

AXES = {  # outputs, targets, whether these are labels: the axes that may be the classes
    ((8, 4), (8,), True): (1,),
    ((8, 4, 5), (8, 5), True): (1,),
    ((8, 5, 4), (8, 5), True): (-1,),
    ((8, 5, 5), (8, 5), True): (1, -1),
    ((8, 4, 3, 2), (8, 3, 2), True): (1,),
    ((8, 3, 2, 4), (8, 3, 2), True): (-1,),
    ((None, 4, 5), (None, 5), True): (1,),
    ((8, 4), (8, 4), False): (1,),
    ((8, 4, 5), (8, 4, 5), False): (1, -1),
    ((8, 4), (8, 4), True): (),
    ((8, 4), (8, 1), True): (),
    ((8, 4), (7,), True): (),
    ((8, 4), (8,), False): (),
    ((8,), (8,), True): (),
}


@pytest.mark.parametrize(("given", "axes"), AXES.items())
def test_the_axes_that_may_be_the_classes(given, axes):
    outputs, targets, of_labels = given
    assert objective.class_axis(outputs, targets, of_labels=of_labels) == axes


REMEDIES = {
    ("cross_entropy", (8, 4), (8, 4), "int64"): "labels are one-hot: give class numbers, as y.argmax(-1)",
    ("cross_entropy", (8, 4), (8, 1), "int64"): "drop the last axis of the labels, as y.squeeze(-1)",
    (
        "cross_entropy",
        (8, 4),
        (8,),
        "float32",
    ): "give class numbers as int64, or a probability of each class in the shape of the outputs",
    ("cross_entropy", (8, 4, 5), (8, 5), "int64"): "classes come last here: move axis 1 of the outputs to the end",
    ("mse", (8, 1), (8,), "float32"): "give the targets another axis, as y[..., None], or take the last one of the "
    "outputs: else each output is compared with every target",
    ("l1", (8, 2), (8, 2, 1), "float32"): "take the last axis of the targets, as y.squeeze(-1): else each output is "
    "compared with every target",
    ("mse", (8, 3), (8, 2), "float32"): "reshape one in the model or in the data set",
}


@pytest.mark.parametrize(("given", "remedy"), REMEDIES.items())
def test_both_shapes_and_the_remedy_are_named(given, remedy):
    loss, outputs, targets, kind = given
    line = str(objective.misfit(*given))
    assert line.startswith(f"loss {loss} needs outputs ")
    assert line.endswith(f", got outputs {list(outputs)} and targets {kind} {list(targets)}; {remedy}.")


@pytest.mark.parametrize(("least", "most", "got"), [(-1, 1, "-1"), (0, 2, "2"), (0.5, 255, "255")])
def test_targets_that_are_no_probabilities(least, most, got):
    line = refusal(DataError, objective.check_probabilities, load("linear"), least, most)
    assert f"needs targets from 0 to 1, dataset linear has {got}; change them" in line
    objective.check_probabilities(load("linear"), 0, 1)
