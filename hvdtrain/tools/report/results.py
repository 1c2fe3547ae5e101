"""A run's result beside what it should be: the values that its recipe expects, what guessing gives, numbers at all."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain import untrusted
from hvdtrain.core import recipe as recipes
from hvdtrain.core.recipe import stopping
from hvdtrain.core.recipe.keys import CROSS_ENTROPIES
from hvdtrain.core.recipe.stopping import DIRECTIONS, VALID
from hvdtrain.core.wording import counted
from hvdtrain.record.history import Column
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.report import origin
from hvdtrain.tools.report.model import Outcome, number, percent

HARMLESS = {
    *("name", "expected", "best", "data_dir", "cache_dir", "decoder", "workers", "device", "data_on_device"),
    *("log_every_steps", "checkpoint_every_epochs", "checkpoint_every_steps", "mtbf_hours", "keep_checkpoints"),
    *("check_replicas_every_steps", "channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "xla", "profile"),
    *("fusion_threshold_mb", "cycle_time_ms", "autotune", "horovod_timeline", "train_crop", "valid_resize"),
}
"""Keys that do not change the result: a run that differs in them from its recipe should still reach what that
expects."""
TWICE = 2.0
"""Accuracies are the same within so many of their standard errors."""
LEAST_TOLERANCE = 0.005
FAR = {True: 6, False: 15}
"""An accuracy, or another metric, is too good where it is better than expected by so many times its tolerance."""
GUESSES = {"au(ro)?c": 0.5, "r2|f1|m?iou|jaccard|dice|mcc|kappa": 0.0}
"""What guessing gives of a metric, by the words of its name."""
CLEARLY = 1.02
"""A loss is worse than guessing where it is so many times what guessing gives."""
ROSE = 0.1
JUMPED = 1.5
"""The loss has jumped where it is so many times what it was before a resume."""
MANY, OFTEN = 100, 5
"""Of fewer validation examples, and of a metric with the same value after so many epochs, the report says so."""
SLOWED = 0.6
"""A run has slowed down where it fell to this part of its throughput."""
WORTH_SECONDS = 30.0
"""Of a run that trained for less, no fall is named: some log lines of a second each are chance."""
SEGMENTS, SHORTEST = 60, 3
"""The intervals in which a fall of the throughput is searched for, and of how many one has at least."""
BEST = "best_"
"""Before the name of the metric that decides on the best checkpoint, in results."""
AGAIN = "Repeat it with another --seed: one run may be chance, two are not."
UNLEARNED = "Train longer, or look at the LR, the labels and the loss."
Fault = tuple[str, str]
"""A sentence on what is wrong with a result, and what to do about it."""


def judged(run: RecordedRun, *, is_finished: bool) -> tuple[Outcome, list[str], str]:
    """Whether the last metrics are as expected, sentences on them, and a remedy; "" where none is known, or needed.
    The metrics of a run that has not trained to its end are not compared."""
    expected, unfair = (_expected(run), _unfair(run)) if is_finished else ({}, ())
    finals = {name: value for name in expected if (value := run.metrics.final(name)) is not None}
    results = [_compared(name, value, expected[name], run, unfair) for name, value in finals.items()]
    faults = lost(run, ends=True)
    if is_finished:
        faults += [*((text, UNLEARNED) for text in _untrained(run)), *_worsened(run)]
    sentences, accuracy = [text for _, (text, _) in results], run.metrics.final("valid_acc1")
    if accuracy is not None and math.isfinite(accuracy) and "valid_acc1" not in finals:
        sentences.append(f"Validation accuracy {accuracy:.4f} after epoch {run.metrics.last_epoch:,}.")
    sentences += [text for text, _ in faults]
    missing = ", ".join(words(name) for name in expected if name not in finals)
    if is_finished and (missing or not expected):
        why = f"the run has recorded no {missing}" if missing else "no expected value of a metric is known"
        sentences.append(f"Nothing to compare with: {why}.")
    faults += [fault for outcome, fault in results if outcome == "not as expected"]
    is_met = results and not missing and all(outcome == "as expected" for outcome, _ in results)
    outcome: Outcome = "not as expected" if faults else "as expected" if is_met else "nothing to compare with"
    return outcome, sentences, faults[0][1] if faults else ""


def _compared(
    name: str, value: float, expected: float, run: RecordedRun, unfair: Sequence[str]
) -> tuple[Outcome, Fault]:
    """Whether a metric is as expected but for chance, a sentence on it, and the remedy where it is not.

    Where it is not known which is better, both directions are worse. `unfair`: the keys that differ from the recipe's,
    so that the run need not reach that value.
    """
    what = f"{words(name)} {value:.4f}, expected {expected:.4g}".replace(" nan", " NaN")
    last = run.metrics.epochs.get(name, Column()).last_x
    epochs = int(min(run.epochs_made, untrusted.whole(run.recipe.get("epochs"), 1) or math.inf))
    is_accuracy, higher = _is_accuracy(name), is_higher_better(name)
    why = f"this run differs from the recipe in {', '.join(unfair)}" if unfair else ""
    why = why or (f"after epoch {last:,.0f}: that of epoch {epochs:,} is not recorded" if last < epochs else "")
    if why or (is_accuracy and (value > 1) != (expected > 1)):
        return "nothing to compare with", (f"{what}, but {why or 'one of the two is in percent'}.", "")
    if not math.isfinite(value):
        return "not as expected", (f"{what}.", AGAIN)
    off, tolerance = value - expected, _tolerance(name, expected, run)
    if abs(off) <= tolerance:
        return "as expected", (f"{what}: as it should be.", "")
    than = "chance" if is_accuracy else "5 % of it"
    side = f"{what}: {'higher' if off > 0 else 'lower'} by more than {than} ({tolerance:.3g})"
    if higher is (off > 0) and abs(off) > FAR[is_accuracy] * tolerance:
        leak = "Look for validation examples among the training examples."
        return "not as expected", (f"{side}, which is too good to be believed without a look.", leak)
    better = {None: "; it is not known which is better", off > 0: ", which is better"}.get(higher, "")
    return "as expected" if higher is (off > 0) else "not as expected", (f"{side}{better}.", AGAIN)


def doubts(run: RecordedRun) -> list[str]:
    """What casts doubt on metrics in which nothing is wrong."""
    examples, found = untrusted.whole(run.plan.get("valid_examples"), 1), []
    if examples and examples < MANY and any(map(_is_accuracy, run.metrics.epochs)):
        few = f"of {counted(examples, 'validation example')} each is {1 / examples:.2g} of an accuracy"
        found.append(f"A difference may be chance: {few}.")
    for name, column in run.metrics.epochs.items():
        same = column.thinned()[:, 2:4]
        if column.count >= OFTEN and is_higher_better(name, run) is not None and np.ptp(same) == 0:
            found.append(f"{words(name)} is {number(same[0, 0])} after each of {column.count:,} epochs.")
    return found


def lost(run: RecordedRun, *, ends: bool) -> list[Fault]:
    """Each metric that is not a number at the end, or that was none before."""
    columns = [("epoch", name, column) for name, column in run.metrics.epochs.items()]
    # Of steps the loss alone: the norm of scaled gradients may overflow.
    columns.append(("step", "loss", run.metrics.steps.get("loss", Column())))
    when = "is NaN at the end" if ends else "was NaN for a while"
    remedy = "Find out which validation examples give NaN; in half precision, try --precision float32."
    if diverged(run):
        remedy = "Do not use the last weights: lower the LR, warm it up, or clip the gradients (--clip-norm)."
    found = []
    for unit, name, column in columns:
        if column.lost and math.isnan(column.last or 0.0) == ends:
            rows, _, best = _best(run, column, name)
            which = f"; the best is {number(rows[best, 1])} at {unit} {rows[best, 0]:,.0f}" if len(rows) else ""
            found.append((f"{words(name)} {when}: {lacks(column, unit)}{which}.", remedy))
    return found


def diverged(run: RecordedRun) -> bool:
    """Whether the training loss is not a number at the end."""
    finals = [run.metrics.final(name) or 0.0 for name in ("train_loss", "loss")]
    return run.error.startswith("the training loss is") or any(map(math.isnan, finals))


def lacks(column: Column, unit: str) -> str:
    """How many values of a metric are not finite, and where they begin; "" where all are."""
    first = f", the first at {unit} {column.first_lost:,.0f}"
    return f"{column.lost:,} of {column.count:,} values are NaN{first}" if column.lost else ""


def _best(run: RecordedRun, column: Column, name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """The finite points of a metric, its values with their sign so that lower ones are better, and the index of the
    last best one; no point where it is not known which is better."""
    rows, higher = column.thinned(), is_higher_better(name, run)
    rows = rows[np.isfinite(rows[:, 1])][: None if higher is not None else 0]
    worse = -rows[:, 1] if higher else rows[:, 1]
    return rows, worse, len(rows) - 1 - int(worse[::-1].argmin()) if len(rows) else 0


def chosen(run: RecordedRun) -> str:
    """The name in metrics.jsonl of the metric that decides on the best checkpoint; "" where none was recorded."""
    named = [untrusted.text(run.program.get(key), 60) for key in ("highest", "lowest")]
    of_recipe = untrusted.text(run.recipe.get("best"), 60).rpartition(" ")[2]
    names = [*named, of_recipe, f"{VALID}{of_recipe}", "valid_acc1", "valid_loss"]
    return next((name for name in names if name and name in run.metrics.epochs), "")


def best(run: RecordedRun) -> tuple[str, float, int] | None:
    """The metric that decides on the best checkpoint, its best value, and the epoch of that; None for none."""
    name = chosen(run)
    rows, _, at = _best(run, run.metrics.epochs.get(name, Column()), name)
    return (name, float(rows[at, 1]), round(rows[at, 0])) if len(rows) else None


def _worsened(run: RecordedRun) -> list[Fault]:
    """Each metric that was better, by more than chance, and than it ever fell back and recovered."""
    found, command = [], origin.export(run)
    remedy = "Train for fewer epochs, or with a lower LR."
    if "--best" in command:
        remedy = f"Take the best checkpoint: {command}"
    for name, column in run.metrics.epochs.items():
        rows, worse, best = _best(run, column, name)
        if column.lost or not len(rows) or (name.startswith("train_") and name != "train_loss"):
            continue
        setback = (worse - np.minimum.accumulate(worse))[: best + 1].max()
        gain, least = worse[0] - worse[best], abs(worse[best])  # what is small beside both may be so by chance
        small = 0.0 if _is_accuracy(name) else min(0.2 * gain, max(0.01 * gain, least))
        if worse[-1] - worse[best] > max(2 * _tolerance(name, rows[best, 1], run), setback, small):
            was = f"{words(name)} was {number(rows[best, 1])} at epoch {rows[best, 0]:,.0f}"
            found.append((f"{was}, and is {number(rows[-1, 1])} at the end.", remedy))
    return found


def slowed(run: RecordedRun) -> Iterator[str]:
    """A sentence on a throughput that swings, or on the interval in which it was lowest, where that was much lower
    than before."""
    trained = [launch.phases.get("training", 0.0) for launch in run.launches]
    rows = run.metrics.steps.get("examples_per_second", Column()).thinned()[1:]  # the first holds the warm-up
    if len(rows) <= 2 * SHORTEST or (trained and sum(trained) < WORTH_SECONDS):
        return
    low, high = np.percentile(rows[:, 1], [25, 75])
    if low < SLOWED * high and np.count_nonzero(np.diff(rows[:, 1] > (low + high) / 2)) > len(rows) / 4:
        yield f"Throughput swings between {number(low)} and {number(high)} examples/s."
        return
    parts = np.array_split(rows, min(SEGMENTS, len(rows)))
    speed, begins = np.array([max(np.median(part[:, 1]), 1e-9) for part in parts]), [part[0, 0] for part in parts]
    found, most = "", 0.0
    for begin in range(SHORTEST, len(parts) - SHORTEST + 1):
        before = np.median(speed[:begin])
        gains = np.cumsum(np.log(before / speed[begin:]) + math.log(SLOWED) / 2)
        end = begin + SHORTEST + int(gains[SHORTEST - 1 :].argmax())
        during = np.median(speed[begin:end])
        if during < SLOWED * before and gains[end - begin - 1] > most:
            most, until = gains[end - begin - 1], f", until step {begins[end]:,.0f}" if end < len(parts) else ""
            fell = f"Throughput fell from {number(before)} to {number(during)} examples/s"
            found = f"{fell} ({percent(during / before - 1)}) at step {begins[begin]:,.0f}{until}."
    if found:
        yield found


def jumped(run: RecordedRun) -> Iterator[str]:
    """A sentence on each resume after which the loss was much higher than before."""
    rows = run.metrics.steps.get("loss", Column()).thinned()
    rows = rows[np.isfinite(rows[:, 1])]
    for step in sorted({launch.first_step for launch in run.launches} - {0}):
        at = int(np.searchsorted(rows[:, 0], step, side="right"))
        before, after = rows[max(at - SHORTEST, 0) : at, 1], rows[at : at + SHORTEST, 1]
        if len(before) == len(after) == SHORTEST and after.min() > JUMPED * before.max() > 0:
            values = f"{number(np.median(before))} to {number(np.median(after))}"
            yield f"The loss jumped from {values} at step {step:,}, where the run resumed."


def noise(run: RecordedRun) -> Iterator[str]:
    """A sentence on up to how many examples a batch is useful, by the noise of the gradients in the run's second half,
    and how many ranks that is."""
    of_steps, whole = run.metrics.steps, untrusted.whole(run.plan.get("global_batch"), 1)
    rows = [of_steps[name].thinned()[:, 1] for name in ("gradient_trace", "gradient_square") if name in of_steps]
    if len(rows) < 2 or not whole:
        return
    trace, square = (float(np.nanmean(each[len(each) // 2 :])) for each in rows)
    if not (trace > 0 and square > 0 and math.isfinite(scale := trace / square)):
        yield "The gradient's noise is so large that its mean cannot be told from 0: a much larger batch is useful."
        return
    local = whole / ((run.launch and run.launch.ranks) or 1)
    ranks = counted(max(1, round(scale / local)), "rank")
    most = f"{scale:,.0f} examples, as on {ranks} of {local:g}"
    yield f"By the noise of the gradients a batch is useful up to about {most}; this run's has {whole:,}."


def words(name: str) -> str:
    """A metric's name as people write it: "validation accuracy" for valid_acc1."""
    named = {"acc1": "accuracy", "acc5": "top-5 accuracy", "bits_per_byte": "bits per byte"}
    if name.startswith(BEST):
        return f"best {words(name.removeprefix(BEST))}"
    split, _, rest = name.partition("_")
    kind = {"valid": "validation ", "train": "training "}.get(split)
    return f"{kind}{named.get(rest, rest)}" if kind and rest else named.get(name, name)


