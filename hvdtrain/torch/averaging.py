"""Gradients averaged over the ranks while backward runs, in messages whose content never changes.

Horovod itself copies the gradients that are ready at one moment into a buffer, and back: it copies much, and the order
of a sum depends on the moment. Here a large gradient is communicated from its own memory, and small ones in a bucket
that they stay in. PyTorch's DistributedDataParallel copies more, too: its buckets (Li et al. 2020, arXiv:2006.15704,
section 3.2) hold the large gradients as well.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hvdtrain.core.recipe import Recipe
from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.core.sharing import gather
from hvdtrain.errors import HvdtrainError, LoopError, RecipeError
from hvdtrain.ranks.stacks import AVERAGING, mark_module
from hvdtrain.torch.engines import Engine, Forward, flat, is_dense
from hvdtrain.torch.models import SyncBatchNorm
from hvdtrain.torch.objective import call

mark_module(AVERAGING, __name__)

DTYPES = {name: getattr(torch, row.dtype) if row.dtype else None for name, row in COMPRESSIONS.items()}
"""The type in which gradients are communicated, by compression; None is their own type."""


class Averager:
    """Averages a model's gradients while backward computes them. Model and optimizer stay as they are.

    Every rank sends the same messages in the same order, whichever parameters its backward reached. A parameter that no
    rank reached keeps the gradient that it had, so that 1 rank and N ranks train alike. The last message has a flag for
    each parameter, by which the ranks know these.
    """

    error: type[HvdtrainError] = RecipeError

    def __init__(self, model: nn.Module, engine: Engine, compression: str, *, at_end: bool = True) -> None:
        """`at_end`: the end of each backward calls `finish`; without it, every rank calls it after its backward."""
        self._engine, self._dtype, self._at_end = engine, DTYPES[compression], at_end
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise self._refusal_of_sparse(f"{name}.weight" if name else "weight")
        self._limit = engine.bucket_bytes()
        self._named = dict(model.named_parameters())
        self._accumulating = self._running = False
        self._computed_here: set[nn.Parameter] = set()
        """Parameters whose gradients are not averaged yet."""
        self._sent: list[tuple[Message, Callable[[], object]]] = []
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        """The gradients that parameters had which backward did not reach on this rank."""
        self._hooks: list[RemovableHandle] = []
        self.unreached: list[str] = []
        """The names of the parameters that no rank's last backward reached."""
        self._divide()

    def close(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def pause(self, enabled: bool = True) -> Iterator[None]:
        """Within the block gradients add up on each rank and are not communicated."""
        self._accumulating = enabled
        try:
            yield
        finally:
            self._accumulating = False

    def finish(self) -> None:
        """Waits until every gradient is the mean over the ranks."""
        if self._accumulating:
            return
        self.unreached = self._finish()
        if any(each.requires_grad and each not in self._names for each in self._named.values()):  # thawed since
            self._divide()
            self._computed_here.update(each for each in self._names if each.grad is not None)
            self._finish()

    def _refusal_of_sparse(self, name: str) -> HvdtrainError:
        return self.error(f"the gradient of {name} is sparse, ranks average dense ones; drop sparse.")

    def _divide(self) -> None:
        """Divides the parameters that learn into messages."""
        self.close()
        self._names = {each: name for name, each in self._named.items() if each.requires_grad}
        self._messages = messages(self._names, self._limit, self._dtype)
        if self._messages:
            last = self._messages[-1]
            if not isinstance(last, _Bucket):
                last = _Bucket([], torch.float32, last.parameters[0].device)
                self._messages.append(last)
            self._reached = last.with_flags(len(self._names))
        self._message_of = {each: message for message in self._messages for each in message.parameters}
        self._hooks = [each.register_post_accumulate_grad_hook(self._computed) for each in self._names]

    def _computed(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise self._refusal_of_sparse(self._names[parameter])
        self._computed_here.add(parameter)
        if self._accumulating:
            return
        if self._at_end and not self._running:
            self._running = True
            queue: Any = torch.autograd.Variable._execution_engine
            queue.queue_callback(self.finish)
        message = self._message_of[parameter]
        if parameter not in message.missing:
            raise self.error(
                f"backward computed the gradient of {self._names[parameter]} twice, so it cannot be averaged while it "
                "runs; where it is checkpointed, take torch.utils.checkpoint with use_reentrant=False."
            )
        message.missing.remove(parameter)
        while len(self._sent) < len(self._messages) and not self._messages[len(self._sent)].missing:
            self._send(self._messages[len(self._sent)])

    def _send(self, message: "Message") -> None:
        for parameter in message.parameters:
            if parameter not in self._computed_here:  # another rank may have reached it
                self._before[parameter] = before = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if before is None else before.clone()
            message.fill(parameter)
        if message is self._messages[-1]:
            self._reached.fill_(1)
            for index, parameter in enumerate(self._names if self._before else ()):
                if parameter in self._before:
                    self._reached[index] = 0
        wait = self._engine.average(message.content(), f"hvdtrain.gradients.{len(self._sent)}")
        self._sent.append((message, wait))

    def _send_rest(self) -> None:
        for message in self._messages[len(self._sent) :]:
            self._send(message)

    def _finish(self) -> list[str]:
        self._send_rest()
        for message, wait in self._sent:
            wait()
            message.hand_out()
            message.reset()
        never = []
        if self._before:  # reading the flags makes the host wait for its GPU
            for (parameter, name), ranks in zip(self._names.items(), self._reached.tolist(), strict=True):
                if not ranks:
                    parameter.grad = self._before[parameter]
                    never.append(name)
        self._running = False
        self._computed_here.clear()
        self._sent.clear()
        self._before.clear()
        return never


class AveragingEngine:
    """The verbs of an engine that averages gradients by an `Averager`, which `hook` makes."""

    size: int
    notes: tuple[str, ...] = ()
    _settings: Recipe
    _averager: Averager | None = None

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        if self.size > 1:
            self.hook(model, self._settings.compression)
        return model, optimizer

    def hook(self: Any, model: nn.Module, compression: str) -> None:
        """Averages the model's gradients from now on. `wrap` calls it for several ranks, a test on one GPU for one."""
        self._averager = Averager(model, self, compression, at_end=False)

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        *first, last = inputs
        for each in first:
            with self._averager.pause() if self._averager else contextlib.nullcontext():
                yield forward(network, each)
        yield forward(network, last)

    def finish(self) -> None:
        if self._averager:
            self._averager.finish()


class Message:
    """One gradient that is communicated from its own memory, as real numbers: two for each complex one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.reset()

    def reset(self) -> None:
        """Begins anew: no gradient of the next backward is there."""
        self.missing = set(self.parameters)

    def fill(self, parameter: nn.Parameter) -> None:
        """Takes the parameter's gradient."""

    def content(self) -> torch.Tensor:
        """What is communicated once no gradient is missing: a contiguous tensor [n]."""
        (parameter,) = self.parameters
        assert parameter.grad is not None
        if parameter.grad.is_conj() or not is_dense(parameter.grad):
            parameter.grad = parameter.grad.resolve_conj().contiguous()
        return flat(real(parameter.grad))

    def hand_out(self) -> None:
        """Makes the average the parameters' gradients."""


class _Bucket(Message):
    """Several gradients that are communicated as one tensor of one type."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        self._whole = torch.zeros(sum(real(each).numel() for each in parameters), dtype=dtype, device=device)
        super().__init__(parameters)
        self._divide()

    def with_flags(self, count: int) -> torch.Tensor:
        """Makes room for so many flags behind the gradients, and returns them: a view [count] of the bucket."""
        self._whole = self._whole.new_zeros(len(self._whole) + count)
        self._divide()
        return self._whole[len(self._whole) - count :]

    def _divide(self) -> None:
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        begin = 0
        for parameter in self.parameters:
            # In the parameter's order of dimensions: with another one the optimizer is slower.
            like = real(parameter if is_dense(parameter) else torch.empty_like(parameter, device="meta").contiguous())
            self._views[parameter] = self._whole.as_strided(like.shape, like.stride(), begin)
            begin += like.numel()

    def fill(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._views[parameter].copy_(real(parameter.grad))
        parameter.grad = None

    def content(self) -> torch.Tensor:
        return self._whole

    def hand_out(self) -> None:
        for parameter, view in self._views.items():
            if parameter.is_complex():
                parameter.grad = torch.view_as_complex(view.to(parameter.dtype.to_real()))
            else:
                parameter.grad = view.to(parameter.dtype)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as real numbers: a view [..., 2] of a complex one."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def messages(parameters: Iterable[nn.Parameter], limit: int, dtype: torch.dtype | None) -> list[Message]:
    """The messages of the parameters' gradients, in the order in which backward computes them. Small gradients share
    messages of at most `limit` bytes."""
    found: list[Message] = []
    for group in grouped(parameters, limit):
        dense = group[0].dtype.to_real()
        sent = dtype or (torch.float32 if dense == torch.bfloat16 else dense)  # Horovod has no bfloat16
        found.append(Message(group) if len(group) == 1 and sent == dense else _Bucket(group, sent, group[0].device))
    return found


def grouped(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """The parameters in the order in which backward reaches them. Small ones of one dtype are together, up to `limit`
    bytes; such a group has the place of its last parameter."""
    groups: list[list[nn.Parameter]] = []
    small: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        if parameter.nbytes > limit:
            groups.append([parameter])
            continue
        gathered = small.setdefault(parameter.dtype, [])
        if sum(each.nbytes for each in gathered) + parameter.nbytes > limit:
            groups.append(gathered)
            gathered = small[parameter.dtype] = []
        gathered.append(parameter)
    return groups + [gathered for gathered in small.values() if gathered]


@torch.no_grad()
def mean_count(count: Any, engine: Engine) -> torch.Tensor:
    """The mean of the ranks' counts, a float64 scalar on the engine's device. Every rank calls it."""
    mean = torch.zeros(1, dtype=torch.float64, device=engine.device) + count
    engine.average(mean, "hvdtrain.count")()
    return mean[0]


def divisor(mean: torch.Tensor) -> torch.Tensor:
    """The number by which each rank's sum is divided: the mean of the counts, or 1 where all are 0."""
    return mean.where(mean != 0, 1)


class Counts:
    """Divides the losses of an update's micro-batches that are sums by the counts of all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._means: list[torch.Tensor] = []

    def mean(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss of an update's only micro-batch, as a mean over all ranks. Every rank calls it."""
        return (total / divisor(mean_count(count, self._engine))).to(total.dtype)

    def divided(self, total: torch.Tensor, count: Any, times: int = 1) -> torch.Tensor:
        """The loss of one of several micro-batches: its value is the micro-batch's mean, and its gradients are `times`
        those of the sum divided by the first count, which `finish` corrects. Every rank calls it."""
        self._means.append(mean_count(count, self._engine))
        share = total / divisor(self._means[0]) * times
        return (share + (total / divisor(self._means[-1]) - share).detach()).to(total.dtype)

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends the update: divides averaged gradients of several micro-batches by all counts in place of the first."""
        if len(self._means) > 1:
            factor = divisor(self._means[0]) / divisor(sum(self._means))  # type: ignore[arg-type]
            for gradient in (each.grad for each in parameters if each.grad is not None):
                gradient.mul_(factor.to(gradient.device))
        self._means.clear()


class LoopAverager(Averager):
    """Averages the gradients of a user's own loop, which may leave an epoch early: a message after each backward
    reports whether this rank has left."""

    error = LoopError

    def __init__(self, model: nn.Module, engine: Engine, compression: str) -> None:
        super().__init__(model, engine, compression)
        self._is_forward_shared = any(isinstance(each, SyncBatchNorm) for each in model.modules())
        self._is_loss_shared = False
        self._leaves = False
        self._left: tuple[torch.Tensor, Callable[[], object]] | None = None
        """Which ranks have left, and the function that waits until that has arrived."""

    def begin_batch(self) -> None:
        """Called before each batch. Raises LoopError on all ranks where one has left the epoch instead."""
        if self._is_forward_shared:
            self._compare(leaves=False)

    def begin_loss(self) -> None:
        """Called before this rank's loss communicates. Raises LoopError as `begin_batch` does."""
        self._is_loss_shared = True
        self._compare(leaves=False)

    def leave(self) -> None:
        """Called where this rank leaves an epoch's batches early. Takes part in what a rank that stays communicates
        next: its backward, or where its forward or loss communicates too, a comparison before it. Raises LoopError on
        all ranks where not all of them leave."""
        if self._is_forward_shared or self._is_loss_shared:
            self._compare(leaves=True)
        else:
            self._leaves = True
            self.finish()
            self.check_left()

    def _compare(self, leaves: bool) -> None:
        rank, size = self._engine.rank, self._engine.size
        left = gather(np.array([leaves], dtype=np.int64), rank, size, self._engine.sum)[:, 0]
        _check_left(np.flatnonzero(left).tolist(), size)

    def check_left(self) -> None:
        """Raises LoopError on all ranks where one had left at the last backward, and others had not. Called by every
        rank after its update, before it communicates anything else: meanwhile the host need not wait for the others'.
        """
        if self._left:
            (left, wait), self._left = self._left, None
            wait()
            _check_left(left.nonzero()[:, 0].tolist(), self._engine.size)

    def _send_rest(self) -> None:
        self.check_left()
        super()._send_rest()
        left = torch.zeros(self._engine.size)
        left[self._engine.rank] = self._leaves
        self._leaves = False
        self._left = left, self._engine.average(left, "hvdtrain.leaving")


def _check_left(left: list[int], size: int) -> None:
    """Raises LoopError where some ranks have left the epoch's batches and others have not."""
    if 0 < len(left) < size:
        stays = next(rank for rank in range(size) if rank not in left)
        raise LoopError(
            f"rank {left[0]} left run.batches() where rank {stays} continued; every rank must make the same steps: end "
            "an epoch early by a number that all of them have, as of world.sum."
        )
