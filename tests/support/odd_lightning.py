"""Odd modules, callbacks and Trainers of Lightning's, drawn from a seed, trained by plain Lightning or by hvdtrain.

`python odd_lightning.py FOLDER`: FOLDER/given.json holds the `way` ("plain", "horovod", "ddp", "tolerant" or
"tolerant ddp"), the `seeds`, and `left`: the signal that each gets at a random step; after SIGTERM it starts again.
FOLDER/rank-R.json gets the result of each seed: the weights and what was logged, or the error.

Plain Lightning reads the samples in the order of GlobalBatches, which it looks up.
"""

import os
import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch
import kept_callbacks
import torch
from captured import each_seed, trained_or_refused
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers import CSVLogger
from odd_lightning_kinds import CALLBACKS, FLAGS, OTHERS, oddities
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

import hvdtrain.lightning as hl
from hvdtrain.core.progress import Progress
from hvdtrain.lightning.recipe import quiet

EXAMPLES, BATCH, EPOCHS = 26, 8, 4
STEPS = EXAMPLES // BATCH
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam")
CALLED = {"limit in parts": "limit_train_batches", "val in parts": "val_check_interval"}
CALLED["clipped by value"] = "gradient_clip_val"


class Sums(Metric):
    """The mean of what it gets, kept as a sum and a number."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.count += values.numel()

    def compute(self) -> torch.Tensor:
        return self.total / self.count


class Lists(Metric):
    """The median of the positive values, kept one by one: lists of other lengths on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, values: torch.Tensor) -> None:
        self.values.extend(values[values > 0])

    def compute(self) -> torch.Tensor:
        return torch.stack(self.values).median() if self.values else torch.zeros(())


class Net(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.has = seed, oddities(seed)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        if "frozen norm" in self.has:
            self.backbone.append(nn.BatchNorm1d(6))
        self.drop = nn.Dropout(0.3 if "dropout" in self.has else 0.0)
        self.head = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.epochs, self.lr = 0, 0.03
        kinds = {"metric of sums": Sums, "metric of lists": Lists}
        self.of_train, self.of_valid = (
            nn.ModuleDict({each.replace(" ", "_"): kinds[each]() for each in sorted(self.has & kinds.keys())})
            for _ in range(2)
        )
        self.automatic_optimization = "two optimizers" not in self.has
        self.train()

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        if "frozen norm" in self.has:
            self.backbone[3].eval()
        return self

    def get_extra_state(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.backbone(x))
        if "counter" in self.has:
            h = h * (1 + 0.01 * self.calls)
        if "extra state" in self.has:
            h = h * (1 + 0.01 * self.epochs)
        return self.head(self.drop(h))

    def error(self, batch: Any, metrics: nn.ModuleDict) -> torch.Tensor:
        x, y, weight = batch
        out = self(x)
        for name, metric in metrics.items():
            metric.update(out.detach()[:, 0])
            self.log(f"{name}_{self.trainer.state.stage}", metric, on_step=False, on_epoch=True)
        gaps = (out - y).square()[:, 0]
        if "masked" in self.has:
            return hl.mean_loss(self, gaps[weight > 0.4].sum(), (weight > 0.4).sum())
        return (gaps * weight).mean() if "weighted" in self.has else gaps.mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        loss = self.error(batch, self.of_train)
        if "logged in training" in self.has:
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        if not self.automatic_optimization:
            made = self.optimizers()
            for each in made:
                each.zero_grad()
            self.manual_backward(loss)
            for each in made:
                each.step()
            for each in self.lr_schedulers() or () if self.has & {"by epoch", "on plateau"} else ():
                each.step(*([loss.detach()] if "on plateau" in self.has else []))
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs += "extra state" in self.has

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        counted = (batch[2] > 0.4).sum() if "masked" in self.has else len(batch[0])
        self.log("valid", self.error(batch, self.of_valid), sync_dist=True, batch_size=int(counted))

    def configure_optimizers(self) -> Any:
        wanted = [each for each in self.parameters() if each.requires_grad]
        if not self.automatic_optimization:
            of_head = torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.5)
            return [self.made(list(self.backbone.parameters())), of_head]
        given: Any = [{"params": wanted[::2], "lr": 0.01}, {"params": wanted[1::2]}] if "groups" in self.has else wanted
        optimizer = self.made(given)
        kinds = {
            "by step": {"scheduler": lr_scheduler.ExponentialLR, "gamma": 0.95},
            "by epoch": {"scheduler": lr_scheduler.StepLR, "step_size": 2},
            "on plateau": {"scheduler": lr_scheduler.ReduceLROnPlateau, "patience": 0, "threshold": 0.3},
        }
        for name in self.has & kinds.keys():
            how = kinds[name]
            config = {"scheduler": how.pop("scheduler")(optimizer, **how), "monitor": "valid"}
            return [optimizer], [config | ({"interval": "step"} if name == "by step" else {})]
        return optimizer

    def made(self, parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, random.Random(-self.seed).choice(OPTIMIZERS))(parameters, lr=self.lr)

    def configure_callbacks(self) -> list[Callback]:
        return [callbacks.EarlyStopping("valid", 0.2, patience=1)] if "callbacks of the module" in self.has else []


