"""Lightning's callbacks with FaultTolerance, in one process: `python lightning_callbacks.py FOLDER`.

By case, FOLDER/found.json gets the digests of the weights of an undisturbed training, of trainings that failed after
some step and were resumed, and of the first one, given once more; and how many batches that one then read.
"""

import contextlib
import hashlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F

import hvdtrain.lightning as hl
from hvdtrain.lightning.recipe import quiet

FAILING = (3, 8, 13)
"""Steps in the first epoch, after a validation, and after changes by callbacks; an epoch has 4 steps."""


class Failed(Exception): ...


class Net(LightningModule):
    """A module with a second network that follows the first after each batch, and an LR by the validation's loss."""

    lr = 0.02

    def __init__(self, at: int | None, plateau: bool) -> None:
        super().__init__()
        self.at, self.plateau, self.batches = at, plateau, 0
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.behind = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.at:
            raise Failed
        self.batches += 1
        loss = F.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss * float("nan") if self.trainer.global_step == 6 else loss

    def on_after_backward(self) -> None:
        if not self.head.bias.grad.isfinite():
            self.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.behind.parameters(), self.head.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self.head(self.backbone(batch[0])), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["made"] = self.made(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["made"] == self.made(checkpoint)
        assert checkpoint["hyper_parameters"]["plateau"] == self.plateau

    def made(self, checkpoint: dict[str, Any]) -> list[Any]:
        """What Lightning's own keys say of the training so far."""
        groups = [group for each in checkpoint["optimizer_states"] for group in each["param_groups"]]
        rates = [[group["lr"] for group in groups], [each.get("_last_lr") for each in checkpoint["lr_schedulers"]]]
        is_whole = self.trainer.max_steps == -1  # else the last epoch may count as ended
        return [checkpoint["epoch"] * is_whole, checkpoint["global_step"], *rates]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return ([optimizer], [{"scheduler": plateau, "monitor": "loss"}]) if self.plateau else optimizer


class Keeps(Callback):
    """A user's callback that saves a tensor and a number by Lightning's hooks, and changes the weights at the end."""

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(8), 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sum, self.count = self.sum + module.head.weight.detach()[0], self.count + 1

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["keeps"] = {"sum": self.sum, "count": self.count}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.sum, self.count = checkpoint["keeps"]["sum"], checkpoint["keeps"]["count"]

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.head.weight[0] = self.sum / self.count


CASES: dict[str, Any] = {
    "averages": lambda folder: {
        "callbacks": [
            callbacks.EMAWeightAveraging(decay=0.9),
            callbacks.GradientAccumulationScheduler({0: 1, 2: 2}),
            callbacks.EarlyStopping("loss", patience=9),
            Keeps(),
        ],
        "val_check_interval": 2,
        "max_time": "00:01:00:00",
    },
    "epoch of statistics": lambda folder: {
        "callbacks": [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2)],
        "plateau": False,
    },
    "watched": lambda folder: {
        "callbacks": [
            callbacks.LearningRateMonitor(),
            callbacks.DeviceStatsMonitor(),
            callbacks.RichProgressBar(),
            callbacks.ModelSummary(),
            callbacks.LambdaCallback(on_save_checkpoint=lambda _, module, checkpoint: checkpoint.pop("callbacks")),
            callbacks.ModelCheckpoint(folder, monitor="loss"),
        ],
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "max_steps": 15,
        "accumulate_grad_batches": 2,
        "limit_train_batches": 7,
        "enable_checkpointing": True,
        "enable_model_summary": True,
        "enable_progress_bar": True,
    },
    "stopped early": lambda folder: {
        "callbacks": [
            callbacks.EarlyStopping("loss", patience=1, min_delta=9),
            callbacks.EarlyStopping("train", patience=9),
        ]
    },
}
REFUSED = {
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.2),
    "LearningRateFinder": callbacks.LearningRateFinder,
    "BatchSizeFinder": callbacks.BatchSizeFinder,
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(2),
    "SpikeDetection": callbacks.SpikeDetection,
}


def trained(folder: Path, settings: dict[str, Any], at: int | None, *, last: bool = False) -> tuple[str, int]:
    """The digest of the weights, and how many batches were read. `last`: FaultTolerance is the last callback."""
    seed_everything(1, verbose=False)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=draw)
    y = x.sum(1, keepdim=True) + torch.randn(64, 1, generator=draw)
    module, run = Net(at, settings.pop("plateau", True)), hl.FaultTolerance(folder, checkpoint_every_steps=1)
    given = settings.pop("callbacks")
    few = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    order = [*given, run] if last else [run, *given]
    trainer = Trainer(
        **{**few, "max_epochs": 4, "num_sanity_val_steps": 0, **settings}, accelerator="cpu", callbacks=order
    )
    try:
        trainer.fit(module, hl.GlobalBatches((x, y), (x[:40], y[:40]), batch_size=16))
    except Failed:
        return "", 0
    weights = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(weights).hexdigest(), module.batches


def main(folder: Path) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    with quiet():
        for name, settings in CASES.items():
            print(f"case {name}", flush=True)
            whole, batches = trained(folder / name, settings(folder), None)
            resumed = []
            for index, at in enumerate(FAILING if batches > max(FAILING) else FAILING[:1]):
                cut = folder / f"{name} {at}"
                trained(cut, settings(folder), at, last=index == 1)
                resumed.append(trained(cut, settings(folder), None, last=index == 1)[0])
            again, more = trained(folder / name, settings(folder), None)
            found[name] = {"whole": whole, "resumed": resumed, "again": again, "more": more, "batches": batches}
        Net.lr = 0.01
        with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            trained(folder / "watched", CASES["watched"](folder), None)
        found["watched"]["of another LR"] = printed.getvalue()
        for name, make in REFUSED.items():
            with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
                trained(folder / name, {"callbacks": [make()], "enable_checkpointing": True}, None)
            found[name] = {"error": printed.getvalue()}
    return found


if __name__ == "__main__":
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(main(Path(sys.argv[1]))))
