"""What a checkpoint's metadata hold of a program's own objects: a scheduler's state, an optimizer's settings."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.errors import CheckpointError, LoopError

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
