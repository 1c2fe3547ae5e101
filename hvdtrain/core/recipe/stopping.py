"""Early stopping, and by which metric the best checkpoint is chosen: the keys, and the decision after each epoch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from hvdtrain.core.values import Count, Number, check_name
from hvdtrain.core.wording import counted, nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import quoted

LOWER = re.compile(
    r"(^|[^a-z])(r?mse|s?mape|mae|rmsle|err|nll|b?ce|ece|perplexity|ppl|wer|cer|fid|brier|deviance|divergence|kld?|"
    r"distance|hinge|bpc|bpb|lpips)([^a-z]|$)|loss|error|entropy"
)
HIGHER = re.compile(
    r"(^|[^a-z])(acc|auc|auroc|auprc|ap|map|f|m?iou|jaccard|dice|r|precision|recall|bleu|rouge|p?snr|ssim|score|top|"
    r"kappa|mcc|specificity|sensitivity|correlation|pearson|spearman|hits?)[0-9]*([^a-z]|$)|accuracy|score"
)
"""Names of metrics that are better where they are lower, else of those that are better where they are higher."""
Name = Annotated[str, Field(max_length=200)]
DIRECTIONS = {"lowest": False, "highest": True}
VALID = "valid_"


class Stopping(BaseModel):
    """When a run ends early, and which checkpoint is its best."""

    best: Name | None = Field(
        None,
        description="the validation metric that is highest, or lowest, in the best checkpoint, as f1 or lowest f1; "
        "left out: acc1, else the loss; with --evaluate, without a name: of the best checkpoint",
    )
    stop_patience: Number | None = Field(
        None, description="early stopping: epochs without a better stop_metric, after which the run ends"
    )
    stop_metric: Name | None = Field(
        None, description="early stopping: a validation metric, as loss or highest f1; left out: that of best"
    )
    stop_min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="early stopping: a value is better where it is so by more than this"
    )
    stop_after_epoch: Count = Field(0, description="early stopping: so many epochs at the beginning do not count")


class Metric(NamedTuple):
    """A metric by its name in metrics.jsonl, and whether it is better where it is higher."""

    name: str
    is_higher: bool

    def __str__(self) -> str:
        return f"{'highest' if self.is_higher else 'lowest'} {self.name}"

    def score(self, values: Mapping[str, float]) -> float | None:
        """The metric's value, negative where lower ones are better; None where it is no number."""
        value = values[self.name]
        return (value if self.is_higher else -value) if math.isfinite(value) else None


def is_higher_better(name: str) -> bool | None:
    """Whether a metric of this name is better where it is higher; None where the name does not show it."""
    name = name.lower().removeprefix(VALID).removeprefix("train_")
    return False if LOWER.search(name) else True if HIGHER.search(name) else None


def parsed(key: str, text: str) -> Metric:
    """The metric that a text names, as f1 or lowest f1. Raises RecipeError."""
    is_higher, name = _split(text)
    if is_higher is None:
        rule = f"{key} must say whether higher or lower is better"
        raise RecipeError(f"{rule}, got {quoted(text)}; write highest or lowest before it.")
    return Metric(name, is_higher)


def chosen(values: Mapping[str, float], metric: Metric | None, key: str) -> Metric:
    """The metric, or where None is given the accuracy, or else the loss, of a validation with these values. Raises
    RecipeError where it is not among them."""
    if metric is None:
        metric = Metric(f"{VALID}acc1", True)
        return metric if metric.name in values else Metric(f"{VALID}loss", False)
    if metric.name not in values:
        names = ", ".join(name.removeprefix(VALID) for name in values)
        raise RecipeError(f"{key} must be a metric of the validation ({names}), got {metric.name.removeprefix(VALID)}.")
    return metric


