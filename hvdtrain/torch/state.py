"""A training state as named tensors and plain facts: what a checkpoint holds and what rank 0 broadcasts."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hvdtrain.checkpoint import Checkpoint
from hvdtrain.metrics import Totals
from hvdtrain.schedule import Plateau


@dataclass
class Progress:
    """How far a run has come. `sample` counts the places of this epoch's order that were used."""

    step: int = 0
    epoch: int = 0
    sample: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    train: Totals = field(default_factory=lambda: Totals(0.0, 0.0, 0.0))

    def facts(self) -> dict[str, Any]:
        """As a JSON mapping; `Progress.of` reads it back."""
        facts = asdict(self)
        # JSON has no infinity.
        facts["plateau"]["best"] = None if self.plateau.best == float("inf") else self.plateau.best
        return facts

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Progress":
        plateau = dict(facts["plateau"])
        plateau["best"] = float("inf") if plateau["best"] is None else plateau["best"]
        return cls(facts["step"], facts["epoch"], facts["sample"], Plateau(**plateau), Totals(**facts["train"]))


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name: `model.NAME`, `momentum.NAME`; the live ones, not copies."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if "momentum_buffer" in optimizer.state[parameter]:
            state[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
    return state


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Momentum of 0 for every parameter, which is what SGD starts from: all ranks then hold the same names."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def load(state: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """Copies the checkpoint's arrays into the live tensors."""
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(checkpoint.arrays[name]))


def snapshot(state: dict[str, torch.Tensor], facts: dict[str, Any]) -> Checkpoint:
    """A checkpoint of the state as it is now."""
    return Checkpoint({name: tensor.detach().cpu().numpy() for name, tensor in state.items()}, facts)
