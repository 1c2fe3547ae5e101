"""Noisy images of discs among rectangles; the discs are to be found."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Discs(Dataset):
    """Pairs (image [3, side, side], mask [1, side, side] of 0 and 1); image i is drawn of the seed and i alone."""

    def __init__(self, images: int, side: int, seed: int, augment: bool = False) -> None:
        self.images, self.side, self.seed, self.augment = images, side, seed, augment

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, mask = draw(np.random.default_rng([self.seed, index]), self.side)
        if self.augment and random.random() < 0.5:
            image, mask = image.flip(2), mask.flip(2)
        if self.augment:
            image = image + 0.05 * torch.randn(3, 1, 1)
        return image, mask


def draw(rng: np.random.Generator, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = np.mgrid[:side, :side]
    image, mask = rng.normal(0, 0.3, (3, side, side)), np.zeros((1, side, side))
    for shape in range(6):
        row, column = rng.integers(0, side, 2)
        radius = rng.integers(side // 12 + 1, side // 5)
        if is_disc := shape % 2 == 0:
            inside = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
        else:
            inside = (abs(rows - row) <= radius) & (abs(columns - column) <= radius)
        image[:, inside] = rng.uniform(-1, 1, (3, 1)) + rng.normal(0, 0.3, (3, inside.sum()))
        mask[0, inside] = is_disc
    return torch.from_numpy(image).float(), torch.from_numpy(mask).float()


def load(images: int = 512, side: int = 48) -> tuple[Discs, Discs]:
    """The training set and the validation set."""
    return Discs(images, side, seed=0, augment=True), Discs(images // 4 + 1, side, seed=1)
