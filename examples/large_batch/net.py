"""A ResNet of eight layers for images of 32 pixels, after He et al. 2016 (arXiv:1512.03385), section 4.2."""

import torch
from torch import nn


class ResNet(nn.Module):
    """Images [n, 3, 32, 32] -> logits [n, classes]; three blocks of width, 2 width and 4 width channels."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width, stride=2), Block(2 * width, 4 * width, stride=2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x).relu())
        return self.head(x.mean(dim=(2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [n, channels, h, w] -> [n, out, h / stride, w / stride]."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.branch(x) + self.shortcut(x)).relu()
