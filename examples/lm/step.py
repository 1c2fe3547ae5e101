"""What a batch costs: the loss_of() of before.py, and what to report."""

import math
from typing import Any

import torch
from torch.nn import functional as F


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean loss over the batch's sequences, and its metrics: of each sequence [n]; (sum, count) over characters."""
    logits, targets = model(batch["tokens"]), batch["targets"]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [n, length]
    right = (logits.argmax(2) == targets).sum()
    return losses.mean(), {"bits": losses.mean(1) / math.log(2), "accuracy": (right, targets.numel())}
