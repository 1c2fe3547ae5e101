"""The process of one rung of the ladder; of the rung `machine`, what the GPU and its libraries are."""

import dataclasses
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ladder import TRAINED
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain import __version__, files
from hvdtrain.core import plan as plans
from hvdtrain.core import recipe as recipes
from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Split, cifar100
from hvdtrain.datasets.base import AHEAD
from hvdtrain.engines import frameworks
from hvdtrain.tools.bench import measure
from hvdtrain.torch import models, resnet
from hvdtrain.torch.data import Loader, Pair
from hvdtrain.torch.engines.cuda_graph import WARM_STEPS, record_cuda_graph
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.step import Step, autocast

TARGET = 0.75
WINDOW_SECONDS = 0.7
DRIVER = ["nvidia-smi", "--id=0", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
TRIAL = {"batch_size": 4, "epochs": 2, "warmup_epochs": 1.0}
TRIAL_TRAIN, TRIAL_VALID = 16, 8

Found = dict[str, Any]


def main(data: Path, device: str, seconds: float, name: str, without: str, result: Path) -> None:
    """Measures one thing and leaves what it found as JSON in `result`."""
    ends = time.monotonic() + seconds
    if name == "machine":
        _write(result, machine(device))
        return
    rung = Rung(name, data, torch.device(device, 0) if device == "cuda" else torch.device(device), without)
    found = {"settings": rung.recipe.model_dump(mode="json"), "flops_per_image": flops(rung.recipe.stem)}
    if name == TRAINED:
        for so_far in rung.trained(ends):
            _write(result, found | so_far | rung.peak())
    else:
        _write(result, found | rung.windows() | rung.peak())


def _write(path: Path, found: Found) -> None:
    """In one piece, as the process may be killed at any time."""
    files.write(path, json.dumps(found))


def machine(device: str) -> Found:
    """Hardware, versions, and the rate of a bfloat16 matmul of 8192^3 in FLOP/s (median of 25 after 5)."""
    found: Found = {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_threads": len(os.sched_getaffinity(0)),
    }
    side = 8192 if device == "cuda" else 256
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        if shutil.which(DRIVER[0]):
            done = subprocess.run(DRIVER, capture_output=True, text=True, check=False)
            found["driver, clock, power"] = (done.stdout or done.stderr).strip()
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: torch.mm(a, b), device, 30)
    return {**found, "matmul_side": side, "matmul_flops": 2 * side**3 / statistics.median(seconds[5:])}


