"""ResNet50 and ResNet101 without torchvision, but with its names, shapes and first weights."""

from collections.abc import Mapping

import torch
from torch import nn

BLOCKS = {"layer1": 3, "layer2": 4, "layer3": 6, "layer4": 3}
BLOCKS_OF_101 = {**BLOCKS, "layer3": 23}
EXPANSION = 4


class ResNet(nn.Module):
    """Images [n, 3, height, width] -> logits [n, classes].

    Examples:
        >>> ResNet(classes=10, stem="cifar").fc
        Linear(in_features=2048, out_features=10, bias=True)
    """

    def __init__(self, classes: int, stem: str, blocks: Mapping[str, int] | None = None) -> None:
        """`stem`: imagenet, or cifar for images of 8 to 64 pixels. `blocks`: the number of blocks of each stage by the
        stage's name; by default ResNet50's."""
        super().__init__()
        self.blocks = blocks or BLOCKS
        self.conv1 = nn.Conv2d(3, 64, 7, stride=1 if stem == "cifar" else 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for index, (name, count) in enumerate(self.blocks.items()):
            width = 64 << index
            first = Bottleneck(channels, width, stride=2 if index else 1)
            channels = width * EXPANSION
            self.add_module(name, nn.Sequential(first, *(Bottleneck(channels, width) for _ in range(count - 1))))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.blocks:
            x = getattr(self, name)(x)
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, added to a shortcut: [n, channels, h, w] -> [n, 4 width, h / stride,
    w / stride]."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out = width * EXPANSION
        # In torchvision's order, in which the seed draws the weights.
        shortcut = None
        if stride != 1 or channels != out:
            shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet50(classes: int, stem: str) -> ResNet:
    """ResNet50 v1.5: He et al. 2016, arXiv:1512.03385, with the stride in the 3x3 convolution.

    Images [n, 3, height, width] -> logits [n, classes]. The stem `imagenet` has stride 2 and a max-pool; `cifar` has
    stride 1 and no max-pool, for images of 8 to 64 pixels. Each residual branch begins at 0 (Goyal et al. 2017,
    arXiv:1706.02677, section 5.1). With torchvision's default the first gradients are so large that rounding alone
    makes two float32 runs differ by some per cent after two steps.

    Examples:
        >>> sum(weights.numel() for weights in resnet50(10, "cifar").parameters())
        23528522
    """
    return ResNet(classes, stem)
