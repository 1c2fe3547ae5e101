"""Random series of a metric, and the epoch after which Keras's or Lightning's own EarlyStopping ends on each.

`python stopping.py keras|lightning` prints the epochs as JSON: from 1, or 0 where none ends it.
"""

import json
import math
import random
import sys
from typing import Any

SEEDS = range(400)


def drawn(seed: int) -> tuple[dict[str, Any], bool, list[float]]:
    """The patience, min_delta and after_epoch of a rule, whether higher is better, and the values."""
    r = random.Random(seed)
    rule = {"patience": r.randint(1, 9), "min_delta": r.choice([0.0, 0.0625, 0.25]), "after_epoch": r.choice([0, 0, 3])}
    is_higher, level, values = r.random() < 0.5, 1.0, []
    for _ in range(30):
        level += r.gauss(0.05 if is_higher else -0.05, 0.1)
        values.append(round(level * 16) / 16)  # ties, exact in the float32 that Keras compares
    for at in r.sample(range(rule["after_epoch"] + 1, 30), r.choice([0, 0, 3])):
        values[at] = math.nan  # not the first that counts: Keras takes it as the best for ever
    return rule, is_higher, values


def by_keras(patience: int, min_delta: float, after_epoch: int, is_higher: bool, values: list[float]) -> int:
    import keras

    mode = "max" if is_higher else "min"
    early = keras.callbacks.EarlyStopping(
        monitor="valid", patience=patience, min_delta=min_delta, mode=mode, start_from_epoch=after_epoch
    )
    early.set_model(model := keras.Model())
    model.stop_training = False
    early.on_train_begin()
    for epoch, value in enumerate(values):
        early.on_epoch_end(epoch, {"valid": value})
        if model.stop_training:
            return epoch + 1
    return 0


def by_lightning(patience: int, min_delta: float, after_epoch: int, is_higher: bool, values: list[float]) -> int:
    import torch
    from lightning.pytorch.callbacks import EarlyStopping

    mode = "max" if is_higher else "min"
    early = EarlyStopping("valid", min_delta, patience, mode=mode, check_finite=False)
    early.best_score = early.best_score.double()
    for epoch, value in enumerate(values[after_epoch:], after_epoch):
        if early._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64))[0]:
            return epoch + 1
    return 0


if __name__ == "__main__":
    ends = {"keras": by_keras, "lightning": by_lightning}[sys.argv[1]]
    print(json.dumps([ends(**rule, is_higher=up, values=values) for rule, up, values in map(drawn, SEEDS)]))
