"""Lightning's private members that hvdtrain.lightning needs: each is named here alone, and refused by name where an
installed release has it no more."""

import functools
from typing import Any

import torch
from lightning.pytorch import loops
from lightning.pytorch.overrides import distributed
from lightning.pytorch.strategies import ddp
from lightning.pytorch.trainer import call

from hvdtrain import installed

TRIED = ("2.6.6",)
"""The releases of Lightning that hvdtrain was tried with."""
member = functools.partial(installed.member, "lightning", TRIED[-1])
replace = functools.partial(installed.replace, "lightning", TRIED[-1])

DDP_FORWARD: Any = member(ddp, "_DDPForwardRedirection")
"""Calls the module's step through DistributedDataParallel."""


def checkpoint_connector(trainer: Any) -> Any:
    """What saves and restores the Trainer's checkpoints."""
    return member(trainer, "_checkpoint_connector")


def set_loaded(connector: Any, checkpoint: dict[str, Any]) -> None:
    """Sets the checkpoint from which the connector restores."""
    replace(connector, "_loaded_checkpoint", checkpoint)


def on_load_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Calls the module's hook."""
    hook = member(call, "_call_lightning_module_hook")
    hook(trainer, "on_load_checkpoint", checkpoint)


def signals(trainer: Any) -> Any:
    """What registers the Trainer's handlers of signals."""
    return member(trainer, "_signal_connector")


def original_handlers(trainer: Any) -> dict[Any, Any]:
    """The handlers that Lightning sets again at the end, by signal."""
    return member(signals(trainer), "_original_handlers")  # type: ignore[no-any-return]


def logged(trainer: Any) -> Any:
    """What the training steps have logged, by key."""
    return member(trainer.fit_loop, "_results")


def accumulates(trainer: Any) -> bool:
    """Whether the batch makes no update."""
    return member(trainer.fit_loop, "_should_accumulate")()  # type: ignore[no-any-return]


def is_last_batch(trainer: Any) -> bool:
    """Whether the epoch's batches are read."""
    return member(trainer.fit_loop.epoch_loop, "_num_ready_batches_reached")()  # type: ignore[no-any-return]


def is_training_done(loop: Any) -> bool:
    """Whether the epoch's loop has reached max_steps or its last batch."""
    return member(loop, "_is_training_done")  # type: ignore[no-any-return]


def set_stepped(trainer: Any, steps: int) -> None:
    """Sets how many batches have made a step."""
    replace(trainer.fit_loop.epoch_loop, "_batches_that_stepped", steps)


def loaders(loop: Any) -> Any:
    """The loop's data loaders together; None before it has any."""
    return member(loop, "_combined_loader")


def began(trainer: Any) -> float:
    """When the training began, in seconds of the monotonic clock."""
    return member(trainer, "_train_start_time")  # type: ignore[no-any-return]


def set_validated(trainer: Any, seconds: float) -> None:
    """Sets when the last validation ended, by that clock."""
    replace(trainer, "_last_val_time", seconds)


def duration(timer: Any) -> Any:
    """A Timer's limit, in seconds; None for none."""
    return member(timer, "_duration")


def has_begun(averaging: Any) -> bool:
    """Whether a StochasticWeightAveraging holds a scheduler's state of a checkpoint."""
    return bool(member(averaging, "_scheduler_state"))


def contains_batch_norm(averaging: Any) -> bool:
    """Whether a StochasticWeightAveraging averages a module with BatchNorm."""
    return bool(member(averaging, "_model_contains_batch_norm"))


def set_restarting(trainer: Any, restarting: bool) -> None:
    """Sets `restarting` for Lightning's loops. The setter of their fit loop would set True whenever there are
    max_steps."""
    member(loops, "_Loop").restarting.fset(trainer.fit_loop, restarting)


def sync_module_states(module: torch.nn.Module) -> None:
    """Gives the module rank 0's tensors."""
    member(distributed, "_sync_module_states")(module)
