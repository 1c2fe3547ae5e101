"""A few examples of each set, compared over ranks and with a checkpoint's: a set may be made otherwise in each process.
Whole numbers and texts are compared exactly, floats and images by means of blocks."""

import contextlib
import itertools
import math
import os
import reprlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from hvdtrain.core.sharing import Sum, from_rank_0, of_ranks
from hvdtrain.errors import AgreementError, CheckpointError, LoopError
from hvdtrain.untrusted import one_line

SECONDS = 2.0
"""For so long, at most, a rank reads examples of all sets to compare them."""
BLOCKS, MOST_VALUES, MOST_ITEMS, MOST_PARTS = 32, 2**18, 32, 256
"""The blocks of an array, and the most numbers of it, items of a list, and parts of a sample to be compared."""
CAUSES = "(a label map made from a set or while it is read, a shuffle without a seed, another split)"
OTHER_FLOATS, OTHER_LABEL = 1, 2
DRAWN: list[Any] = ["", None]
"""In place of what is compared of a part that is another one each time."""
LOOKED_AT = (3, 2, 1, 1, 1), (1, 1, 1)
"""How often each example is read in a set's first look, which later ones repeat, and of others in each later one: an
example is read again to see that it is the same, then with other random numbers."""
Found = dict[str, Any]
"""What `Examples.look` has found of a set, as JSON: its length, and the marks of some examples by index."""
T = TypeVar("T")


