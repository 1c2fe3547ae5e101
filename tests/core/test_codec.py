"""Values of any nesting come back equal and of equal types, into the objects that a program holds; no code is named."""

import collections
import contextlib
import datetime
import enum
import io
import os
import pathlib
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.codec import Codec, Held, Refused
from hvdtrain.errors import CheckpointError
from hvdtrain.run.attributes import Attributes, ProgramKinds


class Own(ProgramKinds):
    def is_users(self, kind):
        return kind.__module__ == __name__


class Meter:
    def __init__(self):
        self.count, self.values, self.show = 0, [], lambda value: value


class Stage(enum.Enum):
    WARM, HOT = 1, 2


class Callback:
    """As a framework's: its own class has slots, and objects also have a dictionary."""


class Counter(Callback):
    __slots__ = ("slot",)
    steps = 0

    def __init__(self):
        self.slot, self.todo, self.text, self.draw = 0, "warm-up", io.StringIO(), np.random.RandomState(0)
        self.given = (number for number in range(9))

    def count(self):
        type(self).steps += 1
        self.slot += 1
        self.text.write("a")
        vars(self).pop("todo", None)
        return next(self.given), self.draw.randint(10**6)


def kinds_of(framework):
    """The framework's kinds, and how it makes a tensor of an array."""
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
        from hvdtrain.torch.codec import TorchKinds

        return TorchKinds(), torch.from_numpy
    if framework == "tensorflow":
        tensorflow = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install tensorflow")
        from hvdtrain.keras.others import KerasKinds

        return KerasKinds(), tensorflow.constant
    return Own(), np.asarray


ARRAYS = st.builds(
    lambda dtype, shape: (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype),
    st.sampled_from(["float32", "float64", "float16", "int64", "int8", "bool", "complex64", "U3", "S4", "M8[s]", "O"]),
    st.sampled_from([(), (0,), (3,), (2, 3)]),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.tuples(st.integers()))
LEAVES = st.one_of(
    KEYS, st.complex_numbers(), st.datetimes(), ARRAYS, st.builds(np.float32, st.floats(width=32)),
    st.builds(pathlib.PurePosixPath, st.sampled_from(["a/b", "c"])), st.builds(bytearray, st.binary()),
    st.sets(st.integers()), st.frozensets(st.text()), st.just(collections.Counter("aab")),
    st.builds(lambda of: ("tensor", of), st.sampled_from(["float32", "int64", "bool"])),
)  # fmt: skip
VALUES = st.deferred(lambda: st.one_of(
    LEAVES, st.lists(VALUES, max_size=3), st.tuples(VALUES, VALUES), st.dictionaries(KEYS, VALUES, max_size=3),
    st.builds(lambda of: collections.deque(of, maxlen=9), st.lists(VALUES, max_size=2)),
    st.builds(lambda of: collections.defaultdict(list, of), st.dictionaries(KEYS, VALUES, max_size=2)),
    st.builds(collections.OrderedDict, st.dictionaries(KEYS, VALUES, max_size=2)),
))  # fmt: skip


def made(value, tensor):
    """The value with tensors in the places of their descriptions."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == "tensor":
        return tensor(np.ones((2, 2), value[1]))
    if isinstance(value, list):
        return [made(each, tensor) for each in value]
    if type(value) is dict:
        return {key: made(each, tensor) for key, each in value.items()}
    return value


def same(one, other):
    """Whether two values are equal and of equal types, however they are nested."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(left, right) for left, right in pairs)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "dtype"):
        left, right = np.asarray(one), np.asarray(other)
        return one.dtype == other.dtype and one.shape == other.shape and repr(left.tolist()) == repr(right.tolist())
    return repr(one) == repr(other) if isinstance(one, float | complex | np.generic) else one == other


@pytest.mark.parametrize("framework", ["", "torch", "tensorflow"])
def test_any_nesting_comes_back_equal_and_of_equal_types(framework):
    kinds, tensor = kinds_of(framework)

    @settings(max_examples=150, deadline=None, database=None)
    @given(VALUES)
    def check(described):
        value, codec = made(described, tensor), Codec(kinds)
        assert codec.look(value)[1] is None
        content = codec.encode(value)
        assert same(codec.filler()(None, codec.decode(content)), value)
        assert codec.look(codec.decode(content))[0] == codec.look(codec.decode(content))[0]

    check()


def begun():
    return {
        "meter": Meter(), "list": [1], "dict": {1: "x"}, "set": {1}, "array": np.zeros(3), "queue": collections.deque(),
        "draw": np.random.default_rng(0), "plain": random.Random(0), "stage": Stage.WARM, "file": io.StringIO(),
    }  # fmt: skip


