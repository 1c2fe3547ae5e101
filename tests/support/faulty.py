"""A training of three epochs in which a fault is planted: `python faulty.py loop|keras|lightning FOLDER`. faulty.yaml
is the same as a recipe. FAULT in the environment is "RANK STEP WHAT", in which RANK may be `all`, and FAULTS has the
fault. Once it has happened, as FOLDER/fired shows, the same program trains without it.

The program writes its steps into FOLDER/step.RANK, and its weights at the end into FOLDER/weights.npy.
"""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

NAMES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "PMIX_RANK")
RANK = next((os.environ[name] for name in NAMES if name in os.environ), "0")
FOLDER = Path(os.environ.get("FAULT_FOLDER", "."))
RUN = FOLDER / "run"
PAUSE = float(os.environ.get("FAULT_PAUSE", "0.02"))
BATCH = int(os.environ.get("FAULT_BATCH", "32"))
EXAMPLES, VALID_EXAMPLES, EPOCHS = 640, 64, 3
_RANK, STEP, WHAT = (os.environ.get("FAULT") or "none 0 none").split(" ", 2)
IS_HERE = _RANK in {RANK, "all"} and not (FOLDER / f"fired.{RANK}").exists()


def fire() -> None:
    """Notes when the fault happened, and lets it happen."""
    (FOLDER / f"fired.{RANK}").touch()
    FAULTS[WHAT]()


def at_step(step: int) -> None:
    """To be called before each step of training."""
    (FOLDER / f"step.{RANK}").write_text(str(step))
    time.sleep(PAUSE)
    if IS_HERE and step == int(STEP) and not WHAT.startswith(("validation", "data", "reader")):
        fire()


def at_validation(step: int) -> None:
    """To be called in each validation."""
    if IS_HERE and WHAT.startswith("validation") and step >= int(STEP) and not (FOLDER / f"fired.{RANK}").exists():
        fire()


def at_example() -> None:
    """To be called where an example is read."""
    in_reader = multiprocessing.parent_process() is not None
    if not (IS_HERE and WHAT.startswith(("data", "reader"))) or WHAT.startswith("reader") != in_reader:
        return
    step = 0
    with contextlib.suppress(OSError, ValueError):
        step = int((FOLDER / f"step.{RANK}").read_text())
    if step >= int(STEP):
        fire()


def fail(error: BaseException) -> None:
    raise error


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def use_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
    held = []
    while True:
        held.append(bytearray(2**24))


def interrupt_twice() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)


def raise_in_fork() -> None:
    if not os.fork():
        raise ValueError("planted in a forked child")


def raise_in_thread() -> None:
    threading.Thread(target=fail, args=(ValueError("planted in a thread"),)).start()


def set_clock(hours: float) -> None:
    """The clock of Python's time.time; Horovod measures by one that nobody sets."""
    real = time.time
    time.time = lambda: real() + 3600 * hours


def remove_folder_of_work() -> None:
    folder = FOLDER / f"gone.{RANK}"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def replace_run() -> None:
    RUN.rename(FOLDER / "moved")
    RUN.mkdir()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("planted: no text")


class Odd(BaseException):
    pass


def recurse() -> None:
    recurse()


def error() -> None:
    raise ValueError("planted: an error of the program")


FAULTS = {
    "none": lambda: None,
    "error": error,
    "validation: error": error,
    "data: error": lambda: fail(OSError(5, "planted in the data set")),
    "reader: error": lambda: fail(OSError(5, "planted in a reader")),
    "reader: SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit 0": lambda: sys.exit(0),
    "exit 3": lambda: sys.exit(3),
    "_exit 0": lambda: os._exit(0),
    "_exit 7": lambda: os._exit(7),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "deadlock": deadlock,
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "memory": use_memory,
    "interrupted twice": interrupt_twice,
    "descriptors closed": lambda: os.closerange(3, 200),
    "stdout closed": lambda: os.close(1),
    "no descriptor left": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, 2**10)),
    "BaseException": lambda: fail(Odd("planted")),
    "KeyboardInterrupt": lambda: fail(KeyboardInterrupt()),
    "long message": lambda: fail(ValueError("\x1b[31mred\x1b[0m " + "x" * 5_000_000)),
    "message raises": lambda: fail(Unprintable()),
    "recursion": recurse,
    "run removed": lambda: shutil.rmtree(RUN),
    "run replaced": replace_run,
    "no folder of work": remove_folder_of_work,
    "fork raises": raise_in_fork,
    "thread raises": raise_in_thread,
    "clock on": lambda: set_clock(1),
    "clock back": lambda: set_clock(-1),
    **{each.name: lambda number=each: os.kill(os.getpid(), number) for each in signal.Signals},
}


