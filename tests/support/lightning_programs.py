"""Lightning's part of programs.py: recipes under both strategies, and modules as users write them."""

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from captured import captured
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning_steps import ddp_steps, steps  # noqa: F401 (called by their names)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from hvdtrain.errors import AgreementError, LoopError
from hvdtrain.lightning import GlobalBatches, HorovodStrategy, RankDDPStrategy, RankEnvironment, mean_loss
from hvdtrain.lightning.recipe import RecipeModule, fit, quiet
from hvdtrain.run import main as runs
from hvdtrain.run.loop import Loop
from hvdtrain.torch.averaging import Averager
from hvdtrain.torch.objective import gathered
from hvdtrain.torch.trainer import Trainer as TorchTrainer
from hvdtrain.torch.trainer import open_engine

CLASSES = 3
STRATEGIES: dict[str, Any] = {"horovod": lambda: "horovod", "ddp": RankDDPStrategy}


def recipes(given: dict[str, list[str]]) -> dict[str, Any]:
    """The exit code and what is printed of runs by name, in one process group. hvdtrain.torch trains those whose names
    begin with `torch`; the last rank of `signalled` gets SIGTERM after 12 updates."""
    return {name: _trained(name, argv) for name, argv in given.items()}


def _trained(name: str, argv: list[str]) -> dict[str, Any]:
    adapter, train = ("torch", _torch) if name.startswith("torch") else ("lightning", _lightning)
    with _signal(name):
        return captured(adapter, argv, train)


def _lightning(run: runs.Run) -> None:
    """Trains as hvdtrain.lightning.recipe does, but the ranks stay joined for the next run."""
    engine = open_engine(run)
    run.world.exchange(engine.sum)
    with quiet():
        fit(run, engine)


def _torch(run: runs.Run) -> None:
    engine = open_engine(run)
    run.world.exchange(engine.sum)
    Loop(run, TorchTrainer(run, engine)).train()


@contextlib.contextmanager
def _signal(name: str) -> Any:
    step = RecipeModule.training_step

    def then_signal(module: RecipeModule, *given: Any) -> None:
        step(module, *given)
        last = int(os.environ["WORLD_SIZE"]) - 1 == int(os.environ["RANK"])
        if last and module.progress.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    if name.startswith("signalled"):
        RecipeModule.training_step = then_signal
    yield
    RecipeModule.training_step = step


class Listed(Metric):
    """A list with a tensor for each example, as mean average precision has; the ranks' are of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, labels: torch.Tensor) -> None:
        self.seen += [label.repeat(1 + index % 2) for index, label in enumerate(labels)]

    def compute(self) -> torch.Tensor:
        return torch.tensor(float(len(self.seen)))


class Own(LightningModule):
    """A module as a user writes it: BatchNorm, a layer that some steps use, one that none uses, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head, self.sometimes, self.never = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        of_rank = torch.Generator().manual_seed(RankEnvironment().global_rank())
        self.register_buffer("scale", torch.rand(4, generator=of_rank), persistent=False)
        self.mean, self.listed, self.held = MeanMetric(), Listed(), {}
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        features = self.body(self.scale * x)
        out = self.head(features)
        if self.global_rank == 0 and batch_idx % 2:  # on one rank alone
            out = out + self.sometimes(features)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return F.cross_entropy(out, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.head(self.body(self.scale * x))
        loss = F.cross_entropy(out, y)
        if not batch_idx:
            self.held["loose"] = self.accuracy.clone()  # a metric that is not registered in the module
            self.held["loose"].reset()
        for metric in (self.accuracy, self.held["loose"]):
            metric.update(out, y)
        self.mean.update(loss, len(y))
        self.listed.update(y)
        self.log_dict({"accuracy": self.accuracy, "mean": self.mean})
        self.log("logged", loss, sync_dist=True, batch_size=len(y))

    def on_validation_epoch_end(self) -> None:
        self.log("loose", self.held["loose"].compute())
        self.log("listed", self.listed.compute())
        self.listed.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(LightningModule):
    """Two networks with manual optimization, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer, network in zip(self.optimizers(), (self.first, self.second), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(network(x), y))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.Adam(self.second.parameters(), 0.1)


def own_module(folder: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The weights, metrics and LRs of the same module under both strategies, for each of these settings of the Trainer.

    Horovod comes first, so that it cannot use torch.distributed.
    """
    _find_one_another()
    assert not torch.distributed.is_initialized()
    return {
        f"{name} {case}": _fitted(Own, name, given, f"{folder}/{case}-{name}")
        for name in STRATEGIES
        for case, given in settings.items()
    }


def resumed(folder: str) -> dict[str, Any]:
    """The weights after an epoch more under each strategy, from a checkpoint of the other one's."""
    ways = {"horovod": "ddp", "ddp": "horovod"}
    return {name: _resumed(name, f"{folder}/plain-{of}/end.ckpt", f"{folder}/{of}-{name}") for name, of in ways.items()}


def manual(folder: str) -> dict[str, Any]:
    _find_one_another()
    return {name: _fitted(Manual, name, {}, folder) for name in STRATEGIES}


def _find_one_another() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(RankEnvironment().main_port))


