"""What a program trains: its model, optimizer, scheduler and loss scale, checked and made resumable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import LoopError
from hvdtrain.torch import resumable
from hvdtrain.torch.own import settings

WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass
class Program:
    """A program's own objects, and the numbers that its order of samples follows from."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler
    seed: int
    data: dict[str, Any] = field(default_factory=dict)
    """Of the training set, once it is known: batch_size and its contents."""
    began: dict[str, str] = field(default_factory=dict)
    """The settings with which the run began, as `settings.given` has them; empty in a run of before they were kept."""
    stopped: str | None = None
    """Why it was ended before its last epoch."""

    def check(self, device: torch.device) -> None:
        """Raises LoopError where its ranks would not train as one, or it could not be resumed."""
        if not isinstance(self.model, nn.Module):
            raise LoopError(f"the model must be a torch.nn.Module, got a {type(self.model).__name__}.")
        for kind in type(self.model).__mro__:
            if kind.__name__ in WRAPPERS:
                raise LoopError(f"the model is wrapped in {kind.__name__}: give the model itself, hvdtrain averages.")
        learning = [each for each in self.model.parameters() if each.requires_grad]
        if not learning:
            raise LoopError(f"model {type(self.model).__name__} has no parameter that learns; give one that has.")
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if tensor.device != device:
                raise LoopError(
                    f"{name} of the model is on {tensor.device}, this rank computes on {device}; call "
                    "model.to(world.device) before the optimizer is made."
                )
        for optimizer in self.optimizers or (None,):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise LoopError(f"the optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
        resumable.check_owners(self.model, self.optimizers)
        self.check_schedulers()
        self.metadata()

    def check_schedulers(self) -> None:
        """Raises LoopError where the run could not be resumed with the optimizers' schedulers."""
        self.check_late_schedulers()
        for each in self.schedulers:
            if getattr(each, "optimizer", self.optimizers[0]) not in self.optimizers:
                raise LoopError("the scheduler is of another optimizer; make it of the one that is given.")
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise LoopError(
                    f"the scheduler ({type(each).__name__}) has no state_dict and load_state_dict, so the run could "
                    "not be resumed; give it both."
                )

    def check_late_schedulers(self) -> None:
        """Raises LoopError where an optimizer has a scheduler that is not given; it may be made after some steps."""
        for optimizer in self.optimizers:
            if any(getattr(each, "optimizer", optimizer) is optimizer for each in self.schedulers):
                continue
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # so PyTorch marks it
                raise LoopError(
                    "the optimizer has a scheduler that no checkpoint would hold; make it before world.run, and give "
                    "it as world.run(..., scheduler=scheduler)."
                )

    def check_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises LoopError where an optimizer that is not given is to update the model."""
        own = {each for group in resumable.groups(self.optimizers) for each in group["params"]}
        theirs = {each for group in optimizer.param_groups for each in group["params"]} - own
        if name := next((name for name, each in self.model.named_parameters() if each in theirs), None):
            raise LoopError(
                f"{type(optimizer).__name__} updates {name} of the model, and no checkpoint would hold its state; give "
                "world.run all optimizers, as (first, second)."
            )

    @property
    def identity(self) -> str:
        """What two runs must share to exchange checkpoints."""
        parameters = sum(each.numel() for each in self.model.parameters())
        return f"{type(self.model).__name__}, {parameters:,} parameters, {resumable.named(self.optimizers)}"

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint: the weights, and as much twice for what an optimizer keeps beside them."""
        return 3 * sum(tensor.nbytes for tensor in self.model.state_dict().values() if isinstance(tensor, torch.Tensor))

    @property
    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def metadata(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside tensors."""
        groups = resumable.settings(self.optimizers)
        found = {"groups": resumable.packed(groups, f"optimizer {resumable.named(self.optimizers)}"), "data": self.data}
        found["schedulers"] = [
            resumable.packed(each.state_dict(), f"scheduler {type(each).__name__}") for each in self.schedulers
        ]
        return {**found, "seed": self.seed, "began": self.began, "stopped": self.stopped}

    def restore(self, meta: Mapping[str, Any], step: int) -> str | None:
        """Takes what a checkpoint holds; a line of the log where the program now gives other settings than when its run
        began. Raises CheckpointError and LoopError."""
        resumable.set_settings(self.optimizers, resumable.unpacked(meta["groups"]), step)
        if len(self.schedulers) != len(meta["schedulers"]):
            raise LoopError(
                f"the checkpoint of step {step} has {len(meta['schedulers'])} schedulers, this program has "
                f"{len(self.schedulers)}; make them alike, or give another folder."
            )
        for scheduler, state in zip(self.schedulers, meta["schedulers"], strict=True):
            scheduler.load_state_dict(resumable.unpacked(state))
        if meta["seed"] != self.seed:
            raise LoopError(f"the run began with seed={meta['seed']}, got {self.seed}; give that, or another folder.")
        self.data, self.stopped = dict(meta["data"]), meta.get("stopped")
        given, self.began = self.began, dict(meta.get("began", {}))
        return settings.difference(given, self.began)
