"""The course script of JSC with hvdtrain's classes: ResNet50 on ImageNet by index files, with Lightning.

    srun python lightning_jsc_course.py DATA_DIR --strategy horovod

With --checkpoint it validates those weights, and trains nothing. Rank 0 prints the results as a line of JSON.
"""

import argparse
import json
import logging
import sys
import warnings

import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch import LightningModule, Trainer, seed_everything

from hvdtrain.lightning import ExactAccuracy, ImageNetDataModule, RankDDPStrategy, RankEnvironment


class ResNet50(LightningModule):
    """torchvision's network, trained by Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torchvision.models.resnet50(weights=None)
        self.accuracy = ExactAccuracy()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, labels = batch
        loss = F.cross_entropy(self(x), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, labels = batch
        self.accuracy.update(self(x), labels)
        self.log("accuracy", self.accuracy)
        self.log("images", float(len(labels)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main() -> None:
    given = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    data = ImageNetDataModule(
        given.data_dir, given.batch_size, train_crop=given.crop, valid_resize=given.crop, valid_crop=given.crop
    )
    trainer = Trainer(
        max_epochs=1,
        max_steps=given.max_steps,
        strategy=RankDDPStrategy() if given.strategy == "ddp" else "horovod",
        devices=RankEnvironment().topology.local_size,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = ResNet50()
    if given.checkpoint:
        trainer.validate(model, data, ckpt_path=given.checkpoint, weights_only=True, verbose=False)
    else:
        trainer.fit(model, data)
        trainer.save_checkpoint(given.save)
    if trainer.is_global_zero:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(json.dumps({**metrics, "losses": model.losses}), file=sys.stdout, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir")
    parser.add_argument("--strategy", choices=("ddp", "horovod"), default="horovod")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--checkpoint")
    parser.add_argument("--save", default="image_classification_model.pt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
