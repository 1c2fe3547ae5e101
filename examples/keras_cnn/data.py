"""scikit-learn's 1,797 scanned digits as arrays."""

import numpy as np
from sklearn.datasets import load_digits

Arrays = tuple[np.ndarray, np.ndarray]


def digits(valid: int = 360) -> tuple[Arrays, Arrays]:
    """(images [n, 8, 8, 1] in [0, 1], labels [n]) to train on, and `valid` others to validate with."""
    scans = load_digits()
    images, labels = scans.images[..., None].astype(np.float32) / 16, scans.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    return (images[valid:], labels[valid:]), (images[:valid], labels[:valid])
