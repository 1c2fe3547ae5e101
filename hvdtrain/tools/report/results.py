"""A run's result beside what it should be: the values that its recipe expects, what guessing gives, numbers at all."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain import untrusted
from hvdtrain.core import recipe as recipes
from hvdtrain.core.user_code import CROSS_ENTROPIES
from hvdtrain.record.history import Column
from hvdtrain.record.reader import Run
from hvdtrain.tools.report import origin
from hvdtrain.tools.report.model import Outcome, number, percent

HARMLESS = {
    *("name", "expected", "data_dir", "cache_dir", "decoder", "workers", "device", "data_on_device"),
    *("log_every_steps", "checkpoint_every_epochs", "checkpoint_every_steps", "mtbf_hours", "keep_checkpoints"),
    *("guard_every_steps", "channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "xla", "profile"),
    *("fusion_threshold_mb", "cycle_time_ms", "autotune", "horovod_timeline", "train_crop", "valid_resize"),
}
"""Keys that do not change the result: a run that differs in them from its recipe should still reach what that
expects."""
LOWER = re.compile(
    r"(^|[^a-z])(r?mse|s?mape|mae|rmsle|err|nll|b?ce|ece|perplexity|ppl|wer|cer|fid|brier|deviance|divergence|kld?|"
    r"distance|hinge|bpc|bpb|lpips)([^a-z]|$)|loss|error|entropy"
)
HIGHER = re.compile(
    r"(^|[^a-z])(acc|auc|auroc|auprc|ap|map|f|m?iou|jaccard|dice|r|precision|recall|bleu|rouge|p?snr|ssim|score|top|"
    r"kappa|mcc|specificity|sensitivity|correlation|pearson|spearman|hits?)[0-9]*([^a-z]|$)|accuracy|score"
)
"""Names of metrics that are better where they are lower, else of those that are better where they are higher."""
TWICE = 2.0
"""Accuracies are the same within so many of their standard errors."""
LEAST_TOLERANCE = 0.005
CLEARLY = 1.02
"""A loss is worse than guessing where it is so many times what guessing gives."""
ROSE = 0.1
SLOWED = 0.6
"""A run has slowed down where it fell to this part of its throughput."""
WORTH_SECONDS = 30.0
"""Of a run that trained for less, no fall is named: some log lines of a second each are chance."""
SEGMENTS, SHORTEST = 60, 3
"""The intervals in which a fall of the throughput is searched for, and of how many one has at least."""


def judged(run: Run) -> tuple[Outcome, tuple[str, ...]]:
    """Whether the final metrics of a run that trained to its end are as expected, with sentences on them."""
    expected, unfair = _expected(run), _unfair(run)
    finals = {name: value for name in expected if (value := run.metrics.final(name)) is not None}
    results = [_compared(name, value, expected[name], run, unfair) for name, value in finals.items()]
    wrong = [*lost(run, ends=True), *_guessed(run), *_unlearned(run)]
    sentences = (*(sentence for _, sentence in results), *plain(run, finals), *wrong)
    if wrong or any(is_worse for is_worse, _ in results):
        return "not as expected", sentences
    if results:
        return "nothing to compare with" if unfair else "as expected", sentences
    missing = ", ".join(map(words, expected))
    why = f"the run has recorded no {missing}" if missing else "no expected value of a metric is known"
    return "nothing to compare with", (*sentences, f"Nothing to compare with: {why}.")


def _compared(name: str, value: float, expected: float, run: Run, unfair: Sequence[str]) -> tuple[bool, str]:
    """Whether a metric is worse than expected, by more than chance, and a sentence on it.

    Where it is not known which is better, both directions are worse. `unfair`: the keys that differ from the recipe's,
    so that the run need not reach that value.
    """
    what = f"{words(name)} {value:.4f}, expected {expected:.4g}".replace(" nan", " NaN")
    if unfair:
        return False, f"{what}, but this run differs from the recipe in {', '.join(unfair)}."
    if not math.isfinite(value):
        return True, f"{what}."
    off, tolerance, higher = value - expected, _tolerance(name, expected, run), is_higher_better(name)
    if abs(off) <= tolerance:
        return False, f"{what}: as it should be."
    than = "chance" if _is_fraction(name) else "5 % of it"
    side = f"{'higher' if off > 0 else 'lower'} by more than {than} ({tolerance:.3g})"
    better = {None: "; it is not known which is better", off > 0: ", which is better"}.get(higher, "")
    return higher is not (off > 0), f"{what}: {side}{better}."


def plain(run: Run, compared: Collection[str] = ()) -> list[str]:
    """The final accuracy, where it is not among the metrics that were compared."""
    value = run.metrics.final("valid_acc1")
    if value is None or not math.isfinite(value) or "valid_acc1" in compared:
        return []
    return [f"Validation accuracy {value:.4f} after epoch {run.metrics.last_epoch:,}."]


def remedy(run: Run, outcome: Outcome) -> str:
    """What to do about a result that is not as expected; "" where it is, or where there is none."""
    if lost(run, ends=True):
        if diverged(run):
            return "Do not use the last weights: lower the LR, warm it up, or clip the gradients (--clip-norm)."
        return "Find out which validation examples give NaN; in half precision, try --precision float32."
    if outcome != "not as expected":
        return ""
    if _guessed(run) or _unlearned(run):
        return "Train longer, or look at the LR, the labels and the loss."
    return "Repeat it with another --seed: one run may be chance, two are not."


def lost(run: Run, *, ends: bool) -> list[str]:
    """A sentence on each metric that is not a number at the end, or that was none before."""
    columns = [("epoch", name, column) for name, column in run.metrics.epochs.items() if column.lost]
    # Of steps the loss alone: the norm of scaled gradients may overflow.
    columns += [("step", "loss", column) for name, column in run.metrics.steps.items() if name == "loss"]
    when = "is NaN at the end" if ends else "was NaN for a while"
    return [
        f"{words(name)} {when}: {lacks(column, unit)}{_best(column, name, unit)}."
        for unit, name, column in columns
        if column.lost and math.isnan(column.last or 0.0) == ends
    ]


def diverged(run: Run) -> bool:
    """Whether the training loss is not a number at the end."""
    finals = [run.metrics.final(name) or 0.0 for name in ("train_loss", "loss")]
    return run.error.startswith("the training loss is") or any(map(math.isnan, finals))


def lacks(column: Column, unit: str) -> str:
    """How many values of a metric are not finite, and where they begin; "" where all are."""
    first = f", the first at {unit} {column.first_lost:,.0f}"
    return f"{column.lost:,} of {column.count:,} values are NaN{first}" if column.lost else ""


def _best(column: Column, name: str, unit: str) -> str:
    """The best finite value of a metric; "" where it is not known which is better."""
    rows, higher = column.thinned(), is_higher_better(name)
    rows = rows[np.isfinite(rows[:, 1])]
    if higher is None or not len(rows):
        return ""
    row, which = (rows[rows[:, 3].argmax()], 3) if higher else (rows[rows[:, 2].argmin()], 2)
    return f"; the best is {number(row[which])} at {unit} {row[0]:,.0f}"


def slowed(run: Run) -> str:
    """A sentence on the interval in which a run was slowest, where that was much slower than before; else ""."""
    trained = [launch.phases.get("training", 0.0) for launch in run.launches]
    rows = run.metrics.steps.get("examples_per_second", Column()).thinned()[1:]  # the first holds the warm-up
    if trained and sum(trained) < WORTH_SECONDS:
        return ""
    parts = np.array_split(rows, min(SEGMENTS, len(rows))) if len(rows) > 2 * SHORTEST else []
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
    return found


def words(name: str) -> str:
    """A metric's name as people write it: "validation accuracy" for valid_acc1."""
    named = {"acc1": "accuracy", "acc5": "top-5 accuracy"}
    split, _, rest = name.partition("_")
    kind = {"valid": "validation ", "train": "training "}.get(split)
    return f"{kind}{named.get(rest, rest)}" if kind and rest else named.get(name, name)


