"""A user's program under Lightning with FaultTolerance: `python lightning_fault_tolerance.py FOLDER JSON`.

Each entry of the JSON list is one `fit`: its `folder` and `strategy`, and what happens in it: the last rank gets a
`signal` after `at` updates, its metrics differ (`apart`), or its data end early (`short`). If all ends well,
FOLDER/rank-N.json gets the digests of the weights by folder.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from small import hold
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import hvdtrain.lightning as hl
from hvdtrain.lightning.recipe import quiet
from hvdtrain.ranks import timeouts

EXAMPLES = 50


class Cells(Dataset):
    """Images with a mask, rotated at random."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.rand(1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        turned = torch.rot90(image, random.randrange(4), (1, 2))
        return {"image": turned, "mask": (turned > 0.5).double()}


class Short:
    """Batches of which the last rank has fewer than their length."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        last = hl.RankEnvironment().global_rank() == hl.RankEnvironment().world_size() - 1
        for index in range(4 if last else 6):
            yield default_collate([Cells()[index]])


class Streamed:
    """The same batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Short())


class UNet(LightningModule):
    """A small U-Net with two groups of parameters, a scheduler by step and one by metric."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given
        self.seeds: list[int] = []
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.out, self.drop = nn.Conv2d(8, 1, 1), nn.Dropout(given.get("dropout", 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = F.relu(self.down(x))
        deep = F.interpolate(F.relu(self.deep(F.max_pool2d(down, 2))), scale_factor=2)
        return self.out(self.drop(torch.cat([down, deep], 1)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        if last and self.given.get("at") == self.trainer.global_step:
            disturb(self.given)
        self.seeds.append(torch.initial_seed())
        return F.binary_cross_entropy_with_logits(self(batch["image"]), batch["mask"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = ((self(batch["image"]) > 0) == (batch["mask"] > 0.5)).double().mean()
        self.log("accuracy", right, sync_dist=not self.given.get("apart"), batch_size=len(batch["mask"]))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.down.parameters(), "lr": 0.02}, {"params": [*self.deep.parameters()]}]
        optimizer = torch.optim.AdamW([*groups, {"params": self.out.parameters()}], lr=0.05)
        by_step = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}
        on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, threshold=0.5)
        return [optimizer], [by_step, {"scheduler": on_plateau, "monitor": "accuracy"}]


def disturb(given: dict[str, Any]) -> None:
    """Sends this process the signal, once the last checkpoint is whole."""
    while not Path(given["folder"], "checkpoints", f"step-{given['at'] // 4 * 4:08}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), given["signal"])


def fit(given: dict[str, Any]) -> str:
    """Trains once; returns the digest of the weights."""
    seed_everything(3, verbose=False)
    module = UNet(given)
    strategy = {"ddp": hl.RankDDPStrategy, "horovod": lambda: "horovod", "alone": lambda: "auto"}[given["strategy"]]()
    run = hl.FaultTolerance(given["folder"], highest="accuracy", log_every_steps=1, checkpoint_every_steps=4)
    data = hl.GlobalBatches(Cells(), Cells(), batch_size=8, seed=5)
    data = {"counted": Short, "streamed": Streamed}[given["short"]]() if "short" in given else data
    with quiet():
        Trainer(
            limit_train_batches=6 if given.get("short") == "streamed" else 1.0,
            strategy=strategy,
            max_epochs=3,
            callbacks=[run],
            accumulate_grad_batches=given.get("passes", 1),
            precision="64-true",
            accelerator="cpu",
            devices=hl.RankEnvironment().topology.local_size,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, data)
    assert len(set(module.seeds)) * given.get("passes", 1) == len(module.seeds), (
        "an update drew another's numbers again"
    )
    weights = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    if f'"signal": {signal.SIGSTOP:d}' in sys.argv[2]:
        timeouts.SILENCE = 3.0
    hold()
    found = {each["folder"]: fit(each) for each in json.loads(sys.argv[2])}
    rank = hl.RankEnvironment().global_rank()
    (Path(sys.argv[1]) / f"rank-{rank}.json").write_text(json.dumps(found))
