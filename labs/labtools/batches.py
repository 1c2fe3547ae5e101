"""Lab 4: images in epochs long enough for a batch of 2048, a grid of trainings, and their accuracies drawn."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from hvdtrain import datasets
from hvdtrain.datasets.base import default_data_dir
from hvdtrain.datasets.cifar100 import FOLDER
from labtools.scale import counted
from labtools.style import COLOURS, Look

Rule = Literal["none", "sqrt", "linear"]
Examples = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Images [n, channels, 8, 8], normalised, and their labels [n]."""

SIDE = 8
"""Pixels on a side of every image; larger images are averaged down to it."""
LOOKS: dict[Rule, Look] = {
    "none": Look(COLOURS["vermillion"], "o", ":"),
    "sqrt": Look(COLOURS["blue"], "s", "--"),
    "linear": Look(COLOURS["green"], "^", "-"),
}
"""How a rule's curve is drawn."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images to train on, shifted by up to a pixel, and images to validate with, as they are."""

    train: Examples
    valid: Examples
    repeats: int
    """How often an epoch sees each training image, every time shifted anew."""

    def __len__(self) -> int:
        """The number of examples of an epoch."""
        return len(self.train[1]) * self.repeats

    def batch(self, indices: NDArray[np.int64], draws: NDArray[np.float32]) -> Examples:
        """The examples of an epoch at these n indices; draws [n, 2], in [0, 1), say how far each is shifted.

        What a shift uncovers repeats the edge.
        """
        images = indices % len(self.train[1])
        down, across = (draws * 3).astype(np.int64).T
        return self._windows[images, :, down, across], self.train[1][images]

    @cached_property
    def _windows(self) -> NDArray[np.float32]:
        """Every training image at every shift, [n, channels, 3, 3, 8, 8]: a view."""
        padded = np.pad(self.train[0], ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        return np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(2, 3))


def digits() -> Images:
    """The 1,437 digits, eight times an epoch: 11,496 examples of 10 classes, enough for five batches of 2048."""
    dataset = datasets.load("digits")
    return Images(_examples(dataset, dataset.train, 10, 1), _examples(dataset, dataset.valid, 10, 1), repeats=8)


def cifar100(classes: int) -> Images | None:
    """The first classes of CIFAR-100, 500 examples each. Where it is missing: None, and how to get it is printed."""
    folder = default_data_dir()
    if not (folder / FOLDER).is_dir():
        print(f"{FOLDER} is not in {folder}: `python -m hvdtrain plan cifar100:bs128` fetches it (169 MB).")
        return None
    dataset = datasets.load("cifar100", data_dir=folder)
    return Images(
        _examples(dataset, dataset.train, classes, 3), _examples(dataset, dataset.valid, classes, 3), repeats=1
    )


def _examples(dataset: datasets.Dataset, split: datasets.Split, classes: int, channels: int) -> Examples:
    x, y = split.read(np.arange(len(split)), None)
    x, y = x[y < classes, ..., :channels], y[y < classes]
    block = x.shape[1] // SIDE
    small = x.reshape(len(x), SIDE, block, SIDE, block, channels).mean(axis=(2, 4)) / 255
    normalised = (small - dataset.mean[:channels]) / dataset.std[:channels]
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2), np.float32), y


@dataclass(frozen=True)
class Setting:
    """What differs between two trainings of a grid, but for the seed."""

    batch: int
    rule: Rule
    warmup_epochs: int


@dataclass(eq=False)
class History:
    """How one training went: the loss of the batch before every update, the accuracies after every epoch."""

    losses: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    valid_accuracy: list[float] = field(default_factory=list)
    silent_units: float = 0.0
    """The fraction of the last hidden layer's units that end at 0 for every training image."""


Results = Mapping[Setting, Sequence[History]]
"""The histories of each setting, one a seed."""


def grid(batches: Sequence[int], rules: Sequence[Rule], warmups: Sequence[int]) -> list[Setting]:
    """Every combination; of the first batch, at which all rules give the same LR, only the rule none."""
    return [
        Setting(batch, rule, warmup)
        for batch in batches
        for rule in (("none",) if batch == batches[0] else rules)
        for warmup in warmups
    ]


def train_all(train: Callable[[Setting, int], History], settings: Sequence[Setting], seeds: Sequence[int]) -> Results:
    """train(setting, seed) for every setting and seed, on every CPU one at a time."""
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        histories = list(counted(pool.map(lambda job: train(*job), jobs), "trainings", len(jobs)))
    return {setting: histories[index * len(seeds) : (index + 1) * len(seeds)] for index, setting in enumerate(settings)}


