"""A training state as named tensors: what a checkpoint holds and what rank 0 broadcasts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hvdtrain.errors import OTHER_FOLDER, CheckpointError, LoopError
from hvdtrain.record.checkpoint import Checkpoint, Layout
from hvdtrain.torch import codec, resumable
from hvdtrain.torch.engines import Engine, distinct
from hvdtrain.torch.models import Ema, digest
from hvdtrain.torch.resumable import EARLIER

GROUPS, EXTRA, NAMES = "groups", "extra.", "names"
FROZEN, ADDED = "frozen", "added"
KEPT = "kept"
"""The name of the tensor whose bytes are a file of torch.save, of what a checkpoint holds beside tensors with names."""
PLAIN = {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32}
PLAIN |= {torch.int64, torch.uint16, torch.uint32, torch.uint64}
"""The dtypes that both NumPy and the checkpoint's file format have."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype, by its size in bytes, as which a checkpoint holds another one."""


class Copies:
    """Memory for copies of tensors, which each call overwrites.

    New memory would be twenty times slower than the copy itself: the kernel makes each page at its first use.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Copies of the tensors by name, which are valid until the next call."""
        with torch.no_grad():
            self._held = {name: self._copied(name, tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # once for all copies from it
        return {name: held.numpy() for name, held in self._held.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is None or held.dtype != tensor.dtype or held.shape != tensor.shape:
            # In the same memory layout; a GPU copies to pinned memory alone while the host issues the next copy.
            held = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
        # With other strides PyTorch copies by way of a temporary, which it reads at once.
        return held.copy_(tensor, non_blocking=held.stride() == tensor.stride())


def start(optimizer: torch.optim.Optimizer, slots: Sequence[str], has_step: bool) -> None:
    """Gives every parameter that learns slots of zeros, and with `has_step` the step 0, where it has none, so that all
    ranks hold the same names. The optimizer chooses their devices."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held, began = optimizer.state_dict(), len(optimizer.state)
    for index, each in enumerate(parameters):
        if (slots or has_step) and each.requires_grad and index not in held["state"]:
            step = {"step": torch.tensor(0.0)} if has_step else {}
            held["state"][index] = step | {slot: torch.zeros_like(each) for slot in slots}
    if len(held["state"]) > began:
        optimizer.load_state_dict(held)


class OptimizerStates:
    """The optimizers of a program, and what a checkpoint holds of them: their groups, and values of each parameter."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self.all, self.given = resumable.ordered(optimizers)
        self._counts = [len(each.param_groups) for each in self.all]
        self._began = [{k: _text(v) for k, v in group.items()} for group in _settings(self._first_groups())]
        """The settings of the groups before the first update: a setting that changes later is state."""

    def _first_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters that the optimizers had at the start."""
        pairs = zip(self.all, self._counts, strict=True)
        return list({id(group): group for each, count in pairs for group in each.param_groups[:count]}.values())

    def slots(self) -> Iterator[tuple[str, Any]]:
        """What the optimizers keep for each parameter, by name: SLOT.NAME as in exp_avg.NAME; SLOT@N.NAME of those
        behind the first `given`, which hold them."""
        named = list(self._model.named_parameters())
        for index, optimizer in enumerate(self.all):
            if any(optimizer.state is each.state for each in self.all[:index]):
                continue
            number = f"@{index - self.given}" if index >= self.given else ""
            for name, parameter in named:
                for slot, value in optimizer.state.get(parameter, {}).items():
                    yield f"{slot}{number}.{name}", value

    def start(self, values: dict[str, Any]) -> None:
        """Gives the optimizers the settings and groups of a checkpoint, and takes these out of its `values`."""
        for index, changed in resumable.unpacked(values.pop(GROUPS, "[]")):
            resumable.update(self._first_groups()[index], changed)
        for index, number, names in json.loads(values.pop(ADDED, "[]")):
            if number >= len(self.all[index].param_groups):
                resumable.add_group(self.all[index], names, self._model, self.all)

    def make(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Makes what the optimizers of a checkpoint keep for each parameter, where these here have it not yet."""
        parameters = dict(self._model.named_parameters())
        groups = [{each: group for group in of.param_groups for each in group["params"]} for of in self.all]
        for key in [*layout, *values]:
            kind, _, name = key.partition(":")[0].partition(".")
            if kind in {"model", "ema", KEPT}:
                continue
            if name not in parameters:
                raise CheckpointError(f"the checkpoint holds {key}, but the model has no {name}", remedy=EARLIER)
            parameter, (slot, _, number) = parameters[name], kind.partition("@")
            first = (each for each in range(self.given) if parameter in groups[each])
            index = self.given + int(number) if number else next(first, len(groups))
            if not (group := groups[index].get(parameter) if index < len(groups) else None):
                continue
            slots = self.all[index].state.setdefault(parameter, {})
            if key in values:
                slots[slot] = values[key]
                continue
            dtype, shape = _layout_of(key, *layout[key])
            if slot not in slots or list(slots[slot].shape) != shape:
                is_alike = list(parameter.shape) == shape  # which keeps the order of dimensions
                zeros = torch.zeros_like(parameter, dtype=dtype) if is_alike else torch.zeros(shape, dtype=dtype)
                # As torch.optim does: a step is where its updates read it.
                on_host = slot == "step" and not (group.get("capturable") or group.get("fused"))
                slots[slot] = zeros.to("cpu" if on_host else parameter.device)

    def values(self) -> dict[str, Any]:
        """Those of `slots` that are no tensors. Raises CheckpointError where one is no number or text."""
        values = {name: value for name, value in self.slots() if not isinstance(value, torch.Tensor)}
        for name, value in values.items():
            if not isinstance(value, resumable.PLAIN):
                kind, own = resumable.named(self.all), type(value).__name__
                raise CheckpointError(
                    f"optimizer {kind} keeps a {own} as {name}, which no checkpoint holds; take another optimizer."
                )
        return values

    def added(self) -> str:
        """The groups that the program has added since the start, from which `start` makes them."""
        names = {each: name for name, each in self._model.named_parameters()}
        return json.dumps(
            [
                [index, number, [names[each] for each in optimizer.param_groups[number]["params"]]]
                for index, optimizer in enumerate(self.all)
                for number in range(self._counts[index], len(optimizer.param_groups))
            ]
        )

    def changed(self) -> dict[str, str]:
        """The settings of groups that have changed since the start, for `start`; empty where none have."""
        changed = [
            [index, {key: settings[key] for key in settings if _text(settings[key]) != began.get(key)}]
            for index, (settings, began) in enumerate(zip(_settings(self._first_groups()), self._began, strict=True))
        ]
        has_any = any(settings for _, settings in changed)
        return {GROUPS: resumable.packed(changed, f"optimizer {resumable.named(self.all)}")} if has_any else {}


class State:
    """A training state; see `hvdtrain.record.writer.State` for the methods."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler,
        ema: Ema | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """`given`: what else a program keeps, by name; see `World.run`."""
        self._model, self._ema, self.scaler = resumable.whole(model), ema, scaler
        resumable.check_kept(self._model)
        self._optimizers, self._copies = OptimizerStates(self._model, optimizers), Copies()
        self._objects, self._is_shared, self._file = given or {}, False, cast(np.ndarray | None, None)
        self._restored: dict[str, Any] = {}
        """What the checkpoint holds beside tensors with names."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, not a copy, by its name: `model.NAME`, `ema.NAME`, or as an optimizer keeps it."""
        model, averages = self._model, self._ema.averages.items() if self._ema else ()
        live = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        named = {f"model.{name}": tensor for name, tensor in live}
        named |= {name: value for name, value in self._optimizers.slots() if isinstance(value, torch.Tensor)}
        return named | {f"ema.{resumable.own_name(name)}": average for name, average in averages}

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors with names; "given", "live" and "attributes" are of this class."""
        weights = set(self._model.parameters())
        attributes = [resumable.attributes(each, weights) for each in self._optimizers.all]
        given = {name: resumable.content(each) for name, each in self._objects.items()}
        live = {name: of for name, each in given.items() if (of := resumable.live_leaves(each, self._model))}
        more = {"attributes": attributes, "live": live}
        return {"given": given} | {name: each for name, each in more.items() if any(each)}

    def share(self, engine: Engine) -> None:
        file = codec.saved(State._kept(self)) if self._file is None else self._file
        size, is_resumed = engine.broadcast({}, [len(file), self._file is not None])
        whole = torch.from_numpy(file) if engine.rank == 0 else torch.zeros(size, dtype=torch.uint8)
        engine.broadcast({KEPT: whole}, None)
        self._is_shared = True
        if not (is_resumed or engine.rank):
            return
        kept = codec.restored(whole.numpy(), engine.device)
        live = kept.pop("live", {})
        for name, value in kept.pop("given", {}).items():
            if name not in self._objects:
                raise CheckpointError(
                    f"the checkpoint holds state {name!r}, which world.run does not get here",
                    remedy="give it, or give another {folder}",
                )
            if not resumable.give_back(self._objects[name], value, self._model, live.get(name, ())):
                raise CheckpointError(f"state {name!r} has another kind or shape than here", remedy=OTHER_FOLDER)
        for optimizer, attributes in zip(self._optimizers.all, kept.pop("attributes", []), strict=False):
            for name, value in attributes.items():
                setattr(optimizer, name, codec.filled(getattr(optimizer, name, None), value))
        self._restored = kept

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        layout = {resumable.own_name(key): each for key, each in layout.items()}
        values = {resumable.own_name(key): each for key, each in values.items()}
        self._optimizers.start(values)
        if (frozen := json.loads(values.pop(FROZEN, "null"))) is not None:
            for name, parameter in self._model.named_parameters():
                learns, is_zeros = frozen.get(name, (True, False))
                # By zeros momentum and weight decay move what is frozen now or next, and not where there is none.
                parameter.requires_grad_(learns).grad = torch.zeros_like(parameter) if is_zeros else None
        for name, module in resumable.extras(self._model):
            if text := values.pop(f"{EXTRA}{name}", None):
                module.set_extra_state(resumable.unpacked(text))
        values.pop(NAMES, None)
        self._make_buffers(layout)
        self._optimizers.make(layout, values)

    def _make_buffers(self, layout: Layout) -> None:
        """Makes the checkpoint's buffers that the model itself makes or fills only while it trains."""
        there = dict(self._model.named_buffers(remove_duplicate=False))
        for key, (plain, shape) in layout.items():
            kind, _, name = key.partition(":")[0].partition(".")
            if kind != "model" or (name in there and there[name].numel()):
                continue
            owner, _, leaf = name.rpartition(".")
            holder = dict(self._model.named_modules()).get(owner)
            if holder is not None and leaf in holder._buffers:
                dtype, wanted = _layout_of(key, plain, shape)
                device = next(self._model.parameters()).device
                holder._buffers[leaf] = torch.zeros(wanted, dtype=dtype, device=device)
            elif holder is None or leaf not in holder._parameters:
                raise CheckpointError(f"the checkpoint holds {key}, but the model has no {name}", remedy=EARLIER)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint = Checkpoint(
            {resumable.own_name(key): array for key, array in checkpoint.arrays.items()}, checkpoint.meta
        )
        self._file = checkpoint.arrays.get(KEPT)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                key, words = _stored(name, tensor)
                found = _taken(checkpoint.array(key, tuple(words.shape)), tensor.dtype)
                distinct(tensor, tensor).copy_(distinct(found, tensor))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.cpu().numpy() for name, tensor in self._words().items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        return self._copies.copy(self._words())

    def _words(self) -> dict[str, torch.Tensor]:
        words = dict(_stored(name, tensor) for name, tensor in self.tensors.items())
        kept = self._kept()
        return words | ({KEPT: torch.from_numpy(codec.saved(kept))} if kept != {"given": {}} else {})

    def values(self) -> dict[str, Any]:
        values = self._optimizers.values()
        named = self._model.named_parameters()
        flags = {name: (each.requires_grad, each.grad is not None) for name, each in named}
        values[FROZEN] = json.dumps({name: both for name, both in flags.items() if both != (True, False)})
        values[ADDED] = self._optimizers.added()
        for name, module in resumable.extras(self._model):
            values[f"{EXTRA}{name}"] = resumable.packed(module.get_extra_state(), resumable.of_extra(name))
        if names := _unlike_names(self._model):
            values[NAMES] = json.dumps(names)
        return values | self._optimizers.changed()

    def numbers(self) -> dict[str, Any]:
        steps = (value for name, value in self._optimizers.slots() if name.startswith("step."))
        scale = {f"loss scale, {name.strip('_')}": value for name, value in self.scaler.state_dict().items()}
        learning = [name for name, each in self._model.named_parameters() if each.requires_grad]
        counted = {"parameters that learn": learning, "updates of the optimizer": _number(next(steps, None))}
        given = self._objects.items() if self._is_shared else ()
        held = {f"state {name}": _described(resumable.content(each)) for name, each in given}
        return numbers(self._optimizers.all) | scale | held | counted


def numbers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The settings of the optimizers' groups by name: LR, momentum, betas."""
    groups = resumable.settings(resumable.groups(optimizers))
    return {
        f"{name} of group {index}" if len(groups) > 1 else name: _number(value)
        for index, group in enumerate(groups)
        for name, value in group.items()
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of each group, except the learning rate."""
    return [{k: v for k, v in group.items() if k != "lr"} for group in resumable.settings(groups)]


def _described(content: Any) -> list[Any]:
    """The numbers and texts of the content, and a digest of its tensors and arrays."""
    leaves = [torch.as_tensor(each) if isinstance(each, np.ndarray) else each for each in tree_leaves(content)]
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    return [str([each for each in leaves if not torch.is_tensor(each)]), digest(tensors) if tensors else 0]


def _text(value: Any) -> str:
    try:
        return resumable.packed(value, "")
    except LoopError:  # such as a function, which is no state
        return repr(value)


def _layout_of(key: str, plain: str, shape: list[int]) -> tuple[torch.dtype, list[int]]:
    """PyTorch's dtype and shape of the tensor that a checkpoint stores under `key` as an array of NumPy's dtype `plain`
    and of `shape`. Raises CheckpointError."""
    _, _, named = key.partition(":")
    dtype = getattr(torch, named, None) if named else torch.from_numpy(np.zeros(0, plain)).dtype
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint holds {key}, and {named} is no dtype", remedy=OTHER_FOLDER)
    return dtype, list(shape[:-1] if dtype.is_complex else shape)


def _stored(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The key and the tensor as which a checkpoint holds it. Where the file format does not have the dtype, the key
    names it, as in model.weight:bfloat16, and the tensor holds integers of that size, or [..., 2] of complex numbers.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in PLAIN:
        return name, tensor
    words = torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(WORDS[tensor.element_size()])
    return f"{name}:{str(tensor.dtype).removeprefix('torch.')}", words


def _taken(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of this dtype that a checkpoint holds as this array; see `_stored`."""
    found = torch.from_numpy(array)
    if dtype.is_complex:
        return torch.complex(found[..., 0], found[..., 1])
    return found if dtype in PLAIN else found.view(dtype)


def _unlike_names(model: resumable.Whole) -> dict[str, str]:
    """The tensors of a state that are not all that their names in the model's state_dict say: by a parameter's second
    name its first one, and "" by a buffer's that is not in the state_dict, and by that of a tensor beside the model."""
    first = {id(each): name for name, each in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    again = {name: first[id(each)] for name, each in every if first[id(each)] != name}
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict(keep_vars=True) if buffers else {}
    beside = [name for name in [*first.values(), *buffers] if name.partition(".")[0] in model.beside]
    return again | {name: "" for name in [*buffers, *beside] if name not in kept or name in beside}


def weights(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The state_dict of the model of which the checkpoint was made, by the weights with which the run validates: the
    averaged ones where it has any. And what these are, in words. Raises CheckpointError."""
    found, averages, values = dict[str, Any](), dict[str, torch.Tensor](), checkpoint.meta.get("optimizer", {})
    for key, array in checkpoint.arrays.items():
        kind, _, name = key.partition(":")[0].partition(".")
        if kind in {"model", "ema"}:
            dtype, _ = _layout_of(key, array.dtype.name, [])
            (found if kind == "model" else averages)[name] = _taken(array, dtype)
    for name, first in json.loads(values.get(NAMES, "{}")).items():
        if first in averages:
            averages[name] = averages[first].clone()
        elif not first:
            found.pop(name, None)
    extras = {key.removeprefix(EXTRA): text for key, text in values.items() if key.startswith(EXTRA)}
    states = {f"{name}{'.' * bool(name)}_extra_state": resumable.unpacked(text) for name, text in extras.items()}
    if KEPT in checkpoint.arrays:  # of Lightning, whose callbacks may replace the weights of its own checkpoints
        averages = codec.restored(checkpoint.arrays[KEPT]).get("state_dict") or {}
    return found | averages | states, "averaged weights" if averages else "weights"
