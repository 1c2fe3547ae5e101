"""A decoder-only transformer over bytes, as in GPT-2: norm first, learned positions, no dropout."""

import torch
from torch import nn


class Transformer(nn.Module):
    """Tokens [n, length] -> logits [n, length, vocabulary]."""

    def __init__(
        self, vocabulary: int = 128, length: int = 64, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=self.positions.dtype)
        return self.head(self.layers(self.tokens(tokens) + self.positions[:length], mask=mask, is_causal=True))
