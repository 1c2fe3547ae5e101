"""What an update shows of the program, where replicas are compared after it."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class Evidence:
    """What an update shows that would explain replicas which part in it. It is looked at where `is_watched`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._averaged: dict[torch.Tensor, tuple[torch.Tensor | None, int]] = {}
        """The averaged gradients, by parameter, and their versions."""
        self._drawn: Any = None
        """The states of the random number generators after the last backward."""
        self.watch(True, parameters)

    def watch(self, enabled: bool, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Looks at the next update of these parameters, or not."""
        self.is_watched, self._is_by_hand, self._is_combined, self._drawn = enabled, False, False, None
        self._averaged.clear()
        self._versions, self._is_changed = {each: each._version for each in parameters if enabled}, False
        self._is_own = False

    def combined(self) -> None:
        """Called where the program has averaged gradients that it then combines by itself."""
        self._is_combined, self._drawn = True, drawn() if self.is_watched else None

    def averaged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called after each backward, with the parameters whose gradients are now averaged."""
        if self.is_watched:
            self._averaged |= {each: (each.grad, 0 if each.grad is None else each.grad._version) for each in parameters}
            self._look()
            self._drawn = drawn()

    def _look(self) -> None:
        self._is_changed |= any(version != each._version for each, version in self._versions.items())
        self._versions = {each: each._version for each in self._versions}

    def steps(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Called before an optimizer's step, with the model's parameters that it updates."""
        self._look()
        self._is_own |= not type(optimizer).__module__.startswith(("torch.", "horovod."))
        for each in parameters:
            averaged, version = self._averaged.get(each, (None, 0))
            self._is_by_hand |= each.grad is not None and each.grad is not averaged
            self._is_changed |= averaged is not None and averaged._version != version

    def stepped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called after an optimizer's step, with the model's parameters."""
        if self.is_watched:
            self._versions = {each: each._version for each in parameters}

    @property
    def cause(self) -> str:
        """Why replicas have parted, as a key of `hvdtrain.ranks.agreement.REMEDIES`."""
        if self._is_by_hand and not self._is_combined:
            return "gradients"
        drew = self._drawn is not None and self._drawn != drawn()
        self._look()
        return "numbers" if drew else "changes" if self._is_changed else "optimizer" if self._is_own else "weights"


def drawn() -> Any:
    """The states of the generators that a program draws from, to be compared."""
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), rest, [each.numpy().tobytes() for each in of_torch]
