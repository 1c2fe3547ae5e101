#!/usr/bin/env python3
"""The ladder on one GPU: images/s of every rung, and the time to 75 % on CIFAR-100; under 8 minutes.

    python benchmarks/gpu.py --data DIR --output gpu.json

DIR holds the published cifar-100-python folder. Needs Python 3.10, torch and NumPy, and neither an installation nor a
network. A rung is the recipe cifar100:NAME with the recipe's data pipeline: one reading thread, or the data set on the
device. "one batch" is the same step without it. Each rung is a process of its own with a time limit: one that fails
costs a line, and the rest goes on.
"""

import argparse
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TARGET = 0.75
DRIVER = ["nvidia-smi", "--id=0", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]

# What the recipes say; a test compares.
BASE = {
    "model": "resnet50", "stem": "cifar", "dataset": "cifar100", "seed": 0, "workers": 0, "batch_norm": "local",
    "accumulation_steps": 1, "clip_norm": None, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": False,
    "label_smoothing": 0.0, "precision": "float32", "channels_last": False, "fused_optimizer": False,
    "cudnn_benchmark": False, "compile": False, "data_on_device": False, "batch_size": 256, "base_lr": 0.14,
    "base_batch_size": None, "lr_rule": "none", "warmup_epochs": 0.0, "lr_schedule": "plateau", "epochs": 100,
}  # fmt: skip
AMP = {"precision": "float16"}
NHWC = AMP | {"channels_last": True}
EXTRA = NHWC | {"fused_optimizer": True, "cudnn_benchmark": True}
BF16 = EXTRA | {"precision": "bfloat16"}
COMPILE = BF16 | {"compile": True}
RESIDENT = COMPILE | {"data_on_device": True}
FAST = RESIDENT | {
    "batch_size": 1024, "base_lr": 0.1, "base_batch_size": 128, "lr_rule": "linear", "warmup_epochs": 5.0,
    "lr_schedule": "cosine", "nesterov": True, "label_smoothing": 0.1, "epochs": 40,
}  # fmt: skip
RUNGS = {
    "bs256": {},
    "bs256-amp": AMP,
    "bs256-amp-nhwc": NHWC,
    "bs256-amp-nhwc-extra-opts": EXTRA,
    "bs256-bf16-nhwc-extra-opts": BF16,
    "bs256-bf16-nhwc-extra-opts-compile": COMPILE,
    "bs256-bf16-nhwc-extra-opts-compile-resident": RESIDENT,
    "fast": FAST,
}

# A rung that compiles may have to do without what does not work on the machine; what is left is measured, and said.
WITHOUT = [[], ["graph"], ["compile"], ["compile", "graph"]]

WINDOW_SECONDS = 0.7

# Seconds a rung may take, and those kept back for the last one, which trains.
SHORTEST, LIMIT, COMPILE_LIMIT, TRAIN_RESERVE = 5, 45, 130, 190


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cifar-100-python")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a trial of the script, tiny")
    parser.add_argument("--seconds", type=float, default=470, help="for everything")
    parser.add_argument("--rungs", default=",".join(RUNGS), help="some of them, by comma; fast is also trained")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options, *options.child)
    if wrong := [name for name in options.rungs.split(",") if name not in RUNGS]:
        parser.error(f"unknown rung {wrong[0]!r}; rungs: {', '.join(RUNGS)}")
    found = climb(options)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return None