def arrays(size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(size).normal(size=(size, 8)).astype("f4")
    return x, x.sum(1, keepdims=True)


class Data:
    """Examples by index; a recipe's have classes."""

    def __init__(self, size: int, has_classes: bool = False) -> None:
        self.x, self.y = arrays(size)
        if has_classes:
            self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        at_example()
        return self.x[index], self.y[index]


def network(outputs: int = 1):
    from torch import nn

    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, outputs))


def data() -> tuple[Data, Data]:
    return Data(EXAMPLES, True), Data(VALID_EXAMPLES, True)


losses = 0


def loss(outputs, targets):
    import torch

    global losses
    if torch.is_grad_enabled():
        losses += 1
        at_step(losses)
    else:
        at_validation(losses)
    return torch.nn.functional.cross_entropy(outputs, targets)


def loop() -> None:
    import torch

    import hvdtrain.torch as ht

    torch.manual_seed(0)
    with ht.join() as world:
        train, valid = Data(EXAMPLES), Data(VALID_EXAMPLES)
        model = network().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run = world.run(RUN, model, optimizer, checkpoint_every_steps=7)
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(train, batch_size=BATCH):
                at_step(run.global_step)
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
            total = count = 0
            with torch.no_grad():
                for x, y in run.each_once(valid, batch_size=BATCH):
                    at_validation(run.global_step)
                    total += ((model(x) - y) ** 2).sum()
                    count += len(y)
            run.report(err=world.mean(total, count))
        if world.is_rank_0:
            save(each.detach().numpy() for each in model.parameters())


def keras() -> None:
    import keras

    import hvdtrain.keras as hvd

    class Fault(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.steps += 1
            at_step(self.steps)

        def on_test_batch_begin(self, batch, logs=None):
            at_validation(self.steps)

    hvd.init()
    keras.utils.set_random_seed(0)
    batches = hvd.GlobalBatches(arrays(EXAMPLES), batch_size=BATCH)
    layers = [keras.layers.Input((8,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    x, y = (each[hvd.rank() :: hvd.size()] for each in arrays(VALID_EXAMPLES))
    run = hvd.FaultTolerance(RUN, batches, checkpoint_every_steps=7)
    callbacks = [run, hvd.MetricAverageCallback(), Fault()]
    model.fit(batches, epochs=EPOCHS, validation_data=(x, y), callbacks=callbacks, verbose=0)
    if hvd.rank() == 0:
        save(model.get_weights())


def lightning() -> None:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    import hvdtrain.lightning as hl

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return ((self.network(batch[0]) - batch[1]) ** 2).mean()

        def validation_step(self, batch, index):
            at_validation(self.global_step)
            self.log("err", ((self.network(batch[0]) - batch[1]) ** 2).mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    class Fault(Callback):
        steps = 0

        def on_train_batch_start(self, *_):
            self.steps += 1
            at_step(self.steps)

    torch.manual_seed(0)
    sets = [tuple(map(torch.from_numpy, arrays(size))) for size in (EXAMPLES, VALID_EXAMPLES)]
    batches = hl.GlobalBatches(*sets, batch_size=BATCH)
    strategies = {"ddp": hl.RankDDPStrategy, "plain ddp": lambda: "ddp"}
    strategy = strategies.get(os.environ.get("FAULT_STRATEGY"), lambda: "horovod")()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    given = {"devices": int(os.environ["LOCAL_WORLD_SIZE"])} if strategy != "horovod" else {}
    run = hl.FaultTolerance(RUN, checkpoint_every_steps=7)
    trainer = Trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=[run, Fault()], **quiet, **given)
    trainer.fit(module := Module(), batches)
    if trainer.is_global_zero:
        save(each.detach().numpy() for each in module.parameters())


def save(weights) -> None:
    np.save(FOLDER / "weights.npy", np.concatenate([each.ravel() for each in weights]))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
