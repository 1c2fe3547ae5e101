"""`python tests/benchmarks/loader.py`: how fast images are read, beside torchvision's loader at the same transforms.

A training image of each comes out as float32: a random part resized to the crop, a flip, scaled and normalised. What
differs is the way there. Torchvision decodes all of an image and does every transform to each alone; hvdtrain decodes
a JPEG no larger than its crop needs (which changes pixels a little), sends bytes between processes and normalises
whole batches, here on the processor, in training on the device.

Per core means per second of processor time, of this process and of all below it: what one core that did nothing else
would read. The rate by the clock, on all the processors that this process may use, is printed beside it. The files are
in the system's memory after the first round, so that no disk is measured. Where NVIDIA DALI is installed, it decodes
the shards too, on the processor.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import benchmark
import numpy as np
import pydantic
from PIL import Image
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.flags import Flag
from hvdtrain.core.progress import Request
from hvdtrain.datasets import DRAWS
from hvdtrain.datasets import packed as shards
from hvdtrain.errors import EngineUnavailable, HvdtrainError, RecipeError
from hvdtrain.launch.topology import discover
from hvdtrain.run.setup import load_dataset
from hvdtrain.terminal import Show
from hvdtrain.tools import pack
from hvdtrain.tools.bench import measure, ranks

GENERATED = 256
CLASSES = 4
SIZE = (500, 375)
Epoch = Callable[[], Iterable[Any]]
"""A pass over the images, in batches."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds: processor time is counted in these."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures images a second and core of hvdtrain's readers beside torchvision's loader."""

    data_dir: Annotated[Path | None, Flag("folders train/<class> and val/<class>; left out: generated images")] = None
    packed: Annotated[Path | None, Flag("the same set packed; left out: packed for this run")] = None
    workers: Annotated[int, Field(ge=0, le=1024), Flag("reader processes; 0 is one thread")] = 2
    batch_size: Annotated[measure.Count, Flag("images a batch")] = 64
    images: Annotated[measure.Count, Flag("images a round, at most all")] = 1024
    crop: Annotated[int, Field(ge=1, le=4096), Flag("side of a training image, pixels")] = 224
    rounds: Annotated[measure.Count, Flag("passes of each, interleaved, after one to warm up")] = 5


def main(argv: Sequence[str]) -> int:
    """Measures in a process of its own; the exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python tests/benchmarks/loader.py", argv)
    _check(options)

    def measuring(show: Show, known: measure.Known) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            results = _measured(options, Path(scratch), show)
        results["data"] = str(options.data_dir or f"generated, {SIZE[0]} x {SIZE[1]}")
        known(results)

    return measure.run("loader", measuring, lambda results: answer(results, options.data_dir is None), options)


def _measured(options: Options, scratch: Path, show: Show) -> dict[str, Any]:
    """What the process that reads found. Raises HvdtrainError."""
    show(f"generating {GENERATED} images")
    folder = options.data_dir or generated(scratch / "images")
    packed = options.packed or scratch / "packed"
    if not options.packed:
        pack.pack(pack.Options(folder, packed), show)
    numbers = (options.workers, options.batch_size, options.images, options.crop, options.rounds)
    return ranks.launch([__file__, benchmark.RANK, *map(str, (folder, packed, *numbers))], "local", 1, show=show)


def _check(options: Options) -> None:
    if importlib.util.find_spec("torchvision") is None:
        raise EngineUnavailable("loader.py needs torchvision; install it: pip install torchvision")
    if options.data_dir and shards.is_in(options.data_dir):
        raise RecipeError(f"--data-dir must be a folder of images for torchvision, {options.data_dir} is packed.")
    if options.packed and not (options.data_dir and shards.is_in(options.packed)):
        raise RecipeError(f"--packed must be the packed set of a --data-dir, got {options.packed}.")


def generated(folder: Path) -> Path:
    """A folder of smooth colourful JPEGs with some noise. Their decoding costs less than a photograph's."""
    random = np.random.default_rng(0)
    for number in range(GENERATED):
        folder_of_class = folder / ("val" if number < CLASSES else "train") / f"class{number % CLASSES}"
        folder_of_class.mkdir(parents=True, exist_ok=True)
        corners = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(corners.resize(SIZE, Image.Resampling.BICUBIC)).astype(int)
        noisy = np.clip(smooth + random.integers(-12, 13, size=smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder_of_class / f"{number}.JPEG", quality=90)
    return folder


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
    return sum(used[pid] for pid in mine) * TICK


def answer(results: dict[str, Any], is_generated: bool) -> measure.Answer:
    """Images/s of each reader, and hvdtrain's over torchvision's."""
    rows = [
        (
            name,
            measure.summary(values),
            measure.summary(results["images_per_second"][name]),
            measure.summary(results["ratios"][name]) if name in results["ratios"] else "1",
        )
        for name, values in results["images_per_core_second"].items()
    ]
    header = ("images/s", "per core", f"on {results['cores']} cores", "times torchvision's")
    ratios = (f"{measure.spread(values).median:.2f} ({name})" for name, values in results["ratios"].items())
    sentence = f"Per core hvdtrain reads {' and '.join(ratios)} times as many images as torchvision."
    if is_generated:
        sentence += " The images are generated: give --data-dir for what real ones give."
    figure = measure.over_rounds(results["images_per_core_second"], "images/s per core")
    return measure.Answer("loader", measure.table(header, rows), sentence, results, figure)


def rank(folder: str, packed: str, *numbers: str) -> None:
    """The process that reads: hvdtrain's readers and torchvision's, interleaved."""
    try:
        with ranks.showing(discover({})) as show:
            _measure(show, Path(folder), Path(packed), *map(int, numbers))
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _measure(
    show: Show, folder: Path, packed: Path, workers: int, batch: int, images: int, crop: int, rounds: int
) -> None:
    """Measures and keeps the figures."""
    import torch

    torch.set_num_threads(1)
    loaders: dict[str, dict[str, Any]] = {"shards": {"data_dir": packed}, "folder": {"data_dir": folder}}
    with contextlib.suppress(ImportError):
        import nvidia.dali  # noqa: F401

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
    found = measure.interleaved(contenders, rounds, show=show, text=lambda rate: f"{rate:,.0f} images/s a core")
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
    import torch

    from hvdtrain.torch.data import Loader

    recipe = recipes.load("imagenet", {**where, "workers": workers, "batch_size": batch, "train_crop": crop})
    dataset = load_dataset(recipe)
    loader, random = Loader(recipe, dataset, torch.device("cpu")), np.random.default_rng(0)

    def epoch() -> Iterable[Any]:
        order = random.permutation(len(dataset.train))[:images]
        batches = np.split(order, range(batch, len(order), batch))
        requests: list[Request] = [
            (samples, random.random((len(samples), DRAWS), dtype=np.float32)) for samples in batches
        ]
        return loader.batches(dataset.train, requests)

    return epoch


def torchvisions(folder: Path, workers: int, batch: int, images: int, crop: int) -> Epoch:
    """Torchvision's, as its ImageNet reference has it."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from hvdtrain.datasets.images import MEAN, STD

    steps = [
        transforms.RandomResizedCrop(crop),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    dataset = ImageFolder(str(folder / "train"), transforms.Compose(steps))
    order: list[int] = []
    loader = DataLoader(dataset, batch, sampler=order, num_workers=workers, persistent_workers=workers > 0)

    def epoch() -> Iterable[Any]:
        order[:] = torch.randperm(len(dataset))[:images].tolist()
        return loader

    return epoch


if __name__ == "__main__":
    benchmark.start("loader", rank)
