"""Ranks of which one differs from the others, in a recipe, a loop, Lightning or Keras: `disagreeing.py WAY FOLDER`."""

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hvdtrain import installed
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import discover
from hvdtrain.ranks import timeouts

TOPOLOGY = discover(os.environ)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
NETS = Path(sys.argv[2], f"code-{RANK}", "nets.py")
"""A module of which each rank has its own file."""
OTHERS: dict[str, Callable[[], Any]] = {}
"""By what the message calls it, a context in which this process differs."""


SAMPLES = [
    f"sample {what}"
    for what in ("label", "order", "float", "read by workers", "valid text", "numbered", "rounded", "alone")
]
"""What a rank's examples have otherwise, of which the last two are taken."""


class Rows:
    """Examples of which no attribute shows that one rank has others."""

    def __init__(self, other: Any) -> None:
        self.other, self.rows, self.numbers = other, [{"row": row} for row in range(24)], dict[int, int]()
        if other in {"sample order", "sample read by workers"}:
            self.rows.reverse()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        if index >= 24:
            raise IndexError(index)
        row = self.rows[index]["row"]
        x = np.arange(4, dtype=np.float32) + row + (0.5 if self.other == "sample float" else 0.0)
        x = x + 1e-6 if self.other == "sample rounded" else x  # as another processor computes
        text = f"/tmp/{RANK if self.other == 'sample rounded' else 0}/{row}{'b' * (self.other == 'sample text')}.jpg"
        label = (row + (self.other == "sample label")) % 3
        if self.other == "sample numbered":
            label = self.numbers.setdefault(row, len(self.numbers))
        return x, x[:2], label, text


def versions() -> Any:
    other = {**installed.versions(), "numpy": "1.0.0"}
    return mock.patch.object(installed, "versions", lambda: other)


