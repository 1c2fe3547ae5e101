"""A training state as named tensors: what a checkpoint holds and what rank 0 broadcasts."""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from hvdtrain.run.checkpoint import Checkpoint


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


class State:
    """A training state; see `hvdtrain.run.loop.State`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.tensors, self.scaler = tensors(model, optimizer), scaler

    def load(self, checkpoint: "Checkpoint") -> None:
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(torch.from_numpy(checkpoint.array(name, tuple(tensor.shape))))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.tensors.items()}
