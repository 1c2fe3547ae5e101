"""What is wrong with a program of lab 10, in words, from what its ranks read, saw and have. None where nothing is.

Each text continues "Gap 3, program_3, ".
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from labtools import hunt
from labtools.exercises import first_of
from labtools.hunt import Found

_CLOSE = 1e-4  # of weights; rounding makes 1e-6 of these trainings
_LEARNED = 0.9  # of the loss that knows nothing
_UPDATES = hunt.EPOCHS * hunt.TRAIN // hunt.BATCH
_WHY = {
    "program_3": "they begin with different weights, and add the same updates to them.",
    "program_4": "what is made after the broadcast, or behind the optimizer, is each rank's own.",
    "program_5": "each rank trains by the gradient of its own examples.",
    "program_6": "the gradient is the same on both, and the learning rate is not.",
}
_USUAL = "something that decides about the update is each rank's own."


def of_program(gap: str, one: Sequence[Found], two: Sequence[Found]) -> str | None:
    """From what one rank has, and each of two."""
    if wrong := next((each.wrong for each in (*one, *two) if each.wrong), ""):
        return f"gives back {wrong}, and not the trained network."
    return (
        _of_reading(one)
        or _of_reading(two)
        or _of_training(one, two)
        or _of_weights(gap, one, two)
        or _of_gap(gap, two)
    )


def of_pause(straight: Sequence[Found], paused: Sequence[Found]) -> str | None:
    """From what two ranks have after a training without a pause, and with one."""
    if len(paused[0].read) != len(straight[0].read) // 2:
        return (
            f"reads {len(paused[0].read)} examples on a rank after a pause at half of the epochs, where "
            f"{len(straight[0].read) // 2} are left: it has to resume, with the epoch behind the last one."
        )
    if np.abs(straight[0].weights - paused[0].weights).max() > _CLOSE:
        return (
            f"with a pause ends with other weights than without one ({hunt.apart(straight[0], paused[0])}): something "
            "that the training needs is not in the checkpoint, or is not read back."
        )
    return None


def _of_reading(found: Sequence[Found]) -> str | None:
    ranks = "1 rank" if len(found) == 1 else f"{len(found)} ranks"
    if not any(each.read for each in found):
        return "reads no example: a program that does nothing makes no mistake, and trains nothing."
    epochs = [hunt.by_epoch(each.read, hunt.EPOCHS) for each in found]
    for parts in zip(*epochs, strict=True):
        times = Counter(index for part in parts for index in part)
        if len(found) > 1 and all(len(set(part)) == hunt.TRAIN for part in parts):
            return f"on {ranks} lets each read all {hunt.TRAIN} examples in an epoch: all do the work of one."
        if set(times.values()) != {1} or len(times) != hunt.TRAIN:
            twice, never = sum(number > 1 for number in times.values()), hunt.TRAIN - len(times)
            return (
                f"on {ranks} reads {twice} of {hunt.TRAIN} examples more than once in an epoch, and {never} not at "
                "all: each belongs to one rank, once in an epoch."
            )
    if any(parts[0] == part for parts in epochs for part in parts[1:]):
        return "reads the examples in the same order in each epoch: the batches never change."
    return None


def _of_training(one: Sequence[Found], two: Sequence[Found]) -> str | None:
    updates = {len(each.noise) for each in (*one, *two)}
    worst = max(each.loss for each in (*one, *two))
    return first_of(
        (
            updates != {_UPDATES},
            f"uses its network {', '.join(str(len(each.noise)) for each in (*one, *two))} times in training (one rank, "
            f"and each of two), where {_UPDATES} batches of {hunt.BATCH} are {hunt.EPOCHS} epochs: the global batch, "
            "task.batch, is that of all ranks.",
        ),
        (
            {each.classes for each in (*one, *two)} != {hunt.CLASSES},
            f"gives back a network with {one[0].classes} outputs, where the set has {hunt.CLASSES} classes.",
        ),
        (
            not all(each.used for each in (*one, *two)),
            "gives back another network than the one that it trains.",
        ),
        (
            not all(all(each.changed) for each in (*one, *two)) or not one[0].changed,
            "leaves a part of the network as it was at the first update, as though the optimizer did not know it.",
        ),
        (
            not worst < _LEARNED * math.log(hunt.CLASSES),
            f"does not learn: its loss is {worst:.3f} in the end, and one that knows nothing has "
            f"{math.log(hunt.CLASSES):.3f}.",
        ),
    )


def _of_weights(gap: str, one: Sequence[Found], two: Sequence[Found]) -> str | None:
    between = np.abs(two[0].weights - two[1].weights).max()
    if between > _CLOSE:
        return f"leaves the two ranks with different weights, apart by {between:.1g}: {_WHY.get(gap, _USUAL)}"
    if gap == "program_8" or not _same_batches(one[0], *two):  # other noise, or another way to share, may be right
        return None
    if (difference := np.abs(one[0].weights - two[0].weights).max()) > _CLOSE:
        return (
            f"leaves two ranks with the same weights, but not those of one rank, apart by {difference:.1g}: with one "
            "global batch, each example has to count as much, however many ranks there are."
        )
    return None


def _same_batches(one: Found, first: Found, second: Found) -> bool:
    """Whether one rank and two have the same examples in each update."""
    alone, here, there = (np.split(np.array(each.read), _UPDATES) for each in (one, first, second))
    return all(sorted(whole) == sorted([*half, *other]) for whole, half, other in zip(alone, here, there, strict=True))


def _of_gap(gap: str, two: Sequence[Found]) -> str | None:
    if gap == "program_6":
        return _of_schedule(two)
    if gap == "program_7" and not two[0].partly:
        return "reads task.train, whose labels are all there: the set is task.partly_labelled."
    if gap == "program_8":
        return _of_noise(two)
    if gap == "program_9":
        return _of_accuracy(two)
    return None


def _of_schedule(two: Sequence[Found]) -> str | None:
    given = [each.asked for each in two]
    return first_of(
        (
            any(len(each) != _UPDATES for each in given),
            f"asks the scheduler {len(given[0])} and {len(given[1])} times on the two ranks, where there are "
            f"{_UPDATES} updates: it is asked after each one.",
        ),
        (
            any(len(set(each)) < _UPDATES // 2 for each in given),
            "gives the scheduler the same number again and again: it was the loss.",
        ),
    )


def _of_noise(two: Sequence[Found]) -> str | None:
    spread = [float(np.std(each.noise)) for each in two]
    pairs = list(zip(two[0].noise, two[1].noise, strict=True))
    return first_of(
        (max(spread) < 0.01, "adds no noise any more: it was wanted, and has to be another on each rank."),
        (
            not all(0.25 < each < 0.35 for each in spread),
            f"adds noise of a standard deviation of {spread[0]:.2f} and {spread[1]:.2f}, where 0.30 was wanted.",
        ),
        (
            any(np.allclose(here, there, atol=1e-3) for here, there in pairs),
            "adds the same noise on both ranks: their random numbers have one seed.",
        ),
        (
            any(np.allclose(each.noise[0], later, atol=1e-3) for each in two for later in each.noise[1:]),
            "adds the same noise in each update: the seed is set again and again.",
        ),
    )


def _of_accuracy(two: Sequence[Found]) -> str | None:
    times = Counter(index for each in two for index in each.read_valid)
    if any(each.value is None for each in two):
        return "gives back no accuracy: model, accuracy."
    wrong = [each for each in two if not isinstance(each.value, float) or abs(each.value - each.accuracy) > 1e-6]
    alike = len(times) == hunt.VALID and len(set(times.values())) == 1
    if alike and not wrong:
        return None
    return first_of(
        (not times, "reads no example of the validation set."),
        (
            len(times) < hunt.VALID,
            f"reads {len(times)} of {hunt.VALID} examples of the validation set: the others count nothing.",
        ),
        (
            len(wrong) == 1 or two[0].value != two[1].value,
            f"reports {two[0].value!s:.6} on rank 0 and {two[1].value!s:.6} on rank 1: it is one number, of all ranks.",
        ),
        (
            not alike,
            f"validates {sum(times.values())} examples, of {hunt.VALID} that there are: some count twice.",
        ),
        (True, f"reports an accuracy of {two[0].value!s:.6}, and the network has {two[0].accuracy:.4f}."),
    )