class Samples:
    """The examples that this rank has looked at; with "off" it looks at none."""

    def __init__(self, how: str = "on") -> None:
        """Raises LoopError."""
        if how not in {"on", "off"}:
            raise LoopError(f"sample_check must be on or off, got {how!r}.")
        self.is_on, self.left, self.kept = how == "on", SECONDS, Found()
        """Whether it looks at any, the seconds left, and what was found of the training set, for checkpoints."""
        self._found, self._before, self._among = list[Found](), Found(), None
        self._looked_at: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._reading: tuple[Any, Sequence[Any]] = None, ()
        self.began = self.passed = 0
        """The step at which this launch's part of the epoch began, and the last one with a finite loss."""

    def begin(self, resumed: Mapping[str, Any], note: Callable[[str], None], among: Any) -> None:
        """`resumed`: the metadata of the checkpoint from which the run continues; `note` writes a line of the log."""
        self._before, self._step = resumed.get("samples", {}), resumed.get("step")
        self._note, self._among = note, among

    @property
    def is_drawn(self) -> bool:
        """Whether epochs have had other training sets."""
        return bool((self.kept or self._before).get("is_drawn"))

    def look(
        self, split: Any, seed: int, requests: Sequence[Any], read: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """Before these requests, looks at some examples, by `read`, and before the set's next requests at these and
        others. A set of another length is a new one. Raises the reader's error."""
        is_training, sets = bool(requests) and requests[0][1] is not None, self._looked_at.setdefault(split, {})
        looks, marks = sets.get(of := (is_training, len(split)), (0, {}))
        self._reading = (split, requests) if is_training else self._reading
        if not self.is_on or self.left <= 0 or looks == split.most_looks:
            return
        given = [(seed, self.left, is_training, number) for number in dict.fromkeys((looks, 0))]
        for found in read(given) if read else itertools.starmap(split.look, given):
            self.left -= found.pop("seconds")
            split.is_random = found.pop("is_random")
            others = [state for state, *_ in difference({"marks": marks}, found)]
            self._found.append({**found, "list": split.listed, "is_drawn": not looks or OTHER_LABEL in others})
        sets[of] = looks + 1, marks | found["marks"]

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
            found = compare(found, *among)
        # The digest of a million files takes seconds.
        is_short = bool(self.kept.get("list")) and not keeps and self.kept["examples"] < 10**5
        if is_short and all(of.digest() != self.kept["list"] for of in self._looked_at):
            self.kept["is_drawn"] = True  # a program has changed its set since the epoch began
        for now in (each for each in found if each["is_training"] and keeps and not each["again"]):
            if not self.kept:
                self._resume(now)
            is_other = now["is_drawn"] or now["list"] != self.kept["list"] if self.kept else now.get("changes", False)
            is_drawn = self.is_drawn or is_other
            marks = {} if is_drawn else self.kept.get("marks", {})  # some, where the time is over
            self.kept = {**now, "marks": marks | now["marks"], "is_drawn": is_drawn}

    def not_finite(self) -> str:
        """Names an example, of any rank and a step since the last finite loss, that is not finite itself; "" where none
        is found in time. Every rank calls it."""
        found, until, (split, requests) = "", time.monotonic() + 10 * SECONDS, self._reading
        with contextlib.suppress(Exception):
            pairs = itertools.chain(*(zip(*each, strict=True) for each in requests[self.passed - self.began :]))
            for index, drawn in itertools.takewhile(lambda _: time.monotonic() < until, pairs):
                if not is_finite(split.read_alone(np.array([index]), np.array([drawn]))):
                    found = f"{split.name}, sample {index}{_file_of(split.dataset, int(index))}"
                    break
        ranks = of_ranks(found, *self._among[0], self._among[2]) if self._among else [found]
        return next(filter(None, ranks), "")

    def _resume(self, now: Found) -> None:
        before, differs = self._before, list[Any]()
        with contextlib.suppress(Exception):  # a checkpoint may hold anything
            # Else the run has said that they are others, or the program draws its sets.
            if before["examples"] == now["examples"] and not before["is_drawn"]:
                differs = difference(before, now, is_same=before["list"] == now["list"])
        for state, index, was, is_now in differs:
            what = f"{now['name']}: example {index} is {is_now}, at the checkpoint of step {self._step} it was {was}"
            if state == OTHER_LABEL:
                error = CheckpointError(
                    f"{what} {CAUSES}; make the set as it was, or give another folder; "
                    "sample_check off is for sets whose labels follow from the epoch."
                )
                error.everywhere = True
                raise error
            self._note(f"{what}; training goes on")


def compare(found: list[Found], ranks: tuple[int, int], host: str, sum_over_ranks: Sum) -> list[Found]:
    """Compares what each rank has found with what rank 0 has, which it returns. Every rank calls it, also one that has
    found nothing. Raises AgreementError on every rank."""
    if ranks[1] == 1:
        return found
    theirs: list[Found] = from_rank_0(found, ranks[0], sum_over_ranks)
    if not theirs:
        return []
    differs = list[Any]()
    for kind in (False, True):  # of validation only where all have the same sets, as rank 0 may validate alone
        sets = [[each for each in of if each["is_training"] == kind] for of in (theirs, found)]
        one, other = ([(each["name"], each["examples"], each["again"]) for each in of] for of in sets)
        for pair in zip(*sets, strict=True) if one == other else ():
            differs += [[pair[0]["name"], *of] for of in difference(*pair)]
    rows = of_ranks([one_line(host, 200), *differs[:1]], *ranks, sum_over_ranks)
    for rank, (other, *differ) in enumerate(rows):
        for name, _, index, *texts in differ:
            values = f": {' and '.join(texts)}" if texts[0] != texts[1] else ""
            raise AgreementError(
                f"{name}: example {index} differs: rank 0 on {rows[0][0]} and rank {rank} on {other} have other data "
                f"{CAUSES}{values}; make the set alike on every rank, as by sorted() and a seed. sample_check off "
                "compares none."
            )
    return theirs


def difference(one: Found, other: Found, *, is_same: bool = True) -> list[Any]:
    """How the example differs that differs most, its index, and both as texts; nothing where none differs. Unless
    `is_same`, only where a part that tells the examples apart is the same in both."""
    both = [index for index in one["marks"] if index in other["marks"]]
    marks = [[of["marks"][index] for of in (one, other)] for index in both]
    pairs = [list(itertools.zip_longest(*(of[1:] for of in each), fillvalue=["", []])) for each in marks]
    for part in zip(*pairs, strict=False):
        is_same |= not any(itertools.starmap(_state, part)) and len({str(of) for _, of in part}) == len(part) > 1
    states = [max(itertools.starmap(_state, of)) for of in pairs]
    found = sorted(zip(states, both, ([one_line(of[0], 160) for of in each] for each in marks), strict=True))[-1:]
    return [(state, index, *texts) for state, index, texts in found if state and is_same]


def _state(one: list[Any], other: list[Any]) -> int:
    """How a part differs by more than rounding: processors and libraries decode and compute otherwise."""
    if DRAWN in (one, other):
        return 0
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return OTHER_LABEL
    apart = [pair for pair in zip(one[1][1:], other[1][1:], strict=True) if pair[0] != pair[1]]
    # Of few values each is a block. A whole number may be a label, and rounding makes no other one of it.
    if len(one[1]) < BLOCKS and any(max(map(abs, pair)) < 1e6 and pair[0] % 1 == pair[1] % 1 == 0 for pair in apart):
        return OTHER_LABEL
    return OTHER_FLOATS * any(abs(x - y) > max(one[1][0], other[1][0]) for x, y in apart)


def marks_of(sample: Any) -> list[Any]:
    """A sample as text for messages, and what is compared of its parts: a digest of what must be equal, and blocks of
    floats and images."""
    text = one_line(shape_text(sample, shows=True), 160)
    return [text, *itertools.starmap(_mark, itertools.islice(_parts(sample), MOST_PARTS))]


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a sample, and the lengths of what they are in."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_text)
    elif getattr(getattr(value, "dtype", None), "kind", "") in {"O", "U", "S"}:
        value = [value.tolist()]
    elif is_dataclass(value):
        value = vars(value)
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = sorted({_text(key): each for key, each in value.items()}.items())
    elif isinstance(value, list | tuple) and not all(isinstance(each, int | float) for each in value):
        items = list(enumerate(value))[:: math.ceil(len(value) / MOST_ITEMS)]
    yield path, len(value) if items else value
    for name, each in items:
        yield from _parts(each, f"{path}.{name}")


def is_finite(sample: Any) -> bool:
    """Whether all floats in a sample are finite."""
    arrays = [np.asarray(one.detach().cpu().double() if hasattr(one, "detach") else one) for _, one in _parts(sample)]
    return all(np.isfinite(one).all() for one in arrays if one.dtype.kind in "fc")


def _file_of(dataset: Any, index: int) -> str:
    """The example's file for messages, where the data set has a list of such; else ""."""
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
        dataset, index = dataset.dataset, dataset.indices[index]
    lists = (each for each in getattr(dataset, "__dict__", {}).values() if isinstance(each, tuple | list))
    held = [each[index] for each in lists if len(each) == len(dataset)]
    paths = [each[0] if isinstance(each, tuple) else each for each in held]
    files = [str(each) for each in paths if isinstance(each, str | os.PathLike) and Path(each).suffix]
    return f" ({one_line(files[0], 200)})" if files else ""


def _mark(path: str, value: Any) -> list[Any]:
    content, floats = b"", list[float]()
    with contextlib.suppress(Exception):  # it cannot be looked at
        if isinstance(value, float | complex | list | tuple) or hasattr(value, "getbands"):  # an image of Pillow's
            value = np.asarray(value)
        content, floats = _array(value) if hasattr(value, "shape") else (_text(value).encode(errors="replace"), [])
    return [xxhash.xxh3_64_hexdigest(f"{path} {type(value).__name__} ".encode() + content), floats]


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, str | os.PathLike) else repr(value)
    # Addresses differ by process, and a node may have its files in another folder.
    return "" if " at 0x" in text else text.rpartition("/")[2] if text.startswith("/") else text


