"""The messages in which an engine communicates gradients, and how they are divided among them."""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.torch.engines import Engine, flat, is_dense

DTYPES = {name: getattr(torch, row.dtype, None) if row.dtype else None for name, row in COMPRESSIONS.items()}
"""The type in which gradients are communicated, by compression; None is their own type."""


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
        assert parameter.grad is not None
        if parameter.grad.is_conj() or not is_dense(parameter.grad):
            parameter.grad = parameter.grad.resolve_conj().contiguous()

    def content(self) -> torch.Tensor:
        """What is communicated once no gradient is missing: a contiguous tensor [n]."""
        return flat(real(self.parameters[0].grad))

    def hand_out(self) -> None:
        """Makes the average the parameters' gradients."""


class Bucket(Message):
    """Several gradients that are communicated as one tensor of one type.

    With `keeps` a gradient stays the tensor that it was, which costs a copy: a program may hold it, or have made it.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device, keeps: bool) -> None:
        self._keeps = keeps
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

    def content(self) -> torch.Tensor:
        if self.parameters:
            torch._foreach_copy_([*self._views.values()], [real(each.grad) for each in self.parameters])
        for parameter in self.parameters if not self._keeps else ():
            parameter.grad = None
        return self._whole

    def hand_out(self) -> None:
        if self._keeps and self.parameters:
            torch._foreach_copy_([real(each.grad) for each in self.parameters], [*self._views.values()])
        for parameter, view in self._views.items() if not self._keeps else ():
            is_complex = parameter.is_complex()
            mean = view.to(parameter.dtype.to_real() if is_complex else parameter.dtype)
            parameter.grad = torch.view_as_complex(mean) if is_complex else mean


def real(tensor: Any) -> torch.Tensor:
    """The tensor as real numbers: a view [..., 2] of a complex one."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


class Messages:
    """The messages of the gradients of parameters that learn, in the order in which backward computes them.

    Every rank sends them in this order, whichever parameters its backward reached. A parameter that no rank reached
    keeps the gradient that it had. The last message has a flag for each parameter, by which the ranks know these.
    """

    slots: torch.Tensor | None = None
    """More numbers that the last message averages, where there is one: a view of it."""
    _lacks = False
    """Whether this rank's backward has ended early, for lack of memory."""

    def __init__(
        self,
        engine: Engine,
        limit: int,
        dtype: torch.dtype | None,
        named: Mapping[str, nn.Parameter],
        *,
        keeps: bool,
        slots: int,
    ) -> None:
        """`limit`: the largest size in bytes of a message of small gradients. `keeps`: see `Bucket`."""
        self._engine = engine
        self.names = {each: name for name, each in named.items() if each.requires_grad}
        self.all: list[Message] = []
        for group in grouped(self.names, limit):
            dense = group[0].dtype.to_real()
            sent = dtype or (torch.float32 if dense == torch.bfloat16 else dense)  # Horovod has no bfloat16
            is_alone = len(group) == 1 and sent == dense
            self.all.append(Message(group) if is_alone else Bucket(group, sent, group[0].device, keeps))
        if self.all:
            if not isinstance(last := self.all[-1], Bucket):
                last = Bucket([], torch.float32, last.parameters[0].device, keeps)
                self.all.append(last)
            flags = last.with_flags(len(self.names) + slots)
            self._reached = flags[: len(self.names)]
            self.slots = flags[len(self.names) :] if slots else None
        self.of = {each: message for message in self.all for each in message.parameters}
        """The message of each parameter."""
        self._waits: list[Callable[[], object]] = []
        """Waits for the average of each message that is sent."""
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        """The gradients that parameters had which backward did not reach on this rank."""

    def send(self, computed: Container[nn.Parameter], *, whole: bool = True) -> None:
        """Begins to average the next messages: those that are `whole`, or all. `computed`: the parameters whose
        gradients backward has computed on this rank."""
        for message in self.all[len(self._waits) :]:
            if whole and message.missing:
                return
            for parameter in message.parameters:
                if parameter not in computed:  # another rank may have reached it
                    self._before[parameter] = before = parameter.grad
                    parameter.grad = torch.zeros_like(parameter) if before is None else before.clone()
                message.fill(parameter)
            if message is self.all[-1]:
                self._reached.fill_(1 + self._engine.size * self._lacks)
                for index, parameter in enumerate(self.names if self._before and not self._lacks else ()):
                    if parameter in self._before:
                        self._reached[index] = 0
            self._waits.append(self._engine.average(message.content(), f"hvdtrain.gradients.{len(self._waits)}"))

    @contextlib.contextmanager
    def flagged(self, lacks: bool) -> Iterator[None]:
        """Within the block this rank says whether its backward has ended early, for lack of memory."""
        self._lacks = lacks
        yield
        self._lacks = False  # before the next backward, which may send the last message itself

    @property
    def some_lack(self) -> bool:
        """Whether any rank's last backward has ended early, for which the host waits."""
        return bool((self._reached > 1.5).any())

    def finish(self, computed: Container[nn.Parameter]) -> list[str]:
        """Averages all gradients, and begins anew. Returns the names of the parameters that no rank has reached."""
        self.send(computed, whole=False)
        for message, wait in zip(self.all, self._waits, strict=True):
            wait()
            message.hand_out()
            message.reset()
        unreached = list[str]()
        if self._before:  # reading the flags makes the host wait for its GPU
            for (parameter, name), ranks in zip(self.names.items(), self._reached.tolist(), strict=True):
                if not ranks:
                    unreached.append(name)
                if (before := self._before.get(parameter)) is not None and ranks:
                    before.copy_(parameter.grad)  # type: ignore[arg-type]
                if before is not None or not ranks:
                    parameter.grad = before
        self._waits.clear()
        self._before.clear()
        return unreached


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
