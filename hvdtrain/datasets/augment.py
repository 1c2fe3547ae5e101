"""Training images, once they are cropped and flipped: operations on each, boxes that are erased, pairs that are mixed.

What is drawn for an image follows from its own row of uniform numbers; for a pair, from the row of the first. Shares
are whole numbers of 2^-16, and pixels follow in whole numbers: NumPy and PyTorch give the same bytes, on any device.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.datasets.base import Split
from hvdtrain.datasets.images import in_threads
from hvdtrain.datasets.operations import Policy, drawn

DRAWS = 8
"""How many more uniform numbers augment a sample."""
BITS = 16
WHOLE = 1 << BITS
"""The share of an image that is not mixed."""
TRIES = 10
ERASED_AREA, ERASED_LOG_RATIO = (0.02, 0.33), (math.log(0.3), math.log(3.3))
OPERATING, ERASING, MIXING = 0, 1, 2
"""Numbers of streams, so that one kind of augmentation does not change what is drawn for another."""
Places = NDArray[np.int32]


@dataclass(frozen=True)
class Augmenter:
    """Augments uint8 images [n, height, width, 3] and their labels [n]."""

    taken: int
    """How many uniform numbers the data set itself takes of each row; those behind them are for this."""
    classes: int
    fill: tuple[int, ...]
    """The colour of erased boxes."""
    mixup: float
    cutmix: float
    erasing: float
    policy: Policy = "none"
    """Which operations of `hvdtrain.datasets.operations` come first; `ops` and `magnitude` are RandAugment's."""
    ops: int = 2
    magnitude: int = 9

    @property
    def mixes(self) -> bool:
        """Whether targets are shares of classes, float32 [n, classes]."""
        return bool(self.mixup or self.cutmix)

    def is_due(self, draws: NDArray[np.float32]) -> bool:
        """Whether a request with these draws is augmented: not where they are those of the data set alone."""
        return draws.shape[1] > self.taken

    def read(self, split: Split, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> Any:
        """What the split's `read` gives, augmented where there are draws."""
        x, labels = split.read(indices, self.of_set(draws))
        self.images(x, draws)
        return x, self.targets(labels, draws, *x.shape[1:3])

    def of_set(self, draws: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        """The draws that the data set takes."""
        return None if draws is None else draws[:, : self.taken]

    def images(self, x: NDArray[np.uint8], draws: NDArray[np.float32] | None) -> None:
        """Augments the images in place, in several threads, where there are draws."""
        if draws is None or not self.is_due(draws):
            return
        erased = self.erased(draws, *x.shape[1:3])
        left = iter(range(len(x)))

        def augment() -> None:
            for number in left:
                if self.policy != "none":
                    random = _random(draws[number, self.taken :], OPERATING)
                    image = Image.fromarray(x[number])
                    x[number] = np.asarray(drawn(self.policy, self.ops, self.magnitude, image, random))
                top, across, bottom, right = erased[number]
                x[number, top:bottom, across:right] = self.fill

        in_threads(augment)
        if not self.mixes:
            return
        mixed = self.mixed(draws, *x.shape[1:3])
        pairs = iter(range(len(mixed)))

        def mix() -> None:
            rows, columns = axes(*x.shape[1:3])
            for pair in pairs:
                blend(x[2 * pair : 2 * pair + 2], shares(mixed[pair : pair + 1], rows, columns))

        in_threads(mix)

    def targets(
        self, labels: NDArray[np.int64], draws: NDArray[np.float32] | None, height: int, width: int
    ) -> np.ndarray:
        """The labels of the images, or each class's share, float32 [n, classes], where pairs are mixed."""
        if draws is None or not self.is_due(draws) or not self.mixes:
            return labels
        own = np.repeat(self.mixed(draws, height, width)[:, 6], 2).astype(np.float32) / WHOLE
        targets, examples = np.zeros((len(labels), self.classes), np.float32), np.arange(len(labels))
        targets[examples, labels] += own
        targets[examples, labels.reshape(-1, 2)[:, ::-1].ravel()] += 1 - own
        return targets

    def erased(self, draws: NDArray[np.float32], height: int, width: int) -> Places:
        """The box that each image loses, [n, 4]: top, left, bottom, right; of no area where it loses none. Source:
        torchvision's RandomErasing."""
        boxes = np.zeros((len(draws), 4), np.int32)
        for box, row in zip(boxes, draws[:, self.taken :] if self.erasing else (), strict=False):
            random = _random(row, ERASING)
            if random.random() >= self.erasing:
                continue
            for _ in range(TRIES):
                area = height * width * random.uniform(*ERASED_AREA)
                ratio = math.exp(random.uniform(*ERASED_LOG_RATIO))
                down, across = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
                if down < height and across < width:
                    top, left = random.integers(height - down + 1), random.integers(width - across + 1)
                    box[:] = top, left, top + down, left + across
                    break
        return boxes

    def mixed(self, draws: NDArray[np.float32], height: int, width: int) -> Places:
        """How each pair is mixed, [n / 2, 7]: a box (top, left, bottom, right), the share of each image itself inside
        and outside of it, and in its target. Sources: Zhang et al. 2018, arXiv:1710.09412; Yun et al. 2019,
        arXiv:1905.04899, with torchvision's box; of both one by an even chance, as in timm."""
        pairs = np.zeros((len(draws) // 2, 7), np.int32)
        for pair, row in zip(pairs, draws[::2, self.taken :], strict=True):
            random = _random(row, MIXING)
            cuts = random.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
            alpha = self.cutmix if cuts else self.mixup
            share = random.beta(alpha, alpha)
            if not cuts:
                pair[4:] = round(share * WHOLE)
                continue
            y, x = int(random.integers(height)), int(random.integers(width))
            down, across = (int(side * 0.5 * math.sqrt(1 - share)) for side in (height, width))
            top, left, bottom, right = (
                max(0, y - down),
                max(0, x - across),
                min(height, y + down),
                min(width, x + across),
            )
            area = (bottom - top) * (right - left)
            pair[:] = top, left, bottom, right, 0, WHOLE, round((1 - area / (height * width)) * WHOLE)
        return pairs


def axes(height: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The numbers of the rows, [height, 1, 1], and of the columns, [width, 1], of images."""
    return np.arange(height, dtype=np.int32)[:, None, None], np.arange(width, dtype=np.int32)[:, None]


def inside(boxes: Any, rows: Any, columns: Any) -> Any:
    """Whether each pixel lies in its image's box, [n, height, width, 1]. Of NumPy or PyTorch."""
    top, left, bottom, right = (boxes[:, side, None, None, None] for side in range(4))
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def shares(pairs: Any, rows: Any, columns: Any) -> Any:
    """The share that each pixel of a pair keeps of its own image, [n / 2, height, width, 1]. Of NumPy or PyTorch."""
    within, without = (pairs[:, side, None, None, None] for side in (4, 5))
    return without + (within - without) * inside(pairs, rows, columns)


def blend(x: Any, share: Any) -> None:
    """Mixes each uint8 image with its partner, in place, by these shares of itself. Of NumPy or PyTorch; in whole
    numbers, so that it is exact on any device."""
    first, second, rest = x[0::2], x[1::2], WHOLE - share
    mixed = [(one * share + other * rest + WHOLE // 2) >> BITS for one, other in ((first, second), (second, first))]
    x[0::2], x[1::2] = mixed


def _random(row: NDArray[np.float32], stream: int) -> np.random.Generator:
    return np.random.default_rng([*np.ascontiguousarray(row).view(np.uint32).tolist(), stream])
