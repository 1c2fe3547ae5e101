"""Draws docs/large_batch.png from runs/ENTRY-SEED and prints the table: `python figure.py runs figure.png`."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

CURVES = {  # entry of the recipe: label, colour, marker
    "small": ("batch 16, SGD", "#009E73", "o"),
    "lars": ("batch 128, LARS", "#0072B2", "s"),
    "sgd": ("batch 128, SGD", "#D55E00", "^"),
}


def accuracies(runs: Path, entry: str) -> np.ndarray:
    """Validation accuracy in percent of all seeds: [seeds, epochs]."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(runs.glob(f"{entry}-*/metrics.jsonl"))]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return np.array([[100 * record["valid_acc1"] for record in run if record["kind"] == "epoch"] for run in records])


def main(runs: str, picture: str) -> None:
    """Mean and range over the seeds: the curves as a picture, the last epoch as a table."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for entry, (label, colour, marker) in CURVES.items():
        values = accuracies(Path(runs), entry)
        epochs = np.arange(1, values.shape[1] + 1)
        axis.plot(epochs, values.mean(0), color=colour, marker=marker, markersize=4, label=label)
        axis.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        last = values[:, -1]
        print(f"| {label} | {last.mean():.1f} | {last.min():.1f} to {last.max():.1f} |")
    axis.set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