def test_objects_of_the_start_are_filled_where_they_are():
    first, second = begun(), begun()
    codec, resumed = Codec(Own()), Codec(Own())
    for each, values in ((codec, first), (resumed, second)):
        before = each.look(values, "of")[0]
        assert each.look(values)[0] == before
    meter = first["meter"]
    meter.count, first["stage"] = 3, Stage.HOT
    meter.values.append({2: 0.5})
    first["same"], first["show"] = meter.values, meter.show
    for change in (
        lambda: first["list"].append(2), lambda: first["dict"].update(own=first["dict"]), lambda: first["set"].add(2),
        lambda: first["array"].fill(2), lambda: first["queue"].append(5), first["draw"].random, first["plain"].random,
    ):  # fmt: skip
        before = codec.look(first)[0]
        change()
        assert codec.look(first) != (before, None)
    held = dict(second)
    filled = resumed.filler()(second, resumed.decode(codec.encode(first)))
    assert filled is second
    assert all(second[name] is each for name, each in held.items() if name != "stage")
    assert (second["meter"].count, second["stage"], second["list"], second["set"]) == (3, Stage.HOT, [1, 2], {1, 2})
    assert second["same"] is second["meter"].values
    assert second["show"] is second["meter"].show
    assert second["dict"]["own"] is second["dict"]
    assert second["array"].tolist() == [2, 2, 2]
    assert second["draw"].random() == first["draw"].random()
    assert second["plain"].random() == first["plain"].random()


def test_slots_and_numbers_of_a_class_come_back_and_a_generator_is_named():
    first = Counter()
    attributes = Attributes({"Counter 0": first}, Own(), lambda each, name: False)
    attributes.begin()
    first.count()
    content = attributes.encode({})
    assert attributes.lines() == ["no checkpoint holds given of Counter, it holds a generator: it begins anew"]
    following, Counter.steps = first.draw.randint(10**6), 0
    resumed = Attributes({"Counter 0": (second := Counter())}, Own(), lambda each, name: False)
    resumed.begin()
    resumed.give_back(resumed.decode(content)[0])
    assert (Counter.steps, "steps" in vars(second)) == (1, False)
    assert (second.slot, second.text.getvalue(), second.text.tell()) == (1, "a", 1)
    assert not hasattr(second, "todo")
    assert second.draw.randint(10**6) == following


@pytest.mark.parametrize(
    "value", [Meter(), lambda: 1, object(), io.StringIO(), range(3), Stage], ids=lambda each: type(each).__name__
)
def test_what_no_checkpoint_holds_is_named_by_its_class(value):
    codec = Codec(Own())
    assert codec.look([{"deep": (value,)}])[1] is type(value)
    with pytest.raises(Refused, match=type(value).__name__):
        codec.encode([{"deep": (value,)}])


def test_a_nesting_without_end_is_named():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    codec = Codec(Own())
    assert codec.look(deep)[1] is RecursionError
    with pytest.raises(Refused):
        codec.encode(deep)


class Command:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def blob(text, arrays=b""):
    return np.frombuffer(len(text).to_bytes(8, "little") + text + arrays, np.uint8)


class Named(pickle.Pickler):
    def persistent_id(self, each):
        return each[1:] if isinstance(each, tuple) and each[:1] == ("id",) else None


def with_id(*found):
    file = io.BytesIO()
    Named(file, 5).dump([("id", *found)])
    return file.getvalue()


@pytest.mark.parametrize("content", [
    blob(pickle.dumps(Command())),
    blob(pickle.dumps(range(10**12))),
    blob(b"cbuiltins\nbytearray\n(I9999999999\ntR."),
    blob(b"cbuiltins\neval\n(S'1'\ntR."),
    blob(b"chvdtrain.core.codec\nCodec\n(NtR."),
    blob(pickle.dumps([1])[:-2]),
    blob(with_id("array", 0, "", "<f8", (2**40,), 0)),
    blob(with_id("array", 0, "", "O", (1,), 0), bytes(8)),
    blob(with_id("array", 0, "", "<f8", (-1,), 0), bytes(8)),
    blob(with_id("array", 0, "", "<f8", (1,), -8), bytes(8)),
    blob(with_id("array", 0, "no tensor", "<f8", (1,), 0), bytes(8)),
    blob(with_id("function", "os.system")),
    np.zeros(3, np.uint8),
    np.full(100, 255, np.uint8),
])  # fmt: skip
@pytest.mark.parametrize("framework", ["", "torch"])
def test_bytes_of_an_attacker_run_nothing(content, framework, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds, _ = kinds_of(framework)
    with pytest.raises(ValueError, match="no values of a program"):
        Codec(kinds).decode(content)
    if framework:
        from hvdtrain.torch.codec import restored

        with pytest.raises(CheckpointError, match="no values of a program"):
            restored(content)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("named", ["collections\nCounter", "hvdtrain.core.codec\nHeld", "pathlib\nPosixPath"])
def test_bytes_of_an_attacker_change_no_class(named):
    with_attributes = b"c" + named.encode() + b"\n(N}X\x06\x00\x00\x00updateI1\nstb."
    with contextlib.suppress(ValueError):
        Codec(Own()).decode(blob(with_attributes))
    for kind in (collections.Counter, Held, pathlib.PosixPath):
        assert getattr(kind, "update", None) != 1


def test_a_checkpoint_names_no_object_that_was_not_there():
    codec, other = Codec(Own()), Codec(Own())
    meter = Meter()
    codec.look({"meter": meter}, "of")
    content = codec.encode({"meter": meter})
    with pytest.raises(ValueError, match="there is no Meter at the start"):
        other.filler()({}, other.decode(content))


def test_times_of_this_process_are_not_state():
    kinds = Own()
    now = datetime.datetime.now()
    assert kinds.is_clock("any", now.timestamp())
    assert kinds.is_clock("any", now)
    assert not kinds.is_clock("loss", 0.5)
    assert not kinds.is_clock("epoch", 1_700_000_000)