def climb(options: argparse.Namespace) -> dict:
    """All rungs in turn, each told as it ends."""
    deadline = time.monotonic() + options.seconds
    machine = started(options, "machine", [], 60)
    found = {"machine": machine, "rungs": {}}
    if "error" in machine:
        sys.exit(f"no measurement is possible: {machine['error']}")
    for name, value in machine.items():
        print(f"{name:22}{value}", flush=True)
    print(f"\n{'rung':46}{'images/s':>10}{'spread':>16}{'one batch':>11}{'GiB':>7}{'of matmul':>10}", flush=True)
    usable = 0
    for name in options.rungs.split(","):
        settings = BASE | RUNGS[name]
        left = deadline - time.monotonic() - (0 if name == "fast" else TRAIN_RESERVE)
        limit = left if name == "fast" else min(COMPILE_LIMIT if settings["compile"] else LIMIT, left)
        ends = time.monotonic() + limit
        for without in WITHOUT[usable:] if settings["compile"] else [[]]:
            told = started(options, name, without, ends - time.monotonic())
            found["rungs"][name] = told | {"without": without}
            report(name, told, without, machine)
            if told.get("images_per_second") or ends - time.monotonic() < SHORTEST:
                break
        if settings["compile"]:  # what failed once, or has not ended, is not tried again
            usable = WITHOUT.index(without if told.get("images_per_second") else ["compile"])
    return found


def started(options: argparse.Namespace, name: str, without: list[str], limit: float) -> dict:
    """What the rung's process found; an `error` beside it, or alone, where it failed."""
    if limit < SHORTEST:
        return {"error": "left out, as the time is over"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--data", str(options.data), "--device", options.device]
        command += ["--seconds", str(limit - 3), "--child", name, ",".join(without), str(result)]
        error = ""
        with log.open("w") as to_log:
            try:
                code = subprocess.run(command, stdout=to_log, stderr=to_log, timeout=limit, check=False).returncode
                error = last_line(log) if code else ""
            except subprocess.TimeoutExpired:
                error = f"not done after {limit:.0f} s"
        found = json.loads(result.read_text()) if result.exists() else {}
        return found | ({"error": error} if error else {})


def last_line(log: Path) -> str:
    """A traceback's last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["it said nothing"])[-1][:200]


def report(name: str, told: dict, without: list[str], machine: dict) -> None:
    label = f"{name} (without {' and '.join(without)})" if without else name
    if not told.get("images_per_second"):
        print(f"{label:46} failed: {told['error']}", flush=True)
        return
    rates = told["images_per_second"]
    rate, low, high = statistics.median(rates), min(rates), max(rates)
    share = f"{rate * told['flops_per_image'] / machine['matmul_flops']:.1%}"
    spread, alone = f"{low:,.0f}-{high:,.0f}", f"{told['one_batch']:,.0f}" if "one_batch" in told else ""
    print(f"{label:46}{rate:10,.0f}{spread:>16}{alone:>11}{told['peak_gib']:7.1f}{share:>10}", flush=True)
    if "epochs" in told:
        report_training(told)


def report_training(told: dict) -> None:
    compiling, best = told["first_steps_seconds"], max(epoch["accuracy"] for epoch in told["epochs"])
    last = told["epochs"][-1]
    print(f"\ntrained {len(told['epochs'])} epochs: validation accuracy {last['accuracy']:.4f}, best {best:.4f}")
    print(
        f"wall time {last['seconds']:.1f} s with every validation, {compiling:.1f} s of it the first, compiling steps"
    )
    reached = [epoch["seconds"] for epoch in told["epochs"] if epoch["accuracy"] >= told["target"]]
    if reached:
        print(f"{told['target']:.0%} after {reached[0]:.1f} s, {reached[0] - compiling:.1f} s without the first steps")
    else:
        print(f"{told['target']:.0%} was not reached{': ' + told['error'] if 'error' in told else ''}")


# ---- what runs in a rung's process ----


def child(options: argparse.Namespace, name: str, without: str, result: str) -> None:
    """Measures one thing and writes what it found."""
    if name == "machine":
        found = machine(options.device)
    else:
        settings = SimpleNamespace(**BASE | RUNGS[name])
        found = Rung(settings, options, without, Path(result)).measured(name == "fast")
    write(Path(result), found)


def write(path: Path, found: dict) -> None:
    """In one piece, as the process may be killed at any time."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(found))
    beside.replace(path)


def machine(device: str) -> dict:
    """Hardware, versions, and the rate of a bfloat16 matmul of 8192^3 in FLOP/s (median of 30)."""
    import torch

    from hvdtrain import __version__

    found = {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_threads": len(os.sched_getaffinity(0)),
    }
    side = 8192
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        if shutil.which(DRIVER[0]):
            told = subprocess.run(DRIVER, capture_output=True, text=True, check=False)
            found["driver, clock, power"] = (told.stdout or told.stderr).strip()
    else:
        side = 256
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: torch.mm(a, b), device, 30)
    found["matmul_side"], found["matmul_flops"] = side, 2 * side**3 / statistics.median(seconds[5:])
    return found


