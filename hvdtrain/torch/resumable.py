"""The settings and states of a user's optimizers and schedulers, as a checkpoint's metadata hold them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.errors import CheckpointError, LoopError
from hvdtrain.untrusted import quoted

PLAIN = (bool, int, float, str, type(None))


def packed(state: Any, what: str) -> str:
    """The state as JSON text, from which `unpacked` makes an equal one. Raises LoopError, which names `what`, for a
    state that holds more than numbers and text."""
    return json.dumps(_encoded(state, what))


def unpacked(text: str) -> Any:
    """The state of which `packed` has made the text."""
    return _decoded(json.loads(text))


class Trained:
    """What a program trains, as `hvdtrain.run.session.Program` knows it: a model and its optimizers."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def identity(self) -> str:
        parameters = sum(each.numel() for each in self.model.parameters())
        return f"{type(self.model).__name__}, {parameters:,} parameters, {named(self.optimizers)}"

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint: the weights, and twice as much for the optimizer's state."""
        return 3 * sum(tensor.nbytes for tensor in self.model.state_dict().values() if isinstance(tensor, torch.Tensor))

    @property
    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])


def groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """All groups of parameters, in the order of the optimizers."""
    return [group for each in optimizers for group in each.param_groups]


def settings(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The settings of each group: the learning rate and more."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups(optimizers)]


def set_settings(optimizers: Iterable[torch.optim.Optimizer], saved: list[dict[str, Any]], step: int) -> None:
    """Gives the groups the settings that were saved at this step. Raises CheckpointError where there are more groups
    or fewer."""
    there = groups(optimizers)
    if len(saved) != len(there):
        raise CheckpointError(
            f"the checkpoint of step {step} has {len(saved)} groups of parameters, the optimizers here have "
            f"{len(there)}; give another --output."
        )
    for group, values in zip(there, saved, strict=True):
        update(group, values)


def check_owners(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises LoopError where an optimizer has parameters that the model does not have, or that another one has too."""
    known, seen = set(model.parameters()), set[torch.nn.Parameter]()
    for optimizer in optimizers:
        updated = parameters([optimizer])
        if updated - known or updated & seen:
            wrong = "that the model has not" if updated - known else "that another one has too"
            raise LoopError(
                f"optimizer {type(optimizer).__name__} has parameters {wrong}, so no checkpoint could name its state; "
                "give each parameter of the model to one optimizer."
            )
        seen |= updated


def parameters(optimizers: Iterable[torch.optim.Optimizer]) -> set[torch.nn.Parameter]:
    """The parameters that the optimizers update."""
    return {each for group in groups(optimizers) for each in group["params"]}


def named(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """The names of the optimizers' classes, as text."""
    return ", ".join(type(each).__name__ for each in optimizers)


def update(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Gives a group of parameters the saved settings."""
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)  # a compiled or fused update uses this very tensor
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
"""Settings that a message names at most."""
DERIVED = {"base_lrs", "last_epoch"}
"""Keys of a scheduler's state that follow from the optimizer or from the number of steps."""
PARTS = "_schedulers"
"""The key under which a scheduler that combines others keeps them."""


def given_settings(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> dict[str, str]:
    """The settings with which optimizers and schedulers were made, as JSON texts. Raises LoopError where no checkpoint
    could hold them."""
    made = [_as_made(group) for group in settings(optimizers)]
    found = {"optimizer": packed(made, f"optimizer {named(optimizers)}")}
    if schedulers:
        found["scheduler"] = packed([each.state_dict() for each in schedulers], "a scheduler")
    return found


def changed_settings(now: Mapping[str, str], began: Mapping[str, str]) -> str:
    """A line that names the settings which the program gives now and did not give when its run began; empty where
    there are none."""
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
    # A setting that only one version of PyTorch has says nothing about the program.
    both = [(name, new, old[name]) for name, new in _leaves(unpacked(now)) if name in old]
    return [(name, new, value) for name, new, value in both if new != value]


def _as_made(group: dict[str, Any]) -> dict[str, Any]:
    """The group's settings before its schedulers, when they were made, changed the learning rate."""
    made = {name: value for name, value in group.items() if name != "initial_lr"}
    return made | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _leaves(state: Any, prefix: str = "", part: str = "group") -> Iterator[tuple[str, Any]]:
    """The settings by name: of the groups of an optimizer, or of a scheduler and its parts."""
    if isinstance(state, list | tuple):
        for number, one in enumerate(state):
            yield from _leaves(one, f"{prefix}{part} {number} " if len(state) > 1 else prefix)
        return
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == PARTS:
            yield from _leaves(value, prefix, "part")
        elif isinstance(name, str) and not name.startswith("_") and name not in DERIVED:
            yield f"{prefix}{name}", value
