"""A training state as named tensors: what a checkpoint holds and what rank 0 broadcasts."""

import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.core.wording import counted
from hvdtrain.errors import CheckpointError, LoopError, RecipeError
from hvdtrain.record.checkpoint import Checkpoint, Layout
from hvdtrain.torch import resumable
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import distinct

GROUPS, EXTRA, NAMES = "groups", "extra.", "names"
KEPT = "kept"
"""The name of the tensor whose bytes are a file of torch.save, of what callbacks, module and data module of Lightning's
keep."""
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

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
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


def tensors(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the state, not a copy, by its name: `model.NAME`, or `SLOT.NAME` as in momentum.NAME."""
    live = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"model.{name}": tensor for name, tensor in live} | {
        name: value for name, value in _slots(model, optimizers) if isinstance(value, torch.Tensor)
    }


def _slots(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    """The values that the optimizers keep for each parameter, by name."""
    for optimizer, (name, parameter) in itertools.product(optimizers, model.named_parameters()):
        for slot, value in optimizer.state.get(parameter, {}).items():
            is_momentum = slot == "momentum_buffer" and isinstance(optimizer, torch.optim.SGD)
            yield f"{'momentum' if is_momentum else slot}.{name}", value


def start(optimizer: torch.optim.Optimizer, slots: Sequence[str], has_step: bool) -> None:
    """Gives every parameter slots of zeros, and with `has_step` the step 0, so that all ranks hold the same names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: list[dict[str, Any]] = [{"step": torch.tensor(0.0)} if has_step else {} for _ in parameters]
    for each, held in zip(parameters, state, strict=True):
        held |= {_name_of_torch(optimizer, slot): torch.zeros_like(each) for slot in slots}
    if slots or has_step:
        _set(optimizer, dict(enumerate(state)))


def _name_of_torch(optimizer: torch.optim.Optimizer, slot: str) -> str:
    """The optimizer's name of a slot that a checkpoint names so."""
    return "momentum_buffer" if isinstance(optimizer, torch.optim.SGD) and slot == "momentum" else slot


def _set(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Gives the optimizer the state of each parameter, by the parameter's number, on the devices that it chooses."""
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def lr_ratios(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """The LR of each group of parameters divided by `lr`, with which the optimizer was made."""
    return [float(group["lr"]) / lr for group in optimizer.param_groups]


def lr_groups(optimizer: torch.optim.Optimizer, ratios: list[float]) -> str:
    """Names the groups of parameters with other LRs than the run's; empty where there are none."""
    if set(ratios) == {1.0}:
        return ""
    sizes = [sum(each.numel() for each in group["params"]) for group in optimizer.param_groups]
    return ", ".join(f"x{ratio:g} for {counted(size, 'parameter')}" for ratio, size in zip(ratios, sizes, strict=True))


class State:
    """A training state; see `hvdtrain.run.trainer.State` for the methods."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler,
        ema: Ema | None = None,
    ) -> None:
        check_kept(model)
        self._model, self._optimizers, self._ema, self.scaler = model, optimizers, ema, scaler
        self._copies = Copies()
        self._given = [{k: _text(v) for k, v in group.items()} for group in _settings(optimizers)]
        """The settings of the optimizers' groups before the first update: a setting that changes later is state."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        averages = self._ema.averages if self._ema else {}
        return tensors(self._model, *self._optimizers) | {f"ema.{name}": average for name, average in averages.items()}

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        values = dict(values)
        for index, changed in resumable.unpacked(values.pop(GROUPS, "[]")):
            resumable.update(resumable.groups(self._optimizers)[index], changed)
        for name, module in _extras(self._model):
            if text := values.pop(f"{EXTRA}{name}", None):
                module.set_extra_state(resumable.unpacked(text))
        values.pop(NAMES, None)
        self._make_buffers(layout)
        for optimizer in self._optimizers:
            if not optimizer.state:  # a recipe's named optimizer has it from the start
                self._start(optimizer, layout, values)

    def _start(self, optimizer: torch.optim.Optimizer, layout: Layout, values: Mapping[str, Any]) -> None:
        """Makes the state of the optimizer that the checkpoint holds."""
        parameters = dict(self._model.named_parameters())
        state: dict[torch.Tensor, dict[str, Any]] = {parameter: {} for parameter in parameters.values()}
        for key in [*layout, *values]:
            kind, _, name = key.partition(":")[0].partition(".")
            if kind in {"model", "ema"}:
                continue
            if name not in parameters:
                raise CheckpointError(
                    f"the checkpoint holds {key}, but the model has no {name}; give another --output."
                )
            slot = _name_of_torch(optimizer, kind)
            state[parameters[name]][slot] = _zeros(parameters[name], key, layout[key]) if key in layout else values[key]
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _set(optimizer, {index: state[each] for index, each in enumerate(order) if state.get(each)})
        for parameter, slots in optimizer.state.items():  # to which torch.optim gives the parameter's dtype
            wanted = state[parameter]
            slots.update({slot: v.to(wanted[slot].dtype) for slot, v in slots.items() if isinstance(v, torch.Tensor)})

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
                raise CheckpointError(
                    f"the checkpoint holds {key}, but the model has no {name}; give another --output."
                )

    def load(self, checkpoint: Checkpoint) -> None:
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                key, words = _stored(name, tensor)
                found = _taken(checkpoint.array(key, tuple(words.shape)), tensor.dtype)
                distinct(tensor, tensor).copy_(distinct(found, tensor))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.cpu().numpy() for name, tensor in self._words().items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        return self._copies.of(self._words())

    def _words(self) -> dict[str, torch.Tensor]:
        return dict(_stored(name, tensor) for name, tensor in self.tensors.items())

    def values(self) -> dict[str, Any]:
        slots = _slots(self._model, self._optimizers)
        values = {name: value for name, value in slots if not isinstance(value, torch.Tensor)}
        for name, value in values.items():
            if not isinstance(value, bool | int | float | str | None):
                kind, own = resumable.named(self._optimizers), type(value).__name__
                raise CheckpointError(
                    f"optimizer {kind} keeps a {own} as {name}, which no checkpoint holds; take another optimizer."
                )
        changed = [
            [index, {key: settings[key] for key in settings if _text(settings[key]) != given.get(key)}]
            for index, (settings, given) in enumerate(zip(_settings(self._optimizers), self._given, strict=True))
        ]
        for name, module in _extras(self._model):
            values[f"{EXTRA}{name}"] = resumable.packed(module.get_extra_state(), _of_extra(name))
        if names := _unlike_names(self._model):
            values[NAMES] = json.dumps(names)
        if any(settings for _, settings in changed):
            values[GROUPS] = resumable.packed(changed, f"optimizer {resumable.named(self._optimizers)}")
        return values

    def numbers(self) -> dict[str, Any]:
        steps = (value for name, value in _slots(self._model, self._optimizers) if name.startswith("step."))
        scale = {f"loss scale, {name.strip('_')}": value for name, value in self.scaler.state_dict().items()}
        learning = [name for name, each in self._model.named_parameters() if each.requires_grad]
        counted = {"parameters that learn": learning, "updates of the optimizer": _number(next(steps, None))}
        return numbers(self._optimizers) | scale | counted


def numbers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The settings of the optimizers' groups by name: LR, momentum, betas."""
    groups = resumable.settings(optimizers)
    return {
        f"{name} of group {index}" if len(groups) > 1 else name: _number(value)
        for index, group in enumerate(groups)
        for name, value in group.items()
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The settings of each group, except the learning rate."""
    return [{k: v for k, v in group.items() if k != "lr"} for group in resumable.settings(optimizers)]


def _text(value: Any) -> str:
    try:
        return resumable.packed(value, "")
    except LoopError:  # such as a function, which is no state
        return repr(value)


def _zeros(parameter: torch.Tensor, key: str, layout: tuple[str, list[int]]) -> torch.Tensor:
    """Zeros of the layout that the checkpoint names, in the parameter's memory layout where the shapes are equal."""
    dtype, shape = _layout_of(key, *layout)
    if list(parameter.shape) == shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _layout_of(key: str, plain: str, shape: list[int]) -> tuple[torch.dtype, list[int]]:
    """Dtype and shape of the tensor that a checkpoint holds under this key, as that dtype and shape. Raises
    CheckpointError."""
    _, _, named = key.partition(":")
    dtype = getattr(torch, named, None) if named else torch.from_numpy(np.zeros(0, plain)).dtype
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint holds {key}, and {named} is no dtype; give another --output.")
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


def _unlike_names(model: torch.nn.Module) -> dict[str, str]:
    """The tensors of `tensors` that are not all that their names in the model's state_dict say: by a parameter's second
    name its first one, and "" by a buffer's that is not in the state_dict."""
    first = {id(each): name for name, each in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    again = {name: first[id(each)] for name, each in every if first[id(each)] != name}
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict(keep_vars=True) if buffers else {}
    return again | {name: "" for name in buffers if name not in kept}


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
        file = io.BytesIO(checkpoint.arrays[KEPT].tobytes())
        averages = torch.load(file, weights_only=True).get("state_dict") or {}
    return found | averages | states, "averaged weights" if averages else "weights"


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
    for name, module in _extras(model):
        state = module.get_extra_state()
        if isinstance(state, torch.Tensor):
            raise RecipeError(f"{_of_extra(name)} is a tensor, which no checkpoint holds; register it as a buffer.")
        resumable.packed(state, _of_extra(name))


def _extras(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules with a state beside their tensors, by name."""
    base = torch.nn.Module.get_extra_state
    return [(name, each) for name, each in model.named_modules() if type(each).get_extra_state is not base]


def _of_extra(name: str) -> str:
    return f"get_extra_state() of {name or 'the model'}"
