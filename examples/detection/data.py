"""Noisy images of discs and squares, each with its box: what torchvision's detection models are trained with."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Shapes(Dataset):
    """Pairs (image [3, side, side], {"boxes": [shapes, 4] in pixels, "labels": [shapes], 1 a disc and 2 a square}) of
    one to three shapes."""

    def __init__(self, images: int, side: int, seed: int) -> None:
        self.images, self.side, self.seed = images, side, seed

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> Sample:
        rng, side = np.random.default_rng([self.seed, index]), self.side
        rows, columns = np.mgrid[:side, :side]
        image, boxes, labels = rng.normal(0.2, 0.05, (3, side, side)), [], []
        for _ in range(rng.integers(1, 4)):
            radius, label = int(rng.integers(side // 8, side // 4)), int(rng.integers(1, 3))
            row, column = rng.integers(radius, side - radius, 2)
            away = (
                np.hypot(rows - row, columns - column)
                if label == 1
                else np.maximum(abs(rows - row), abs(columns - column))
            )
            image[:, away <= radius] = rng.uniform(0.4, 1, (3, 1))
            boxes.append([column - radius, row - radius, column + radius, row + radius])
            labels.append(label)
        target = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}
        return torch.from_numpy(image).float(), target


def collate(samples: list[Sample]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Lists: images have as many boxes as they have."""
    return [image for image, _ in samples], [target for _, target in samples]


def load(images: int = 256, side: int = 96) -> tuple[Shapes, Shapes]:
    """The training set and the validation set."""
    return Shapes(images, side, seed=0), Shapes(images // 4, side, seed=1)
