"""What a program keeps beside its model, in checkpoints or not: found among the objects that are alive."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hvdtrain.errors import LoopError
from hvdtrain.torch import resumable

LIBRARIES = "torch", "hvdtrain", "torchdata", "lightning", "lightning_utilities"
"""Packages whose objects are no state of a program, apart from those of KINDS."""
KINDS = nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
LOOKS = 3
MOST_READ = 8
"""Elements of a tensor that a look reads at most."""


def alive(is_wanted: Callable[[type], bool]) -> list[Any]:
    """The objects that this process holds and whose class is wanted."""
    objects = gc.get_objects()  # a million, with PyTorch's compiler
    return list(compress(objects, map(functools.cache(is_wanted), map(type, objects))))


class Looks:
    """Looks at the objects that are alive before a program's first step and at its first two checkpoints, and names
    those that have changed and that no checkpoint holds."""

    def __init__(self, model: nn.Module, kept: Iterable[Any]) -> None:
        """`kept`: what checkpoints hold beside the model."""
        parts = [vars(each) for each in kept if hasattr(each, "__dict__")]  # as of a scheduler that chains others
        modules = [model, *(each for each in kept if isinstance(each, nn.Module))]
        self._kept = {id(each) for each in [*kept, *tree_leaves(parts)]}
        self._tensors = {each.data_ptr() for of in modules for each in [*of.parameters(), *of.buffers()]}
        self._made = 0
        self._seen: dict[int, tuple[Any, str]] = {}
        """What was alive at the look before, by identity, and what it held."""
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        """Those that were alive before the first step."""

    def look(self) -> list[str]:
        """A line for each object that has changed since the look before."""
        self._made += 1
        if self._made > LOOKS:
            return []
        before, last = self._seen, self._made == LOOKS
        found = [each for of, _ in before.values() if (each := of()) is not None] if last else alive(_has_state)
        if self._made == 1:
            self.optimizers.update(each for each in found if isinstance(each, torch.optim.Optimizer))
            # A metric of torchmetrics is reset in each epoch, before its checkpoint or after.
            found = [each for each in found if not hasattr(each, "_update_count")]
        inside = {id(part) for each in found if isinstance(each, nn.Module) for part in each._modules.values()}
        found = [each for each in found if id(each) not in self._kept | inside]
        self._seen = {id(each): (weakref.ref(each), self._content(each)) for each in found}
        lines = []
        for each in found:
            was, content = before.get(id(each), (lambda: None, ""))
            if was() is each and content != self._seen[id(each)][1]:
                self._kept.add(id(each))
                name, kind = _variable(each), type(each).__name__
                gives = f"world.run(..., state={{{name!r}: {name}}})"
                lines.append(f"{name} ({kind}) has changed and no checkpoint holds it: give it as {gives}")
        return lines

    def _content(self, each: Any) -> str:
        """The numbers and texts of the object's state, and some of those in its tensors that no checkpoint holds."""
        try:
            leaves = tree_leaves(getattr(each, "_update_count", None) or each.state_dict())
            return str([self._read(value) if isinstance(value, torch.Tensor) else value for value in leaves])
        except Exception:  # it has none now, or its tensors have no values, as on the device meta
            return ""

    def _read(self, tensor: torch.Tensor) -> Any:
        flat = tensor.detach().reshape(-1)
        is_kept = tensor.data_ptr() in self._tensors
        return None if is_kept else flat[:: max(1, len(flat) // MOST_READ)][:MOST_READ].tolist()


def _has_state(kind: type) -> bool:
    if not hasattr(kind, "state_dict") or not kind.__weakrefoffset__:
        return False
    return issubclass(kind, KINDS) or str(kind.__module__).partition(".")[0] not in LIBRARIES


def _variable(each: Any) -> str:
    """The name of the variable that holds the object; else of its class."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        if not frame.f_globals.get("__name__", "").startswith("hvdtrain."):
            for scope in (frame.f_locals, frame.f_globals):
                if name := next((name for name, value in scope.items() if value is each), None):
                    return name
    return type(each).__name__.lower()


def the_scaler() -> torch.amp.GradScaler | None:
    """The loss scale that this process has and has not used, as in a run before, where it has one alone."""
    found = alive(lambda kind: issubclass(kind, torch.amp.GradScaler))
    found = [each for each in found if each.is_enabled() and each._scale is None]
    return found[0] if len(found) == 1 else None


def beside(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, nn.Module]:
    """The modules, by name, whose parameters these optimizers update and the model does not have, such as a loss with
    centers. Parameters of no module are in one that is made for them."""
    own, found = set(model.parameters()), list[nn.Module]()
    left = [each for group in resumable.groups(optimizers) for each in group["params"] if each not in own]
    modules = alive(lambda kind: issubclass(kind, nn.Module) and kind is not resumable.Whole) if left else []
    of_each = {each: set(each.parameters()) for each in modules}
    while left:
        holders = [each for each, held in of_each.items() if left[0] in held and not held & own]
        found.append(max(holders, key=lambda each: len([*each.modules()]), default=nn.Module()))
        if not holders:
            found[-1]._parameters = {"0": left[0]}
        known = set(found[-1].parameters())
        left = [each for each in left if each not in known]
    return {f"beside {index}": each for index, each in enumerate(found)}


def check_state(given: Mapping[str, Any]) -> None:
    """Raises LoopError where a checkpoint could not hold what `world.run` is given as `state`, or not give it back."""
    for name, each in given.items():
        if not str(name).isidentifier():
            raise LoopError(f"state has the name {name!r}; a name is one of Python's, as ema.")
        if not hasattr(each, "load_state_dict") and not isinstance(each, torch.Tensor | np.ndarray | dict | list):
            raise LoopError(
                f"state {name!r} is a {type(each).__name__}, which no resume could give back to the program; "
                "put it into a dictionary that the program changes, or give an object with state_dict."
            )
        if not resumable.is_kept(resumable.content(each)):
            raise LoopError(f"state {name!r} keeps what no checkpoint holds; give one of tensors, numbers and texts.")
