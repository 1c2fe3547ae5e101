"""The pictures over steps: loss, accuracy, LR, images/s, gradient norm, and what a user's own loop reports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hvdtrain.tools.report.metrics import Metrics
from hvdtrain.tools.report.model import Curve, Series
from hvdtrain.tools.report.thinning import Column

TITLES = {"acc1": "Accuracy", "lr": "Learning rate", "gradient_norm": "Gradient norm", "loss": "Loss"}
STEP_CURVES = {
    "lr": ("Learning rate", "LR"),
    "examples_per_second": ("Throughput", "examples/s"),
    "gradient_norm": ("Gradient norm", "norm"),
}
"""Of a step's record: name and label of the picture."""
SPLITS = ("train", "valid")
NOT_CURVES = {"loss", "seconds", "examples"}
"""Of an epoch's record; the loss has a picture of its own."""
MOST_CURVES = 12


def curves(metrics: Metrics, lr_derivation: str, steps_per_epoch: int | None) -> tuple[Curve, ...]:
    """In the order in which a reader wants them. Ends of epochs are placed by their step."""
    epochs = {name: _by_step(column.series(name), metrics, steps_per_epoch) for name, column in metrics.epochs.items()}
    found = [_loss(metrics.steps, epochs)]
    bases = [name.removeprefix("valid_").removeprefix("train_") for name in epochs]
    for base in dict.fromkeys(sorted(bases, key=lambda base: (base != "acc1", base))):
        if base not in NOT_CURVES:
            found.append(_of_epochs(base, metrics.steps, epochs))
    known = {*STEP_CURVES, "loss", *bases}
    for name, (title, label) in STEP_CURVES.items():
        if name in metrics.steps:
            note = lr_derivation if name == "lr" else ""
            found.append(Curve(title, "step", label, (metrics.steps[name].series(title),), note))
    others = [name for name in metrics.steps if name not in known]
    found += [Curve(name, "step", name, (metrics.steps[name].series("step"),)) for name in others]
    return tuple(curve for curve in found if curve.series)[:MOST_CURVES]


def _loss(steps: Mapping[str, Column], epochs: Mapping[str, Series]) -> Curve:
    series = [steps["loss"].series("training, log lines")] if "loss" in steps else []
    names = {"train_loss": "training, epochs", "valid_loss": "validation"}
    series += [replace(epochs[name], label=label) for name, label in names.items() if name in epochs]
    return Curve("Loss", "step", "loss", tuple(series), log=_spans_decades(series))


def _of_epochs(base: str, steps: Mapping[str, Column], epochs: Mapping[str, Series]) -> Curve:
    labels = {f"{split}_{base}": label for split, label in zip(SPLITS, ("training", "validation"), strict=True)}
    series = [steps[base].series("log lines")] if base in steps else []
    series += [
        replace(epochs[name], label=label) for name, label in {**labels, base: "epochs"}.items() if name in epochs
    ]
    title = TITLES.get(base, base)
    return Curve(title, "step", title.lower() if base in TITLES else base, tuple(series))


def _by_step(series: Series, metrics: Metrics, steps_per_epoch: int | None) -> Series:
    """Over steps in place of epochs, counted from 1."""
    each = steps_per_epoch or (metrics.last_step / metrics.last_epoch if metrics.last_epoch else 1.0)
    return replace(series, x=np.minimum(series.x * each, max(metrics.last_step, 1)))


def _spans_decades(series: Sequence[Series]) -> bool:
    """Whether a linear axis would hide most of it: all positive, and two decades from top to bottom."""
    values = np.concatenate([each.y for each in series]) if series else np.zeros(0)
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())