def timed(work, device: str, times: int) -> list[float]:
    """Seconds of each call, by CUDA events on a GPU."""
    import torch

    if device == "cpu":
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


class Rung:
    """A rung's network, data and step on the device."""

    def __init__(self, settings: SimpleNamespace, options: argparse.Namespace, without: str, result: Path) -> None:
        import torch

        from hvdtrain.datasets import cifar100
        from hvdtrain.schedule import Schedule, peak_lr
        from hvdtrain.torch import compiling, models, resnet
        from hvdtrain.torch.data import Loader
        from hvdtrain.torch.engines.local import LocalEngine
        from hvdtrain.torch.step import Step

        self.torch, self.settings, self.result = torch, settings, result
        self.ends = time.monotonic() + options.seconds
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        self.is_trial = options.device == "cpu"
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark
        graph = settings.compile and not self.is_trial and "graph" not in without
        settings.compile = settings.compile and "compile" not in without
        self.dataset = cifar100.load(options.data)
        self.train_count, self.valid_count = len(self.dataset.train), len(self.dataset.valid)
        if self.is_trial:  # four blocks, four steps
            resnet.BLOCKS.update(dict.fromkeys(resnet.BLOCKS, 1))
            settings.batch_size, settings.epochs, settings.warmup_epochs = 8, 2, 1.0
            self.train_count, self.valid_count = 32, 20
        self.steps_per_epoch = self.train_count // settings.batch_size
        engine = LocalEngine(self.device)
        self.model = models.build(settings, cifar100.CLASSES, engine)
        peak = peak_lr(settings.base_lr, settings.base_batch_size, settings.batch_size, settings.lr_rule)
        self.schedule = Schedule(
            peak, self.steps_per_epoch, settings.epochs, settings.warmup_epochs, settings.lr_schedule
        )
        record = compiling.record_cuda_graph if graph else None
        self.step = Step(settings, engine, self.model, peak, in_one=True, record=record)
        self.loader = Loader(settings, self.dataset, self.device)
        self.first_steps = min(self.steps_per_epoch, compiling.WARM_STEPS + 2)

    def measured(self, is_trained: bool) -> dict:
        """Images per second of several windows after the first steps; of `fast`, of the epochs of a whole training."""
        found = {"settings": vars(self.settings), "flops_per_image": self.flops()}
        found |= self.trained(found) if is_trained else self.windows()
        return found | self.peak()

    def windows(self) -> dict:
        """Rates with the data pipeline, and the median rate of one batch again and again, without it."""
        batches, batch = self.endless(), self.settings.batch_size
        self.model.train()
        began = self.now()
        for _ in range(self.first_steps):
            self.step([next(batches)], 0.01)
        first_steps = self.now() - began
        steps = self.steps_in(WINDOW_SECONDS, lambda: self.step([next(batches)], 0.01))
        count = 2 if self.is_trial else 6
        rates = [batch * steps / self.seconds(steps, lambda: self.step([next(batches)], 0.01)) for _ in range(count)]
        pair = next(batches)
        steps = self.steps_in(WINDOW_SECONDS, lambda: self.step([pair], 0.01))
        alone = [batch * steps / self.seconds(steps, lambda: self.step([pair], 0.01)) for _ in range(count // 2)]
        found = {"images_per_second": rates, "one_batch": statistics.median(alone), "first_steps_seconds": first_steps}
        loss = self.step([next(batches)], 0.01)[0][0].item()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss} after the windows")
        return found

    def steps_in(self, seconds: float, step) -> int:
        """How many steps take about so long, and at least 3."""
        return 1 if self.is_trial else max(3, round(seconds / (self.seconds(3, step) / 3)))

    def seconds(self, steps: int, step) -> float:
        began = self.now()
        for _ in range(steps):
            step()
        return self.now() - began

    def now(self) -> float:
        """Seconds on the host's clock, with nothing left to do on the device."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def trained(self, found: dict) -> dict:
        """The recipe's training to its end, or to the end of the time: what is known after each epoch is written."""
        found |= {"images_per_second": [], "epochs": [], "target": 0.0 if self.is_trial else TARGET}
        began = self.now()
        for epoch in range(self.settings.epochs):
            epoch_began, first = self.now(), self.first_steps if epoch == 0 else 0
            self.model.train()
            for place, pair in enumerate(self.batches(epoch)):
                self.step([pair], self.schedule.lr(epoch + place / self.steps_per_epoch))
                if place + 1 == first:
                    found["first_steps_seconds"] = self.now() - epoch_began
            trained = self.now()
            if epoch:
                found["images_per_second"].append(
                    self.steps_per_epoch * self.settings.batch_size / (trained - epoch_began)
                )
            accuracy = self.accuracy()
            found["epochs"].append({"seconds": self.now() - began, "accuracy": accuracy})
            print(found["epochs"][-1], flush=True)
            write(self.result, found | self.peak())
            if time.monotonic() > self.ends:
                return found | {"error": f"the time was over after {epoch + 1} of {self.settings.epochs} epochs"}
        return found

    def batches(self, epoch: int):
        """The pairs of an epoch: the samples that a run of the recipe sees, in its order."""
        from hvdtrain.datasets import DRAWS
        from hvdtrain.sharding import Epoch

        order, batch = Epoch.of(self.train_count, self.settings.seed, epoch, DRAWS), self.settings.batch_size
        parts = [order.share(place * batch, batch, 0, 1) for place in range(self.steps_per_epoch)]
        return self.loader.batches(self.dataset.train, [(part, order.draws[part]) for part in parts])

    def endless(self):
        """Epoch after epoch."""
        epoch = 0
        while True:
            yield from self.batches(epoch)
            epoch += 1

    def accuracy(self) -> float:
        """Of the whole validation split."""
        import numpy as np

        from hvdtrain.torch.step import autocast

        batch = self.settings.batch_size
        requests = [
            (np.arange(start, min(start + batch, self.valid_count)), None)
            for start in range(0, self.valid_count, batch)
        ]
        right = self.torch.zeros((), dtype=self.torch.int64, device=self.device)
        self.model.eval()
        with self.torch.inference_mode(), autocast(self.settings, self.device):
            for x, y in self.loader.batches(self.dataset.valid, requests):
                right += (self.model(x).argmax(1) == y).sum()
        return right.item() / self.valid_count

    def flops(self) -> int:
        """Of one picture in training: torch.utils.flop_counter's of convolutions and matmuls, forward, times 3."""
        from torch.utils.flop_counter import FlopCounterMode

        from hvdtrain.torch.models import resnet50

        with self.torch.device("meta"):
            model, picture = resnet50(100, self.settings.stem), self.torch.zeros(1, 3, 32, 32)
        with FlopCounterMode(display=False) as counter, self.torch.no_grad():
            model.eval()(picture)
        return 3 * counter.get_total_flops()

    def peak(self) -> dict:
        """What PyTorch reserved at most, a graph's own memory in it."""
        peak = self.torch.cuda.max_memory_reserved() if self.device.type == "cuda" else 0
        return {"peak_gib": peak / 2**30}


if __name__ == "__main__":
    main()
