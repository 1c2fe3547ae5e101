"""Lightning's Trainer over the ranks of overhead.py, interleaved with the other loops."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from overhead import Driver, StepOthers, Times, now, since
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


class _Interleaved(Callback):
    """Lets the other loops train a step before each of Lightning's, and times what Lightning does between them."""

    def __init__(self, step_others: StepOthers) -> None:
        self._step_others = step_others
        self._began: tuple[float, float] | None = None
        self.times: Times = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._end_step()
        self._step_others()
        self._began = now()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._began is not None:
            self.times.append(since(self._began))


def driver_of(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    loss_of: LossOf,
    strategy: type[DDPStrategy],
) -> Driver:
    """Lightning's loop over this network, optimiser and loader."""

    def drive(epochs: int, steps: int, step_others: StepOthers) -> Times:
        interleaved = _Interleaved(step_others)
        with quiet():
            trainer = Trainer(
                accelerator="cpu",
                devices=run.topology.local_size,
                num_nodes=run.topology.size // run.topology.local_size,
                strategy=strategy(cluster_environment=RankEnvironment(run.topology)),
                max_epochs=epochs,
                limit_train_batches=steps,
                callbacks=[interleaved],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(Module(model, optimizer, loss_of), loader)
        return interleaved.times

    return drive


def steps_of(driver: Driver) -> Iterator[None]:
    """The steps of a loop that can only run by itself, one at a time: in a thread, which waits after each."""
    threads, turn, back = torch.get_num_threads(), threading.Semaphore(0), threading.Semaphore(0)

    def hand_over() -> None:
        back.release()
        turn.acquire()

    def drive() -> None:
        torch.set_num_threads(threads)  # a thread has its own number
        driver(10_000, 10_000, hand_over)

    threading.Thread(target=drive, daemon=True).start()
    back.acquire()
    while True:
        turn.release()
        back.acquire()
        yield
