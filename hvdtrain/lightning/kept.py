"""A Trainer's state with what its callbacks and modules keep: what Lightning's own checkpoints hold."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer import call
from torch.utils._pytree import tree_leaves, tree_map_only

from hvdtrain.torch.state import State

if TYPE_CHECKING:
    from hvdtrain.run.checkpoint import Layout

KEPT = "kept"
ELSEWHERE = {"epoch", "global_step", "loops", "optimizer_states", "lr_schedulers", "MixedPrecision"}
"""Of a checkpoint of Lightning's, what the run's checkpoint has by itself."""
HYPER_PARAMETERS = ("hparams_name", "hparams_type", "hyper_parameters")


class TrainerState(State):
    """Module and optimizers, and what Lightning would keep beside them, as the bytes of a file of torch.save."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None) or torch.amp.GradScaler(enabled=False)
        super().__init__(module, trainer.optimizers, scaler)
        self._trainer, self._module = trainer, module
        self._file: dict[str, torch.Tensor] = {}
        self.unkept = [name for name, value in self._parts().items() if not _is_kept(value)]
        """Whose state no checkpoint can hold."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors | self._file

    def snapshot(self) -> dict[str, np.ndarray]:
        file = io.BytesIO()
        torch.save({name: value for name, value in self._parts().items() if _is_kept(value)}, file)
        self._file = {KEPT: torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}
        return super().snapshot()

    def start(self, layout: "Layout", values: Mapping[str, Any]) -> None:
        if KEPT in layout:
            self._file = {KEPT: torch.zeros(layout[KEPT][1], dtype=torch.uint8, device=self._module.device)}
        super().start({name: layout[name] for name in layout if name != KEPT}, values)

    def give_back(self) -> None:
        """Callbacks, module and data module take what a checkpoint holds of them, as from one of Lightning's."""
        if KEPT in self._file:
            content = self._file.pop(KEPT).cpu().numpy().tobytes()
            whole = {"state_dict": self._module.state_dict(), "callbacks": {}}
            for name, value in torch.load(io.BytesIO(content), weights_only=True).items():
                holder, _, key = name.rpartition(" of ")
                (whole["callbacks"] if holder else whole)[key] = self._module.state_dict() if value is None else value
            connector = self._trainer._checkpoint_connector
            connector._loaded_checkpoint = whole
            call._call_lightning_module_hook(self._trainer, "on_load_checkpoint", whole)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector._loaded_checkpoint = {}

    def _parts(self) -> dict[str, Any]:
        """What is kept by name, "state of KEY" a callback's; None for the module's own state under another name."""
        whole = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        own = {each.data_ptr() for each in self._module.state_dict().values() if isinstance(each, torch.Tensor)}
        parts = {f"state of {key}": state for key, state in whole.pop("callbacks").items()}
        for name, value in whole.items():
            if name not in ELSEWHERE and not name.endswith(HYPER_PARAMETERS):
                tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
                parts[name] = None if tensors and all(each.data_ptr() in own for each in tensors) else value
        return parts


def _is_kept(value: Any) -> bool:
    """Whether torch.load reads it again without running code of it."""
    file = io.BytesIO()
    try:
        torch.save(tree_map_only(torch.Tensor, lambda _: 0, value), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True
