"""Which examples count as the same on two ranks, whatever they hold, and how much of a set is read for that."""

import dataclasses
import datetime
import enum
import json
import pathlib

import numpy as np
import pytest
from ranks import on_ranks

from hvdtrain.errors import AgreementError, CheckpointError
from hvdtrain.run.examples import Examples
from hvdtrain.run.samples import OTHER_FLOATS, OTHER_LABEL, Samples, compare, difference, marks_of

DRAW = np.random.default_rng(0)
X = DRAW.standard_normal(1000)
PIXELS = DRAW.integers(0, 256, (32, 32, 3)).astype(np.uint8)


def decoded(pixels):
    """A picture as another library decodes it."""
    return np.clip(pixels.astype(int) + DRAW.integers(-1, 2, pixels.shape), 0, 255).astype(np.uint8)


class Color(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Box:
    corners: np.ndarray
    label: int


def different(one, other):
    """How a sample differs from another one, as it is written into a checkpoint; the label beside it is the same."""
    marks = [json.loads(json.dumps({"marks": {"17": marks_of((each, 1))}})) for each in (one, other)]
    return difference(*marks)[0][0] if difference(*marks) else 0


ALIKE = {
    "rounded": (X, X * (1 + 1e-6)),
    "a rounded number": (0.37, 0.3700001),
    "rounded to a whole number": (2.9999999, 3.0),
    "noise about 0": (1e-17, 0.0),
    "no number": (np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, np.inf])),
    "decoded otherwise": (PIXELS, decoded(PIXELS)),
    "many": ([PIXELS] * 20, [decoded(PIXELS) for _ in range(20)]),
    "small ones": ([PIXELS[:8, :8]] * 20, [decoded(PIXELS[:8, :8]) for _ in range(20)]),
    "as floats": (PIXELS / 255, decoded(PIXELS) / 255),
    "a zero's sign": (np.array([-0.0, 1.0]), np.array([0.0, 1.0])),
    "keys that are objects": ({object(): 1}, {object(): 1}),
    "None": (None, None),
    "keys in another order": ({"a": "x", "b": 1}, {"b": 1, "a": "x"}),
    "a set": ({"a", "b", 1}, {1, "b", "a"}),
    "objects": (object(), object()),
    "functions": (lambda: 1, lambda: 1),
    "another folder": (pathlib.Path("/a/x.jpg"), pathlib.Path("/b/x.jpg")),
    "another folder as text": ("/a/x.jpg", "/b/x.jpg"),
    "nothing": ([], []),
    "an empty array": (np.zeros((0, 4)), np.zeros((0, 4))),
    "what holds itself": (np.array([2**70, None], object), np.array([2**70, None], object)),
}
UNLIKE = {
    "another row": (X, -X, OTHER_FLOATS),
    "another small picture": (PIXELS[:8, :8], PIXELS[8:16, :8], OTHER_FLOATS),
    "no number": (np.array([1.5, np.nan]), np.array([np.nan, 1.5]), OTHER_LABEL),
    "labels of bytes": (np.array([0, 1], np.uint8), np.array([1, 0], np.uint8), OTHER_LABEL),
    "of a long list": (["a"] * 5000, ["a"] * 4999, OTHER_LABEL),
    "another order": (X, X[::-1].copy(), OTHER_FLOATS),
    "one place": (np.eye(1000)[3], np.eye(1000)[4], OTHER_FLOATS),
    "a picture": (PIXELS, PIXELS[:, ::-1].copy(), OTHER_FLOATS),
    "a number": (0.37, 0.52, OTHER_FLOATS),
    "a label": (3, 4, OTHER_LABEL),
    "a label as float": (3.0, 4.0, OTHER_LABEL),
    "a class in an array": (np.array([0, 1, 0.0]), np.array([1, 0, 0.0]), OTHER_LABEL),
    "a bool": (True, False, OTHER_LABEL),
    "no label": (None, 1, OTHER_LABEL),
    "a text": ("ant", "bee", OTHER_LABEL),
    "texts": (np.array(["ant", "bee"]), np.array(["bee", "ant"]), OTHER_LABEL),
    "bytes": (b"ant", b"bee", OTHER_LABEL),
    "nested": ({"boxes": [{"label": 1}]}, {"boxes": [{"label": 2}]}, OTHER_LABEL),
    "a key": ({"ant": 1}, {"bee": 1}, OTHER_LABEL),
    "a date": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), OTHER_LABEL),
    "an enum": (Color.RED, Color.BLUE, OTHER_LABEL),
    "a dataclass": (Box(X, 1), Box(X, 2), OTHER_LABEL),
    "its array": (Box(X, 1), Box(-X, 1), OTHER_FLOATS),
    "a length": ([1, 2], [1, 2, 2], OTHER_LABEL),
    "a shape": (X, X[:-1], OTHER_LABEL),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_the_same_but_for_rounding_or_the_process(name):
    assert different(*ALIKE[name]) == 0


