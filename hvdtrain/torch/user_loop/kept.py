"""What a program keeps beside its model, in checkpoints or not: found among the objects that are alive."""

import contextlib
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

from hvdtrain.errors import CheckpointError, LoopError
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.torch import resumable
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.models import digest
from hvdtrain.torch.state import GIVEN, tensors_of

LIBRARIES = "torch", "hvdtrain", "torchdata", "lightning", "lightning_utilities"
"""Packages whose objects are no state of a program, apart from those of KINDS."""
KINDS = nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, Ema
NUMBERS = bool, int, float
LOOKS = 3
MOST_READ = 8
"""Elements of a tensor that a look reads at most."""
MOST_HELD = 10_000
"""The length of a list or dictionary that a look leaves out, such as a data set."""


def alive(is_wanted: Callable[[type], bool]) -> list[Any]:
    """The objects that this process holds and whose class is wanted."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if is_wanted(kind)}
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))  # a tenth of a microsecond for each


class Looks:
    """Looks at the objects that are alive before a program's first step and at its first two checkpoints, and names
    those that have changed and that no checkpoint holds."""

    def __init__(self, model: nn.Module, kept: Iterable[Any]) -> None:
        """`kept`: what checkpoints hold beside the model."""
        self._modules = [model, *(each for each in kept if isinstance(each, nn.Module))]
        parts = [
            vars(each) for each in kept if not isinstance(each, torch.optim.Optimizer) and hasattr(each, "__dict__")
        ]
        self._kept = {id(each) for each in [*kept, *tree_leaves(parts)]}
        self._seen: list[dict[int, tuple[Any, str]]] = []
        self._named = set[int]()

    def had(self, each: Any) -> bool:
        """Whether an object was alive before the first step."""
        known = self._seen[0].get(id(each))
        return known is not None and known[0]() is each

    def look(self) -> list[str]:
        """A line for each object that has changed since the look before."""
        if len(self._seen) == LOOKS:
            return []
        found = [each for each in alive(_has_state) if id(each) not in self._kept]
        parents = {id(part): each for each in found if isinstance(each, nn.Module) for part in each._modules.values()}
        before = self._seen[-1] if self._seen else {}
        tensors = {id(each) for of in self._modules for each in [*of.parameters(), *of.buffers()]}
        self._seen.append({id(each): (weakref.ref(each), _content(each, tensors)) for each in found})
        changed = dict[int, Any]()
        for each in found:
            was, content = before.get(id(each), (lambda: None, ""))
            # A metric of torchmetrics is reset in each epoch, before its checkpoint or after.
            is_early = hasattr(each, "_update_count") and len(self._seen) < LOOKS
            if was() is each and content != self._seen[-1][id(each)][1] and not is_early:
                top = each
                while id(top) in parents:
                    top = parents[id(top)]
                changed[id(top)] = top
        lines = [
            f"{(name := _variable(each))} ({type(each).__name__}) has changed and no checkpoint holds it: give it as "
            f"world.run(..., state={{{name!r}: {name}}})"
            for number, each in changed.items()
            if number not in self._named
        ]
        self._named |= changed.keys()
        return lines


def _content(each: Any, known: set[int]) -> str:
    """A digest of the object's numbers and of its tensors, but for the known ones."""
    if hasattr(each, "_update_count"):
        return str(each._update_count)
    if isinstance(each, nn.Module):
        held = [*each._parameters.values(), *each._buffers.values()]
    elif isinstance(each, torch.optim.Optimizer):
        held = tree_leaves(list(each.state.values()))
    else:
        values = [value for name, value in vars(each).items() if name != "optimizer"]
        held = tree_leaves([value for value in values if not isinstance(value, list | dict) or len(value) < MOST_HELD])
    numbers = [value for value in held if isinstance(value, NUMBERS)]
    return str(
        [numbers, *(_read(value) for value in held if isinstance(value, torch.Tensor) and id(value) not in known)]
    )


