"""Lightning's part of programs.py on what a step trains: phases, gathered negatives, gradients set by hand, and ranks
without a backward."""

import os
import weakref
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.nn import functional as F

import hvdtrain.lightning as hl
from hvdtrain.errors import HvdtrainError
from hvdtrain.lightning.recipe import quiet
from hvdtrain.ranks import timeouts

STRATEGIES: dict[str, Any] = {
    "horovod": lambda: "horovod",
    "tolerant": lambda: "horovod",
    "ddp": hl.RankDDPStrategy,
    "static": lambda: hl.RankDDPStrategy(static_graph=True),
    "unused": lambda: hl.RankDDPStrategy(find_unused_parameters=True),
}
BY_HAND = {"averaged", "by hand", "absent", "twice", "without manual_backward", "every second", "noise"}
GATHERED = {"gathered"}


class Steps(LightningModule):
    """Two layers, of which other ones learn from time to time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.automatic_optimization = kind, kind not in BY_HAND
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 4)
        self.centers = [nn.Parameter(torch.zeros(4))]  # in a list, so that the module does not know it
        self.made, self.wrappers = 0, weakref.WeakSet[Any]()
        if kind in {"phases", "foreign"}:
            self.backbone.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "Steps":
        super().train(mode)
        self.backbone[1].eval()
        return self

    def on_train_epoch_start(self) -> None:
        if self.kind == "phases":
            self.backbone.requires_grad_(self.current_epoch % 2 == 1)
            self.head.requires_grad_(self.current_epoch % 2 == 0)
        if self.kind == "grown" and self.current_epoch == 1:
            self.more = nn.Linear(4, 4, dtype=torch.float64)
            self.optimizers().add_param_group({"params": self.more.parameters()})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "in turn":
            self.head.requires_grad_(batch_idx % 2 == 0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.wrappers.add(self.trainer.strategy.model)
        assert len(self.wrappers) == 1, "a DistributedDataParallel that is no longer used is still there"
        averager = self.trainer.strategy._averager
        assert not (averager and averager.evidence.is_watched), "gradients of the step would be kept"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.backbone(x))
        return self.more(out) if hasattr(self, "more") else out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.made += 1
        if self.kind == "thawed inside":
            self.backbone.requires_grad_(self.made > 3)
        if self.kind == "left out":
            return self.backbone(x).square().mean()
        if self.kind in GATHERED:
            others = F.normalize(self.all_gather(self(x + 0.1), sync_grads=True).flatten(0, -2))
            own = F.normalize(self(x))
            return F.cross_entropy(5 * own @ others.T, self.global_rank * len(x) + torch.arange(len(x)))
        loss = (self(x) - y).square().mean() + self.centers[0].square().sum() * (self.kind == "foreign")
        is_one = self.global_rank == self.trainer.world_size - 1 and self.made == 3
        if self.kind == "None":
            return None if is_one else loss
        if not self.automatic_optimization:
            return self.by_hand(loss, is_one)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.all_gather(batch[0])

    def by_hand(self, loss: torch.Tensor, is_one: bool) -> None:
        optimizer = self.optimizers()
        match self.kind:
            case "averaged" | "by hand":
                learn = list(self.parameters())
                for each, gradient in zip(learn, torch.autograd.grad(loss, learn), strict=True):
                    is_mean = self.kind == "averaged"
                    each.grad = self.trainer.strategy.reduce(gradient) if is_mean else gradient
                optimizer.step()
            case "absent":
                optimizer.zero_grad()
                if not is_one:
                    self.manual_backward(loss)
                optimizer.step()
            case "twice":
                optimizer.zero_grad()
                for _ in range(1 + is_one):
                    self.manual_backward(loss, retain_graph=True)
                optimizer.step()
            case "without manual_backward":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            case "noise":
                optimizer.zero_grad()
                torch.manual_seed(self.global_rank)
                self.manual_backward(loss)
                for each in self.parameters():
                    each.grad += 0.1 * torch.randn_like(each)
                optimizer.step()
            case "every second":
                if self.made % 2:
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "finetuned":
            return torch.optim.SGD(self.head.parameters(), 0.1, 0.9)
        if self.kind == "line search":
            return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")
        return torch.optim.SGD([*self.parameters(), *self.centers[: self.kind == "foreign"]], 0.1, 0.9)


def steps(ways: list[str], folder: str, patience: float = timeouts.ARRIVAL) -> dict[str, Any]:
    """By strategy and kind of step, the weights at the end, or the error. `patience`: for how many seconds a rank waits
    for the others."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(hl.RankEnvironment().main_port))
    timeouts.ARRIVAL = patience
    return {way: _stepped(*way.split(" ", 1), folder) for way in ways}


def ddp_steps(**given: Any) -> dict[str, Any]:
    """The same, after all that must find no group of torch.distributed, with which Lightning communicates."""
    return steps(**given)


def _stepped(name: str, kind: str, folder: str) -> Any:
    seed_everything(7, verbose=False)
    module = Steps(kind).double()
    callbacks: list[Any] = [BackboneFinetuning(1, lambda epoch: 1.0, verbose=False)] if kind == "finetuned" else []
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(32, 3, generator=draw).double(), torch.randn(32, 4, generator=draw).double()
    quietly = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer: dict[str, Any] = dict.fromkeys(quietly, False) | {"accelerator": "cpu", "max_epochs": 4}
    with quiet():
        if name == "tolerant":
            callbacks.append(hl.FaultTolerance(f"{folder}/{kind}"))
        try:
            Trainer(
                strategy=STRATEGIES[name](),
                callbacks=callbacks,
                devices=hl.RankEnvironment().topology.local_size,
                **trainer,
            ).fit(module, hl.GlobalBatches((x, y), (x[:7], y[:7]) if kind == "unequal" else None, batch_size=8))
        except (HvdtrainError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return [value for each in module.parameters() for value in each.flatten().tolist()]