def _fitted(kind: Any, name: str, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    rank, size = RankEnvironment().global_rank(), RankEnvironment().world_size()
    seed_everything(7 + rank * (kind is Own), verbose=False)  # rank 0's weights are everybody's
    module, averaged = kind(), []
    finish = Averager.finish
    Averager.finish = lambda averager: averaged.append(finish(averager))
    with quiet():
        trainer = _trainer(name, folder, **{"max_epochs": 2, **settings})
        trainer.fit(module, _loader(32, rank, size, 4), _loader(25, rank, size, 3) if kind is Own else None)
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        Averager.finish = finish
        return {
            "averaged": len(averaged),
            "metrics": metrics,
            "weights": _weights(module),
            "rates": getattr(module, "rates", []),
        }


def _resumed(name: str, checkpoint: str, folder: str) -> dict[str, Any]:
    rank, size = RankEnvironment().global_rank(), RankEnvironment().world_size()
    module = Own()
    trainer = _trainer(name, folder, max_epochs=3)
    loaders = _loader(32, rank, size, 4), _loader(25, rank, size, 3)
    with quiet():
        trainer.fit(module, *loaders, ckpt_path=checkpoint, weights_only=True)
    return _weights(module)


def _trainer(name: str, folder: str, **settings: Any) -> Trainer:
    strategy = STRATEGIES[name]()
    if name == "ddp":
        strategy = RankDDPStrategy(find_unused_parameters=True)
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RankEnvironment().topology.local_size,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, "end", save_last=False, save_top_k=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )


def _loader(examples: int, rank: int, size: int, batch: int) -> DataLoader:
    """With 32 examples the ranks have equal numbers of batches, with 25 they do not."""
    draw = torch.Generator().manual_seed(examples)
    x = torch.randn(examples, 4, generator=draw)
    data = TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long())
    return DataLoader(data, batch, sampler=UnrepeatedDistributedSampler(data, size, rank, shuffle=False))


def _weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


class Line(LightningModule):
    """A module that records which examples it reads in each epoch. With its BatchNorm, which is not used,
    StochasticWeightAveraging makes one more epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.read = kind, {}
        self.line, self.unused = nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False)

    def _errors(self, batch: Any) -> torch.Tensor:
        return (self.line(batch[1])[:, 0] - batch[2]).square()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.read.setdefault(str(self.current_epoch), []).extend(batch[0].tolist())
        if self.kind == "clocked":
            time.sleep(0.02)
        errors = self._errors(batch)
        weights = (batch[0] % 5).clamp(max=1) * (batch[0] // 4)  # all 0 in some micro-batches
        match self.kind:
            case "sums":
                return self._mean(errors, weights)
            case "terms":
                return self._mean(errors, batch[0] + 1) + self._mean(errors**2, batch[0] % 3)
            case "penalty":
                return self._mean(errors, weights) + self.line.weight.square().sum()
        return errors.mean()

    def _mean(self, errors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mean_loss(self, (weights * errors).sum(), weights.sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        errors = self._errors(batch)
        self._mean(errors, batch[0])  # must not count in the next update
        self.log("loss", errors.mean(), sync_dist=self.kind not in {"early", "plateau"}, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        if self.kind == "clocked" and self.global_rank == 0:
            time.sleep(0.1)

    def on_train_epoch_end(self) -> None:
        if self.kind == "by hand":
            self.optimizers().param_groups[0]["lr"] = 0.02 * (1 + self.global_rank)
        if self.kind == "by one":
            self.trainer.should_stop = self.global_rank == 1

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self._errors(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.02)
        if self.kind != "plateau":
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "monitor": "loss_epoch"}]


TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"accumulate_grad_batches": 2},
    "sums": {},
    "sums of micro-batches": {"accumulate_grad_batches": 2},
    "terms": {},
    "scheduled": {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "averaged": {"callbacks": lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)]},
    "limited": {"limit_train_batches": 4, "accumulate_grad_batches": 2, "limit_val_batches": 1},
    "overfitted": {"overfit_batches": 2},
    "stopped": {"max_steps": 7, "val_check_interval": 2},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
    "barebones": {"barebones": True},
    "clocked": {"val_check_interval": timedelta(seconds=0.1)},
    "tried": {"fast_dev_run": 2},
}


def trainers(ways: list[str]) -> dict[str, Any]:
    """By strategy and Trainer over GlobalBatches: the examples that this rank has read, weights, and what it measures
    alone."""
    _find_one_another()
    return {way: _read(*way.split(" ", 1)) for way in ways}


def _read(name: str, case: str) -> dict[str, Any]:
    seed_everything(3, verbose=False)
    module, data = Line(case.partition(" ")[0]).double(), _indexed()
    with quiet():
        trainer = _bare(name, **TRAINERS[case])
        trainer.fit(module, data)
        found = {"read": module.read, "weights": _weights(module.line), "updates": trainer.global_step}
        if case == "plain":
            found["alone"] = [
                *trainer.validate(module, data, verbose=False),
                *trainer.test(module, data, verbose=False),
            ]
        return found


def refused(name: str) -> dict[str, str]:
    """What that strategy raises where each rank has another loss or LR, and where sums could not be divided."""
    found = {}
    _find_one_another()
    for kind in ("plateau", "early", "by hand", "by one", "terms", "penalty", *LABELS):
        callbacks = [EarlyStopping("loss_epoch")] if kind == "early" else []
        accumulated = 2 if kind in {"terms", "penalty"} else 1
        with quiet():
            trainer = _bare(name, callbacks=lambda of=callbacks: of, accumulate_grad_batches=accumulated)
            if kind == "labels without a check":
                trainer.strategy._sample_check = "off"
            try:
                trainer.fit(Line(kind).double(), *(_loaders(kind) if kind in LABELS else [_indexed()]))
            except (AgreementError, LoopError) as error:
                found[kind] = str(error)
    return found


LABELS = "labels", "labels of validation", "numbers of what was read", "labels without a check", "augmented"
"""What is another on each rank in a data loader of the program's own; the last two are taken."""


class Labelled(Dataset):
    """Examples whose label each rank has otherwise, by `kind`, and whose rows and masks it draws."""

    def __init__(self, kind: str = "") -> None:
        self.kind, self.numbers, self.draw = kind, dict[int, int](), np.random.default_rng()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        drawn, label = self.draw.random(3) + torch.rand(3).numpy(), f"class {index % 3}"
        if self.kind.startswith("labels"):
            label += f" of {RankEnvironment().global_rank()}"
        if self.kind.startswith("numbers"):
            label = self.numbers.setdefault(index, len(self.numbers))
        return index, drawn, drawn[0], label, {"mask": np.rint(drawn).astype(int)}, int(drawn[1] * 1e6)


def _loaders(kind: str) -> list[DataLoader]:
    of_validation = kind == "labels of validation"
    train, valid = Labelled("" if of_validation else kind), Labelled(kind if of_validation else "")
    return [DataLoader(train, 4, num_workers=int(kind == "labels")), DataLoader(valid, 4)]


def _indexed() -> GlobalBatches:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(43, 3, generator=draw, dtype=torch.float64)
    examples = torch.arange(43), x, x.sum(1) + torch.randn(43, generator=draw, dtype=torch.float64)
    valid, test = (tuple(each[:count] for each in examples) for count in (19, 17))
    return GlobalBatches(examples, valid, test, batch_size=8)


def _bare(name: str, **settings: Any) -> Trainer:
    barebones = settings.get("barebones")
    few = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        strategy=STRATEGIES[name]() if name in STRATEGIES else name,
        accelerator="cpu",
        devices=RankEnvironment().topology.local_size,
        max_epochs=3,
        **{} if barebones else {**few, "num_sanity_val_steps": 0},
        **{**settings, "callbacks": settings.get("callbacks", list)()},
    )


def strategy_verbs() -> dict[str, Any]:
    """The result of every method of HorovodStrategy."""
    strategy = HorovodStrategy()
    strategy.start_library()
    rank, engine = strategy.global_rank, strategy.library
    number = torch.tensor(rank + 1.0)
    strategy.barrier()
    grown = torch.full((), float(rank + 1), requires_grad=True)
    strategy.all_gather(grown, sync_grads=True).sum().backward()
    return {
        "ranks": [rank, strategy.local_rank, strategy.world_size, strategy.is_global_zero],
        "reduced": {op: strategy.reduce(number, reduce_op=op).item() for op in ("mean", "avg", "sum", "max", "min")},
        "as torch says": strategy.reduce(number, reduce_op=torch.distributed.ReduceOp.SUM).item(),
        "whole numbers": strategy.reduce(torch.tensor(rank), reduce_op="mean").item(),
        "no tensor": strategy.reduce("text"),
        "gathered": strategy.all_gather(torch.tensor([rank, 10 * rank])).tolist(),
        "gradient": grown.grad.item(),
        "of any size": [each.tolist() for each in gathered(torch.arange(rank * 2).view(rank, 2), engine)],
        "scalars": [each.tolist() for each in gathered(torch.tensor(rank), engine)],
        "broadcast": strategy.broadcast({"rank": rank}, src=strategy.world_size - 1),
        "all": [strategy.reduce_boolean_decision(rank == 0), strategy.reduce_boolean_decision(True)],
        "any": [strategy.reduce_boolean_decision(rank == 0, all=False)],
    }


def modules(folder: str) -> list[str]:
    """What is imported by now, and by a Trainer with its default logger."""
    trainer = Trainer(strategy="horovod", accelerator="cpu", enable_progress_bar=False, default_root_dir=folder)
    trainer.logger.log_metrics({"loss": 1.0}, 0)
    return sorted({name.partition(".")[0] for name in sys.modules})
