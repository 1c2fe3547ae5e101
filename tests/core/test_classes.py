"""Unequal classes and augmentation: how an epoch is drawn, what weights come to, and what is refused."""

import dataclasses

import numpy as np
import pytest
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.core.progress import BLOCK, Epoch, Progress, train_requests
from hvdtrain.core.recipe import augmentation, validate
from hvdtrain.core.recipe.classes import labels_of, weights_of
from hvdtrain.datasets.base import Arrays
from hvdtrain.errors import DataError, PlanError, RecipeError

LABELS = np.repeat([0, 2, 5], [70, 25, 5])
BASE = {"name": "mine", "model": "resnet50", "dataset": "digits", "batch_size": 8, "epochs": 1, "base_lr": 0.1}


def test_a_balanced_epoch_has_each_class_alike_often():
    for epoch in range(3):
        order = Epoch.balanced(LABELS, 0, epoch, 2)
        times = np.bincount(order.order, minlength=100)
        assert sorted(np.bincount(LABELS[order.order])[[0, 2, 5]]) == [33, 33, 34]
        # Of a class that comes k times as often as it has examples, each comes k times, or once more.
        assert set(times[:70]) == {0, 1} and set(times[70:95]) == {1, 2} and set(times[95:]) <= {6, 7}
    assert len(np.unique(order.request(np.arange(100))[1], axis=0)) == 100, "each time with draws of its own"
    assert (order.order != Epoch.balanced(LABELS, 0, 1, 2).order).any()
    assert order.draws.shape == (100, 2)


@pytest.mark.parametrize(("examples", "repeats"), [(1000, 3), (640, 2), (7, 4)])
def test_repeated_examples_are_near_one_another_and_partners_differ(examples, repeats):
    epoch = Epoch.repeated(examples, repeats, 0, 1, 2)
    order, part = epoch.order, -(-examples // repeats)
    times = np.bincount(order, minlength=examples)
    assert len(order) == examples and np.count_nonzero(times) == part and times.max() == repeats
    places = [np.flatnonzero(order == each) for each in np.unique(order)]
    assert max(each[-1] - each[0] for each in places) < BLOCK * repeats
    whole = order[: part // BLOCK * BLOCK * repeats].reshape(-1, 2)
    assert (whole[:, 0] != whole[:, 1]).all()
    assert len({frozenset(pair) for pair in whole.tolist()}) >= 0.95 * len(whole)
    assert len(np.unique(epoch.request(np.arange(examples))[1], axis=0)) == examples
    assert (order != Epoch.repeated(examples, repeats, 0, 2, 2).order).any()


@pytest.mark.parametrize("order", [{"sample": "balanced"}, {"augment_repeats": 3}])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_one_epoch_from_anywhere_in_it(size, order, make_plan):
    def read(size, sample):
        plan = make_plan("digits", size, **order)
        of_ranks = [train_requests(plan, Progress(epoch=1, sample=sample), rank)[1] for rank in range(size)]
        return [tuple(map(np.concatenate, zip(*step, strict=True))) for step in zip(*of_ranks, strict=True)]

    whole, ours = read(1, 0), read(size, 5 * 64)
    assert len(ours) == 22 - 5
    for alone, of_all in zip(whole[5:], ours, strict=True):
        for one, other in zip(alone, of_all, strict=True):
            np.testing.assert_array_equal(one, other)


def test_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    data = dataclasses.replace(datasets.load("digits"), train=Arrays(LABELS, LABELS), classes=6, names=tuple("abcdef"))
    assert labels_of(data, "x") is not None
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 5]), y=LABELS)
    np.testing.assert_allclose(np.array(weights_of("balanced", LABELS, data))[[0, 2, 5]], expected, rtol=1e-15)
    assert weights_of({"1": 3.0, "c": 0.0}, None, data) == (1.0, 3.0, 0.0, 1.0, 1.0, 1.0)
    message = "class_weights names class 'x', digits has 0 to 5; name one of these."
    assert refusal(DataError, weights_of, {"x": 1.0}, None, data) == message


def test_a_data_set_without_labels_is_refused():
    data = dataclasses.replace(datasets.load("linear"), name="cells:Cells")
    assert refusal(DataError, labels_of, data, "sample balanced") == (
        "sample balanced needs the label of each training example, which cells:Cells does not say; give the data set "
        "`targets`, a whole number from 0 for each example."
    )


WRONG = "class_weights must be balanced, or map classes to weights from 0 to 10^9, as in {{0: 1, 1: 2.5}}, got {}."
REFUSED = {
    "a word": ({"class_weights": "equal"}, WRONG.format("'equal'")),
    "below 0": ({"class_weights": {0: -1}}, WRONG.format("{0: -1}")),
    "of a line": (
        {"model": "linear", "dataset": "linear", "sample": "balanced"},
        "sample balanced is for classes, which dataset linear has not; drop it.",
    ),
    "of another loss": (
        {"loss": "mse", "class_weights": "balanced"},
        "class_weights goes with loss cross_entropy, got loss mse; weigh the examples there, and return (sum, count).",
    ),
    "Adasum": (
        {"reduction": "adasum", "class_weights": {"0": 2}},
        "class_weights cannot be divided after reduction adasum; drop one.",
    ),
    "two orders": (
        {"augment_repeats": 2, "sample": "balanced"},
        "augment_repeats and sample balanced are two orders of the examples; drop one.",
    ),
    "images of a line": (
        {"model": "linear", "dataset": "linear", "random_erasing": 0.5},
        "random_erasing is for images, which dataset linear has not; drop it.",
    ),
    "shares of a regression": (
        {"loss": "mse", "cutmix": 1.0},
        "cutmix makes targets of shares of classes, for loss cross_entropy or bce_with_logits, got loss mse; drop one.",
    ),
    "operations on a device": (
        {"augment": "randaugment", "data_on_device": True},
        "augment randaugment is computed by readers on the host; drop it, or data_on_device.",
    ),
    "shards": (
        {"dataset": "imagenet", "shuffle": "shards", "sample": "balanced"},
        "sample balanced reads examples of all shards at any time; drop shuffle shards.",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(keys, message):
    assert refusal(RecipeError, validate, {**BASE, **keys}) == message


def test_pairs_lie_in_a_micro_batch(make_plan):
    assert refusal(PlanError, make_plan, "digits", 2, mixup=0.2, batch_size=12, accumulation_steps=2) == (
        "batch_size must be a multiple of 2 ranks x 2 accumulation steps x 2 examples of a pair that is mixed, got 12; "
        "take 8 or 16."
    )
    plan = make_plan("digits", 2, mixup=0.2, batch_size=12)
    assert plan.may_have(1) and not make_plan("digits", 2, mixup=0.2, batch_size=12).may_have(4)


def test_a_data_set_that_does_not_say_that_it_has_images_is_refused():
    recipe = validate({**BASE, "mixup": 0.2})
    data = dataclasses.replace(datasets.load("digits"), name="cells:Cells", classes=None)
    assert refusal(PlanError, augmentation.draws, recipe, data) == (
        "mixup needs images of classes, uint8 [n, height, width, 3], which cells:Cells does not say that it has; "
        "augment in its __getitem__, or return an hvdtrain Dataset."
    )


def test_the_plan_shows_them(make_plan):
    lines = make_plan("digits", class_weights={"3": 2}, sample="balanced").lines()
    assert lines[1:3] == [
        "weights     1 to 2 over 10 classes; the training loss is divided by those of the global batch",
        "sample      balanced: an epoch has 143 examples of each class, of 138 to 147 in the data",
    ]
