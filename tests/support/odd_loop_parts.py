"""What the loops of odd_loops.py are made of: a world of plain PyTorch, a network, and optimizers around optimizers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.torch.engines import seed as seed_step


class Plain:
    """`world` and `run` of a program that has neither: PyTorch on one process, which reads whole batches."""

    rank, size, global_step = 0, 1, 0

    def __init__(self, ranks: int) -> None:
        """`ranks`: how many would have read the batch."""
        self.ranks, self.drawn, self.seeded = ranks, torch.Generator(), -1

    def run(self, *_: Any, **given: Any) -> "Plain":
        return self

    def epochs(self, count: int, **_: Any) -> Iterator[int]:
        for self.epoch in range(count):
            self.sets = 0
            yield self.epoch

    def batches(self, data: tuple[torch.Tensor, ...], batch_size: int) -> Iterator[Any]:
        order = np.random.default_rng([self.sets, self.epoch, 0]).permutation(len(data[0]))
        self.sets += 1
        for rows in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
            self.seed(0)
            yield [each[rows] for each in data]

    def seed(self, rank: int) -> None:
        seed_step(0, self.global_step, rank, torch.device("cpu"))

    def step(self, loss: Any = None) -> None:
        self.global_step += 1

    skip = step
    gather = sum = average = staticmethod(lambda value: value)
    mean = staticmethod(lambda total, count: float(total) / count)
    accumulating = contextlib.nullcontext

    @property
    def generator(self) -> torch.Generator:
        if self.global_step != self.seeded:
            self.drawn.manual_seed(hash((0, self.global_step)))
        self.seeded = self.global_step
        return self.drawn


def layer(seed: int, *sizes: int, kind: Any = nn.Linear) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*sizes).double()


class Net(nn.Module):
    added: nn.Module | None = None

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second, self.last = layer(seed, 4, 6), layer(seed + 1, 6, 6), layer(seed + 2, 6, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        return self.last(h) + (self.added(h) if self.added else 0)


class Sam(torch.optim.Optimizer):
    """Updates by the gradient at the worst point nearby; the momentum is the inner optimizer's."""

    def __init__(self, given: Any, kind: Any, **more: Any) -> None:
        super().__init__(given, more)
        self.base, self.count = kind(self.param_groups, **more), 0
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults

    def reached(self) -> list[nn.Parameter]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    @torch.no_grad()
    def ascend(self) -> None:
        norm = torch.stack([each.grad.norm() for each in self.reached()]).norm()
        for each in self.reached():
            self.state[each]["old"] = each.detach().clone()
            each.add_(0.05 * each.grad / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.reached():
            each.copy_(self.state[each]["old"])
        self.base.step()


class Lookahead(Sam):
    """Slow weights that follow every second step, by a counter of its own; its state is the inner optimizer's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        for each in self.reached():
            slow = self.base.state[each].setdefault("slow", each.detach().clone())
            if self.count % 2 == 0:
                each.copy_(slow.lerp_(each, 0.5))

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups
