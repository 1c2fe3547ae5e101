"""nanoGPT's GPT in a recipe: how it is made, and what a batch costs. model.py stays as it was fetched."""

from typing import Any

import torch
from model import GPT, GPTConfig
from torch.nn import functional as F


def gpt(**config: Any) -> GPT:
    """A GPT of this configuration."""
    return GPT(GPTConfig(**config))


def step(model: GPT, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss over the batch's sequences, and perplexity's logarithm of each [n]."""
    logits, loss = model(batch["tokens"], batch["targets"])
    return loss, {"nats": F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none").mean(1)}
