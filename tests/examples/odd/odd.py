"""A user's network with more than one input, and one with every BatchNorm."""

import random

import torch
from torch import nn
from torch.utils.data import Dataset


class Two(nn.Module):
    """a [n, 4], b [n, 4] -> [n, 1]; a layer is never used, and another in the odd calls alone where `sometimes`."""

    def __init__(self, unused: bool = False, sometimes: bool = False) -> None:
        super().__init__()
        self.of_a, self.of_b = nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        self.spare = nn.Linear(4, 4) if unused else None
        self.other = nn.Linear(8, 8) if sometimes else None
        self.calls = 0

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.of_a(a) * self.of_b(b))
        self.calls += 1
        return self.head(self.other(h) if self.other and self.calls % 2 else h)


class Norms(nn.Module):
    """x [n, 1, 4, 4, 4] -> [n, 1], by BatchNorm3d, 2d and 1d."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Tanh())
        self.maps = nn.Sequential(nn.Conv2d(16, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.maps(self.volumes(x).flatten(1, 2)))


class Samples(Dataset):
    """x a dict, a tuple or a volume; y [1]. `augment` adds noise to y."""

    def __init__(self, kind: str, samples: int, seed: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.augment = kind, augment
        self.values = torch.randn(samples, 64, generator=generator)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int):
        values = self.values[index]
        y = values.sum(0, keepdim=True) + (random.gauss(0, 0.1) if self.augment else 0)
        a, b = values[:4], values[4:8]
        return {"dict": {"b": b, "a": a}, "tuple": (a, b), "volume": values.view(1, 4, 4, 4)}[self.kind], y


def load(kind: str = "dict", samples: int = 26, valid: int = 7) -> tuple[Samples, Samples]:
    return Samples(kind, samples, 0, augment=True), Samples(kind, valid, 1, augment=False)
