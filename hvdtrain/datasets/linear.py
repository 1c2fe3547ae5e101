"""Points of y = 2x + noise, whose least-squares loss is near the noise's variance, 1/12."""

import numpy as np

from hvdtrain.datasets.base import Arrays, Dataset

POINTS = 1000
SLOPE = 2.0


def load(seed: int) -> Dataset:
    """1000 points to train on and 1000 others to validate with; x and noise uniform in [-.5, .5)."""
    return Dataset("linear", _points(seed, 0), _points(seed, 1), None, (1,), (), ())


def _points(seed: int, stream: int) -> Arrays:
    x, noise = np.random.default_rng([seed, stream]).random((2, POINTS, 1)) - 0.5
    return Arrays(x.astype(np.float32), (SLOPE * x + noise).astype(np.float32))
