"""A few examples of each set, compared over ranks and with a checkpoint's: a set may be made otherwise in each process.
Whole numbers and texts are compared exactly, floats and pictures by means of blocks."""

import contextlib
import itertools
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from hvdtrain.core.sharing import Sum, from_rank_0, gather, of_ranks
from hvdtrain.errors import AgreementError, CheckpointError, LoopError
from hvdtrain.untrusted import one_line

SECONDS = 2.0
"""For so long, at most, a rank reads examples of all sets to compare them."""
BLOCKS, MOST_VALUES, MOST_ITEMS, MOST_LEAVES = 32, 2**18, 1024, 8
"""The blocks of an array; the most numbers of it, items of a list, and arrays in a part of a sample to be compared."""
CAUSES = "(a label map made from a set, a shuffle without a seed, another split)"
OTHER_FLOATS, OTHER_LABEL = 1, 2
Found = dict[str, Any]
"""What `Examples.look` has found of a set, as JSON: its length, and the marks of some examples by index."""
T = TypeVar("T")


class Look(NamedTuple):
    """What a reader does in place of a request: it looks at examples, drawn by the seed, for at most so long."""

    seed: int
    seconds: float
    is_training: bool


class Samples:
    """The examples that this rank has looked at; with "off" it looks at none."""

    def __init__(self, how: str = "on") -> None:
        """Raises LoopError."""
        if how not in {"on", "off"}:
            raise LoopError(f"sample_check must be on or off, got {how!r}.")
        self.is_on, self.left, self.kept = how == "on", SECONDS, Found()
        """Whether it looks at any, the seconds left, and what was found of the training set, for checkpoints."""
        self._found, self._before, self._among = list[Found](), Found(), None
        self._looked_at: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def begin(self, resumed: Mapping[str, Any], note: Callable[[str], None], among: Any) -> None:
        """`resumed`: the metadata of the checkpoint from which the run continues; `note` writes a line of the log."""
        self._before, self._step = resumed.get("samples", {}), resumed.get("step")
        self._note, self._among = note, among

    @property
    def is_drawn(self) -> bool:
        """Whether epochs have had other training sets."""
        return bool((self.kept or self._before).get("is_drawn"))

    def looks(self, split: Any, seed: int, requests: Sequence[Any]) -> list[Look]:
        """What is read before these requests: nothing of a set that was looked at and is as long as it was."""
        is_training, lengths = bool(requests) and requests[0][1] is not None, self._looked_at.setdefault(split, set())
        if not self.is_on or self.left <= 0 or (is_training, len(split)) in lengths:
            return []
        lengths.add((is_training, len(split)))
        return [Look(seed, self.left, is_training)]

    def take(self, split: Any, found: Any) -> None:
        """Takes what a reader has found. Raises its error."""
        if isinstance(found, Exception):
            raise found
        self.left -= found.pop("seconds")
        split.is_random = found.pop("is_random")
        self._found.append({**found, "list": split.listed})

    def read(self, batches: Iterator[T]) -> Iterator[T]:
        """An epoch's batches. Once the first is read, compares what was found."""
        for number, batch in enumerate(batches):
            if not number:
                self.compare()
            yield batch

    def compare(self, among: Any = None, *, keeps: bool = True) -> None:
        """Compares what was found since the last call; `keeps`: and takes it for checkpoints, which hold no set that is
        read beside another. Every rank calls it. Raises AgreementError and CheckpointError."""
        found, self._found = self._found, []
        if among := among or self._among:
            compare(found, *among)
        for now in (each for each in found if each["is_training"] and keeps):
            is_first = not self.kept
            self.kept = {**now, "is_drawn": self.is_drawn or not is_first}
            if is_first and self._before.get("examples") == now["examples"]:
                with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # a damaged checkpoint
                    self._resume(self._before, now)

    def _resume(self, before: Found, now: Found) -> None:
        states = states_of(before, now)
        state, index = max(((max(of, default=0), index) for index, of in states.items()), default=(0, ""))
        if not state:
            return
        is_now, was = (shown(of["marks"][index]) for of in (now, before))
        what = f"{now['name']}: example {index} is {is_now}, at the checkpoint of step {self._step} it was {was}"
        is_same = before["list"] == now["list"] and not before["is_drawn"]
        # They are the same examples, too, where a part that is no constant is as it was in all of them.
        for part, of_part in enumerate(zip(*states.values(), strict=False)):
            values = {json.dumps(now["marks"][index][part][:2]) for index in states}
            is_same |= not any(of_part) and len(values) > 1
        if not is_same:  # which the run has said, or the program draws its sets
            return
        if state == OTHER_LABEL:
            error = CheckpointError(f"{what} {CAUSES}; make the set as it was, or give another folder.")
            error.everywhere = True
            raise error
        self._note(f"{what}; training goes on")


