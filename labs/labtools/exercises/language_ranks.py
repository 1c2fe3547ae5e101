"""What the checks of lab 8 run on each rank: it calls the learner's function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labtools.exercises.srun_ranks import refusal
from labtools.worker import tell

RANKS, MICRO = 3, 2  # ranks, and the micro-batches of each
LENGTHS = (((5, 2), (1, 4)), ((3, 3), (6, 1)), ((2, 1), (1, 1)))
"""Tokens that count, by rank, micro-batch and sequence; the other places are padding."""
TOKENS = 5  # the vocabulary
LEFT_OUT = -100

Array = NDArray[Any]


class Means(NamedTuple):
    """What a rank got back in each case; else why it stopped."""

    error: str = ""
    values: Sequence[Any] = ()


class Shares(NamedTuple):
    """The gradient [n] that the learner's function left on a rank; those of the sums over each of its micro-batches
    [micro-batches, n]; and the most sequences that the model was given at once. Else why the rank stopped."""

    error: str = ""
    left: Any = None
    of_sums: Any = None
    most: int = 0


class Clipped(NamedTuple):
    """In each case, the gradient [n] and the norm that the learner's function left and gave back on a rank; the share
    [n] that was there before, and the numbers of each tensor. Else why the rank stopped."""

    error: str = ""
    left: Sequence[Array] = ()
    norms: Sequence[Any] = ()
    shares: Sequence[Array] = ()
    sizes: Sequence[int] = ()


def means(mean_per_token: Callable[[Any, Any, Any], Any], cases: Sequence[Sequence[tuple[float, int]]]) -> Means:
    """What mean_per_token(world, total, count) gives back on this rank, for the sums and counts [case][rank]."""
    found: list[Any] = []

    def body(world: Any) -> None:
        for case in cases:
            value = mean_per_token(world, *case[world.rank])
            found.append(None if value is None else float(value))

    error = _in_world(body)
    return Means(error) if error else Means("", found)


def shares(accumulate: Callable[[Any, Any, Any], Any]) -> Shares:
    """This rank's share of a gradient, by accumulate(world, model, parts)."""
    import torch

    class Bigrams(torch.nn.Module):  # type: ignore[misc]
        most = 0

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(TOKENS, 3), torch.nn.Linear(3, TOKENS)

        def forward(self, tokens: Any) -> Any:
            self.most = max(self.most, len(tokens))
            return self.head(self.table(tokens))

    found = Shares()

    def body(world: Any) -> None:
        nonlocal found
        torch.manual_seed(0)
        model, parts, of_sums = Bigrams(), _parts(world.rank), []
        for x, y in parts:
            _sum_of(model, x, y).backward()
            of_sums.append(_gradient(model))
            model.zero_grad()
        model.most = 0
        accumulate(world, model, parts)
        found = Shares("", _gradient(model), np.array(of_sums), model.most)

    error = _in_world(body)
    return Shares(error) if error else found


def clipped(reduce: Callable[[Any, Any, float], Any], most: Sequence[float]) -> Clipped:
    """The gradient of all ranks by reduce(world, model, most), for each of these norms."""
    import torch

    left, norms, before = list[Array](), list[Any](), list[Array]()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))

    def body(world: Any) -> None:
        for each in most:
            draw = torch.Generator().manual_seed(world.rank)
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = (1 + number) * torch.randn(parameter.shape, generator=draw)
            before.append(_gradient(model))
            norm = reduce(world, model, each)
            left.append(_gradient(model))
            norms.append(None if norm is None else float(norm))

    error = _in_world(body)
    return Clipped(error) if error else Clipped("", left, norms, before, [each.numel() for each in model.parameters()])


def _in_world(body: Callable[[Any], None]) -> str:
    """Why hvdtrain ended this rank; empty where it did not."""
    import hvdtrain.torch as ht

    def joined() -> None:
        with ht.join(device="cpu") as world:
            body(world)
            tell(None)

    return refusal(joined)


def _parts(rank: int) -> list[tuple[Any, Any]]:
    """This rank's micro-batches: tokens and targets [sequences, longest]."""
    import torch

    draw, made = torch.Generator().manual_seed(rank), []
    for lengths in LENGTHS[rank]:
        x = torch.randint(TOKENS, (len(lengths), max(lengths)), generator=draw)
        y = torch.randint(TOKENS, x.shape, generator=draw)
        for row, length in enumerate(lengths):
            y[row, length:] = LEFT_OUT
        made.append((x, y))
    return made


def _sum_of(model: Any, x: Any, y: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(
        model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=LEFT_OUT
    )


def _gradient(model: Any) -> Array:
    """All gradients [n], 0 where there is none."""
    return np.concatenate(
        [np.zeros(each.numel()) if each.grad is None else each.grad.numpy().ravel() for each in model.parameters()]
    )