def data(examples: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(x, y, weights)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 4, generator=draw)
    return x, x.sum(1, keepdim=True), torch.rand(examples, generator=draw)


class InOrder:
    """Global batches for plain Lightning, in the micro-batches that the Trainer wants."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.whole, self.parts = trainer, data(EXAMPLES), trainer.accumulate_grad_batches

    def __len__(self) -> int:
        return STEPS * self.parts

    def __iter__(self) -> Iterator[Any]:
        for indices in ORDER[0 if self.trainer.overfit_batches else self.trainer.current_epoch]:
            for part in indices.chunk(self.parts):
                yield tuple(each[part] for each in self.whole)


def order_of_epochs() -> list[list[torch.Tensor]]:
    """By epoch and step, which examples GlobalBatches reads."""
    batches = hl.GlobalBatches((torch.arange(EXAMPLES),), batch_size=BATCH)
    found = []
    for epoch in range(EPOCHS + 1):
        batches.follow(lambda epoch=epoch: Progress(epoch=epoch))
        found.append([indices for (indices,) in batches.train_dataloader()])
    return found


class Logged(Callback):
    """Keeps what was logged by each epoch's end, the LR and the number of updates."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {"epochs": [], "LR": [], "updates": []}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["epochs"].append(trainer.current_epoch)
        self.found["updates"].append(trainer.global_step)
        self.found["LR"].append([trainer.optimizers[0].param_groups[at]["lr"] for at in (0, -1)])
        for name, value in trainer.callback_metrics.items():
            self.found.setdefault(name, []).append(float(value))


