"""Gradients of a user's own loop, averaged over the ranks in messages that know their step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hvdtrain.core.sharing import of_ranks
from hvdtrain.errors import LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import AVERAGING, Stacks, mark_module
from hvdtrain.torch import resumable
from hvdtrain.torch.averaging import Averager
from hvdtrain.torch.engines import Engine, flat
from hvdtrain.torch.engines.buckets import real
from hvdtrain.torch.models import SyncBatchNorm

mark_module(AVERAGING, __name__)

CALLS = ("backward()", "run.average()", "run.loss()", "no backward()", "run.skip()")
DOES = (*(f"calls {call}" for call in CALLS), "begins", "leaves")
"""What a rank does in a step, or before it, when it communicates."""
BACKWARD, AVERAGE, LOSS, NOTHING, SKIP, STEP, LEAVE = range(len(DOES))
NUMBERS, LEARNING = 2**10, 2**16
"""The moduli of the numbers of update and backward, and of the digest of what learns."""
REMEDY = (
    "every rank calls the same in each step; one that has nothing to learn from calls (loss * 0).backward(), and what "
    "is to be added up on a rank alone goes into run.accumulating()"
)


class LoopAverager(Averager):
    """Averages the gradients of a user's own loop, which may leave an epoch early, leave a batch out, or call backward
    otherwise than another rank does. Before all that a step communicates goes a number of each rank, which says what
    the rank does in which step, and what learns."""

    error = LoopError
    in_bucket = False

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        compression: str,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        host: str = "",
    ) -> None:
        self._optimizers, self._host = optimizers, host
        self._sizes: tuple[int, ...] = ()
        super().__init__(model, engine, compression)
        self.is_forward_shared = any(isinstance(each, SyncBatchNorm) for each in model.modules())
        """Whether the forward pass of each of the next batches communicates."""
        self._call = BACKWARD
        self._coming: tuple[torch.Tensor, Callable[[], object]] | None = None
        """The ranks' numbers, and the function that waits until they have arrived."""

    def begin_batch(self) -> None:
        """Called before each batch. Raises LoopError on all ranks where one has left the epoch instead."""
        if self._running:
            raise LoopError("an error ended backward() in the step before; end the program, other ranks wait for it.")
        if self.is_forward_shared:
            self.take_part(STEP)

    def updated(self) -> None:
        """Called after each update. Raises LoopError where this rank had no backward in it, and another one had."""
        if not self.backwards:
            self.take_part(NOTHING)
            self._computed_here.clear()
        super().updated()

    def take_part(self, call: int) -> None:
        """Called where this rank makes a call that is no backward, and has no gradient for what others may communicate
        next. Raises LoopError on all ranks where not all of them do the same."""
        self._call, made = call, self.backwards
        if not self._running:
            self._begin()
        self._finish()
        if call in {LOSS, STEP, LEAVE}:  # after which an update may still have none
            self.backwards = made

    def average(self, gradients: Any) -> Any:
        """The mean over the ranks of each tensor in a structure of gradients."""
        leaves, structure = tree_flatten(gradients)
        if wrong := {type(each).__name__ for each in leaves if not isinstance(each, torch.Tensor)}:
            raise LoopError(
                f"run.average takes gradients, tensors of the same shapes on all ranks, got a {wrong.pop()}; give "
                "torch.autograd.grad materialize_grads=True."
            )
        self.take_part(AVERAGE)
        means = [real(each.detach()).clone(memory_format=torch.contiguous_format) for each in leaves]
        means = [each.float() if each.dtype == torch.bfloat16 else each for each in means]  # which Horovod has not
        waits = [self._engine.average(flat(each), f"hvdtrain.average.{number}") for number, each in enumerate(means)]
        for wait in waits:
            wait()
        self.evidence.combined()
        pairs = zip(means, leaves, strict=True)
        return tree_unflatten(
            [torch.view_as_complex(m) if o.is_complex() else m.to(o.dtype) for m, o in pairs], structure
        )

    def _divide(self) -> bool:
        sizes = tuple(len(group["params"]) for group in resumable.groups(self._optimizers))
        is_other = super()._divide() or sizes != self._sizes
        if is_other:
            self._sizes, self._digest = sizes, hash((self.parameters.learning, sizes)) % LEARNING
        return is_other

    def _begin(self) -> None:
        super()._begin()
        number = self._digest * NUMBERS + self._update % NUMBERS
        numbers = torch.zeros(self._engine.size, dtype=torch.float64)
        numbers[self._engine.rank] = (number * NUMBERS + self.backwards % NUMBERS) * len(DOES) + self._call
        self._coming = numbers, self._engine.average(numbers, "hvdtrain.step")

    def _finish(self) -> None:
        assert self._coming
        (coming, wait), self._coming, self._call = self._coming, None, BACKWARD
        wait()
        numbers = [round(each) for each in (coming * self._engine.size).tolist()]
        if self._learns_alike(numbers) and BACKWARD in {number % len(DOES) for number in numbers}:
            super()._finish()  # also where it is wrong: no message is left on its way
        else:
            self._end()  # what this rank has accumulated stays
        self._check(numbers)

    def _learns_alike(self, numbers: Sequence[int]) -> bool:
        return len({number // NUMBERS**2 // len(DOES) for number in numbers}) == 1

    def _check(self, numbers: Sequence[int]) -> None:
        """Raises LoopError where the ranks' numbers differ."""
        if len(set(numbers)) == 1:
            return
        among = (self._engine.rank, self._engine.size)
        if not self._learns_alike(numbers):
            names = [*self._messages.names.values()]
            learning = {"parameters that learn": names, "parameters of each group": [*self._sizes]}
            named = agreement.named("learning", learning)
            raise LoopError(agreement.differences(named, among, self._host, self._engine.sum))
        calls = [number % len(DOES) for number in numbers]
        if LEAVE in calls:
            left, stays = calls.index(LEAVE), next(rank for rank, call in enumerate(calls) if call != LEAVE)
            raise LoopError(
                f"rank {left} left run.batches() where rank {stays} continued; every rank must make the same steps: "
                "end an epoch early by a number that all of them have, as of world.sum."
            )
        lines = of_ranks(Stacks().now()[4], *among, self._engine.sum)
        first = {number: numbers.index(number) for number in numbers}
        does = "; ".join(f"rank {rank} {_does(number)}, in {lines[rank]}" for number, rank in first.items())
        raise LoopError(f"the ranks are not in the same step: {does}: {REMEDY}.")


def _does(number: int) -> str:
    call, backward, update = number % len(DOES), number // len(DOES) % NUMBERS, number // len(DOES) // NUMBERS
    which = f" number {backward + 1}" if call in {BACKWARD, AVERAGE, LOSS} else ""
    return f"{DOES[call]}{which}{'' if call == STEP else ' in'} step {update % NUMBERS + 1} of this start"
