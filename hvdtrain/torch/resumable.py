"""What a checkpoint's metadata hold of a program's own objects: a scheduler's state, an optimizer's settings."""

import json
from collections import Counter
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


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer's groups say beside their parameters: the learning rate and more."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], step: int) -> None:
    """Gives the optimizer's groups these settings. Raises CheckpointError where there are others."""
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint of step {step} has an optimizer of {len(groups)} groups, this one has "
            f"{len(optimizer.param_groups)}; give another --output."
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        update(group, saved)


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
