"""The operations of RandAugment and TrivialAugment, by Pillow: the pixels are those of torchvision for images of PIL.

Sources: Cubuk et al. 2019, arXiv:1909.13719; Müller, Hutter 2021, arXiv:2103.10158; the ranges of magnitudes are those
of torchvision's RandAugment and TrivialAugmentWide. What lies outside of the image becomes black, by the nearest pixel.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Policy = Literal["none", "randaugment", "trivialaugment"]
MAGNITUDES = 31
"""How many magnitudes an operation has, from 0, which changes least."""


def _affine(image: Image.Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image.Image:
    """The image whose pixel (x, y) is that of the given one at (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST)


OPERATIONS: Mapping[str, Callable[[Image.Image, float], Image.Image]] = {
    "Identity": lambda image, value: image,
    "ShearX": lambda image, value: _affine(image, 1, value, 0, 0, 1, 0),
    "ShearY": lambda image, value: _affine(image, 1, 0, 0, value, 1, 0),
    "TranslateX": lambda image, value: _affine(image, 1, 0, -int(value), 0, 1, 0),
    "TranslateY": lambda image, value: _affine(image, 1, 0, 0, 0, 1, -int(value)),
    "Rotate": lambda image, value: image.rotate(value, Image.Resampling.NEAREST),
    "Brightness": lambda image, value: ImageEnhance.Brightness(image).enhance(1 + value),
    "Color": lambda image, value: ImageEnhance.Color(image).enhance(1 + value),
    "Contrast": lambda image, value: ImageEnhance.Contrast(image).enhance(1 + value),
    "Sharpness": lambda image, value: ImageEnhance.Sharpness(image).enhance(1 + value),
    "Posterize": lambda image, value: ImageOps.posterize(image, int(value)),
    "Solarize": lambda image, value: ImageOps.solarize(image, 255 * value),  # type: ignore[arg-type]
    "AutoContrast": lambda image, value: ImageOps.autocontrast(image),
    "Equalize": lambda image, value: ImageOps.equalize(image),
}
"""By torchvision's names."""
NAMES = tuple(OPERATIONS)
SIGNED = NAMES[1:10]
"""Operations whose magnitude may be negative."""


def value_of(policy: Policy, name: str, magnitude: int, width: int, height: int) -> float:
    """What the operation takes at a magnitude, from 0 to MAGNITUDES - 1, without its sign."""
    wide, first = policy == "trivialaugment", 0.0
    if name == "Posterize":
        return float(np.round(8 - magnitude * (6 if wide else 4) / (MAGNITUDES - 1)))
    if name == "Solarize":
        first, last = 1.0, 0.0
    elif name.startswith("Translate"):
        last = 32.0 if wide else 150 / 331 * (width if name == "TranslateX" else height)
    else:
        last = {"ShearX": (0.3, 0.99), "ShearY": (0.3, 0.99), "Rotate": (30.0, 135.0)}.get(name, (0.9, 0.99))[wide]
    # To the bit as torch.linspace in float32, which goes from the nearer end.
    start, end = np.float32(first), np.float32(last)
    step, left = float((end - start) / np.float32(MAGNITUDES - 1)), MAGNITUDES - 1 - magnitude
    is_early = magnitude < MAGNITUDES // 2
    return float(np.float32(float(start) + step * magnitude if is_early else float(end) - step * left))


def drawn(policy: Policy, ops: int, magnitude: int, image: Image.Image, random: np.random.Generator) -> Image.Image:
    """The image after `ops` operations of RandAugment at that magnitude, or after one of TrivialAugment at any."""
    for _ in range(1 if policy == "trivialaugment" else ops):
        name = NAMES[random.integers(len(NAMES))]
        chosen = int(random.integers(MAGNITUDES)) if policy == "trivialaugment" else magnitude
        value = value_of(policy, name, chosen, *image.size)
        is_negative = random.random() < 0.5 and name in SIGNED
        image = OPERATIONS[name](image, -value if is_negative else value)
    return image