@pytest.mark.parametrize("name", UNLIKE)
def test_what_differs(name):
    one, other, state = UNLIKE[name]
    assert different(one, other) == different(other, one) == state


class Huge:
    """A gigabyte of numbers, of which a part is looked at. Its views have `shape`, and count what is read."""

    read = 0

    def __init__(self, shape):
        self.shape = shape

    def __getitem__(self, which):
        return Huge(tuple(len(range(*cut.indices(side))) for cut, side in zip(which, self.shape, strict=False))
                    + self.shape[len(which):])  # fmt: skip

    def __array__(self, dtype=None, copy=None):
        Huge.read += int(np.prod(self.shape))
        return np.zeros(self.shape, np.float32)


def test_of_a_huge_array_a_part_is_read():
    marks_of((Huge((30000, 30000)), 1))
    assert 2**16 < Huge.read <= 2**18


def test_a_sample_of_another_number_of_parts_differs():
    marks = [{"marks": {"17": marks_of(each)}} for each in ((X, 1), (X, 1, 1))]
    assert difference(*marks) == [(OTHER_LABEL, "17", "(float64 [1000], 1)", "(float64 [1000], 1, 1)")]


class Files:
    """Examples of which one is not finite, with the files that they are of."""

    def __init__(self, bad, floats=float):
        self.bad, self.floats, self.samples = bad, floats, [(f"cells/{index}.png", 1) for index in range(32)]

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": [self.floats("inf" if index == self.bad else 1)], "y": 1}


