"""`python -m hvdtrain.torch.loading`, started by `bench loader`: hvdtrain's readers and torchvision's, in turn."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from hvdtrain import recipe as recipes
from hvdtrain.bench import measure
from hvdtrain.datasets import DRAWS
from hvdtrain.errors import HvdtrainError
from hvdtrain.run import load_dataset
from hvdtrain.torch.data import Loader, Pair

Epoch = Callable[[], Iterable[Pair]]


def main(
    folder: Path, packed: Path, kept: Path, workers: int, batch: int, pictures: int, crop: int, rounds: int
) -> None:
    """Measures and leaves the figures as JSON in `kept`."""
    torch.set_num_threads(1)
    loaders = {"shards": packed, "folder": folder}
    epochs = {name: ours(data_dir, workers, batch, pictures, crop) for name, data_dir in loaders.items()}
    epochs["torchvision"] = torchvisions(folder, workers, batch, pictures, crop)
    clock: dict[str, list[float]] = {name: [] for name in epochs}

    def measured(name: str) -> Callable[[], float]:
        def once() -> float:
            began, used = time.perf_counter(), processor_seconds()
            count = sum(len(y) for _, y in epochs[name]())
            clock[name].append(count / (time.perf_counter() - began))
            return count / (processor_seconds() - used)

        return once

    found = measure.in_turn({name: measured(name) for name in epochs}, rounds)
    ratios = {
        name: [one / theirs for one, theirs in zip(found[name], found["torchvision"], strict=True)] for name in loaders
    }
    facts = {
        "images_per_core_second": found,
        "images_per_second": {name: values[-rounds:] for name, values in clock.items()},
        "ratios": ratios,
        "cores": len(os.sched_getaffinity(0)),
        "workers": workers,
        "batch_size": batch,
        "crop": crop,
    }
    kept.write_text(json.dumps(facts))


def ours(data_dir: Path, workers: int, batch: int, pictures: int, crop: int) -> Epoch:
    """hvdtrain's pass over so many pictures, in an order and with crops drawn anew each time."""
    keys = {"data_dir": data_dir, "workers": workers, "batch_size": batch, "train_crop": crop}
    recipe = recipes.load("imagenet", keys)
    dataset = load_dataset(recipe)
    loader, random = Loader(recipe, dataset, torch.device("cpu")), np.random.default_rng(0)

    def epoch() -> Iterable[Pair]:
        order = random.permutation(len(dataset.train))[:pictures]
        parts = np.split(order, range(batch, len(order), batch))
        requests = [(part, random.random((len(part), DRAWS), dtype=np.float32)) for part in parts]
        return loader.batches(dataset.train, requests)

    return epoch


def torchvisions(folder: Path, workers: int, batch: int, pictures: int, crop: int) -> Epoch:
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
        order[:] = torch.randperm(len(dataset))[:pictures].tolist()
        return loader

    return epoch


def processor_seconds() -> float:
    """User and system time of this process and of all that live below it, in seconds."""
    parents, used = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold spaces; proc(5) counts the fields behind it from 3.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)], used[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(used[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