def is_higher_better(name: str, run: RecordedRun | None = None) -> bool | None:
    """Whether a metric is better where it is higher, by what the program or recipe named as its best checkpoint's
    highest or lowest, else by the metric's name; None where neither shows it."""
    chosen = [run.program.get("highest"), run.program.get("lowest")] if run else []
    if name in chosen:
        return chosen.index(name) == 0
    direction, _, named = untrusted.text(run.recipe.get("best"), 300).partition(" ") if run else ("", "", "")
    if named and name.removeprefix(VALID) == named.removeprefix(VALID) and direction in DIRECTIONS:
        return DIRECTIONS[direction]
    return stopping.is_higher_better(name)


def _is_accuracy(name: str) -> bool:
    return name.endswith(("acc", "acc1", "acc5", "accuracy"))


def _expected(run: RecordedRun) -> Mapping[str, float]:
    """The values that the recipe expects."""
    given = untrusted.mapping(run.recipe.get("expected")) or untrusted.mapping(origin.shipped(run).get("expected"))
    pairs = [(untrusted.text(name, 60), untrusted.number(goal)) for name, goal in list(given.items())[:10]]
    return {name: goal for name, goal in pairs if goal is not None}


def _unfair(run: RecordedRun) -> tuple[str, ...]:
    """The keys that differ from the recipe which expects something: the shipped one, or the user's own."""
    flags = [str(word).partition("=")[0] for word in origin.words_of(run)]
    given = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")} & recipes.Recipe.model_fields.keys()
    theirs: Mapping[str, Any] = origin.shipped(run)
    own = untrusted.mapping(run.recipe.get("expected"))
    if "expected" in given or (own and theirs and own != theirs.get("expected")):
        return ()  # the run's own expectation
    keys = [key for key, _, _ in origin.differences(run)] if theirs else sorted(given)
    return tuple(key for key in keys if key not in HARMLESS)


