"""What a Trainer trains, as checkpoints hold it: module, optimizers, schedulers, loss scale, Lightning's counters."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from hvdtrain.core.progress import Progress
from hvdtrain.errors import CheckpointError, LoopError
from hvdtrain.lightning.global_batches import GlobalBatches
from hvdtrain.run.own import take_data
from hvdtrain.torch import resumable
from hvdtrain.torch.state import State


class Program:
    """The rest of what a Trainer trains; see `hvdtrain.run.own.Program`."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        scaler = getattr(trainer.precision_plugin, "scaler", None) or torch.amp.GradScaler(enabled=False)
        self.state = State(module, trainer.optimizers, scaler)

    @property
    def data(self) -> GlobalBatches | None:
        """The data, where its order is the one global one."""
        found = getattr(self.trainer, "datamodule", None)
        return found if isinstance(found, GlobalBatches) else None

    @property
    def identity(self) -> str:
        parameters = sum(each.numel() for each in self.module.parameters())
        return f"{type(self.module).__name__}, {parameters:,} parameters, {resumable.named(self.trainer.optimizers)}"

    @property
    def state_bytes(self) -> int:
        tensors = (value for value in self.module.state_dict().values() if isinstance(value, torch.Tensor))
        return 3 * sum(tensor.nbytes for tensor in tensors)  # an optimizer keeps up to twice the weights

    @property
    def lr(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def check(self) -> None:
        """Raises LoopError where what is trained could not be resumed."""
        resumable.check_owners(self.module, self.trainer.optimizers)
        if self.trainer.ckpt_path:
            raise LoopError(
                f"Trainer.fit got ckpt_path={str(self.trainer.ckpt_path)!r}, but FaultTolerance resumes from its own "
                "folder; leave it out, and load weights into the module before fit."
            )
        self.metadata()

    def metadata(self) -> dict[str, Any]:
        groups = [resumable.settings([optimizer]) for optimizer in self.trainer.optimizers]
        schedulers = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        loops = self.trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # of a loader that keeps its own position
        return {
            "groups": resumable.packed(groups, "the optimizers"),
            "schedulers": resumable.packed(schedulers, "a scheduler"),
            "loops": resumable.packed(loops, "Lightning's loop"),
            "data": self._order,
        }

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """Takes what a checkpoint holds; a line where the data are others. Raises CheckpointError and LoopError."""
        groups, schedulers = (resumable.unpacked(meta[name]) for name in ("groups", "schedulers"))
        configs = self.trainer.lr_scheduler_configs
        for name, saved, own in (("optimizers", groups, self.trainer.optimizers), ("schedulers", schedulers, configs)):
            if len(saved) != len(own):
                raise CheckpointError(
                    f"the checkpoint of step {progress.step} has {len(saved)} {name}, this module {len(own)}; give "
                    "another --output."
                )
        for optimizer, settings in zip(self.trainer.optimizers, groups, strict=True):
            resumable.set_settings([optimizer], settings, progress.step)
        for config, state in zip(configs, schedulers, strict=True):
            config.scheduler.load_state_dict(state)
        news = take_data(meta["data"], self._order, progress)
        self._restore_loops(resumable.unpacked(meta["loops"]), progress)
        return news

    def unkept(self, folder: str) -> list[str]:
        """What this callback cannot promise, a line each."""
        trainer, lines = self.trainer, []
        if not self.data:
            lines.append(
                "the order of the samples is the data loader's: other for another number of ranks, and a resumed epoch "
                "reads from its beginning; hl.GlobalBatches keeps both"
            )
        if not self.module.automatic_optimization:
            lines.append("manual optimization: a step is a batch, and the loss is logged if training_step returns it")
        stateful = [each for each in trainer.callbacks if not isinstance(each, ModelCheckpoint) and each.state_dict()]  # type: ignore[attr-defined]
        hooks = [each for each in (self.module, trainer.datamodule) if each and _keeps_more(each)]  # type: ignore[attr-defined]
        if names := [type(each).__name__ for each in [*stateful, *hooks]]:
            lines.append(f"no checkpoint holds what {', '.join(names)} would keep in Lightning's: it begins anew")
        if any(isinstance(each, ModelCheckpoint) for each in trainer.callbacks):  # type: ignore[attr-defined]
            lines.append(
                f"ModelCheckpoint writes checkpoints beside those of {folder}, which alone are resumed from; "
                "Trainer(enable_checkpointing=False) leaves them out"
            )
        return lines

    @property
    def _order(self) -> dict[str, Any]:
        """What the order of the samples follows from."""
        if not (data := self.data):
            return {}
        return {"batch_size": data.batch_size, "seed": data.seed, **data.train.contents()}

    def _restore_loops(self, loops: dict[str, Any], progress: Progress) -> None:
        """Lightning's counters, as they are after a batch inside an epoch, or between two epochs."""
        fit, inside = self.trainer.fit_loop, progress.sample > 0
        batches: Any = fit.epoch_loop.batch_progress
        fit.load_state_dict(loops)
        for tracker in vars(fit.epoch_progress).values():
            tracker.ready = tracker.started = progress.epoch + inside
            tracker.processed = tracker.completed = progress.epoch
        fit.epoch_loop._batches_that_stepped = progress.step - inside
        for tracker in (batches.total, batches.current):
            tracker.completed = tracker.processed - inside  # Lightning counts it once it has restarted
        fit.restarting = inside


def _keeps_more(owner: Any) -> bool:
    """Whether a module or a data module writes into Lightning's checkpoints by itself."""
    if isinstance(owner, LightningModule):
        return is_overridden("on_save_checkpoint", owner)
    return is_overridden("on_save_checkpoint", owner) or is_overridden("state_dict", owner)
