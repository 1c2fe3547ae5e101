"""Gradients averaged over the ranks while backward runs, in messages whose content never changes.

Horovod copies what is ready at one moment into a buffer of its own, and back: much is copied, and what a sum is made
of depends on the moment. Here a large gradient is communicated from its own memory, and small ones in a bucket, which
they stay in: less copying than in PyTorch's DistributedDataParallel, too, whose buckets (Li et al. 2020,
arXiv:2006.15704, section 3.2) hold the large ones as well.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

Send = Callable[[torch.Tensor, str], int]
"""Begins to average a tensor [n] over the ranks, in place, under a name that all ranks give it; a handle."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as [n], whatever the order of the dimensions is: Horovod takes contiguous tensors only.

    Raises RuntimeError where the tensor has gaps.
    """
    as_they_lie = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(as_they_lie).view(-1)


class Buckets:
    """The gradients of some parameters, averaged over the ranks in every `passes`-th backward."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        limit: int,
        dtype: torch.dtype | None,
        passes: int,
        send: Send,
        wait: Callable[[int], object],
    ) -> None:
        """`limit`: the most bytes of parameters whose gradients share a bucket; 0 leaves each alone. `dtype`: what they
        are communicated as, None for the parameter's own. `wait` returns once the tensor of a handle is averaged."""
        self._send, self._wait, self._passes = send, wait, passes
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        self._messages = messages(learning, limit, dtype)
        for number, message in enumerate(self._messages):
            for parameter in message.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._computed, number))

    def finish(self) -> None:
        """Returns once every gradient is the mean over the ranks. Every rank calls it after its backward; a parameter
        that backward did not reach counts as 0."""
        for number, message in enumerate(self._messages):
            for parameter in message.parameters:
                if parameter in message.missing:
                    self._fill(number, parameter)
        for message in self._messages:
            assert message.handle is not None
            self._wait(message.handle)
            message.hand_out()
            message.reset()

    def _computed(self, number: int, parameter: nn.Parameter) -> None:
        message = self._messages[number]
        if message.passes[parameter] == self._passes:
            raise RuntimeError(
                f"a gradient of {tuple(parameter.shape)} was computed once more while it is communicated"
            )
        message.passes[parameter] += 1
        if message.passes[parameter] == self._passes:
            self._fill(number, parameter)

    def _fill(self, number: int, parameter: nn.Parameter) -> None:
        message = self._messages[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        message.fill(parameter)
        message.missing.remove(parameter)
        if not message.missing:
            message.handle = self._send(message.content(), f"hvdtrain.gradients.{number}")


class Message:
    """What is communicated at once."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.reset()

    def reset(self) -> None:
        self.handle: int | None = None
        self.missing = set(self.parameters)
        self.passes = dict.fromkeys(self.parameters, 0)

    def fill(self, parameter: nn.Parameter) -> None:
        """Takes the parameter's gradient."""

    def content(self) -> torch.Tensor:
        """What is sent once nothing is missing: a contiguous tensor [n]."""
        raise NotImplementedError

    def hand_out(self) -> None:
        """Makes what has come back the gradients."""


class _Alone(Message):
    """One gradient, in its own memory."""

    def content(self) -> torch.Tensor:
        gradient = self.parameters[0].grad
        assert gradient is not None
        return flat(gradient)


class _Bucket(Message):
    """Gradients in one tensor, as the type that is communicated."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype | None) -> None:
        first = parameters[0]
        self._whole = first.new_zeros(sum(parameter.numel() for parameter in parameters), dtype=dtype or first.dtype)
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        begin = 0
        for parameter in parameters:
            # In the parameter's order of dimensions, without which the optimizer takes a slower way.
            self._views[parameter] = self._whole.as_strided(parameter.shape, parameter.stride(), begin)
            begin += parameter.numel()
        super().__init__(parameters)

    def fill(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._views[parameter].copy_(parameter.grad)
        parameter.grad = None

    def content(self) -> torch.Tensor:
        return self._whole

    def hand_out(self) -> None:
        for parameter, view in self._views.items():
            parameter.grad = view.to(parameter.dtype)


def messages(parameters: Iterable[nn.Parameter], limit: int, dtype: torch.dtype | None) -> list[Message]:
    """The gradients of the parameters in messages of at most `limit` bytes, in the order in which backward has them."""
    return [
        _Alone(group) if len(group) == 1 and dtype is None else _Bucket(group, dtype)
        for group in grouped(parameters, limit)
    ]


def grouped(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """The parameters in the order in which backward reaches them, small ones together up to `limit` bytes: a group
    stands where its last one is reached."""
    groups: list[list[nn.Parameter]] = []
    small: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(list(parameters)):
        if parameter.nbytes > limit:
            groups.append([parameter])
            continue
        if size + parameter.nbytes > limit:
            groups.append(small)
            small, size = [], 0
        small.append(parameter)
        size += parameter.nbytes
    return [*groups, small] if small else groups
