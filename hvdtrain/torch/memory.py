"""What forward keeps for backward: how many bytes, and activations that are computed again instead."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hvdtrain.core.recipe.memory import BLOCKS
from hvdtrain.core.wording import nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import quoted

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


def checkpointed(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The same model, whose modules of these names keep their inputs alone for backward, which computes them again.

    Chen et al. 2016, arXiv:1604.06174. Raises RecipeError where a pattern has no module, or a module is TorchScript.
    """
    kinds: dict[type, type] = {}
    for name in _chosen(model, patterns):
        module = model.get_submodule(name)
        if isinstance(module, torch.jit.ScriptModule):
            raise RecipeError(f"{name} is TorchScript, whose activations stay; leave it out of checkpoint_activations.")
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = type(f"Checkpointed{kind.__name__}", (Checkpointed, kind), {"kind": kind})
        module.__class__ = kinds[kind]
    return model


def _chosen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the modules, of which none is part of another one."""
    names = [name for name, _ in model.named_modules() if name]
    found = list[str]()
    for pattern in patterns:
        matching = _blocks(model) if pattern == BLOCKS else [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            rule = "finds no repeated blocks in the model" if pattern == BLOCKS else "is the name of no module"
            near = "" if pattern == BLOCKS else nearest(pattern, names)
            remedy = f"name modules, as {names[0] if names else 'layers.*'}"
            raise RecipeError(f"checkpoint_activations {quoted(pattern)} {rule}; {remedy}.{near}")
        found += matching
    chosen = dict.fromkeys(found)
    return [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]


def _blocks(model: nn.Module, prefix: str = "") -> list[str]:
    """The modules in the outermost lists of modules that have modules themselves; or such lists of single layers."""
    found = list[str]()
    for name, module in model.named_children():
        children = [(key, child) for key, child in module.named_children() if [*child.parameters()]]
        inner = [f"{prefix}{name}.{key}" for key, child in children if [*child.children()]]
        if isinstance(module, CONTAINERS) and inner:
            found += inner
        elif isinstance(module, nn.Sequential) and len(children) > 1:
            found.append(f"{prefix}{name}")
        else:
            found += _blocks(module, f"{prefix}{name}.")
    return found


class Kept:
    """Within the block counts the bytes that forward keeps for backward, beside the model's own tensors."""

    counting: ClassVar["Kept | None"] = None

    def __init__(self, model: nn.Module) -> None:
        own = (*model.parameters(), *model.buffers())
        self._own, self._seen = {each.untyped_storage()._cdata for each in own}, dict[int, Any]()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        self.bytes = 0

    def __enter__(self) -> "Kept":
        Kept.counting = self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        Kept.counting, self.bytes = None, sum(each.nbytes() for each in self._seen.values())
        self._seen.clear()

    def add(self, *kept: Any) -> None:
        """Counts the tensors in these values, each storage once."""
        for tensor in tree_leaves(kept):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own:
                    self._seen[storage._cdata] = storage

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor


class Checkpointed(nn.Module):
    """The class that such a module gets beside its own. One that is read from a pickle has its first class again."""

    kind: type[nn.Module]

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checkpointed":
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        return self.kind.__new__, (self.kind,), self.__dict__


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
