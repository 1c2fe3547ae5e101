"""The checks of lab 4: updates counted, the LR's rule and warm-up, and a choice of both, measured."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from labtools.batches import History, Setting, accuracy, train_all
from labtools.exercises import Exercise, first_of, listed, print_right

BATCH, SEEDS = 1024, range(6)
SMALL = 0.982
"""The accuracy at batch 128 and the same base LR, 0.1, as measured: the mean of six seeds."""
MOST_LOST = 0.005
EMPTY = "is still empty: it gives back nothing (if it computes something, a `return` is missing)."


class Check(Exercise):
    """The four gaps of lab 4."""

    lab = 4
    hints: ClassVar = {
        "updates": (
            "how many whole batches are there in an epoch? What is left over is dropped.",
            "// divides and leaves the rest out. Each epoch begins anew, so its rest is lost each time.",
        ),
        "scaled_lr": (
            "k is how many times as large as base_batch the batch is.",
            '`rule` is a text: compare it with "none" and with "sqrt". What is left is linear.',
            "linear multiplies by k itself, sqrt by math.sqrt(k), and none by nothing.",
        ),
        "warmup": (
            "draw it: a straight line from 0 at the start to 1 after warmup_epochs, and then a level one.",
            "min(1, ...) keeps a line from rising further. Without warm-up there is nothing to divide by.",
        ),
        "choice": (
            "which rule keeps the length of the way of an epoch, when it has an eighth of the steps?",
            "look at the first dozen updates above: what keeps the loss from leaping, and for how many epochs?",
            "a few epochs of twelve are enough; the rest is needed to learn at the full rate.",
        ),
    }

    def updates(self, updates: Callable[[int, int, int], Any]) -> None:
        """Gap 1: `updates(examples, batch, epochs)` is the number of updates of a training."""
        given = {
            case: self._call("updates", updates, *case) for case in ((11496, 1024, 12), (11496, 128, 12), (100, 30, 2))
        }
        self._judge("updates", of_updates(given))
        print_right("11,496 examples make 1,068 updates at 128, and 132 at 1024, in 12 epochs.")

    def scaled_lr(self, scaled_lr: Callable[[float, int, int, str], Any]) -> None:
        """Gap 2: `scaled_lr(base_lr, base_batch, batch, rule)` is the peak LR at that batch."""
        rules = ("none", "sqrt", "linear")
        given = {rule: self._call("scaled_lr", scaled_lr, 0.1, 128, 1024, rule) for rule in rules}
        at_64 = self._call("scaled_lr", scaled_lr, 0.1, 64, 1024, "linear")
        self._judge("scaled_lr", of_lr(given, at_64))
        print_right("from 0.1 at 128, a batch of 1024 gets 0.1, 0.283 or 0.8.")

    def warmup(self, warmup: Callable[[float, int], Any]) -> None:
        """Gap 3: `warmup(epochs_done, warmup_epochs)` is the fraction of the peak LR."""
        cases = [(0.0, 4), (1.0, 4), (2.5, 4), (4.0, 4), (9.0, 4), (0.5, 0), (3.0, 0)]
        given = {case: self._call("warmup", warmup, *case) for case in cases}
        self._judge("warmup", of_warmup(given))
        print_right("a quarter of the peak after 1 of 4 epochs, all of it after 4 and later; and at once without any.")

    def choice(self, choice: Setting, train: Callable[[Setting, int], History]) -> None:
        """Gap 4: trains with the choice from six seeds, and compares with batch 128."""
        self._judge("choice", of_setting(choice))
        reached = self._call("choice", train_all, train, [choice], SEEDS)[choice]
        self._judge("choice", of_choice(choice, reached))
        print_right(
            f"{accuracy(reached):.1%} at batch {choice.batch}, with an eighth of the updates; {SMALL:.1%} at 128."
        )


def of_updates(given: dict[tuple[int, int, int], Any]) -> str | None:
    """What is wrong with the numbers of updates given, by examples, batch and epochs."""
    ways = {
        "of every epoch there is a rest that is dropped; yours takes part of it along": lambda n, b, e: n * e // b,
        "that is a fraction of an update: // divides without a rest": lambda n, b, e: n * e / b,
        "that is the updates of one epoch": lambda n, b, e: n // b,
        "it counts the rest of an epoch as a whole batch; here it is dropped": lambda n, b, e: -(-n // b) * e,
        "that is the number of examples": lambda n, b, e: n * e,
        "it divides the epochs, too": lambda n, b, e: n // b // e,
        "it rounds; a batch that is not full is dropped": lambda n, b, e: round(n / b) * e,
        "the rest is a fraction: // divides without one": lambda n, b, e: n / b * e,
    }
    if any(value is None for value in given.values()):
        return EMPTY
    for case, value in given.items():
        examples, batch, epochs = case
        right = examples // batch * epochs
        if value != right:
            why = [text for text, way in ways.items() if all(math.isclose(given[each], way(*each)) for each in given)]
            return (
                f"gives {value:,.6g} for {examples:,} examples, batch {batch} and {epochs} epochs, "
                f"and {right:,} is right: {why[0] if why else 'whole batches of an epoch, times epochs'}."
            )
    return None


def of_lr(given: dict[str, Any], at_64: Any) -> str | None:
    """What is wrong with the LRs given by rule for 8 times the batch; and with the linear one for 16 times."""
    if any(value is None for value in given.values()):
        empty = [rule for rule, value in given.items() if value is None]
        return EMPTY if len(empty) == 3 else f"gives back nothing for the rule {empty[0]}: a `return` is missing there."
    for rule, right in (("none", 0.1), ("sqrt", 0.1 * math.sqrt(8)), ("linear", 0.8)):
        value = given[rule]
        if math.isclose(value, right, rel_tol=1e-6):
            continue
        why = first_of(
            (rule == "none", "without a rule the LR stays what it was"),
            (math.isclose(value, 0.1), "it is not scaled: look whether you compare `rule` with the right text"),
            (
                math.isclose(value, 0.01 / right),
                "it is divided: k is batch / base_batch, and not the other way round",
            ),
            (rule == "sqrt" and math.isclose(value, 0.8), "that is the linear rule"),
            (rule == "linear" and math.isclose(value, 0.1 * math.sqrt(8)), "that is the square-root rule"),
            (math.isclose(value, math.sqrt(0.8)), "the root is of k alone, and not of the LR"),
            (math.isclose(value, 0.1 * 1024 ** (0.5 if rule == "sqrt" else 1)), "k is how many times base_batch it is"),
            (True, "base_lr times k (linear) or times its root (sqrt), with k = batch / base_batch"),
        )
        return f"gives {value:.3g} for the rule {rule} from 0.1 at 128 to batch 1024, and {right:.3g} is right: {why}."
    if at_64 is None or not math.isclose(at_64, 1.6):
        return f"is right for a base batch of 128, but gives {at_64} for one of 64, where 1.6 is right: use base_batch."
    return None


def of_warmup(given: dict[tuple[float, int], Any]) -> str | None:
    """What is wrong with the fractions of the peak given, by epochs done and epochs of warm-up."""
    if any(value is None for value in given.values()):
        return EMPTY if all(value is None for value in given.values()) else "gives back nothing in one of its branches."
    one, over = given[1.0, 4], given[9.0, 4]
    return first_of(
        (given[3.0, 0] != 1, f"gives {given[3.0, 0]:.3g} without any warm-up, and 1 is right: the whole rate at once."),
        (over > 1, f"rises further: {over:.3g} times the peak after 9 epochs, when 4 were warm-up. It ends at 1."),
        (math.isclose(one, 0.75), "falls where it has to rise: it begins at 1 and ends at 0."),
        (math.isclose(given[0.0, 4], 1), "begins at the peak: there is no warm-up where the first step is a full one."),
        (one == 0, "jumps: before the end of the warm-up it is 0 (// drops the rest; use /)."),
        (math.isclose(over, 0) or over < 1, f"falls again: {over:.3g} after 9 epochs. After the warm-up it is 1."),
        (
            not math.isclose(one, 0.25),
            f"gives {one:.3g} after 1 of 4 epochs, and 0.25 is right: a straight line from 0.",
        ),
        (not math.isclose(given[2.5, 4], 0.625), f"gives {given[2.5, 4]:.3g} after 2.5 of 4 epochs, and not 0.625."),
    )


def of_setting(choice: Any) -> str | None:
    """What is wrong with a choice before it is trained."""
    if not isinstance(choice, Setting):
        return f"is {choice!r:.60}, and not a Setting(1024, rule, warmup_epochs)."
    return first_of(
        (choice.rule is ..., "is still empty: name a rule and the epochs of warm-up."),
        (choice.batch != BATCH, f"has a batch of {choice.batch}. The accuracy is to be kept at 1024, 8 times as many."),
        (
            choice.rule not in ("none", "sqrt", "linear"),
            f"has the rule {choice.rule!r}; they are none, sqrt and linear.",
        ),
        (
            not isinstance(choice.warmup_epochs, int) or not 0 <= choice.warmup_epochs <= 12,
            f"has a warm-up of {choice.warmup_epochs!r} epochs: a whole number from 0 to the 12 of the training.",
        ),
    )


def of_choice(choice: Setting, reached: Sequence[History]) -> str | None:
    """What is wrong with a choice of which these trainings came, if it loses more than half a point."""
    kept = accuracy(reached)
    if kept >= SMALL - MOST_LOST:
        return None
    leap = max(max(history.losses[:20]) for history in reached)
    silent = float(np.mean([history.silent_units for history in reached]))
    seeds = listed([f"{history.valid_accuracy[-1]:.1%}" for history in reached])
    why = first_of(
        (
            choice.rule == "none",
            "The steps are as small as before, and there are eight times fewer: it has not got there.",
        ),
        (
            choice.rule == "linear" and choice.warmup_epochs == 0,
            f"The first steps are eight times as large, at a steep place: the loss leaps to {leap:.0f}, and "
            f"{silent:.0%} of the hidden units fall silent for ever. Small first steps would prevent that.",
        ),
        (
            choice.warmup_epochs >= 10,
            f"{choice.warmup_epochs} of 12 epochs are warm-up: little time is left at the full rate.",
        ),
        (
            choice.rule == "sqrt",
            "The steps are 2.8 times as large, and there are eight times fewer: on average they go a third of the way.",
        ),
        (True, "Some more epochs of warm-up, or fewer, may do."),
    )
    return f"loses accuracy: {kept:.1%} on average over six seeds ({seeds}), and {SMALL:.1%} at batch 128.\n{why}"