def timed(work: Callable[[], object], device: str, times: int) -> list[float]:
    """Seconds of each call, by CUDA events on a GPU."""
    if device == "cpu":
        stamps = [time.perf_counter()]
        for _ in range(times):
            work()
            stamps.append(time.perf_counter())
        return [end - began for began, end in itertools.pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [began.elapsed_time(end) / 1000 for began, end in itertools.pairwise(events)]


def flops(stem: str) -> int:
    """Of one image in training: torch.utils.flop_counter's of convolutions and matmuls, forward, times 3."""
    with torch.device("meta"):
        model, image = resnet.resnet50(cifar100.CLASSES, stem), torch.zeros(1, 3, cifar100.SIDE, cifar100.SIDE)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(image)
    return 3 * int(counter.get_total_flops())


def recipe_of(name: str, is_trial: bool, without: str) -> tuple[Recipe, bool]:
    """The rung's recipe, and whether its whole update is one CUDA graph."""
    whole = recipes.load(f"cifar100:{name}")
    changes = {**(TRIAL if is_trial else {}), **({"compile": False} if "compile" in without else {})}
    return recipes.load(f"cifar100:{name}", changes), whole.compile and not is_trial and "graph" not in without


def first(split: Split, count: int) -> cifar100.Cifar:
    """The first examples alone of a split of CIFAR-100."""
    assert isinstance(split, cifar100.Cifar)
    pixels = np.concatenate([split.pixels[: count * cifar100.PIXELS], split.pixels[-1:]])
    return cifar100.Cifar(pixels, split.labels[:count])


class Rung:
    """A rung's network, data and step on the device. On a CPU it is a trial: four blocks, four steps an epoch."""

    def __init__(self, name: str, data: Path, device: torch.device, without: str) -> None:
        """`without` names what the machine cannot do: compile, graph. Raises HvdtrainError."""
        self.device, self.is_trial = device, device.type == "cpu"
        self.recipe, graph = recipe_of(name, self.is_trial, without)
        dataset = cifar100.load(data)
        if self.is_trial:
            resnet.BLOCKS.update(dict.fromkeys(resnet.BLOCKS, 1))
            dataset = dataclasses.replace(
                dataset, train=first(dataset.train, TRIAL_TRAIN), valid=first(dataset.valid, TRIAL_VALID)
            )
        network = frameworks.network_of(self.recipe, "torch", dataset)
        self.dataset, self.plan = dataset, plans.make(self.recipe, 1, dataset, network)
        torch.backends.cudnn.benchmark = self.recipe.cudnn_benchmark
        engine = LocalEngine(device)
        self.model = models.build(self.recipe, dataset.classes, engine)
        record = record_cuda_graph if graph else None
        self.step = Step(self.recipe, engine, self.model, self.plan.schedule.peak_lr, in_one=True, record=record)
        self.loader = Loader(self.recipe, dataset, device)
        self.first_steps = min(self.plan.steps_per_epoch, WARM_STEPS + 2)

    def windows(self) -> Found:
        """Rates with the data pipeline, and the median rate of one batch again and again, interleaved with them."""
        pairs = (pair for epoch in itertools.count() for _, pair in self._batches(Progress(epoch=epoch)))
        models.training_mode(self.model, self.recipe)
        first_steps = self._seconds(self.first_steps, lambda: self._update(next(pairs)))
        one = next(pairs)
        rate = self._rate(lambda: self._update(next(pairs)))

        def with_reading() -> float:
            for _ in range(0 if self.is_trial else AHEAD + 2):  # what was read ahead while the one batch was trained
                self._update(next(pairs))
            return rate()

        contenders = {"reading": with_reading, "one": self._rate(lambda: self._update(one))}
        found = measure.interleaved(contenders, 2 if self.is_trial else 6, warm_up=0)
        loss = self._update(one).item()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss} after the windows")
        rates = {"images_per_second": found["reading"], "one_batch": statistics.median(found["one"])}
        return {**rates, "first_steps_seconds": first_steps}

    def trained(self, ends: float) -> Iterator[Found]:
        """The recipe's training to its end, or to the end of the time: what is known after each epoch."""
        found: Found = {"images_per_second": [], "epochs": [], "target": 0.0 if self.is_trial else TARGET}
        began = self._now()
        for epoch in range(self.recipe.epochs):
            epoch_began = self._now()
            models.training_mode(self.model, self.recipe)
            for number, (lr, pair) in enumerate(self._batches(Progress(epoch=epoch)), 1):
                self.step([pair], lr)
                if not epoch and number == self.first_steps:
                    found["first_steps_seconds"] = self._now() - epoch_began
            if epoch:
                images = self.plan.steps_per_epoch * self.plan.global_batch
                found["images_per_second"].append(images / (self._now() - epoch_began))
            accuracy = self._accuracy()
            found["epochs"].append({"seconds": self._now() - began, "accuracy": accuracy})
            if time.monotonic() > ends:
                yield found | {"error": f"the time was over after {epoch + 1} of {self.recipe.epochs} epochs"}
                return
            yield found

    def peak(self) -> Found:
        """What PyTorch reserved at most, a graph's own memory in it."""
        peak = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else 0
        return {"peak_gib": peak / 2**30}

    def _batches(self, progress: Progress) -> Iterator[tuple[float, Pair]]:
        """LR and batch of every update of an epoch, as a run of the recipe has them."""
        _, requests = train_requests(self.plan, progress, 0)
        for pair in self.loader.batches(self.dataset.train, requests):
            yield progress.lr(self.plan), pair
            progress.advance(self.plan)

    def _update(self, pair: Pair) -> torch.Tensor:
        """One update at an LR that changes little; its mean loss."""
        return self.step([pair], 0.01)[0].loss

    def _rate(self, step: Callable[[], object]) -> Callable[[], float]:
        """Measures images a second over as many steps as take about WINDOW_SECONDS, at least 3."""
        steps = 1 if self.is_trial else max(3, round(WINDOW_SECONDS / (self._seconds(3, step) / 3)))
        return lambda: self.plan.global_batch * steps / self._seconds(steps, step)

    def _seconds(self, steps: int, step: Callable[[], object]) -> float:
        began = self._now()
        for _ in range(steps):
            step()
        return self._now() - began

    def _now(self) -> float:
        """Seconds on the host's clock, with nothing left to do on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _accuracy(self) -> float:
        """Of the whole validation split."""
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self.model.eval()
        with torch.inference_mode(), autocast(self.recipe, self.device):
            for x, y in self.loader.batches(self.dataset.valid, valid_requests(self.plan, 0)):
                correct += (self.model(x).argmax(1) == y).sum()
        return correct.item() / self.plan.valid_examples


if __name__ == "__main__":
    _, data, device, seconds, name, without, result = sys.argv
    main(Path(data), device, float(seconds), name, without, Path(result))