def compare(found: list[Found], ranks: tuple[int, int], host: str, sum_over_ranks: Sum) -> None:
    """Compares what each rank has found with rank 0's. Every rank calls it, also one that has found nothing. Raises
    AgreementError on every rank."""
    if ranks[1] == 1:
        return
    theirs, differs = from_rank_0(found, ranks[0], sum_over_ranks), list[Any]()
    for kind in (False, True):  # of validation only where all have the same sets, as rank 0 may validate alone
        sets = [[each for each in of if each["is_training"] == kind] for of in (theirs, found)]
        one, other = ([(each["name"], each["examples"]) for each in of] for of in sets)
        for pair in zip(*sets, strict=True) if one == other else ():
            for index in (index for index, states in states_of(*pair).items() if any(states)):
                differs = differs or [pair[0]["name"], index, *(shown(of["marks"][index]) for of in pair)]
    if not gather(np.array([len(differs)]), *ranks, sum_over_ranks).any():
        return
    rows = of_ranks([one_line(host, 200), differs], *ranks, sum_over_ranks)
    rank, (other, (name, index, *texts)) = next((rank, row) for rank, row in enumerate(rows) if row[1])
    values = f": {' and '.join(texts)}" if texts[0] != texts[1] else ""
    raise AgreementError(
        f"{name}: example {index} differs: rank 0 on {rows[0][0]} and rank {rank} on {other} have other data {CAUSES}"
        f"{values}; make the set alike on every rank, as by sorted() and a seed. sample_check off compares none."
    )


def states_of(one: Found, other: Found) -> dict[str, list[int]]:
    """Of each example that both have, how each part of it differs: not at all (0), OTHER_FLOATS or OTHER_LABEL."""
    common = {index: (mark, other["marks"][index]) for index, mark in one["marks"].items() if index in other["marks"]}
    return {
        index: list(itertools.starmap(_state, itertools.zip_longest(*of, fillvalue=[""])))
        for index, of in common.items()
    }


