"""What a batch costs: the losses that torchvision's detection models return in training, and their detections else."""

from typing import Any

import torch
from torch import nn
from torchvision.ops import box_iou

Images = list[torch.Tensor]
Targets = list[dict[str, torch.Tensor]]


def step(model: nn.Module, batch: tuple[Images, Targets]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sum of the model's losses, each divided by the boxes that it matched in the whole batch, as SSD's paper has
    it; validating, the mean over the images of the boxes' overlap too."""
    images, targets = batch
    if model.training:
        return sum(model(images, targets).values()), {"overlap": (0, 0)}
    return losses_of_all(model, images, targets), {"overlap": overlap(model(images), targets)}


def step_per_image(model: nn.Module, batch: tuple[Images, Targets]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same with each image's losses by themselves, and their mean: the same for every number of ranks."""
    images, targets = batch
    each = [losses_of_all(model, [image], [target]) for image, target in zip(images, targets, strict=True)]
    return torch.stack(each).mean(), {"overlap": (0, 0) if model.training else overlap(model(images), targets)}


def losses_of_all(model: nn.Module, images: Images, targets: Targets) -> torch.Tensor:
    """The losses, which the model returns in training mode alone; its layers keep theirs."""
    before, model.training = model.training, True
    try:
        return sum(model(images, targets).values())
    finally:
        model.training = before


def overlap(detections: list[dict[str, torch.Tensor]], targets: Targets) -> torch.Tensor:
    """Of each image [n]: the mean over its boxes of the best intersection over union of a detection of that class."""
    return torch.stack([_overlap(found, target) for found, target in zip(detections, targets, strict=True)])


def _overlap(found: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    likely = found["scores"] > 0.3
    alike = found["labels"][likely][None] == target["labels"][:, None]
    overlaps = box_iou(target["boxes"], found["boxes"][likely]) * alike
    return overlaps.max(1).values.mean() if overlaps.numel() else overlaps.new_zeros(())
