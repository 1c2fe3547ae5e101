"""The settings and states of a user's optimizers and schedulers, as a checkpoint's metadata hold them."""

import json
import random
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hvdtrain.errors import OTHER_FOLDER, CheckpointError, LoopError, RecipeError
from hvdtrain.torch.codec import Live, TorchKinds, address, filled
from hvdtrain.torch.engines import distinct

EARLIER = "build it before the start, or give another {folder}"
PLAIN = (bool, int, float, str, type(None))
HELD = (*PLAIN, torch.Tensor, np.ndarray, np.generic)
GENERATORS = torch.Generator, np.random.Generator, random.Random
NO_ATTRIBUTES = {"defaults", "param_groups", "state", "_opt_called", "_step_supports_amp_scaling"}
NO_ATTRIBUTES |= {
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_need_device_dtype_check_for_fused",
}
"""Attributes that are no state, or kept in another way, beside those of hooks."""


def packed(state: Any, what: str) -> str:
    """The state as JSON text, from which `unpacked` makes an equal one. Raises LoopError, which names `what`, for a
    state that holds more than numbers and text."""
    return json.dumps(_encoded(state, what))


def unpacked(text: str) -> Any:
    """The state of which `packed` has made the text."""
    return _decoded(json.loads(text))


def content(each: Any) -> Any:
    """What `saved` takes of an object that a program keeps."""
    if isinstance(each, GENERATORS):
        return TorchKinds().state_of(each)
    return each.state_dict() if hasattr(each, "load_state_dict") else each


def give_back(each: Any, value: Any, model: "Whole", live: Container[int]) -> bool:
    """Gives an object the content that was saved of it; whether that is of its kind and shape. What was the model's own
    memory, by `live_leaves`, stays that, and no other is written into it."""
    if isinstance(each, GENERATORS):
        TorchKinds().set_state(each, value, filled)
    elif hasattr(each, "load_state_dict"):
        each.load_state_dict(value)
    else:
        leaves, structure = tree_flatten(value)
        leaves = [Live() if index in live else leaf for index, leaf in enumerate(leaves)]
        return filled(each, tree_unflatten(leaves, structure), memory(model)) is each
    return True


def live_leaves(content: Any, model: "Whole") -> list[int]:
    """Which tensors in the content are the model's own, as of a state_dict that the program has not copied."""
    own = memory(model)
    return [index for index, leaf in enumerate(tree_leaves(content)) if address(leaf) in own]


def memory(model: torch.nn.Module) -> set[int]:
    """The addresses of a module's tensors."""
    return {address(each) for each in [*model.parameters(), *model.buffers()]} - {0}


def check_kept(model: torch.nn.Module) -> None:
    """Raises RecipeError where a checkpoint could not hold the model's state, or the ranks could not share it."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise RecipeError(f"{name} of the model is lazy; run a batch through the model where it is made.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype == torch.complex32:
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise RecipeError(f"{name} of the model is {kind}, which no checkpoint holds; make it dense, or no buffer.")
        if isinstance(tensor, torch.nn.Parameter) and distinct(tensor, tensor).shape != tensor.shape:
            raise RecipeError(f"{name} of the model is expanded, so no update could write it; make it contiguous().")
    for name, module in extras(model):
        state = module.get_extra_state()
        if isinstance(state, torch.Tensor):
            raise RecipeError(f"{of_extra(name)} is a tensor, which no checkpoint holds; register it as a buffer.")
        packed(state, of_extra(name))


def extras(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules with a state beside their tensors, by name."""
    base = torch.nn.Module.get_extra_state
    return [(name, each) for name, each in model.named_modules() if type(each).get_extra_state is not base]


def of_extra(name: str) -> str:
    return f"get_extra_state() of {name or 'the model'}"


def own_name(name: str) -> str:
    """The name without the parts that torch.compile puts before those of the network."""
    return re.sub(r"(?<![^.])_orig_mod\.", "", f"{name}.")[:-1]


class Whole(torch.nn.Module):
    """All that is trained as one module: a model, whose names are those that it has uncompiled, and modules beside it
    by name, which only its loss uses."""

    def __init__(self, model: torch.nn.Module, beside: Mapping[str, torch.nn.Module] | None = None) -> None:
        super().__init__()
        self._parts = [("", model), *(beside or {}).items()]  # in a list, no submodules
        self.beside = set(beside or ())

    @property
    def kind(self) -> str:
        """The name of the model's class."""
        model = self._parts[0][1]
        return type(getattr(model, "_orig_mod", model)).__name__

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        memo = set() if memo is None else memo
        for part, module in self._parts:
            for name, each in module.named_modules(memo, part, remove_duplicate):
                yield own_name(name), each

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        of_parts = [
            module.state_dict(prefix=f"{part}." * bool(part), keep_vars=keep_vars) for part, module in self._parts
        ]
        return {own_name(name): value for each in of_parts for name, value in each.items()}


def whole(model: torch.nn.Module) -> Whole:
    """The model under its own names."""
    return model if isinstance(model, Whole) else Whole(model)