def _state(one: list[Any], other: list[Any]) -> int:
    """How a part differs by more than rounding: processors and libraries decode and compute otherwise."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return OTHER_LABEL
    state = 0
    for (*extremes, a), (*others, b) in zip(one[1], other[1], strict=True):
        limit = 1e-3 * (max(*extremes, *others, 0) - min(*extremes, *others, 0)) + 1e-7
        apart = [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]
        # Of few values each is a block. A whole number may be a label, and rounding makes no other one of it.
        if len(a) < BLOCKS and any(max(map(abs, pair)) < 1e6 and pair[0] % 1 == pair[1] % 1 == 0 for pair in apart):
            return OTHER_LABEL
        state |= any(abs(x - y) > limit for x, y in apart)
    return state


def marks_of(sample: Any) -> tuple[list[Any], list[str]]:
    """What is compared of each part of a sample: a digest of structure, whole numbers and texts; blocks of floats and
    pictures; a text for messages. And digests of all bits."""
    items = list(sample) if isinstance(sample, tuple | list) else [sample]
    parts = [_Part(sample[k]) for k in sorted(sample, key=str)] if isinstance(sample, Mapping) else map(_Part, items)
    return tuple(zip(*(each.found for each in parts), strict=True)) or ((), ())


class _Part:
    """A part of a sample: what `marks_of` finds of it."""

    def __init__(self, value: Any) -> None:
        self._exact, self._bits, self._leaves = xxhash.xxh3_64(), xxhash.xxh3_64(), list[Any]()
        text = type(value).__name__
        with contextlib.suppress(Exception):  # it cannot be looked at
            text = _shown(value)
            self._add(value)
        self.found = [self._exact.hexdigest(), self._leaves[:MOST_LEAVES], text], self._bits.hexdigest()

    def _take(self, content: bytes | bytearray) -> None:
        self._exact.update(content)
        self._bits.update(content)

    def _add(self, value: Any) -> None:
        self._take(f"{type(value).__name__} ".encode())
        if isinstance(value, set | frozenset):
            value = sorted(value, key=str)
        if isinstance(value, list | tuple):
            self._take(f"{len(value)} ".encode())
            value = value[:: math.ceil(len(value) / MOST_ITEMS) or 1]
            value = np.asarray(value) if value and all(isinstance(each, int | float) for each in value) else value
        if hasattr(value, "shape"):
            self._add_array(value)
        elif isinstance(value, float | complex) or hasattr(value, "getbands"):  # an image of Pillow's
            self._add_array(np.asarray(value))
        elif isinstance(value, list | tuple):
            for each in value:
                self._add(each)
        elif isinstance(value, bytes | bytearray):
            self._take(value)
        elif isinstance(value, str | os.PathLike):  # a node may have its files in another folder
            text = str(value)
            self._take((text.rpartition("/")[2] if text.startswith("/") else text).encode(errors="replace"))
        elif isinstance(value, Mapping) or is_dataclass(value):
            named = value if isinstance(value, Mapping) else vars(value)
            self._add([[str(key), named[key]] for key in sorted(named, key=str)])
        elif " at 0x" not in (text := repr(value)):
            self._take(text.encode(errors="replace"))

    def _add_array(self, value: Any) -> None:
        shape = list(value.shape)
        while (size := math.prod(value.shape)) > MOST_VALUES:  # by steps, which copy nothing
            axis = int(np.argmax(value.shape))
            step = slice(None, None, min(value.shape[axis], math.ceil(size / MOST_VALUES)))
            value = value[(*[slice(None)] * axis, step)]
        if hasattr(value, "is_floating_point"):  # a tensor, whose type NumPy may not have
            value = value.detach().cpu().resolve_conj()
            value = value.double() if value.is_floating_point() else value
        own = np.asarray(value)
        self._take(f"{own.dtype.kind} {shape}".encode())
        is_picture = own.dtype == np.uint8 and sum(side > 1 for side in shape) > 1
        if own.dtype.kind in "OUS":
            self._add(own.tolist())
        elif not (is_picture or own.dtype.kind in "fcV"):
            self._take(np.ascontiguousarray(own).tobytes())
        elif own.size:
            self._bits.update(np.ascontiguousarray(own).tobytes())
            values = (np.stack([own.real, own.imag]) if own.dtype.kind == "c" else own).astype(np.float64).ravel()
            is_finite = np.isfinite(values)
            self._leaves.append(_blocks(np.where(is_finite, np.clip(values, -1e30, 1e30), 0)))
            self._leaves += [] if is_finite.all() else [_blocks(is_finite.astype(np.float64))]


def _blocks(values: NDArray[np.float64]) -> list[Any]:
    """The extremes, and the means of blocks, weighted so that another order has others; of few values these."""
    extremes = [float(values.min()), float(values.max())]
    if values.size < BLOCKS:
        return [*extremes, values.tolist()]
    first = np.arange(BLOCKS) * values.size // BLOCKS
    sums = np.add.reduceat(values * (0.5 + np.arange(values.size) * 0.6180339887 % 1), first)
    return [*extremes, [float(f"{mean:.7g}") for mean in sums / np.diff(first, append=values.size)]]


def shown(marks: Sequence[Any]) -> str:
    """A sample as text: short values themselves, of others type and shape."""
    return one_line(f"({', '.join(text for _, _, text in marks)})", 160)


def _shown(value: Any) -> str:
    value = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
    if hasattr(value, "item") and math.prod(value.shape) == 1:
        return str(value.item())
    value = value[:60] if isinstance(value, str) else value
    is_short = isinstance(value, str | int | float) or value is None
    return one_line(repr(value) if is_short else shape_text(value) if hasattr(value, "shape") else type(value).__name__)


def shape_text(sample: Any) -> str:
    """The types and shapes in a sample, as in (float32 [3, 32, 32], int)."""
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        return f"{getattr(sample.dtype, 'name', sample.dtype)} {list(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_text(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(map(shape_text, sample)) + ")"
    return type(sample).__name__
