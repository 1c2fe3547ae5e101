"""A GPT and its training by PyTorch alone, in one process, with which losses are compared. Nothing is of hvdtrain's."""

import itertools
import math

import torch
from torch.nn import functional as F

SEQUENCES = "packed", "separate", "padded"
LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH = 2, 2, 8, 11, 6
END = 10
EPOCHS, LR, DECAY, NORM = 5, 0.01, 0.1, 0.5
BETAS = 0.9, 0.95


def first_weights(seed):
    """Weights that are larger than a training would begin with, so that all of them matter."""
    drawn, width = torch.Generator().manual_seed(seed), WIDTH
    shapes = {"wte": (VOCABULARY, width), "wpe": (LENGTH, width), "ln_f": (width,)}
    for layer in range(LAYERS):
        of = {"ln_1": (width,), "attn.c_attn": (3 * width, width), "attn.c_proj": (width, width), "ln_2": (width,)}
        of |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
        shapes |= {f"h.{layer}.{name}": shape for name, shape in of.items()}
    found = {}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = (len(shape) == 1) + 0.3 * torch.randn(shape, generator=drawn).double()
        if not name.startswith("w"):
            found[f"{name}.bias"] = 0.1 * torch.randn(shape[:1], generator=drawn).double()
    return found


def logits(w, x, apart):
    """x [t], one sequence. `apart`: each document by itself."""
    if apart:
        cuts = [0, *[at + 1 for at in range(len(x) - 1) if x[at] == END], len(x)]
        return torch.cat([logits(w, x[a:b], False) for a, b in itertools.pairwise(cuts)])
    at, size = torch.arange(len(x)), WIDTH // HEADS
    out = w["wte.weight"][x] + w["wpe.weight"][at]

    def linear(name, given):
        return given @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, given):
        centred = given - given.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    for h in (f"h.{layer}." for layer in range(LAYERS)):
        q, k, v = linear(h + "attn.c_attn", norm(h + "ln_1", out)).split(WIDTH, dim=-1)
        heads = []
        for a in range(0, WIDTH, size):
            scores = q[:, a : a + size] @ k[:, a : a + size].T / math.sqrt(size)
            heads.append(scores.masked_fill(at[None] > at[:, None], -math.inf).softmax(-1) @ v[:, a : a + size])
        out = out + linear(h + "attn.c_proj", torch.cat(heads, -1))
        wide = linear(h + "mlp.c_fc", norm(h + "ln_2", out))
        wide = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        out = out + linear(h + "mlp.c_proj", wide)
    return norm("ln_f", out) @ w["wte.weight"].T


def loss(w, rows, apart=False):
    """The mean loss of each token that counts in the rows (x, y)."""
    losses = [F.cross_entropy(logits(w, x, apart), y, reduction="sum", ignore_index=-100) for x, y in rows]
    return sum(losses) / sum(int((y != -100).sum()) for _, y in rows)


def rows(ids, sequences):
    """The examples (x, y) of a file's ids."""
    if sequences != "padded":
        windows = (ids[at : at + LENGTH + 1] for at in range(0, len(ids) - LENGTH, LENGTH))
        return [(torch.tensor(each[:-1]), torch.tensor(each[1:])) for each in windows]
    found, document = [], []
    for token in ids:
        document.append(token)
        if token == END:
            for at in range(0, len(document) - 1, LENGTH):
                piece = document[at : at + LENGTH + 1]
                x, y = torch.zeros(LENGTH, dtype=torch.int64), torch.full((LENGTH,), -100)
                x[: len(piece) - 1], y[: len(piece) - 1] = torch.tensor(piece[:-1]), torch.tensor(piece[1:])
                found.append((x, y))
            document = []
    return found


def trained(w, train, valid, sequences):
    """For each epoch of one update on all rows, the training loss before it and the validation loss after it."""
    w = {name: each.clone().requires_grad_() for name, each in w.items()}
    plain = [each for name, each in w.items() if each.dim() == 1]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": [each for each in w.values() if each.dim() > 1]}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=DECAY)
    found, apart = [], sequences == "separate"
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        of_train = loss(w, train, apart)
        of_train.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), NORM)
        optimizer.step()
        with torch.no_grad():
            found.append((of_train.item(), loss(w, valid, apart).item()))
    return found