def _array(value: Any) -> tuple[bytes, list[float]]:
    """What must be equal of an array of any library; of its floats, by how much the means of blocks may differ, and
    these: weighted, so that another order has others, and of few values each."""
    shape = list(value.shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        step = math.ceil(math.prod(value.shape) / MOST_VALUES)  # by steps, which copy nothing
        value = value[(*[slice(None)] * axis, slice(None, None, min(step, shape[axis])))] if step > 1 else value
    if hasattr(value, "is_floating_point"):  # a tensor, whose type NumPy may not have
        value = value.detach().cpu().resolve_conj()
        value = value.double() if value.is_floating_point() else value
    own = np.asarray(value)
    content, is_picture = f"{own.dtype.kind} {shape}".encode(), own.dtype == np.uint8 and sum(n > 1 for n in shape) > 1
    if (own.dtype.kind in "biumM" and not is_picture) or not own.size:
        return content + own.tobytes(), []
    values = (np.stack([own.real, own.imag]) if own.dtype.kind == "c" else own).astype(np.float64).ravel()
    content += np.packbits(np.isfinite(values)).tobytes()
    values = np.clip(np.nan_to_num(values, posinf=0, neginf=0), -1e30, 1e30)
    blocks = np.array_split(values, min(BLOCKS, len(values)))
    weights = 0.5 + (0.5 + np.arange(len(blocks[0])) * 0.6180339887) % 1
    means = [block @ weights[: len(block)] / len(block) for block in blocks]
    # Rounding by a 255th of the range in each value, as of decoded images, moves the mean of a small block further.
    noise = 1 + 16 / math.sqrt(len(blocks[0])) if len(values) > BLOCKS else 1
    limit = 1e-3 * noise * (max(values.max(), 0) - min(values.min(), 0)) + 1e-7
    return content, [float(f"{each:.7g}") for each in (limit, *means)]


def shape_text(sample: Any, *, shows: bool = False) -> str:
    """The types and shapes in a sample, as in (float32 [3, 32, 32], int); `shows`: of short values these."""
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        if shows and math.prod(sample.shape) == 1:
            return str(sample.item())
        return f"{getattr(sample.dtype, 'name', sample.dtype)} {list(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_text(value, shows=shows)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(shape_text(each, shows=shows) for each in sample) + ")"
    return reprlib.repr(sample) if shows and isinstance(sample, str | int | float | None) else type(sample).__name__
