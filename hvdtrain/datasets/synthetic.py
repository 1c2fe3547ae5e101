"""Random images and labels for speed measurements, where reading must cost next to nothing."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.base import Dataset, digest, require_positive

POOL = 256
POOL_BYTES = 2**27  # of large images there are fewer
MEAN, STD = 0.5, 0.28980
"""Of uniform bytes scaled to [0, 1]: std = sqrt((256^2 - 1) / 12) / 255."""


@dataclass(frozen=True, eq=False)
class Synthetic:
    """Sample i is entry i modulo the pool's size; there is no augmentation."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    examples: int

    def __len__(self) -> int:
        return self.examples

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        entries = indices % len(self.images)
        return self.images[entries], self.labels[entries]

    def digest(self) -> str:
        return digest(self.images, self.labels, np.array(self.examples))


def load(seed: int, image_size: int, classes: int, examples: int) -> Dataset:
    """`examples` images to train on and a tenth as many to validate with, all out of one small pool."""
    require_positive(image_size=image_size, classes=classes, examples=examples)
    shape = (image_size, image_size, 3)
    random = np.random.default_rng([seed])
    images = random.integers(
        256, size=(min(POOL, max(1, POOL_BYTES // math.prod(shape)), examples), *shape), dtype=np.uint8
    )
    labels = random.integers(classes, size=len(images), dtype=np.int64)
    train, valid = (Synthetic(images, labels, n) for n in (examples, max(1, examples // 10)))
    return Dataset("synthetic", train, valid, classes, shape, (MEAN,) * 3, (STD,) * 3)
