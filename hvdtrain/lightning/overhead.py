"""Lightning's Trainer over the ranks of `bench overhead`, which takes turns with the other loops."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.lightning.train import quiet
from hvdtrain.overhead import Driver, Turn
from hvdtrain.run import Run


class Classifier(LightningModule):
    """A network with its optimiser, as a Lightning script has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.loss_of = nn.CrossEntropyLoss()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return self.loss_of(self.model(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class _Turns(Callback):
    """Lets the other loops train their epoch before each of Lightning's, and times that one."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._began = turn, 0.0
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._turn(trainer.current_epoch)
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seconds.append((time.perf_counter() - self._began) / trainer.num_training_batches)


def driver_of(run: Run, parts: tuple[nn.Module, torch.optim.Optimizer, Any]) -> Driver:
    """A function that trains so many epochs, and gives the seconds of a step in each."""
    model, optimizer, loader = parts

    def drive(rounds: int, turn: Turn) -> list[float]:
        turns = _Turns(turn)
        with quiet():
            trainer = Trainer(
                accelerator="cpu",
                devices=run.topology.local_size,
                num_nodes=run.topology.size // run.topology.local_size,
                strategy=DDPStrategy(cluster_environment=RankEnvironment(run.topology)),
                max_epochs=rounds,
                callbacks=[turns],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(Classifier(model, optimizer), loader)
        return turns.seconds

    return drive
