"""Loss and metric of a segmentation: logits and masks [n, 1, height, width]."""

import torch
from torch.nn import functional as F


def dice_and_bce(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The mean over the images of (1 - Dice coefficient) + binary cross entropy."""
    p = logits.sigmoid()
    dice = (2 * (p * masks).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)
    return (1 - dice).mean() + F.binary_cross_entropy_with_logits(logits, masks)


def iou(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Intersection over union of each image [n]."""
    found, there = logits > 0, masks > 0.5
    return ((found & there).sum((1, 2, 3)) + 1) / ((found | there).sum((1, 2, 3)) + 1)
