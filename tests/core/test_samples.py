"""Which examples count as the same on two ranks, whatever they hold, and how much of a set is read for that."""

import dataclasses
import datetime
import enum
import json
import pathlib
from collections.abc import Mapping

import numpy as np
import pytest
from ranks import on_ranks

from hvdtrain.core.samples import OTHER_FLOATS, OTHER_LABEL, compare, marks_of, states_of
from hvdtrain.errors import AgreementError

DRAW = np.random.default_rng(0)
X = DRAW.standard_normal(1000)
PIXELS = DRAW.integers(0, 256, (32, 32, 3)).astype(np.uint8)
DECODED = np.clip(PIXELS.astype(int) + DRAW.integers(-1, 2, PIXELS.shape), 0, 255).astype(np.uint8)


class Color(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Box:
    corners: np.ndarray
    label: int


def different(one, other):
    """How a sample differs from another one, as it is written into a checkpoint; the label beside it is the same."""
    marks = [json.loads(json.dumps({"marks": {"17": marks_of((each, 1))[0]}})) for each in (one, other)]
    state, rest = states_of(*marks)["17"]
    assert not rest
    return state


class Broken:
    """A value that raises an error wherever one looks."""

    __class__ = Mapping  # type: ignore[assignment]

    def __getattr__(self, name):
        raise RuntimeError(name)


ALIKE = {
    "what cannot be looked at": (Broken(), Broken()),
    "rounded": (X, X * (1 + 1e-6)),
    "a rounded number": (0.37, 0.3700001),
    "rounded to a whole number": (2.9999999, 3.0),
    "noise about 0": (1e-17, 0.0),
    "no number": (np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, np.inf])),
    "decoded otherwise": (PIXELS, DECODED),
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
    marks = [{"marks": {"17": marks_of(each)[0]}} for each in ((X, 1), (X, 1, 1))]
    assert OTHER_LABEL in states_of(*marks)["17"]


def found(labels, is_training=True, examples=32):
    """What a rank has found of a set, with these labels by index."""
    marks = {index: marks_of((X, label))[0] for index, label in labels.items()}
    return {"name": "the set", "examples": examples, "is_training": is_training, "marks": marks}


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
        assert (first, second) == (None, None)
        return
    assert isinstance(first, AgreementError) and str(first) == str(second)
    begin = f"the set: example {named} differs: rank 0 on nid0 and rank 1 on nid1 have other data (a label map made "
    assert str(first).startswith(begin) and ": (float64 [1000], 1) and (float64 [1000], 2); " in str(first)