def is_higher_better(name: str) -> bool | None:
    """Whether a metric is better where it is higher; None where its name does not show it."""
    name = name.lower().removeprefix("valid_").removeprefix("train_")
    return False if LOWER.search(name) else True if HIGHER.search(name) else None


def _is_fraction(name: str) -> bool:
    return name.endswith(("acc1", "acc5", "accuracy"))


def _expected(run: Run) -> Mapping[str, float]:
    """The values that the recipe expects."""
    given = untrusted.mapping(run.recipe.get("expected")) or untrusted.mapping(origin.shipped(run).get("expected"))
    pairs = [(untrusted.text(name, 60), untrusted.number(goal)) for name, goal in list(given.items())[:10]]
    return {name: goal for name, goal in pairs if goal is not None}


def _unfair(run: Run) -> tuple[str, ...]:
    """The keys that differ from the recipe which expects something: the shipped one, or the user's own."""
    flags = [str(word).partition("=")[0] for word in origin.words_of(run)]
    given = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")} & recipes.Recipe.model_fields.keys()
    theirs: Mapping[str, Any] = origin.shipped(run)
    own = untrusted.mapping(run.recipe.get("expected"))
    if "expected" in given or (own and theirs and own != theirs.get("expected")):
        return ()  # the run's own expectation
    keys = [key for key, _, _ in origin.differences(run)] if theirs else sorted(given)
    return tuple(key for key in keys if key not in HARMLESS)