@dataclass(frozen=True)
class Patience:
    """The state of early stopping: the best value of a metric, the epoch that had it (from 1), the epochs since then,
    and whether that were too many."""

    metric: str = ""
    best: float | None = None
    epoch: int = 0
    waited: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Rule:
    """When a run ends early. A value is better, and the epochs are counted, as in Keras's and Lightning's
    EarlyStopping; one that is no number is not better."""

    patience: int
    metric: Metric | None
    min_delta: float = 0.0
    after_epoch: int = 0

    def observe(self, state: Patience, epoch: int, values: Mapping[str, float]) -> Patience:
        """The state after an epoch, counted from 1, whose validation had these values."""
        metric = chosen(values, self.metric, "stop_metric")
        if state.metric != str(metric):
            state = Patience(str(metric))
        if epoch <= self.after_epoch:
            return state
        score, sign = metric.score(values), 1 if metric.is_higher else -1
        if score is not None and (state.best is None or score - self.min_delta > sign * state.best):
            return Patience(state.metric, values[metric.name], epoch)
        return self.judged(replace(state, waited=state.waited + 1))

    def judged(self, state: Patience) -> Patience:
        """The state, which is over where this rule, maybe another one than before, waits no longer."""
        is_same = self.metric is None or state.metric == str(self.metric)
        return replace(state, is_over=is_same and state.waited >= self.patience)

    def why(self, state: Patience) -> str:
        """Why the run is over, in one line; "" where it is not."""
        if not state.is_over:
            return ""
        direction, _, name = state.metric.partition(" ")
        if state.best is None:
            return f"{name} has been no number in {counted(state.waited, 'epoch')}"
        than = f"{'above' if DIRECTIONS[direction] else 'below'} {state.best:.4g}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{name} has not been {than}{by} since epoch {state.epoch}; best is kept"


def best_of(r: Any) -> Metric | None:
    """The metric by which a recipe's best checkpoint is chosen; None where it names none."""
    return _of_recipe("best", r.best, r) if r.best is not None else None


def rule_of(r: Any) -> Rule | None:
    """The recipe's rule; None where it has none."""
    if r.stop_patience is None:
        return None
    metric = best_of(r) if r.stop_metric is None else _of_recipe("stop_metric", r.stop_metric, r)
    return Rule(r.stop_patience, metric, r.stop_min_delta, r.stop_after_epoch)


def check(r: Any) -> None:
    """Raises RecipeError where a metric is none of the recipe's, or its direction is not known."""
    known = ["loss", "acc1", *r.metrics]
    for key in ("best", "stop_metric"):
        if (text := getattr(r, key)) is None:
            continue
        check_name(text)
        name = _split(text)[1]
        # What a step returns is not known before.
        if not r.step and name not in known and name.removeprefix(VALID) not in known:
            rule = f"{key} must be a metric of the recipe ({', '.join(known)}), maybe after highest or lowest"
            near = nearest(name, known) or " Another one is named below `metrics` first."
            raise RecipeError(f"{rule}, got {quoted(text)}.{near}")
        _of_recipe(key, text, r)
    for key in ("stop_metric", "stop_min_delta", "stop_after_epoch"):
        if r.stop_patience is None and (value := getattr(r, key)):
            raise RecipeError(f"{key} {value} needs stop_patience, the epochs without a better value; give it.")


def lines(r: Any) -> list[str]:
    """What the plan says of it."""
    best, rule, found = best_of(r), rule_of(r), []
    if best:
        found.append(f"best        the checkpoint with the {best}")
    if rule:
        name, than = f"{VALID}acc1 (or else {VALID}loss)", "better than"
        if rule.metric:
            name, than = rule.metric.name, "above" if rule.metric.is_higher else "below"
        by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        begin = f"; the first {counted(rule.after_epoch, 'epoch')} do not count" if rule.after_epoch else ""
        without = f"without a {name} {than} the best before{by}"
        found.append(f"stop        early, after {counted(rule.patience, 'epoch')} {without}{begin}")
    return found


def _of_recipe(key: str, text: str, r: Any) -> Metric:
    """The metric that a key names, under the name that validation has for it."""
    name, is_higher = parsed(key, text)
    return Metric(VALID + (name if name in r.metrics else name.removeprefix(VALID)), is_higher)


def _split(text: str) -> tuple[bool | None, str]:
    """Whether higher is better, as the text or the metric's name says it, and that name."""
    first, _, rest = text.partition(" ")
    return (DIRECTIONS[first], rest) if rest and first in DIRECTIONS else (is_higher_better(text), text)
