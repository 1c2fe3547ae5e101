"""A training state as named tensors: what a checkpoint holds and what rank 0 broadcasts."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvdtrain.errors import CheckpointError, LoopError
from hvdtrain.torch import resumable
from hvdtrain.torch.copies import Copies
from hvdtrain.torch.ema import Ema

if TYPE_CHECKING:
    from hvdtrain.run.checkpoint import Checkpoint, Layout


GROUPS = "groups"


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name: `model.NAME`, `SLOT.NAME` as in momentum.NAME; the live ones, not copies."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return state | {name: value for name, value in _slots(model, optimizer) if isinstance(value, torch.Tensor)}


def _slots(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What the optimizer keeps beside each parameter, by name."""
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            yield f"{_named(slot, optimizer)}.{name}", value


def _named(slot: str, optimizer: torch.optim.Optimizer) -> str:
    return "momentum" if slot == "momentum_buffer" and isinstance(optimizer, torch.optim.SGD) else slot


def start_momentum(optimizer: torch.optim.Optimizer, slot: str = "momentum_buffer") -> None:
    """Momentum of 0 for every parameter, which is what SGD starts from: all ranks then hold the same names."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter][slot] = torch.zeros_like(parameter)


def start_moments(optimizer: torch.optim.Optimizer) -> None:
    """Step 0 and moments of 0 for every parameter, which is what Adam and LAMB start from."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [
        {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(each), "exp_avg_sq": torch.zeros_like(each)}
        for each in parameters
    ]
    _set(optimizer, dict(enumerate(state)))


def _set(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Gives the optimizer this state of its parameters, each by its number, on the devices where it would make it."""
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class State:
    """A training state; see `hvdtrain.run.loop.State`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ema: Ema | None = None,
    ) -> None:
        self._model, self._optimizer, self._ema, self.scaler = model, optimizer, ema, scaler
        self._copies = Copies()
        self._given = [{k: _text(v) for k, v in group.items()} for group in _settings(optimizer)]
        """What the optimizer's groups said before the first update: what is another then is state too."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        averages = self._ema.averages if self._ema else {}
        return tensors(self._model, self._optimizer) | {f"ema.{name}": average for name, average in averages.items()}

    def start(self, layout: "Layout", values: Mapping[str, Any]) -> None:
        values = dict(values)
        for index, changed in resumable.unpacked(values.pop(GROUPS, "[]")):
            resumable.update(self._optimizer.param_groups[index], changed)
        if self._optimizer.state:  # a named one's is there from the start
            return
        parameters = dict(self._model.named_parameters())
        state: dict[torch.Tensor, dict[str, Any]] = {parameter: {} for parameter in parameters.values()}
        for key in [*layout, *values]:
            kind, _, name = key.partition(".")
            if kind in {"model", "ema"}:
                continue
            if name not in parameters:
                raise CheckpointError(
                    f"the checkpoint holds {key}, but the model has no {name}; give another --output."
                )
            slot = "momentum_buffer" if isinstance(self._optimizer, torch.optim.SGD) and kind == "momentum" else kind
            state[parameters[name]][slot] = _zeros(parameters[name], *layout[key]) if key in layout else values[key]
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        _set(self._optimizer, {index: state[each] for index, each in enumerate(order) if state.get(each)})
        for parameter, slots in self._optimizer.state.items():  # torch.optim gives all of them the parameter's dtype
            wanted = state[parameter]
            slots.update({slot: v.to(wanted[slot].dtype) for slot, v in slots.items() if isinstance(v, torch.Tensor)})

    def load(self, checkpoint: "Checkpoint") -> None:
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(torch.from_numpy(checkpoint.array(name, tuple(tensor.shape))))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.tensors.items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        return self._copies.of(self.tensors)

    def values(self) -> dict[str, Any]:
        slots = _slots(self._model, self._optimizer)
        values = {name: value for name, value in slots if not isinstance(value, torch.Tensor)}
        for name, value in values.items():
            if not isinstance(value, bool | int | float | str | None):
                kind, own = type(self._optimizer).__name__, type(value).__name__
                raise CheckpointError(
                    f"optimizer {kind} keeps a {own} as {name}, which no checkpoint holds; take another optimizer."
                )
        changed = [
            [index, {key: settings[key] for key in settings if _text(settings[key]) != given.get(key)}]
            for index, (settings, given) in enumerate(zip(_settings(self._optimizer), self._given, strict=True))
        ]
        if any(settings for _, settings in changed):
            values[GROUPS] = resumable.packed(changed, f"optimizer {type(self._optimizer).__name__}")
        return values


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group says beside its learning rate."""
    return [{k: v for k, v in group.items() if k != "lr"} for group in resumable.settings(optimizer)]


def _text(value: Any) -> str:
    try:
        return resumable.packed(value, "")
    except LoopError:  # as a function, which is no state
        return repr(value)


def _zeros(parameter: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    """In the parameter's memory layout where the shape is its own."""
    own = torch.from_numpy(np.zeros(0, dtype)).dtype
    return torch.zeros_like(parameter, dtype=own) if list(parameter.shape) == shape else torch.zeros(shape, dtype=own)
