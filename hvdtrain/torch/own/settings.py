"""What a program gave its optimizer and its scheduler when its run began, beside what it gives as the run resumes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.torch import resumable
from hvdtrain.untrusted import quoted

MOST_NAMED = 4
DERIVED = {"base_lrs", "last_epoch"}
"""Of a scheduler: they follow from the optimizer, and from the steps that were made."""
PARTS = "_schedulers"
"""Of a scheduler that is made of others."""


def given(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> dict[str, str]:
    """The settings with which both were made, as JSON texts. Raises LoopError where no checkpoint could hold them."""
    groups = [_as_made(group) for group in resumable.settings(optimizers)]
    found = {"optimizer": resumable.packed(groups, f"optimizer {resumable.named(optimizers)}")}
    if schedulers:
        found["scheduler"] = resumable.packed([each.state_dict() for each in schedulers], "a scheduler")
    return found


def difference(now: Mapping[str, str], began: Mapping[str, str]) -> str | None:
    """A line that names what the program now gives otherwise than when its run began; None where that is nothing."""
    unlike = [(kind, *values) for kind in now if kind in began for values in _unlike(now[kind], began[kind])]
    if not unlike:
        return None
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
    old = dict(_leaves(resumable.unpacked(began)))
    # One that only another version of PyTorch knows says nothing of the program.
    both = [(name, new, old[name]) for name, new in _leaves(resumable.unpacked(now)) if name in old]
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
