"""Gradients averaged over the ranks while backward runs, in messages whose content never changes.

Horovod copies what is ready at one moment into a buffer of its own, and back: much is copied, and what a sum is made
of depends on the moment. Here a large gradient is communicated from its own memory, and small ones in a bucket, which
they stay in: less copying than in PyTorch's DistributedDataParallel, too, whose buckets (Li et al. 2020,
arXiv:2006.15704, section 3.2) hold the large ones as well.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from hvdtrain.errors import RecipeError

Send = Callable[[torch.Tensor, str], int]
"""Begins to average a tensor [n] over the ranks, in place, under a name that all ranks give it; a handle."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as [n], whatever the order of the dimensions is: Horovod takes contiguous tensors only.

    Raises RuntimeError where the tensor has gaps.
    """
    as_they_lie = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(as_they_lie).view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, without gaps, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def distinct(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions that `like`, of the same shape, has: its expanded dimensions have length 1."""
    for dimension, (stride, size) in enumerate(zip(like.stride(), like.shape, strict=True)):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


@contextlib.contextmanager
def in_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The bytes [n] of each tensor that has any, to be overwritten within the block: of its own memory, or where it has
    gaps or dimensions that are expanded, of a copy that is copied back."""
    found, copies = {}, []
    for name, tensor in tensors.items():
        lying = own = distinct(tensor.detach(), tensor)
        if own.is_conj() or own.is_neg() or not is_dense(own):
            lying = own.resolve_conj().resolve_neg().contiguous()
            copies.append((own, lying))
        if own.numel():
            found[name] = flat(lying).view(torch.uint8)
    yield found
    with torch.no_grad():
        for own, lying in copies:
            own.copy_(lying)


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
        self._indices = {parameter: index for index, parameter in enumerate(learning)}
        self._messages = messages(learning, limit, dtype)
        last = self._messages[-1]
        if not isinstance(last, _Bucket):
            last = _Bucket([], torch.float32, learning[0].device)
            self._messages.append(last)
        self._reached = last.with_flags(len(learning))
        """Of each parameter, whether backward reached it: once averaged, 0 where no rank's did. The last message has
        it, and leaves last."""
        self._unreached: set[nn.Parameter] = set()
        """By this rank's backward."""
        for number, message in enumerate(self._messages):
            for parameter in message.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._computed, number))

    def finish(self) -> None:
        """Returns once every gradient is the mean over the ranks. Every rank calls it after its backward; a parameter
        that its backward did not reach counts as 0, and keeps the gradient None where no rank's did."""
        for number, message in enumerate(self._messages):
            for parameter in message.parameters:
                if parameter in message.missing:
                    self._fill(number, parameter)
        for message in self._messages:
            assert message.handle is not None
            self._wait(message.handle)
            message.hand_out()
            message.reset()
        if self._unreached:  # else nothing is read, for which a host would wait for its GPU
            reached = self._reached.tolist()
            for parameter in self._unreached:
                if not reached[self._indices[parameter]]:
                    parameter.grad = None
            self._unreached.clear()

    def _computed(self, number: int, parameter: nn.Parameter) -> None:
        message = self._messages[number]
        if message.passes[parameter] == self._passes:
            raise RecipeError(
                f"backward computed a gradient of shape {list(parameter.shape)} twice, so it cannot be averaged while "
                "it runs; where it is checkpointed, take torch.utils.checkpoint with use_reentrant=False."
            )
        message.passes[parameter] += 1
        if message.passes[parameter] == self._passes:
            self._fill(number, parameter)

    def _fill(self, number: int, parameter: nn.Parameter) -> None:
        message, last = self._messages[number], len(self._messages) - 1
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RecipeError(
                f"a gradient of shape {list(parameter.shape)} is sparse, ranks average dense ones; drop sparse."
            )
        if parameter.grad is None:
            self._unreached.add(parameter)
            parameter.grad = torch.zeros_like(parameter)
        message.fill(parameter)
        message.missing.remove(parameter)
        if message.missing:
            return
        if number != last:
            self._begin(number)
        if not any(each.missing for each in self._messages):
            self._reached.fill_(1)
            for unreached in self._unreached:
                self._reached[self._indices[unreached]] = 0
            self._begin(last)

    def _begin(self, number: int) -> None:
        message = self._messages[number]
        message.handle = self._send(message.content(), f"hvdtrain.gradients.{number}")


class Message:
    """What is communicated at once: real numbers, of a complex gradient both parts."""

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
        (parameter,) = self.parameters
        assert parameter.grad is not None
        if parameter.grad.is_conj() or not is_dense(parameter.grad):
            parameter.grad = parameter.grad.resolve_conj().contiguous()
        return flat(real(parameter.grad))


class _Bucket(Message):
    """Gradients in one tensor, as the type that is communicated."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        self._whole = torch.zeros(sum(real(each).numel() for each in parameters), dtype=dtype, device=device)
        super().__init__(parameters)
        self._divide()

    def with_flags(self, count: int) -> torch.Tensor:
        """So many numbers more, behind the gradients: a view of what is communicated."""
        self._whole = self._whole.new_zeros(len(self._whole) + count)
        self._divide()
        return self._whole[len(self._whole) - count :]

    def _divide(self) -> None:
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        begin = 0
        for parameter in self.parameters:
            # In the parameter's order of dimensions, without which the optimizer takes a slower way.
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
    """The numbers of a tensor, of a complex one as [..., 2]."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def messages(parameters: Iterable[nn.Parameter], limit: int, dtype: torch.dtype | None) -> list[Message]:
    """The gradients of the parameters in messages of at most `limit` bytes, in the order in which backward has them."""
    found: list[Message] = []
    for group in grouped(parameters, limit):
        own = group[0].dtype.to_real()
        sent = dtype or (torch.float32 if own == torch.bfloat16 else own)  # Horovod has no bfloat16
        found.append(_Alone(group) if len(group) == 1 and sent == own else _Bucket(group, sent, group[0].device))
    return found


def grouped(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """The parameters in the order in which backward reaches them, small ones of one dtype together up to `limit` bytes:
    a group stands where its last one is reached."""
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
