"""Gradients that are the mean over the ranks once backward() returns, for any model and any optimizer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

from hvdtrain.core.sharing import gather
from hvdtrain.errors import LoopError
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.buckets import Message, messages
from hvdtrain.torch.models import SyncBatchNorm

DTYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
"""By compression, what gradients are communicated as; None is their own."""


class Averager:
    """Averages a model's gradients while backward computes them. Model and optimizer stay what they are.

    Every rank sends the same messages in the same order, whichever parameters its backward reached. A parameter that no
    rank reached keeps the gradient that it had, so that 1 rank and N ranks train alike.
    """

    def __init__(self, model: nn.Module, engine: Engine, compression: str) -> None:
        self._engine = engine
        self._names = {each: name for name, each in model.named_parameters() if each.requires_grad}
        self._messages = messages(self._names, engine.bucket_bytes(), DTYPES[compression])
        self._message_of = {each: message for message in self._messages for each in message.parameters}
        self._hooks = [each.register_post_accumulate_grad_hook(self._computed) for each in self._names]
        self._is_forward_shared = any(isinstance(each, SyncBatchNorm) for each in model.modules())
        self._accumulating = False
        self._running = False
        self._unreached: list[str] | None = None
        self._computed_here: set[Parameter] = set()
        """Whose gradients hold what was not averaged yet."""
        self._sent: list[tuple[Message, Callable[[], object]]] = []
        self._before: dict[Parameter, torch.Tensor | None] = {}
        """The gradients of parameters that backward did not reach."""

    def close(self) -> None:
        """Releases the model: removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def pause(self, enabled: bool) -> Iterator[None]:
        """Within it gradients add up on their ranks."""
        self._accumulating = enabled
        try:
            yield
        finally:
            self._accumulating = False

    def take_unreached(self) -> list[str]:
        """The parameters that no rank's first backward reached; once."""
        unreached, self._unreached = self._unreached, []
        return unreached or []

    def begin_batch(self) -> None:
        """This rank takes its next batch. Raises LoopError on all ranks where one has left instead."""
        if self._is_forward_shared:
            self._compare(leaves=False)

    def leave(self) -> None:
        """This rank leaves an epoch's batches early: takes part in what one that stays communicates next, which is its
        backward, or where its forward communicates too, a comparison before it. Raises LoopError on all ranks where not
        all of them leave."""
        if self._is_forward_shared:
            self._compare(leaves=True)
        else:
            self._finish(leaves=True)

    def _compare(self, leaves: bool) -> None:
        rank, size = self._engine.rank, self._engine.size
        left = gather(np.array([leaves], dtype=np.int64), rank, size, self._engine.sum)[:, 0]
        _check_left(np.flatnonzero(left).tolist(), size)

    def _computed(self, parameter: Parameter) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise LoopError(
                f"the gradient of {self._names[parameter]} is sparse, ranks average dense ones; drop sparse."
            )
        self._computed_here.add(parameter)
        if self._accumulating:
            return
        if not self._running:
            self._running = True
            queue: Any = torch.autograd.Variable._execution_engine
            queue.queue_callback(self._finish)
        message = self._message_of[parameter]
        if parameter not in message.missing:
            raise LoopError(
                f"backward computed the gradient of {self._names[parameter]} twice, so it cannot be averaged while it "
                "runs; where it is checkpointed, take torch.utils.checkpoint with use_reentrant=False."
            )
        message.missing.remove(parameter)
        while len(self._sent) < len(self._messages) and not self._messages[len(self._sent)].missing:
            self._send(self._messages[len(self._sent)])

    def _send(self, message: Message) -> None:
        for parameter in message.parameters:
            if parameter not in self._computed_here:  # another rank may have reached it
                self._before[parameter] = parameter.grad
                before = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if before is None else before.clone()
            message.fill(parameter)
        wait = self._engine.average(message.content(), f"hvdtrain.gradients.{len(self._sent)}")
        self._sent.append((message, wait))

    def _finish(self, leaves: bool = False) -> None:
        """At the end of backward: returns once every gradient is the mean over the ranks."""
        for message in self._messages[len(self._sent) :]:
            self._send(message)
        here = [each in self._computed_here for each in self._names]
        leaving = [leaves and rank == self._engine.rank for rank in range(self._engine.size)]
        shared = torch.tensor(here + leaving, dtype=torch.float32)
        count = self._engine.average(shared, "hvdtrain.reached")
        for message, wait in self._sent:
            wait()
            message.hand_out()
            message.reset()
        count()
        reached, left = shared[: len(here)], shared[len(here) :]
        if self._unreached is None and not leaves:
            self._unreached = [
                name for name, ranks in zip(self._names.values(), reached.tolist(), strict=True) if not ranks
            ]
        for parameter, ranks in zip(self._names, reached.tolist(), strict=True):
            if not ranks:
                parameter.grad = self._before[parameter]
        self._running = False
        self._computed_here.clear()
        self._sent.clear()
        self._before.clear()
        _check_left([rank for rank, is_left in enumerate(left.tolist()) if is_left], self._engine.size)


def _check_left(left: list[int], size: int) -> None:
    """Raises LoopError where some ranks have left the epoch's batches, others not."""
    if 0 < len(left) < size:
        stays = next(rank for rank in range(size) if rank not in left)
        raise LoopError(
            f"rank {left[0]} left run.batches() where rank {stays} continued; every rank must make the same steps: end "
            "an epoch early by a number that all of them have, as of world.sum."
        )