class Trained:
    """What a program trains, as `hvdtrain.run.session.Program` knows it: a model and its optimizers."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def identity(self) -> str:
        parameters = sum(each.numel() for each in self.model.parameters())
        return f"{whole(self.model).kind}, {parameters:,} parameters, {named(self.optimizers)}"

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint: the weights, and twice as much for the optimizer's state."""
        return 3 * sum(tensor.nbytes for tensor in self.model.state_dict().values() if isinstance(tensor, torch.Tensor))

    @property
    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0].get("lr") or 0)  # which an optimizer may choose by itself

    @property
    def lr_groups(self) -> int:
        lrs = [float(each.get("lr") or 0) for each in groups(self.optimizers)]
        return len(lrs) if len(set(lrs)) > 1 else 1


def groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """All groups of parameters, in the order of the optimizers, which may share them."""
    return list({id(group): group for each in optimizers for group in each.param_groups}.values())


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if type(optimizer).__module__.startswith("horovod."):  # whose bookkeeping belongs to a process
        return {}
    own = vars(optimizer).items()
    return {name: value for name, value in own if name not in NO_ATTRIBUTES and not name.startswith("_optimizer_")}


def by_parameter(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the attributes that are dictionaries by tensor, which no checkpoint holds."""
    held = {name: value for name, value in _own(optimizer).items() if isinstance(value, dict)}
    return [name for name, value in held.items() if any(map(torch.is_tensor, value))]


def inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that these hold in attributes, lists and dictionaries, as SAM and Lookahead do."""
    found = list(optimizers)
    given = len(found)
    for optimizer in found:  # which grows
        held = [each for each in tree_leaves(_own(optimizer)) if isinstance(each, torch.optim.Optimizer)]
        found += dict.fromkeys(each for each in held if each not in found)
    return found[given:]


def ordered(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[list[torch.optim.Optimizer], int]:
    """First those that update no parameter that one before updates, and how many these are; then the others, as that of
    a second phase, and those inside."""
    first, again = list[torch.optim.Optimizer](), list[torch.optim.Optimizer]()
    for each in optimizers:
        (first if parameters([each]).isdisjoint(parameters(first)) else again).append(each)
    return [*first, *again, *inner(optimizers)], len(first)


def attributes(optimizer: torch.optim.Optimizer, weights: set[torch.Tensor]) -> dict[str, Any]:
    """The numbers, texts and tensors that an optimizer has for attributes, as Lookahead its count of steps; none that
    are or hold the `weights`."""
    left_out = by_parameter(optimizer)
    return {
        name: value
        for name, value in _own(optimizer).items()
        if name not in left_out
        and all(
            isinstance(each, HELD) and not (torch.is_tensor(each) and each in weights) for each in tree_leaves(value)
        )
    }


def add_group(
    optimizer: torch.optim.Optimizer, names: list[str], model: torch.nn.Module, all_of: Iterable[torch.optim.Optimizer]
) -> None:
    """Gives the optimizer a group of these parameters, which `all_of` may share. Raises CheckpointError."""
    parameters = dict(model.named_parameters())
    if lacking := next((name for name in names if name not in parameters), None):
        raise CheckpointError(f"the optimizer of the checkpoint has {lacking}, the model here not", remedy=EARLIER)
    own = [parameters[name] for name in names]
    for group in optimizer.param_groups:  # where a parameter was made anew, for another group
        stays = [each not in set(own) for each in group["params"]]
        for key in group.keys() & {"params", "param_names"}:
            group[key][:] = compress(group[key], stays)
    is_named = "param_names" in optimizer.param_groups[0]
    optimizer.add_param_group({"params": list(zip(names, own, strict=True)) if is_named else own})
    for each in all_of:
        _add_once(each, own)


def _add_once(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Lets a program that resumes inside an epoch add a group of these parameters again, which is there already."""
    add_group, known = optimizer.add_param_group, set(parameters)

    def add_param_group(group: dict[str, Any]) -> None:
        given = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if set(given) != known:
            add_group({**group, "params": given})

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def settings(of: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of each of these groups: the learning rate and more."""
    return [{key: value for key, value in group.items() if key != "params"} for group in of]


def set_settings(optimizers: Iterable[torch.optim.Optimizer], saved: list[dict[str, Any]], step: int) -> None:
    """Gives the groups the settings that were saved at this step. Raises CheckpointError where there are more groups
    or fewer."""
    there = groups(optimizers)
    if len(saved) != len(there):
        raise CheckpointError(
            f"the checkpoint of step {step} has {len(saved)} groups of parameters, the optimizers here have "
            f"{len(there)}",
            remedy=OTHER_FOLDER,
        )
    for group, values in zip(there, saved, strict=True):
        update(group, values)


def check_owners(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises LoopError where an optimizer has parameters that the model does not have."""
    known = set(model.parameters())
    for optimizer in optimizers:
        if parameters([optimizer]) - known:
            raise LoopError(
                f"optimizer {type(optimizer).__name__} has parameters that the model has not, so no checkpoint could "
                "name its state; make it of the model's."
            )


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