def _tolerance(name: str, expected: float, run: Run) -> float:
    """How far an accuracy may be off by chance; for other metrics a twentieth."""
    examples = untrusted.whole(run.plan.get("valid_examples"), 1)
    if not _is_fraction(name) or not 0 <= expected <= 1:
        return abs(expected) / 20
    return max(LEAST_TOLERANCE, TWICE * math.sqrt(expected * (1 - expected) / (examples or 1000)))


def _guessed(run: Run) -> list[str]:
    """A sentence where a classification is no better than guessing among its classes."""
    classes = run.launch.classes if run.launch else None
    if not classes or run.recipe.get("dataset") == "synthetic":  # whose labels are random
        return []
    split = "valid" if "valid_loss" in run.metrics.epochs or "valid_acc1" in run.metrics.epochs else "train"
    accuracy, loss = run.metrics.final(f"{split}_acc1"), run.metrics.final(f"{split}_loss")
    chance, found = 1 / classes, []
    if accuracy is not None and accuracy <= chance + _tolerance("acc1", chance, run):
        found.append(f"{words(f'{split}_acc1')} {accuracy:.4f} is no better than guessing ({chance:.4f})")
    is_entropy = run.recipe.get("loss") in {None, *CROSS_ENTROPIES} and not run.recipe.get("step")
    if is_entropy and loss is not None and loss > CLEARLY * math.log(classes):
        found.append(f"{words(f'{split}_loss')} {loss:.4f} is worse than guessing ({math.log(classes):.4f})")
    return [f"{text}, of {classes:,} classes." for text in found]


def _unlearned(run: Run) -> list[str]:
    """A sentence where the training loss has not changed, or a recipe's has risen."""
    of_epochs, of_steps = run.metrics.epochs.get("train_loss", Column()), run.metrics.steps.get("loss", Column())
    rows = of_steps.thinned()
    if len(rows) >= SHORTEST and np.nanmax(rows[:, 3]) - np.nanmin(rows[:, 2]) <= 1e-6 * abs(rows[0, 1]):
        return [f"The training loss is {number(rows[0, 1])} from the beginning to the end: nothing was learned."]
    first, last = of_epochs.thinned()[[0, -1], 1] if of_epochs.count > 1 else (math.nan, math.nan)
    if run.recipe and last - first > ROSE * abs(first):
        return [f"The training loss has risen from {number(first)} to {number(last)}."]
    return []