def accuracy(histories: Sequence[History]) -> float:
    """The validation accuracy after the last epoch, its mean over the seeds."""
    return float(np.mean([history.valid_accuracy[-1] for history in histories]))


def report(results: Results, named: Mapping[str, Setting]) -> None:
    """Prints each named setting's accuracy, its points below the first, and its silent units: means over the seeds."""
    small = accuracy(results[next(iter(named.values()))])
    print(f"{'batch':44s} accuracy  points lost  silent units")
    for label, setting in named.items():
        reached = accuracy(results[setting])
        silent = float(np.mean([history.silent_units for history in results[setting]]))
        print(f"{label:44s} {reached:8.1%}  {100 * (small - reached):11.1f}  {silent:12.0%}")


def curves(results: Results, named: Mapping[str, Setting]) -> None:
    """Training and validation accuracy over the epochs, side by side: a line for each named setting.

    A line is the mean over the seeds, the band around it reaches from the lowest to the highest.
    """
    figure, panels = plt.subplots(1, 2, figsize=(12, 6.5), sharey=True)
    for label, setting in named.items():
        training = [history.train_accuracy for history in results[setting]]
        validation = [history.valid_accuracy for history in results[setting]]
        _line(panels[0], training, _look(setting, results))
        _line(panels[1], validation, _look(setting, results), label)
    for title, axes in zip(("Training images", "Validation images"), panels, strict=True):
        axes.set(title=title, xlabel="Epochs", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=None))
    panels[0].set_ylabel("Accuracy / %")
    figure.legend(loc="outside lower center", ncols=2)


def first_losses(results: Results, named: Mapping[str, Setting], updates: int, classes: int) -> None:
    """The loss before each of the first updates, drawn as in `curves`, beside the loss of a guess."""
    figure, axes = plt.subplots()
    for label, setting in named.items():
        losses = [history.losses[:updates] for history in results[setting]]
        _line(axes, losses, _look(setting, results), label, first=0)
    axes.axhline(
        math.log(classes), color=COLOURS["purple"], linewidth=1.5, linestyle="-.", label=f"guessing: ln {classes}"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="Updates done", ylabel="Loss of the batch (cross-entropy)", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2)


def over_batch(results: Results) -> None:
    """The last validation accuracy over the batch size, a line a rule, without warm-up and with it side by side.

    A point is the mean over the seeds, its bar reaches from the lowest to the highest.
    """
    warmups = sorted({setting.warmup_epochs for setting in results})
    batches = sorted({setting.batch for setting in results})
    figure, panels = plt.subplots(1, len(warmups), figsize=(12, 6), sharey=True, squeeze=False)
    for warmup, axes in zip(warmups, panels[0], strict=True):
        for rule, look in LOOKS.items():
            every = [_histories(results, Setting(batch, rule, warmup)) for batch in batches]
            last = np.array([[history.valid_accuracy[-1] for history in histories] for histories in every])
            mean = last.mean(axis=1)
            reach = np.abs(np.stack([last.min(axis=1), last.max(axis=1)]) - mean)
            colour, marker, linestyle = look
            axes.errorbar(
                batches, mean, reach, color=colour, marker=marker, linestyle=linestyle, capsize=5, markersize=9,
                label=f"rule {rule}",
            )  # fmt: skip
        axes.set(title=f"Warm-up over {warmup} epochs" if warmup else "Without warm-up", xlabel="Batch / examples")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
    panels[0][0].set_ylabel("Validation accuracy after the last epoch / %")
    panels[0][0].yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panels[0][0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=None))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LOOKS))


def _histories(results: Results, setting: Setting) -> Sequence[History]:
    """At the smallest batch every rule gives the same LR, and `grid` has one for all."""
    return results.get(setting) or results[Setting(setting.batch, "none", setting.warmup_epochs)]


def _look(setting: Setting, results: Results) -> Look:
    if setting.batch == min(other.batch for other in results):
        return Look(COLOURS["black"], "D", "-")
    if setting.rule == "linear" and not setting.warmup_epochs:
        return Look(COLOURS["orange"], "v", "--")
    return LOOKS[setting.rule]


def _line(axes: Axes, values: Sequence[Sequence[float]], look: Look, label: str = "", first: int = 1) -> None:
    """The mean over the seeds of values [seeds, n] at first, first + 1, …, in a band from the lowest to the highest."""
    seeds = np.array(values)
    positions = np.arange(first, first + seeds.shape[1])
    colour, marker, linestyle = look
    axes.fill_between(positions, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.plot(positions, seeds.mean(axis=0), color=colour, marker=marker, linestyle=linestyle, label=label or None)
