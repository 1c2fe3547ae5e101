"""The messages in which an engine communicates gradients, and how they are divided among them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.torch.engines import flat, is_dense

DTYPES = {name: getattr(torch, row.dtype, None) if row.dtype else None for name, row in COMPRESSIONS.items()}
"""The type in which gradients are communicated, by compression; None is their own type."""


class Message:
    """One gradient that is communicated from its own memory, as real numbers: two for each complex one."""

    keeps = True
    """Whether a gradient stays the tensor that it was, which costs a copy: a program may hold it, or have made it."""

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
        super().fill(parameter)
        self._views[parameter].copy_(real(parameter.grad))
        parameter.grad = parameter.grad if self.keeps else None

    def content(self) -> torch.Tensor:
        return self._whole

    def hand_out(self) -> None:
        if self.keeps and self.parameters:
            torch._foreach_copy_([real(each.grad) for each in self.parameters], [*self._views.values()])
        for parameter, view in self._views.items() if not self.keeps else ():
            is_complex = parameter.is_complex()
            mean = view.to(parameter.dtype.to_real() if is_complex else parameter.dtype)
            parameter.grad = torch.view_as_complex(mean) if is_complex else mean


def real(tensor: Any) -> torch.Tensor:
    """The tensor as real numbers: a view [..., 2] of a complex one."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def messages(parameters: Iterable[nn.Parameter], limit: int, dtype: torch.dtype | None) -> list[Message]:
    """The messages of the parameters' gradients, in the order in which backward computes them. Small gradients share
    messages of at most `limit` bytes."""
    found: list[Message] = []
    for group in grouped(parameters, limit):
        dense = group[0].dtype.to_real()
        sent = dtype or (torch.float32 if dense == torch.bfloat16 else dense)  # Horovod has no bfloat16
        found.append(Message(group) if len(group) == 1 and sent == dense else Bucket(group, sent, group[0].device))
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
