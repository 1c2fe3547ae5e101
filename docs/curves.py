"""Draws a run's curves: `python docs/curves.py runs/digits/2026-01-01_12-00-00 curves.png` (needs matplotlib)."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(run: str, picture: str) -> None:
    """Loss and accuracy, training and validation, over the epochs of one run."""
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    numbers = [record["epoch"] for record in epochs]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, key, label, scale in zip(
        axes, ("loss", "acc1"), ("loss (cross-entropy)", "accuracy (top-1)"), ("log", "linear"), strict=True
    ):
        for part, name, colour in (("train", "training", "#0072B2"), ("valid", "validation", "#D55E00")):
            axis.plot(numbers, [record[f"{part}_{key}"] for record in epochs], "o-", color=colour, label=name)
        axis.set(xlabel="epoch", ylabel=label, yscale=scale)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[1].axhline(0.95, color="0.4", linestyle=":", linewidth=1)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
