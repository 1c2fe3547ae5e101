"""The 1,797 scanned digits of 8x8 pixels that come with scikit-learn (E. Alpaydin, C. Kaynak, UCI, 1998)."""

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from hvdtrain.datasets.base import Arrays, Dataset

MEAN, STD = 0.304926, 0.375712
CLASSES = 10
VALID_PER_CLASS = 36
SPLIT_SEED = 0


def load() -> Dataset:
    """1,437 digits to train on and 360 to validate with, 36 of each class: always the same ones.

    Not augmented: ResNet50 learned them in 8 epochs to 0.96 as they are, and to 0.93 with shifts of a
    pixel (one run each).
    """
    scans = load_digits()
    grey = (scans.images.astype(np.uint16) * 255 + 8) // 16
    images = np.repeat(grey[..., None], 3, axis=3).astype(np.uint8)
    labels = scans.target.astype(np.int64)
    train, valid = (Arrays(images[indices], labels[indices]) for indices in _split(labels))
    return Dataset("digits", train, valid, CLASSES, images.shape[1:], (MEAN,) * 3, (STD,) * 3)


def _split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    by_class = (shuffled[labels[shuffled] == label] for label in range(CLASSES))
    valid = np.concatenate([members[:VALID_PER_CLASS] for members in by_class])
    return np.setdiff1d(shuffled, valid), np.sort(valid)
