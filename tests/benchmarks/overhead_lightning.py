"""Lightning's Trainer over the ranks of overhead.py, interleaved with the other loops."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from hvdtrain.lightning.environment import RankEnvironment
from hvdtrain.lightning.recipe import quiet
from hvdtrain.run.run import Run

LossOf = Callable[[nn.Module, Any], torch.Tensor]


class Module(LightningModule):
    """A network with its loss and optimiser, as a Lightning script has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf) -> None:
        super().__init__()
        self.model, self.optimizer, self.loss_of = model, optimizer, loss_of

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class _Stepwise(Callback):
    """Waits before each step."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._wait()


def steps(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    loss_of: LossOf,
    strategy: type[DDPStrategy],
) -> Iterator[None]:
    """The steps of Lightning's loop over this network, optimiser and loader, one at a time: a loop that can only run by
    itself has a thread, which waits after each."""
    threads, turn, back = torch.get_num_threads(), threading.Semaphore(0), threading.Semaphore(0)

    def hand_over() -> None:
        back.release()
        turn.acquire()

    def drive() -> None:
        torch.set_num_threads(threads)  # a thread has its own number
        with quiet():
            trainer = Trainer(
                accelerator="cpu",
                devices=run.topology.local_size,
                num_nodes=run.topology.size // run.topology.local_size,
                strategy=strategy(cluster_environment=RankEnvironment(run.topology)),
                max_epochs=10_000,
                limit_train_batches=10_000,
                callbacks=[_Stepwise(hand_over)],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(Module(model, optimizer, loss_of), loader)

    threading.Thread(target=drive, daemon=True).start()
    back.acquire()
    while True:
        turn.release()
        back.acquire()
        yield
