"""A plain GPT of any size: GPT-2's network."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

from hvdtrain.core import network


class GPT(nn.Module):
    """Tokens int64 [n, t], t at most `context` -> logits [n, t, vocabulary] of the token that follows each.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, with its names: norms
    before the layers, learned positions, the embedding as the head too. Dropout is on the embeddings and on what each
    layer adds to the residual stream.

    Examples:
        >>> sizes = network.GPT(layers=1, heads=2, width=8)
        >>> GPT(sizes, vocabulary=257, context=16)(torch.zeros(3, 5, dtype=torch.int64)).shape
        torch.Size([3, 5, 257])
    """

    def __init__(
        self, sizes: network.GPT, vocabulary: int, context: int, end: int | None = None, seed: int = 0
    ) -> None:
        """`end`: the token that ends a document, where attention is to stay inside of documents, each of which begins
        at position 0 then: a document's logits are those that it has alone. `seed`: of the first weights."""
        super().__init__()
        self.end = end
        self.wte = nn.Embedding(vocabulary, sizes.width)
        self.wpe = nn.Embedding(context, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.h = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, array in sizes.first_weights(vocabulary, context, seed):
                own[name].copy_(torch.from_numpy(array))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask, positions = None, torch.arange(tokens.shape[1], device=tokens.device)
        if self.end is not None:
            ends = tokens == self.end
            document = ends.cumsum(1) - ends.long()  # the token belongs to the document that it ends
            mask = (document[:, :, None] == document[:, None, :]).tril()
            positions, mask = mask.sum(2) - 1, mask[:, None]
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x, mask)
        return F.linear(self.ln_f(x), self.wte.weight)


class Block(nn.Module):
    """Attention and two layers between which the width is four times as large: [n, t, width] -> [n, t, width]."""

    def __init__(self, sizes: network.GPT) -> None:
        super().__init__()
        width = sizes.width
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(sizes), nn.LayerNorm(width)
        layers = {"c_fc": nn.Linear(width, 4 * width), "gelu": nn.GELU("tanh"), "c_proj": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), mask))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Attention(nn.Module):
    """Causal self-attention by heads: [n, t, width] -> [n, t, width]. The mask [n, 1, t, t] says what each token sees,
    where it does not see all that is before it."""

    def __init__(self, sizes: network.GPT) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.c_attn = nn.Linear(sizes.width, 3 * sizes.width)
        self.c_proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        of_heads = self.c_attn(x).view(*x.shape[:2], 3, self.heads, -1)
        query, key, value = of_heads.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(seen.transpose(1, 2).reshape(x.shape))