class Left(Callback):
    """Sends this process the signal in that batch, counted from the first."""

    def __init__(self, batch: int, number: int) -> None:
        self.batch, self.number = batch, number

    def on_train_batch_start(self, trainer: Trainer, pl_module: Net, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1 and pl_module.calls == self.batch:
            os.kill(os.getpid(), self.number)


def theirs(has: set[str], folder: Path, seed: int, own: list[Callback]) -> list[Callback]:
    """The program's callbacks, Lightning's and its own, in an order drawn from the seed."""
    kinds: dict[str, Any] = {
        "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 1, 2: 2}),
        "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2),
        "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(decay=0.8),
        "EarlyStopping": lambda: callbacks.EarlyStopping("valid", 0.2, patience=1, check_on_train_epoch_end=False),
        "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(folder / "best", monitor="valid", save_top_k=2),
        "ModelCheckpoint in steps": lambda: callbacks.ModelCheckpoint(folder / "steps", every_n_train_steps=2),
        "LearningRateMonitor": lambda: callbacks.LearningRateMonitor("step"),
        "Timer": lambda: callbacks.Timer("00:01:00:00"),
        "LambdaCallback": lambda: callbacks.LambdaCallback(on_train_epoch_start=shake),
    }
    kinds |= {name: getattr(callbacks, name, None) for name in OTHERS}
    kinds |= {
        "DeviceStatsMonitor": lambda: callbacks.DeviceStatsMonitor(cpu_stats=False),
        "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(lambda batch: len(batch[0])),
    }
    found = [*(kinds[name]() for name in (*CALLBACKS, *OTHERS) if name in has), *own]
    random.Random(seed).shuffle(found)
    return found


def shake(trainer: Trainer, module: Net) -> None:
    """Changes a weight by the epoch."""
    with torch.no_grad():
        module.head.bias += 0.01 * trainer.current_epoch


def trained(way: str, seed: int, folder: Path, left: int = 0) -> dict[str, Any]:
    """Trains the program of that seed; returns the weights and what Lightning has logged."""
    has, rank = oddities(seed), hl.RankEnvironment().global_rank()
    seed_everything(seed + rank, verbose=False)  # ranks begin with rank 0's
    module, logged = Net(seed), Logged()
    flags: dict[str, Any] = {CALLED.get(name, name): FLAGS[name] for name in has & FLAGS.keys()}
    flags |= {"gradient_clip_algorithm": "value"} if "clipped by value" in has else {}
    flags |= {"max_steps": 2 * STEPS + 1} if "max_steps" in has else {}
    if way != "plain":
        flags["strategy"] = hl.RankDDPStrategy() if "ddp" in way else "horovod"
        flags["devices"] = hl.RankEnvironment().topology.local_size
    own = kept_callbacks.made(
        kept_callbacks.drawn(seed) if "own callbacks" in has else [], kept_callbacks.lightning_adapter()
    )
    used = [*theirs(has, folder, seed, own), logged]
    if "tolerant" in way:
        every = random.Random(seed).choice([1, 2, 100])
        run = hl.FaultTolerance(folder / "run", checkpoint_every_steps=every)
        used.insert(random.Random(seed).randrange(len(used)) if "first" not in way else 0, run)
    if left and "fast_dev_run" not in has:  # in which FaultTolerance does nothing
        used.append(Left(random.Random(seed).randrange(1, STEPS * (EPOCHS - 1)), left))
    if "barebones" not in has:
        wanted = {"progress_bar": "ProgressBar", "model_summary": "Summary", "checkpointing": "Checkpoint"}
        flags |= {f"enable_{name}": any(word in each for each in has) for name, word in wanted.items()}
        flags["logger"] = CSVLogger(folder / "logs") if any("Monitor" in each for each in has) else False
    trainer = Trainer(
        max_epochs=EPOCHS, callbacks=used, accelerator="cpu", num_sanity_val_steps=0, precision="64-true", **flags
    )
    valid = data(11, 7)
    given: dict[str, Any] = {"datamodule": hl.GlobalBatches(data(EXAMPLES), valid, batch_size=BATCH)}
    if way == "plain":
        given = {"val_dataloaders": DataLoader(TensorDataset(*valid), BATCH)}
    trainer.fit(module, **given, **({"train_dataloaders": InOrder(trainer)} if way == "plain" else {}))
    weights = {n: each.tolist() for n, each in module.state_dict().items() if isinstance(each, torch.Tensor)}
    if "validated" in has:
        given = {name.replace("val_", ""): value for name, value in given.items()}
        weights |= trainer.validate(module, verbose=False, **given)[0]
    return {"weights": weights, "logs": logged.found, "own": kept_callbacks.results(own)}


def quietly(*given: Any) -> dict[str, Any]:
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(*given)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    horovod.torch.shutdown = lambda: None  # which a stopped program calls; a process cannot start it a second time
    ORDER = order_of_epochs()
    each_seed(partial(trained_or_refused, quietly), hl.RankEnvironment().global_rank())
