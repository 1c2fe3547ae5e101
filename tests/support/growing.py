"""An optimizer that keeps a number beside no parameter but in its group, as schedule-free ones do."""

from typing import Any

import torch


class Growing(torch.optim.Optimizer):
    """SGD whose first steps are smaller."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "made": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["made"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["made"] / (group["made"] + 10))
