"""A UNet (Ronneberger et al. 2015, arXiv:1505.04597) with BatchNorm, small enough for a laptop."""

import torch
from torch import nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Images [n, 3, height, width] -> logits [n, 1, height, width]; sides divisible by 2 ** (levels - 1)."""

    def __init__(self, channels: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[:-1])
        self.merge = nn.ModuleList(block(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for level, down in enumerate(self.down):
            x = down(nn.functional.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        skipped.pop()
        for up, merge in reversed(list(zip(self.up, self.merge, strict=True))):
            x = merge(torch.cat([up(x), skipped.pop()], dim=1))
        return self.head(x)
