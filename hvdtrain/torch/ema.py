"""An exponential moving average of the weights, with which a run validates."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class Ema:
    """The moving average e = decay e + (1 - decay) w of each parameter w; it begins as the weights themselves.

    Buffers, such as BatchNorm's statistics, are not averaged.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = Ema(model, decay=0.5)
        >>> _ = nn.init.ones_(model.weight), nn.init.zeros_(ema.averages["weight"])
        >>> ema.update()
        >>> with ema.swapped_in():
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = dict(model.named_parameters())
        self._weight = 1 - decay
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights; to be called after each update."""
        torch._foreach_lerp_(list(self.averages.values()), list(self._parameters.values()), self._weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the averages for weights; afterwards it has its weights again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self.averages[name] = self.averages[name], parameter.data