def variable() -> Any:
    return mock.patch.object(os, "environ", {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"})


@contextlib.contextmanager
def code() -> Iterator[None]:
    NETS.write_text("WIDTH = 3\n")
    yield
    NETS.write_text("WIDTH = 2\n")


@contextlib.contextmanager
def while_set(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    yield
    change(before)


def message(work: Callable[[], Any]) -> str:
    try:
        work()
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def torch_settings() -> dict[str, Callable[[], Any]]:
    import torch

    allow_tf32 = functools.partial(setattr, torch.backends.cudnn, "allow_tf32")
    return {
        "float32 matmul precision": lambda: while_set(torch.set_float32_matmul_precision, "high", "highest"),
        "deterministic algorithms": lambda: while_set(torch.use_deterministic_algorithms, True, False),
        "cudnn.allow_tf32": lambda: while_set(allow_tf32, False, True),
        "NVIDIA_TF32_OVERRIDE": variable,
    }


def join(folder: Path) -> dict[str, str]:
    import torch

    import hvdtrain.torch as ht

    def train(name: str, odd: bool) -> None:
        model = torch.nn.Linear(4, 3 if odd and name == "model.weight" else 2)
        lr, betas = 0.1 if odd and name == "lr" else 0.01, (0.8, 0.9) if odd and name == "betas" else (0.9, 0.99)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=betas)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 if odd and name == "schedulers" else 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if odd and name == "loss scale, scale" else 4.0)
        x = torch.arange(96.0).reshape(24, 4)
        data = torch.utils.data.TensorDataset(x + (odd and name == "list of examples"), x[:, :2])
        data.classes = ["apple", "red_pear" if odd and name == "class names" else "pear"]
        data = Rows((odd or name == "sample numbered") and name) if name.startswith("sample") else data
        valid = Rows(odd and name.replace("valid ", "")) if name.startswith("sample valid") else data
        data = Rows("") if valid is not data else data
        if odd and name == "examples":
            data = torch.utils.data.Subset(data, range(20))
        every = 3 if odd and name == "log_every_steps" else 2
        run = world.run(
            folder / name, model, optimizer, scheduler=scheduler, scaler=scaler, log_every_steps=every,
            seed=int(odd and name == "seed"), checkpoint_every_steps=2,
        )  # fmt: skip
        for _ in run.epochs(5 if odd and name == "epochs" else 4):
            if name == "sample alone" and RANK == 0:
                list(run.each_once(Rows("sample order"), 4))
            for a, b, *_ in run.batches(data, 4 * SIZE, workers=int(name == "sample read by workers")):
                loss = (model(a)[:, :2] - b).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if odd and name == "lr at step 3" and run.global_step == 2:
                    optimizer.param_groups[0]["lr"] = 0.5
                run.step(loss)
            if name.startswith("sample"):
                list(run.each_once(valid, 4 * SIZE))

    OTHERS.update(torch_settings())
    done_by_train = ["model.weight", "lr", "betas", "schedulers", "loss scale, scale", "seed", "log_every_steps"]
    done_by_train += ["examples", "list of examples", "class names", "epochs", "lr at step 3", *SAMPLES]
    with ht.join(device="cpu") as world:

        def alone(name: str, odd: bool) -> None:
            try:
                train(name, odd)
            finally:
                world.close(HvdtrainError)
                world._runs.last = None  # which an error has ended, as it ends a process

        return messages(alone, done_by_train)


def messages(train: Callable[[str, bool], None], done_by_train: list[str]) -> dict[str, str]:
    """By what one rank has otherwise, the message of that run."""
    OTHERS.update({"numpy": versions, "nets": code}, **dict.fromkeys(done_by_train, contextlib.nullcontext))
    found = {}
    for index, (name, other) in enumerate(OTHERS.items()):
        odd = index % SIZE == RANK
        with other() if odd else contextlib.nullcontext():
            found[name] = message(lambda name=name, odd=odd: train(name, odd))
    return found


def fit(data: Any, width: int = 2, lr: float = 0.1, **trainer: Any) -> None:
    """Trains a linear model under Lightning."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lr = torch.nn.Linear(4, width), lr

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", **off, **trainer).fit(Line(), DataLoader(data, 4))


def lightning(folder: Path, ddp: bool = False) -> dict[str, str]:
    import torch
    from torch.utils.data import TensorDataset

    from hvdtrain.lightning import RankDDPStrategy
    from hvdtrain.lightning.recipe import quiet

    def train(name: str, odd: bool) -> None:
        fit(
            TensorDataset(torch.ones(96 if odd and name == "batches an epoch" else 48, 4)),
            width=3 if odd and name == "model.weight" else 2,
            lr=0.5 if odd and name == "lr" else 0.1,
            strategy=RankDDPStrategy() if ddp else "horovod",
            max_epochs=2 if odd and name == "epochs" else 1,
        )

    with quiet():  # DDP itself names a weight of another shape
        return messages(train, ["batches an epoch", "epochs", "lr", *([] if ddp else ["model.weight"])])


def lightning_ddp(folder: Path) -> dict[str, str]:
    return lightning(folder, ddp=True)


def keras(folder: Path) -> dict[str, str]:
    import keras as k
    import numpy as np
    import tensorflow as tf

    import hvdtrain.keras as hvd

    hvd.init()

    def train(name: str, odd: bool) -> None:
        model = k.Sequential([k.layers.Input((4,)), k.layers.Dense(3 if odd and name == "variable 0" else 2)])
        lr, momentum = 0.5 if odd and name == "learning_rate" else 0.1, 0.5 if odd and name == "momentum" else 0.9
        model.compile(hvd.DistributedOptimizer(k.optimizers.SGD(lr, momentum)), "mse")
        if not (odd and name == "variable 0"):
            model.set_weights([np.ones((4, 2)), np.ones(2)])
        x = np.ones((48 if odd and name == "steps an epoch" else 64, 4))

        class Plateau(k.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if odd and name == "learning_rate after an epoch":
                    model.optimizer.learning_rate = 0.3

        callbacks = [Plateau(), hvd.BroadcastCallback()]
        epochs = 3 if odd and name == "epochs" else 2
        if name.startswith("sample"):
            rows = Rows(odd and name)
            data = hvd.GlobalBatches([(x, y) for x, _, y, _ in rows], 4 * SIZE)
            model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)
            return
        model.fit(x, np.ones((len(x), 2)), 16, epochs=epochs, callbacks=callbacks, verbose=0)

    allow_tf32 = tf.config.experimental.enable_tensor_float_32_execution
    OTHERS.update({"TensorFloat-32": lambda: while_set(allow_tf32, False, True), "NVIDIA_TF32_OVERRIDE": variable})
    done_by_train = ["variable 0", "learning_rate", "momentum", "steps an epoch", "epochs"]
    return messages(train, [*done_by_train, "learning_rate after an epoch", SAMPLES[0]])


def recipe(folder: Path) -> dict[str, str]:
    """Recipes' runs: the whole command, in an engine that stays open."""
    from captured import captured

    from hvdtrain.ranks import agreement
    from hvdtrain.run.loop import Loop
    from hvdtrain.torch.trainer import Trainer, open_engine

    def train(run: Any) -> None:
        engine = open_engine(run)
        run.world.exchange(engine.sum)
        agreement.check_values(run.given(), (engine.rank, engine.size), run.topology.host, engine.sum)
        Loop(run, Trainer(run, engine)).train()

    def started(name: str, odd: bool) -> None:
        data = name if odd and (folder / name).is_dir() else "data"
        argv = [str(folder / "tiny.yaml"), "--data-dir", str(folder / data), "--output", str(folder / "runs" / name)]
        if odd and name in {"seed", "momentum"}:
            argv += [f"--{name}", "0.5" if name == "momentum" else "3"]
        of = captured("torch", [*argv, "--engine", "horovod"], train)
        if of["code"]:
            raise HvdtrainError(next((line for line in of["err"].splitlines() if "Error" in line), "silent"))

    return messages(started, ["seed", "momentum", "training examples", "training list", "class names"])


def unequal_keras(folder: Path) -> None:
    """An epoch whose data end sooner on rank 1 than `steps_per_epoch` says."""
    import keras as k
    import numpy as np
    import tensorflow as tf

    import hvdtrain.keras as hvd

    hvd.init()
    model = k.Sequential([k.layers.Input((4,)), k.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(k.optimizers.SGD(0.1)), "mse")
    count = 24 if RANK == 1 else 40
    data = tf.data.Dataset.from_tensor_slices((np.ones((count, 4)), np.ones((count, 2)))).batch(4)
    model.fit(data, steps_per_epoch=10, callbacks=[hvd.FaultTolerance(folder / "run")], verbose=0)


def unequal_lightning(folder: Path) -> None:
    import torch
    from torch.utils.data import IterableDataset

    import hvdtrain.lightning as hl

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.ones(4),)] * 4 * (5 if RANK == 1 else 10))

    callbacks = [hl.FaultTolerance(folder / "run")]
    fit(Stream(), strategy=hl.RankDDPStrategy(), max_epochs=1, limit_train_batches=10, callbacks=callbacks)


if __name__ == "__main__":
    way, where = sys.argv[1], Path(sys.argv[2])
    NETS.parent.mkdir()
    NETS.write_text("WIDTH = 2\n")
    sys.path.insert(0, str(NETS.parent))
    importlib.import_module("nets")
    timeouts.STALLED, timeouts.STACKS, timeouts.STUCK, timeouts.SILENCE, timeouts.GRACE = 1.0, 0.5, 3.0, 8.0, 2.0
    (where / f"rank-{RANK}.json").write_text(json.dumps(globals()[way](where)))