def _read(tensor: torch.Tensor) -> Any:
    with contextlib.suppress(Exception):  # it has no values, as on the device meta
        flat = tensor.detach().reshape(-1)
        return flat[:: max(1, len(flat) // MOST_READ)][:MOST_READ].tolist()
    return []


def _has_state(kind: type) -> bool:
    if not hasattr(kind, "state_dict") or not kind.__dictoffset__ or not kind.__weakrefoffset__:
        return False
    is_library = str(kind.__module__).partition(".")[0] in LIBRARIES
    return issubclass(kind, KINDS) or not (is_library or hasattr(kind, "__getitem__"))


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
    own = set(model.parameters())
    others = [each for group in resumable.groups(optimizers) for each in group["params"] if each not in own]
    if not others:
        return {}
    modules = alive(lambda kind: issubclass(kind, nn.Module) and kind is not resumable.Whole)
    of_each = {each: set(each.parameters()) for each in modules}
    holders = [each for each, held in of_each.items() if held.intersection(others) and not held & own]
    inside = {part for each in holders for part in list(each.modules())[1:]}
    tops = sorted(
        (each for each in holders if each not in inside),
        key=lambda each: min(index for index, one in enumerate(others) if one in of_each[each]),
    )
    alone = nn.Module()
    known = set[torch.Tensor]().union(*(of_each[each] for each in tops))
    alone._parameters = {str(index): each for index, each in enumerate(others) if each not in known}
    taken, found = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}, dict[str, nn.Module]()
    for each in [*tops, *([alone] if alone._parameters else [])]:
        name = resumable.whole(each).kind if each is not alone else "beside"
        while name in taken | found.keys():
            name += "_"
        found[name] = each
    return found


class Objects:
    """What `world.run` is given as `state`, by name: objects with state_dict and load_state_dict, tensors and arrays,
    and dictionaries and lists of them, of numbers and texts."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        for name, each in self.given.items():
            if not str(name).isidentifier():
                raise LoopError(f"state has the name {name!r}; a name is one of Python's, as ema.")
            if not hasattr(each, "load_state_dict") and not isinstance(each, torch.Tensor | np.ndarray | dict | list):
                raise LoopError(
                    f"state {name!r} is a {type(each).__name__}, which no resume could give back to the program; "
                    "put it into a dictionary that the program changes, or give an object with state_dict."
                )
        self._packed()

    def _packed(self) -> dict[str, tuple[str, list[torch.Tensor]]]:
        found = {}
        for name, each in self.given.items():
            tensors: list[torch.Tensor] = []
            content = each.state_dict() if hasattr(each, "load_state_dict") else each
            found[name] = resumable.packed(content, f"state {name!r}", tensors), tensors
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors and arrays, by their names in a checkpoint."""
        packed = self._packed().items()
        return {f"{GIVEN}.{name}.{index}": each for name, (_, own) in packed for index, each in enumerate(own)}

    def metadata(self) -> dict[str, Any]:
        """The rest, by name, and a digest of each one's tensors: both are the same on all ranks."""
        return {f"state {name}": [text, digest(own) if own else 0] for name, (text, own) in self._packed().items()}

    def begin(self, engine: Engine, checkpoint: Checkpoint | None) -> None:
        """Gives all ranks what rank 0 has: the content of the checkpoint, which only rank 0 knows, or else its own.
        Raises CheckpointError where the program does not give what the checkpoint holds."""
        packed, saved = self._packed(), dict[str, Any](checkpoint.meta["program"] if checkpoint else {})
        names = {name.removeprefix("state ") for name in saved if name.startswith("state ")}
        if lacking := min(names - packed.keys(), default=None):
            raise CheckpointError(
                f"the checkpoint holds state {lacking!r}, which world.run does not get here; give it, or give another "
                "--output."
            )
        if checkpoint:
            packed |= {name: (saved[f"state {name}"][0], tensors_of(checkpoint, f"{GIVEN}.{name}")) for name in names}
        layouts = {
            name: [text, [[str(each.dtype).removeprefix("torch."), list(each.shape), each.is_cpu] for each in own]]
            for name, (text, own) in packed.items()
        }
        layouts, restored = engine.broadcast({}, [layouts, sorted(names)])
        for name, (text, layout) in layouts.items():
            own = packed[name][1]
            if engine.rank:
                where = ["cpu" if on_host else engine.device for *_, on_host in layout]
                pairs = zip(layout, where, strict=True)
                own = [torch.zeros(shape, dtype=getattr(torch, kind), device=on) for (kind, shape, _), on in pairs]
            engine.broadcast({f"{GIVEN}.{index}": each for index, each in enumerate(own)}, None)
            if engine.rank or name in restored:
                self._give(name, resumable.unpacked(text, own))

    def _give(self, name: str, saved: Any) -> None:
        given = self.given[name]
        if hasattr(given, "load_state_dict"):
            given.load_state_dict(saved)
        elif resumable.filled(given, saved) is not given:
            raise CheckpointError(f"state {name!r} has another kind or shape than here; give another --output.")