def _tolerance(name: str, expected: float, run: RecordedRun) -> float:
    """How far an accuracy may be off by chance; for other metrics a twentieth."""
    if not _is_accuracy(name) or not 0 <= expected <= 1:
        return abs(expected) / 20
    examples = untrusted.whole(run.plan.get("valid_examples"), 1) or 1000
    return max(LEAST_TOLERANCE, TWICE * math.sqrt(expected * (1 - expected) / examples))


def _untrained(run: RecordedRun) -> Iterator[str]:
    """Sentences on metrics that are no better than guessing, on a training loss that has not changed, or that of a
    recipe which has risen."""
    columns, of_steps = run.metrics.epochs, run.metrics.steps.get("loss", Column()).thinned()
    for (name, column), (pattern, guess) in itertools.product(columns.items(), GUESSES.items()):
        is_named = re.search(rf"(^|[^a-z])({pattern})([^a-z0-9]|$)", name.lower()) and not name.startswith("train_")
        if (
            is_named
            and is_higher_better(name, run)
            and column.last is not None
            and column.last <= guess + LEAST_TOLERANCE
        ):
            yield f"{words(name)} {column.last:.4f} is no better than guessing ({guess:g})."
    classes = run.launch.classes if run.launch else None
    if classes and run.recipe.get("dataset") != "synthetic":  # whose labels are random
        split = "valid" if {"valid_loss", "valid_acc1"} & columns.keys() else "train"
        accuracy, loss = run.metrics.final(f"{split}_acc1"), run.metrics.final(f"{split}_loss")
        chance, of, entropy = 1 / classes, f", of {classes:,} classes.", math.log(classes)
        if accuracy is not None and accuracy <= chance + _tolerance("acc1", chance, run):
            yield f"{words(f'{split}_acc1')} {accuracy:.4f} is no better than guessing ({chance:.4f}){of}"
        is_entropy = run.recipe and run.recipe.get("loss") in {None, *CROSS_ENTROPIES} and not run.recipe.get("step")
        if is_entropy and loss is not None and loss > CLEARLY * entropy:
            yield f"{words(f'{split}_loss')} {loss:.4f} is worse than guessing ({entropy:.4f}){of}"
        if is_entropy and loss is not None and loss < 0:
            yield f"{words(f'{split}_loss')} {loss:.4f} is negative, which no cross-entropy is."
    of_epochs = columns.get("train_loss", Column()).thinned()[:, 1]
    if len(of_steps) >= SHORTEST and np.nanmax(of_steps[:, 3]) - np.nanmin(of_steps[:, 2]) <= 1e-6 * abs(
        of_steps[0, 1]
    ):
        yield f"The training loss is {number(of_steps[0, 1])} from the beginning to the end: nothing was learned."
    elif run.recipe and len(of_epochs) > 1 and of_epochs[-1] - of_epochs[0] > ROSE * abs(of_epochs[0]):
        yield f"The training loss has risen from {number(of_epochs[0])} to {number(of_epochs[-1])}."
