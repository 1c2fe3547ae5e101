"""What a checkpoint's metadata hold of the user's optimizers and schedulers: their settings and states."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.errors import CheckpointError, LoopError
from hvdtrain.untrusted import quoted

PLAIN = (bool, int, float, str, type(None))


def packed(state: Any, what: str) -> str:
    """The state as JSON text, which `unpacked` reads back to an equal one. Raises LoopError."""
    return json.dumps(_encoded(state, what))


def unpacked(text: str) -> Any:
    """The state that `packed` has written."""
    return _decoded(json.loads(text))


def groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The groups of parameters of one optimizer after the other."""
    return [group for each in optimizers for group in each.param_groups]


def settings(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """What the groups say beside their parameters: the learning rate and more."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups(optimizers)]


def set_settings(optimizers: Iterable[torch.optim.Optimizer], saved: list[dict[str, Any]], step: int) -> None:
    """Gives the groups these settings. Raises CheckpointError where there are others."""
    own = groups(optimizers)
    if len(saved) != len(own):
        raise CheckpointError(
            f"the checkpoint of step {step} has {len(saved)} groups of parameters, the optimizers here have "
            f"{len(own)}; give another --output."
        )
    for group, values in zip(own, saved, strict=True):
        update(group, values)


def check_owners(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises LoopError where an optimizer's parameters are not the model's, or another's too."""
    known, seen = set(model.parameters()), set[torch.nn.Parameter]()
    for optimizer in optimizers:
        own = {each for group in optimizer.param_groups for each in group["params"]}
        if own - known or own & seen:
            wrong = "that the model has not" if own - known else "that another one has too"
            raise LoopError(
                f"optimizer {type(optimizer).__name__} has parameters {wrong}, so no checkpoint could name its state; "
                "give each parameter of the model to one optimizer."
            )
        seen |= own


def named(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """What the optimizers are called."""
    return ", ".join(type(each).__name__ for each in optimizers)


def update(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Gives a group of an optimizer these settings."""
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)  # a compiled or fused update holds the tensor itself
        else:
            group[key] = value


def _encoded(value: Any, what: str) -> Any:
    # JSON has neither tuples nor keys that are numbers, both of which schedulers keep.
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [_encoded(item, what) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs = [[_encoded(key, what), _encoded(item, what)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a NumPy number
        return value.item()
    raise LoopError(
        f"{what} keeps a value of type {type(value).__name__}, which no checkpoint holds; take one of numbers and text."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, items), *_ = value.items()
    if kind == "tuple":
        return tuple(_decoded(items))
    pairs = {_decoded(key): _decoded(item) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs


MOST_NAMED = 4
DERIVED = {"base_lrs", "last_epoch"}
"""Keys of a scheduler's state that follow from the optimizer, and from the steps that were made."""
PARTS = "_schedulers"
"""The key of the parts of a scheduler that is made of others."""


def given_settings(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> dict[str, str]:
    """The settings with which both were made, as JSON texts. Raises LoopError where no checkpoint could hold them."""
    groups = [_as_made(group) for group in settings(optimizers)]
    found = {"optimizer": packed(groups, f"optimizer {named(optimizers)}")}
    if schedulers:
        found["scheduler"] = packed([each.state_dict() for each in schedulers], "a scheduler")
    return found


def changed_settings(now: Mapping[str, str], began: Mapping[str, str]) -> str:
    """A line that names what the program now gives otherwise than when its run began; empty where that is nothing."""
    unlike = [(kind, *values) for kind in now if kind in began for values in _unlike(now[kind], began[kind])]
    if not unlike:
        return ""
    kinds = " and ".join(dict.fromkeys(kind for kind, *_ in unlike))
    more = f" and {len(unlike) - MOST_NAMED} more" if len(unlike) > MOST_NAMED else ""
    gives = ", ".join(f"{name}={quoted(new)}" for _, name, new, _ in unlike[:MOST_NAMED])
    keeps = ", ".join(f"{name}={quoted(old)}" for _, name, _, old in unlike[:MOST_NAMED])
    return (
        f"{kinds}: the program gives {gives}{more}, this run began with {keeps}{more} and keeps its own; for another "
        "value give another folder"
    )


def _unlike(now: str, began: str) -> list[tuple[str, Any, Any]]:
    """The settings that differ: name, new and old value."""
    old = dict(_leaves(unpacked(began)))
    # One that only another version of PyTorch knows says nothing of the program.
    both = [(name, new, old[name]) for name, new in _leaves(unpacked(now)) if name in old]
    return [(name, new, value) for name, new, value in both if new != value]


def _as_made(group: dict[str, Any]) -> dict[str, Any]:
    """The group's settings before a scheduler changed its learning rate, as each does once it is made."""
    made = {name: value for name, value in group.items() if name != "initial_lr"}
    return made | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _leaves(state: Any, prefix: str = "", part: str = "group") -> Iterator[tuple[str, Any]]:
    """The settings by name, of the groups of an optimizer or of a scheduler and its parts."""
    if isinstance(state, list | tuple):
        for number, one in enumerate(state):
            yield from _leaves(one, f"{prefix}{part} {number} " if len(state) > 1 else prefix)
        return
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == PARTS:
            yield from _leaves(value, prefix, "part")
        elif isinstance(name, str) and not name.startswith("_") and name not in DERIVED:
            yield f"{prefix}{name}", value
