"""What forward keeps for backward: how many bytes, activations that are computed again instead, and a step of smaller
micro-batches where memory runs out."""

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import RecipeError
from hvdtrain.torch.networks import Beside, put_beside, without_activations
from hvdtrain.torch.objective import Batch


def checkpointed(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The same model, whose modules of these names keep their inputs alone for backward, which computes them again.

    Chen et al. 2016, arXiv:1604.06174. Raises RecipeError where a pattern has no module, or a module is TorchScript.
    """
    kinds: dict[type, type] = {}
    for name in without_activations(model, patterns):
        module = model.get_submodule(name)
        if isinstance(module, torch.jit.ScriptModule):
            raise RecipeError(f"{name} is TorchScript, whose activations stay; leave it out of checkpoint_activations.")
        put_beside(module, Checkpointed, kinds)
    return model


class Kept:
    """Within the block counts the bytes that forward keeps for backward, beside the model's own tensors."""

    counting: ClassVar["Kept | None"] = None

    def __init__(self, model: nn.Module) -> None:
        own = (*model.parameters(), *model.buffers())
        self._own, self._seen = {each.untyped_storage()._cdata for each in own}, dict[int, Any]()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        self.bytes, self._by = 0, dict[str, int]()
        children = [*model.named_children()]
        while len(children) == 1 and [*children[0][1].children()]:
            children = [(f"{children[0][0]}.{name}", child) for name, child in children[0][1].named_children()]
        self._watches = [hook for name, child in children for hook in self._watched(name, child)]

    def _watched(self, name: str, child: nn.Module) -> list[Any]:
        before = list[int]()
        enter = child.register_forward_pre_hook(lambda *_: before.append(self.bytes))

        def leave(*_: Any) -> None:
            self._by[name] = self._by.get(name, 0) + self.bytes - before.pop()

        return [enter, child.register_forward_hook(leave)]

    def modules(self) -> list[tuple[str, int]]:
        """The bytes of the outermost modules, the largest first."""
        return sorted(self._by.items(), key=lambda row: -row[1])

    def __enter__(self) -> "Kept":
        Kept.counting = self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        Kept.counting = None
        self._seen.clear()
        for hook in self._watches:
            hook.remove()

    def add(self, *kept: Any) -> None:
        """Counts the tensors in these values, each storage once."""
        for tensor in tree_leaves(kept):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor


class Checkpointed(Beside):
    """The class that such a module gets beside its own."""

    def forward(self, *args: Any, **options: Any) -> Any:
        compute = super().forward
        if not self.training or not torch.is_grad_enabled():
            return compute(*args, **options)
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        if Kept.counting:
            Kept.counting.add(args, options)

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _as_before(before)

        return checkpoint(compute, *args, use_reentrant=False, context_fn=contexts, **options)


@contextlib.contextmanager
def _as_before(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Within the block buffers have the values that the first forward found: a BatchNorm counts each batch once."""
    now = [(buffer, buffer.clone()) for buffer, _ in buffers]
    try:
        for buffer, value in buffers:
            buffer.data.copy_(value)
        yield
    finally:
        for buffer, value in now:
            buffer.data.copy_(value)


def lack(error: BaseException | None) -> str:
    """What was asked for, where an error, or what caused it, is that memory ran out; else ""."""
    while error:
        text = str(error)
        is_of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in text
        if is_of_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError):
            asked = re.search(r"[Tt]ried to allocate (?:(\d+) bytes|([\d.]+ [KMGT]iB))", text)
            size = (asked[2] or f"{int(asked[1]) / 2**20:,.1f} MiB") if asked else "memory"
            return f"{size} could not be had"
        error = error.__cause__
    return ""


class Fitting:
    """Makes the gradients of an update of as large micro-batches as fit into the memory of every rank.

    Where one does not fit on a rank, that rank sends what is left of its messages with a flag, all ranks halve their
    micro-batches, and the step is made again from the state before it.
    """

    parts = 1
    """Into how many parts each micro-batch is divided."""
    most = 1
    """The number of examples in the largest micro-batch, the same on all ranks."""

    def __init__(self, engine: Any, owners: Sequence[Any], enabled: bool) -> None:
        """`owners`: what a forward may write to, of which modules are kept."""
        self._engine, self._enabled = engine, enabled
        self._modules = [each for each in owners if isinstance(each, nn.Module)]

    @property
    def _averager(self) -> Any:
        return getattr(self._engine, "averager", None)

    def some_lack(self) -> bool:
        """Whether a rank lacked memory in the gradients that were averaged last. Every rank calls it."""
        return self._enabled and self._averager is not None and self._averager._messages.some_lack

    def gradients(self, compute: Callable[[list[Any]], list[Any]], batches: Sequence[Any]) -> list[Any]:
        """What `compute` returns of the parts of these micro-batches. Every rank calls it, and raises what it raised
        where single examples do not fit."""
        if not self._enabled:
            return compute([*batches])
        before = _State(self._modules, self._engine.device)
        while True:
            asked, seen = "", []
            try:
                seen = compute([part for batch in batches for part in divided(batch, self.parts)])
            except Exception as error:
                if not (asked := lack(error)):
                    raise
            if asked:  # the error, whose traceback holds activations, is gone
                if self._engine.device.type == "cuda":
                    torch.cuda.empty_cache()
                if self._averager:
                    self._averager.finish(lacks=True)
            if not (asked or self.some_lack()):
                return seen
            if self.parts >= self.most:
                raise torch.OutOfMemoryError(asked or "memory of another rank")
            self.parts *= 2
            before.restore()


class _State:
    """The buffers of modules and the states of the random number generators, as they are now."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
        self._cuda = (torch.cuda.get_rng_state(device), device) if device.type == "cuda" else None
        self._drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        for buffer, value in self._buffers:
            buffer.data.copy_(value)
        of_torch, of_python, of_numpy = self._drawn
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if self._cuda:
            torch.cuda.set_rng_state(*self._cuda)


def divided(batch: Any, parts: int) -> list[Any]:
    """A micro-batch in so many parts of neighbouring examples, or fewer. Raises RecipeError where it has anything but
    tensors [n, ...] of its examples."""
    data, count = (batch.data, batch.count) if isinstance(batch, Batch) else (batch, len(batch[1]))
    cuts = sorted({count * part // parts for part in range(parts + 1)})
    if len(cuts) < 3:
        return [batch]
    if not all(isinstance(each, torch.Tensor) and each.dim() and len(each) == count for each in tree_leaves(data)):
        raise RecipeError(
            "fit_memory divides batches whose tensors have one row for each example, this batch has others; drop it, "
            "and give a larger accumulation_steps."
        )
    pieces = [tree_map(lambda one, part=slice(*cut): one[part], data) for cut in itertools.pairwise(cuts)]
    if not isinstance(batch, Batch):
        return pieces
    return [Batch(piece, last - first) for piece, (first, last) in zip(pieces, itertools.pairwise(cuts), strict=True)]