REQUESTS = [(np.arange(step, 32, 4), np.full((8, 3), 0.5, np.float32)) for step in range(4)]
NOT_FINITE = {  # by name: the bad example of each of two ranks, the steps that had a finite loss, and the example named
    "none": (None, None, 0, ""),
    "on rank 0": (5, None, 0, "the set, sample 5 (cells/5.png)"),
    "on another rank": (None, 6, 2, "the set, sample 6 (cells/6.png)"),
    "of a step before": (5, None, 2, ""),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_example_that_is_not_finite_is_named_on_every_rank(name):
    *bad, passed, expected = NOT_FINITE[name]

    def work(rank, sum_over_ranks):
        samples = Samples("off")
        samples.begin({}, print, ((rank, 2), "host", sum_over_ranks))
        samples.look(Examples(Files(bad[rank]), "the set", list), 0, REQUESTS)
        samples.look(Examples(Files(9), "the validation set", list), 0, [(np.arange(32), None)])
        samples.began, samples.passed = 3, 3 + passed
        return samples.not_finite()

    assert on_ranks(2, work) == [expected] * 2
    assert Samples().not_finite() == ""


def found(labels, is_training=True, examples=32, again=False):
    """What a rank has found of a set, with these labels by index."""
    marks = {index: marks_of((X, label)) for index, label in labels.items()}
    return {"name": "the set", "examples": examples, "is_training": is_training, "again": again, "marks": marks}


VALID = found({"3": 1}, is_training=False)
COMPARED = {  # by name: what rank 0 and rank 1 have found, the example that is named
    "alike": ([found({"17": 1})], [found({"17": 1})], ""),
    "a label": ([found({"17": 1})], [found({"17": 2})], "17"),
    "the second": ([found({"3": 1, "17": 1})], [found({"3": 1, "17": 2})], "17"),
    "a slow rank": ([found({"3": 1, "17": 1})], [found({"3": 1})], ""),
    "nothing in time": ([found({"3": 1})], [], ""),
    "validation": ([VALID], [found({"3": 2}, is_training=False)], "3"),
    "validation on rank 0": ([VALID, found({"3": 1})], [found({"3": 1})], ""),
    "one more on rank 0": ([VALID, VALID], [found({"3": 2}, is_training=False)], ""),
    "and other training": ([VALID, found({"3": 1})], [found({"3": 2})], "3"),
    "another length": ([found({"3": 1})], [found({"3": 2}, examples=31)], ""),
}


@pytest.mark.parametrize("case", COMPARED)
def test_what_all_ranks_have_read_is_compared(case):
    *of_ranks, named = COMPARED[case]
    first, second = on_ranks(2, lambda rank, total: compare(of_ranks[rank], (rank, 2), f"nid{rank}", total))
    if not named:
        assert first == second == of_ranks[0]
        return
    assert isinstance(first, AgreementError) and str(first) == str(second)
    begin = f"the set: example {named} differs: rank 0 on nid0 and rank 1 on nid1 have other data (a label map made "
    assert str(first).startswith(begin) and ": (float64 [1000], 1) and (float64 [1000], 2); " in str(first)


def kept(labels):
    """What a checkpoint has of the set."""
    return {**found(labels), "list": "abc", "is_drawn": False}


def resumed(rank, total, before, labels):
    """The error, or the line, with which a run takes what was found after a checkpoint."""
    lines, samples = [], Samples()
    samples.begin({"samples": before, "step": 8}, lines.append, ((rank, 2), "nid0", total) if total else None)
    samples._found = [{**found(labels), "list": "abc"}]
    samples.compare()
    return lines


def test_ranks_of_which_one_was_slow_take_a_checkpoint_alike():
    labels = [{"3": 1}, {"3": 1, "17": 1}]
    for before, ends in (({"3": 1, "17": 2}, False), ({"3": 2, "17": 1}, True)):
        first, second = on_ranks(2, lambda rank, total, of=before: resumed(rank, total, kept(of), labels[rank]))
        assert str(first) == str(second)
        assert isinstance(first, CheckpointError) == ends


@pytest.mark.parametrize("changed", [(1,), (0, 1)])
def test_a_set_that_changes_in_a_later_epoch_does_so_on_every_rank(changed):
    def kept(rank, total):
        samples, data = Samples(), [(X, label) for label in range(32)]
        samples.begin({}, print, ((rank, 2), f"nid{rank}", total))
        examples, drawn = Examples(data, "the set", list), []
        for epoch in range(4):
            if epoch == 2 and rank in changed:
                data[:] = data[::-1]
            samples.look(examples, 0, [(None, True)])
            samples.compare()
            drawn.append(samples.is_drawn)
        return drawn, len(samples.kept["marks"])

    both = on_ranks(2, kept)
    if 0 in changed:
        assert both == [([False, False, True, True], 5)] * 2
    else:
        assert all(isinstance(each, AgreementError) for each in both) and "rank 1 on nid1 have other" in str(both[0])


def test_labels_that_change_before_the_epochs_checkpoint_are_no_others_at_a_resume():
    samples, data = Samples(), type("Set", (list,), {})((X, label) for label in range(32))
    data.targets = list(range(32))
    examples = Examples(data, "the set", list)
    examples.digest()
    samples.look(examples, 0, [(None, True)])
    samples.compare()
    for changed in (False, True):
        data.targets[7] += changed
        samples.compare(keeps=False)
        assert samples.is_drawn == changed


DAMAGED = {  # by name: what a checkpoint that others may write has as marks
    "a number": 5,
    "no list": {"3": 5},
    "a huge number": {"3": ["", *([of[0], [10**400] * len(of[1])] for of in marks_of((X, 1))[1:])]},
    "no numbers": {"3": ["", *([of[0], ["x"] * len(of[1])] for of in marks_of((X, 1))[1:])]},
    "infinite": {"3": ["", *([of[0], [float("inf")] * len(of[1])] for of in marks_of((X, 1))[1:])]},
    "long lists": {"3": ["\n" * 10**6, *[["0", [0.0] * 100]] * 10**4]},
    "texts": {"3": [{"x": "\033[2J"}, "0", "0", "0"]},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_mark_ends_a_start_in_one_line_or_is_none(name):
    before = json.loads(json.dumps({**kept({}), "marks": DAMAGED[name]}))
    try:
        assert resumed(0, None, before, {"3": 1}) == []
    except CheckpointError as error:
        assert len(str(error)) < 600 and str(error).isprintable()
