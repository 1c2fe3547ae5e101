"""Ranks of which one has something else than the others: each way in names it. `disagreeing.py WAY FOLDER`."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain import installed
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import discover
from hvdtrain.ranks import timeouts

TOPOLOGY = discover(os.environ)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
NETS = Path(sys.argv[2], f"code-{RANK}", "nets.py")
"""A module that each rank has a file of its own for."""
OTHERS: dict[str, Callable[[], Any]] = {}
"""What makes this process differ, undone at the next case; by what the message calls it."""


def versions() -> Any:
    own = {**installed.versions(), "numpy": "1.0.0"}
    return _replaced(installed, "versions", lambda: own)


def variable() -> Any:
    return _replaced(os, "environ", {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"})


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def code() -> Iterator[None]:
    NETS.write_text("WIDTH = 3\n")
    yield
    NETS.write_text("WIDTH = 2\n")


def message(work: Callable[[], Any]) -> str:
    try:
        work()
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def torch_settings() -> dict[str, Callable[[], Any]]:
    import torch

    @contextlib.contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    @contextlib.contextmanager
    def precision() -> Iterator[None]:
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision("highest")

    return {
        "float32 matmul precision": precision,
        "deterministic algorithms": deterministic,
        "cudnn.allow_tf32": lambda: _replaced(torch.backends.cudnn, "allow_tf32", False),
        "NVIDIA_TF32_OVERRIDE": variable,
        "numpy": versions,
        "nets": code,
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
        if odd and name == "examples":
            data = torch.utils.data.Subset(data, range(20))
        every = 3 if odd and name == "log_every_steps" else 2
        run = world.run(
            folder / name, model, optimizer, scheduler=scheduler, scaler=scaler, log_every_steps=every,
            seed=int(odd and name == "seed"), checkpoint_every_steps=2,
        )  # fmt: skip
        for _ in run.epochs(5 if odd and name == "epochs" else 4):
            for a, b in run.batches(data, 4 * SIZE):
                loss = (model(a)[:, :2] - b).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if odd and name == "lr at step 3" and run.global_step == 2:
                    optimizer.param_groups[0]["lr"] = 0.5
                run.step(loss)

    OTHERS.update(torch_settings())
    own = ["model.weight", "lr", "betas", "schedulers", "loss scale, scale", "seed", "log_every_steps"]
    own += ["examples", "list of examples", "class names", "epochs", "lr at step 3"]
    OTHERS.update(dict.fromkeys(own, contextlib.nullcontext))
    with ht.join(device="cpu") as world:

        def alone(name: str, odd: bool) -> None:
            try:
                train(name, odd)
            finally:
                world.close(HvdtrainError)
                world._run = None  # which an error has ended, as it ends a process

        return of_cases(alone)


def of_cases(train: Callable[[str, bool], None]) -> dict[str, str]:
    found = {}
    for index, (name, other) in enumerate(OTHERS.items()):
        odd = index % SIZE == RANK
        with other() if odd else contextlib.nullcontext():
            found[name] = message(lambda name=name, odd=odd: train(name, odd))
    return found


def lightning(folder: Path, ddp: bool = False) -> dict[str, str]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from hvdtrain.lightning import RankDDPStrategy
    from hvdtrain.lightning.recipe import quiet

    class Line(LightningModule):
        def __init__(self, width: int, lr: float) -> None:
            super().__init__()
            self.model, self.lr = torch.nn.Linear(4, width), lr

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    def train(name: str, odd: bool) -> None:
        examples = torch.ones(96 if odd and name == "batches an epoch" else 48, 4)
        epochs = 2 if odd and name == "epochs" else 1
        trainer = Trainer(
            strategy=RankDDPStrategy() if ddp else "horovod", accelerator="cpu", max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Line(3 if odd and name == "model.weight" else 2, 0.5 if odd and name == "lr" else 0.1)
        trainer.fit(module, DataLoader(TensorDataset(examples), 4))

    OTHERS.update(torch_settings())
    own = ["batches an epoch", "epochs", "lr", *([] if ddp else ["model.weight"])]  # which DDP itself names
    OTHERS.update(dict.fromkeys(own, contextlib.nullcontext))
    with quiet():
        return of_cases(train)


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
        model.fit(x, np.ones((len(x), 2)), 16, epochs=epochs, callbacks=callbacks, verbose=0)

    @contextlib.contextmanager
    def tf32() -> Iterator[None]:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        yield
        tf.config.experimental.enable_tensor_float_32_execution(True)

    OTHERS.update({"TensorFloat-32": tf32, "NVIDIA_TF32_OVERRIDE": variable, "numpy": versions, "nets": code})
    own = ["variable 0", "learning_rate", "momentum", "steps an epoch", "epochs", "learning_rate after an epoch"]
    OTHERS.update(dict.fromkeys(own, contextlib.nullcontext))
    return of_cases(train)


def recipe(folder: Path) -> dict[str, str]:
    """Recipes' runs: the whole command, in an engine that stays open."""
    from captured import captured

    from hvdtrain.ranks import agreement
    from hvdtrain.run.loop import Loop
    from hvdtrain.torch.trainer import Trainer, open_engine

    def train(run: Any) -> None:
        engine = open_engine(run)
        run.world.exchange(engine.sum)
        agreement.check(run.given(), (engine.rank, engine.size), run.topology.host, engine.sum)
        Loop(run, Trainer(run, engine)).train()

    def started(name: str, odd: bool) -> None:
        data = name if odd and (folder / name).is_dir() else "data"
        argv = [str(folder / "tiny.yaml"), "--data-dir", str(folder / data), "--output", str(folder / "runs" / name)]
        if odd and name in {"seed", "momentum"}:
            argv += [f"--{name}", "0.5" if name == "momentum" else "3"]
        of = captured("torch", [*argv, "--engine", "horovod"], train)
        if of["code"]:
            raise HvdtrainError(next((line for line in of["err"].splitlines() if "Error" in line), "silent"))

    OTHERS.update(torch_settings())
    own = ["seed", "momentum", "training examples", "training list", "class names"]
    OTHERS.update(dict.fromkeys(own, contextlib.nullcontext))
    return of_cases(started)


def unequal_keras(folder: Path) -> None:
    """An epoch whose data end sooner on one rank than it was promised."""
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
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, IterableDataset

    import hvdtrain.lightning as hl

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.ones(4)] * (5 if RANK == 1 else 10))

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(
        strategy=hl.RankDDPStrategy(), accelerator="cpu", max_epochs=1, limit_train_batches=10, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[hl.FaultTolerance(folder / "run")],
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(Stream(), batch_size=1))


if __name__ == "__main__":
    way, where = sys.argv[1], Path(sys.argv[2])
    NETS.parent.mkdir()
    NETS.write_text("WIDTH = 2\n")
    sys.path.insert(0, str(NETS.parent))
    importlib.import_module("nets")
    timeouts.STALLED, timeouts.STACKS, timeouts.STUCK, timeouts.SILENCE, timeouts.GRACE = 1.0, 0.5, 3.0, 8.0, 2.0
    (where / f"rank-{RANK}.json").write_text(json.dumps(globals()[way](where)))
