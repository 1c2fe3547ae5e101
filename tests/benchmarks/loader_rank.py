"""The process that reads: hvdtrain's readers and torchvision's, interleaved."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader import TICK, processor_seconds
from torch.utils.data import DataLoader

from hvdtrain.core import recipe as recipes
from hvdtrain.core.progress import Request
from hvdtrain.datasets import DRAWS, dali
from hvdtrain.errors import EngineUnavailable, HvdtrainError
from hvdtrain.launch.topology import discover
from hvdtrain.run.main import load_dataset
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.tools.rank_status import Show
from hvdtrain.torch.data import Loader, Pair

Epoch = Callable[[], Iterable[Pair]]


def main(show: Show, folder: Path, packed: Path, workers: int, batch: int, images: int, crop: int, rounds: int) -> None:
    """Measures and keeps the figures."""
    torch.set_num_threads(1)
    loaders: dict[str, dict[str, Any]] = {"shards": {"data_dir": packed}, "folder": {"data_dir": folder}}
    with contextlib.suppress(EngineUnavailable):
        dali.check()
        loaders["DALI"] = {"data_dir": packed, "decoder": "dali"}
    epochs = {name: ours(keys, workers, batch, images, crop) for name, keys in loaders.items()}
    epochs["torchvision"] = torchvisions(folder, workers, batch, images, crop)
    clock: dict[str, list[float]] = {name: [] for name in epochs}

    def measured(name: str) -> Callable[[], float]:
        def once() -> float:
            began, used = time.perf_counter(), processor_seconds()
            count = sum(len(y) for _, y in epochs[name]())
            clock[name].append(count / (time.perf_counter() - began))
            return count / max(processor_seconds() - used, TICK)

        return once

    contenders: dict[str, Callable[[], float]] = {name: measured(name) for name in epochs}
    found = measure.interleaved(contenders, rounds, show=show)
    ratios = {
        name: [one / theirs for one, theirs in zip(found[name], found["torchvision"], strict=True)] for name in loaders
    }
    results = {
        "images_per_core_second": found,
        "images_per_second": {name: values[-rounds:] for name, values in clock.items()},
        "ratios": ratios,
        "cores": len(os.sched_getaffinity(0)),
        "workers": workers,
        "batch_size": batch,
        "crop": crop,
    }
    ranks.keep(results)


def ours(where: dict[str, Any], workers: int, batch: int, images: int, crop: int) -> Epoch:
    """hvdtrain's pass over so many images, in an order and with crops drawn anew each time."""
    recipe = recipes.load("imagenet", {**where, "workers": workers, "batch_size": batch, "train_crop": crop})
    dataset = load_dataset(recipe)
    loader, random = Loader(recipe, dataset, torch.device("cpu")), np.random.default_rng(0)

    def epoch() -> Iterable[Pair]:
        order = random.permutation(len(dataset.train))[:images]
        batches = np.split(order, range(batch, len(order), batch))
        requests: list[Request] = [
            (samples, random.random((len(samples), DRAWS), dtype=np.float32)) for samples in batches
        ]
        return loader.batches(dataset.train, requests)

    return epoch


def torchvisions(folder: Path, workers: int, batch: int, images: int, crop: int) -> Epoch:
    """Torchvision's, as its ImageNet reference has it."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from hvdtrain.datasets.imagenet import MEAN, STD

    steps = [
        transforms.RandomResizedCrop(crop),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    dataset = ImageFolder(str(folder / "train"), transforms.Compose(steps))
    order: list[int] = []
    loader = DataLoader(dataset, batch, sampler=order, num_workers=workers, persistent_workers=workers > 0)

    def epoch() -> Iterable[Pair]:
        order[:] = torch.randperm(len(dataset))[:images].tolist()
        return loader

    return epoch


if __name__ == "__main__":
    folder, packed, *numbers = sys.argv[1:]
    try:
        with ranks.showing(discover({})) as show:
            main(show, Path(folder), Path(packed), *map(int, numbers))
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
