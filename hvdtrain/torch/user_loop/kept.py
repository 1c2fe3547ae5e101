"""What a program keeps beside its model, in checkpoints or not: found among the objects that are alive."""

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, zip_longest
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from hvdtrain.errors import LoopError
from hvdtrain.ranks.stacks import is_users
from hvdtrain.torch import codec, resumable

LIBRARIES = "torch", "hvdtrain", "torchdata", "lightning", "lightning_utilities"
"""Packages whose objects are no state of a program, apart from those of KINDS."""
PLAIN = nn.Module.get_extra_state
KINDS = nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
MOST_READ = 8
"""Elements of a tensor that a look reads at most."""


def alive(is_wanted: Callable[[type], bool]) -> list[Any]:
    """The objects that this process holds and whose class is wanted."""
    objects = gc.get_objects()  # a million, with PyTorch's compiler
    found = compress(objects, map(functools.cache(is_wanted), map(type, objects)))
    return [each for each in found if not isinstance(each, nn.Module) or "_modules" in vars(each)]  # else half made


class Looks:
    """Looks at the objects that are alive before a program's first step and at its checkpoints 1, 2, 4, 8 and so on,
    and at those that it has seen at each checkpoint. It names those that change and that no checkpoint holds."""

    def __init__(self, model: nn.Module, kept: Iterable[Any]) -> None:
        """`kept`: what checkpoints hold beside the model."""
        parts = [vars(each) for each in kept if hasattr(each, "__dict__")]  # as of a scheduler that chains others
        self._modules = [model, *(each for each in kept if isinstance(each, nn.Module))]
        self._kept = {id(each) for each in [*kept, *tree_leaves(parts)]}
        self._tensors = set[int]()
        """The addresses of tensors that checkpoints hold."""
        self._model, self.made = model, 0
        self._optimizers = [each for each in kept if isinstance(each, torch.optim.Optimizer)]
        self._seen: dict[int, tuple[Any, str]] = {}
        """What was alive at the look before, by identity, and what it held."""
        self.beside: dict[str, str] = {}
        """By its variable's name, a digest of what each module beside the model held before the first step."""
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        """Those that were alive before the first step."""
        self._held: dict[str, str] = {}
        """Digests of plain attributes."""

    def look(self) -> list[str]:
        """A line for each object that has changed since the look before."""
        self.made += 1
        before, checkpoints = self._seen, self.made - 1
        is_whole = not checkpoints & (checkpoints - 1)
        found = alive(_has_state) if is_whole else [each for of, _ in before.values() if (each := of()) is not None]
        found += [each for _, each in _variables() if isinstance(each, resumable.GENERATORS)]
        found = list({id(each): each for each in found}.values())  # those of the look before are among both
        if self.made == 1:
            self.optimizers.update(each for each in found if isinstance(each, torch.optim.Optimizer))
            # A metric of torchmetrics is reset in each epoch, before its checkpoint or after.
            found = [each for each in found if not hasattr(each, "_update_count")]
        inside = {id(part) for each in found if isinstance(each, nn.Module) for part in each._modules.values()}
        inside |= {id(each) for of in self._modules for each in (of, *of.modules())}  # the program may add some
        lines = self.attributes({"the model": self._model})
        found = [each for each in found if id(each) not in self._kept | inside]
        self._seen = {id(each): (_reference(each), self._content(each)) for each in found}
        if self.made == 1:
            names = {id(value): name for name, value in _variables()}
            held = [each for each in found if isinstance(each, nn.Module) and id(each) in names]
            held = [each for each in held if any(map(self._is_other, each.state_dict().values()))]
            self.beside = {names[id(each)]: self._seen[id(each)][1] for each in held}
        for optimizer in self._optimizers if self.made == 2 else ():  # after some steps
            for name in resumable.by_parameter(optimizer):
                kind, rule = type(optimizer).__name__, "a dictionary by parameter, which no checkpoint holds"
                lines.append(f"{name} of {kind} is {rule}: keep it in optimizer.state[parameter]")
        for each in found:
            was, content = before.get(id(each), (lambda: None, ""))
            if was() is each and content != self._seen[id(each)][1]:
                self._kept.add(id(each))
                name, kind = _variable(each), type(each).__name__
                gives = f"world.run(..., state={{{name.rpartition('.')[2]!r}: {name}}})"
                lines.append(f"{name} ({kind}) has changed and no checkpoint holds it: give it as {gives}")
        return lines

    def _content(self, each: Any) -> str:
        """The numbers and texts of the object's state, and some of those in its tensors that no checkpoint holds."""
        try:
            if isinstance(each, resumable.GENERATORS):
                return _digest(codec.saved(resumable.content(each)).tobytes())
            leaves = tree_leaves(getattr(each, "_update_count", None) or each.state_dict())
            return _digest([self._read(value) if isinstance(value, torch.Tensor) else value for value in leaves])
        except Exception:  # it has none now, or its tensors have no values, as on the device meta
            return ""

    def _read(self, tensor: torch.Tensor) -> Any:
        flat = tensor.detach().reshape(-1)
        return flat[:: max(1, len(flat) // MOST_READ)][:MOST_READ].tolist() if self._is_other(tensor) else None

    def _is_other(self, value: Any) -> bool:
        """Whether it is a tensor that no checkpoint holds."""
        return isinstance(value, torch.Tensor) and value.numel() > 0 and value.data_ptr() not in self._tensors

    def attributes(self, of: Mapping[str, Any]) -> list[str]:
        """Lines on attributes of these objects, by name, and of the modules in them that are no buffers, numbers and
        tensors, and have changed since the call before; and on such variables outside of a function."""
        self._tensors = {each.data_ptr() for of in self._modules for each in [*of.parameters(), *of.buffers()]}
        now = {
            f"{f'{name}.{key}'.removeprefix('.')} of {whose}": _digest(
                self._read(value) if isinstance(value, torch.Tensor) else value
            )
            for whose, each in of.items()
            for name, part in (each.named_modules() if isinstance(each, nn.Module) else [("", each)])
            if getattr(type(part), "get_extra_state", PLAIN) is PLAIN
            for key, value in _held(part).items()
            if key[0] != "_" and isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
            if not isinstance(value, torch.Tensor) or not (value.grad_fn or getattr(part, "_forward_pre_hooks", 0))
        }
        before, self._held = self._held, now
        changed = [name for name, held in now.items() if before.get(name, held) != held]
        for name in changed:
            self._held[name] = ""  # named once
        ends = "changed, and no checkpoint holds an attribute: register a buffer"
        return [f"{name} has {ends}" for name in changed if before[name]]

    def unlike(self, first: Mapping[str, Any], ranks: Iterable[Mapping[str, Any]]) -> list[str]:
        """Lines on modules beside the model that are other ones on other ranks, or than at the run's first start."""
        lines = []
        for name, held in self.beside.items():
            others = {each[name] for each in ranks if name in each}
            if len(others) > 1:
                lines.append(f"{name} is another on each rank: seed it before it is made, or load it")
            elif first.get(name, held) != held:
                lines.append(
                    f"{name} is not what it was at the run's first start, and no checkpoint holds it: give it as "
                    f"world.run(..., state={{{name.rpartition('.')[2]!r}: {name}}})"
                )
        return lines


def _has_state(kind: type) -> bool:
    if not hasattr(kind, "state_dict") or not kind.__weakrefoffset__:
        return False
    return issubclass(kind, KINDS) or str(kind.__module__).partition(".")[0] not in LIBRARIES


def _held(each: Any) -> dict[str, Any]:
    """The attributes of an object, and the variables outside of a function that it names."""
    outside = inspect.getclosurevars(each)[:2] if inspect.isfunction(each) else ()
    parts = *outside, vars(type(each)), getattr(each, "__dict__", {})
    return {name: value for part in parts for name, value in part.items()}


def _variable(each: Any) -> str:
    """The name of the variable that holds the object; else of its class."""
    return next((name for name, value in _variables() if value is each), type(each).__name__.lower())


def _variables() -> Iterator[tuple[str, Any]]:
    """The variables of the functions that have called this one, outside of this package and of libraries, and the
    attributes of those whose class is the user's."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        if is_users(frame.f_code.co_filename):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                yield name, value
                module = sys.modules.get(type(value).__module__)
                if hasattr(value, "__dict__") and is_users(getattr(module, "__file__", None) or "<"):
                    yield from ((f"{name}.{key}", held) for key, held in vars(value).items())


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(str(value).encode(errors="surrogateescape"))


def _reference(each: Any) -> Callable[[], Any]:
    """A weak reference, where the object can have one."""
    return weakref.ref(each) if type(each).__weakrefoffset__ else lambda: each


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


def of_scheduler(scheduler: Any) -> Any:
    """The state of a learning-rate scheduler, with that of schedulers in its attributes, as of one for the warmup."""
    return tree_map_only(LRScheduler, of_scheduler, scheduler.state_dict())


def load_scheduler(scheduler: Any, saved: Any) -> None:
    """Gives a scheduler a state that `of_scheduler` has returned."""
    scheduler.load_state_dict(_loaded(scheduler.state_dict(), saved))


def _loaded(now: Any, saved: Any) -> Any:
    """`saved`, with the schedulers that stand in `now` in the places of their states."""
    if isinstance(now, LRScheduler):
        load_scheduler(now, saved)
        return now
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _loaded(now.get(key), value) for key, value in saved.items()}
    if isinstance(now, list) and isinstance(saved, list):
        return [_loaded(*pair) for pair in zip_longest(now[: len(saved)], saved)]
    return saved


def check_state(given: Mapping[str, Any]) -> None:
    """Raises LoopError where a checkpoint could not hold what `world.run` is given as `state`, or not give it back."""
    for name, each in given.items():
        if not str(name).isidentifier():
            raise LoopError(f"state has the name {name!r}; a name is one of Python's, as ema.")
        kinds = (torch.Tensor, np.ndarray, dict, list, *resumable.GENERATORS)
        if not hasattr(each, "load_state_dict") and not isinstance(each, kinds):
            raise LoopError(
                f"state {name!r} is a {type(each).__name__}, which no resume could give back to the program; "
                "put it into a dictionary that the program changes, or give an object with state_dict."
            )
        if other := codec.unkept(resumable.content(each)):
            raise LoopError(
                f"state {name!r} keeps a {other}, which no checkpoint holds; give tensors, numbers and texts."
            )
