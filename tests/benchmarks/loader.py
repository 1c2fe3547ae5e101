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

import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import tyro
from PIL import Image
from pydantic import Field

from hvdtrain import cli, terminal
from hvdtrain.core import flags
from hvdtrain.datasets.packed import shards
from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools import pack
from hvdtrain.tools.bench import measure, ranks

RANK = Path(__file__).with_name("loader_rank.py")
GENERATED = 256
CLASSES = 4
SIZE = (500, 375)
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds: processor time is counted in these."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures images a second and core of hvdtrain's readers beside torchvision's loader."""

    data_dir: Annotated[
        Path | None, tyro.conf.arg(help="folders train/<class> and val/<class>; left out: generated images")
    ] = None
    packed: Annotated[Path | None, tyro.conf.arg(help="the same set packed; left out: packed for this run")] = None
    workers: Annotated[int, Field(ge=0, le=1024), tyro.conf.arg(help="reader processes; 0 is one thread")] = 2
    batch_size: Annotated[measure.Count, tyro.conf.arg(help="images a batch")] = 64
    pictures: Annotated[measure.Count, tyro.conf.arg(help="images a round, at most all")] = 1024
    crop: Annotated[int, Field(ge=1, le=4096), tyro.conf.arg(help="side of a training image, pixels")] = 224
    rounds: Annotated[measure.Count, tyro.conf.arg(help="passes of each, interleaved, after one to warm up")] = 5


def main(argv: Sequence[str]) -> int:
    """Measures in a process of its own; the exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python tests/benchmarks/loader.py", argv)
    _check(options)
    with tempfile.TemporaryDirectory() as scratch, Status("loader") as status:
        results = _measured(options, Path(scratch), status)
    results["data"] = str(options.data_dir or f"generated, {SIZE[0]} x {SIZE[1]}")
    answer(results, options.data_dir is None).conclude(options)
    return 0


def _measured(options: Options, scratch: Path, status: Status) -> dict[str, Any]:
    """What the process that reads found. Raises HvdtrainError."""
    status.update(f"generating {GENERATED} images")
    folder = options.data_dir or generated(scratch / "images")
    packed = options.packed or scratch / "packed"
    if not options.packed:
        pack.pack(pack.Options(folder, packed), status.update)
    numbers = (options.workers, options.batch_size, options.pictures, options.crop, options.rounds)
    return ranks.launch([str(RANK), *map(str, (folder, packed, *numbers))], "local", 1, show=status.update)


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
    draw = functools.partial(measure.bars, found=results["images_per_core_second"], unit="images/s per core")
    return measure.Answer("loader", measure.table(header, rows), sentence, results, draw)


if __name__ == "__main__":
    terminal.listen()
    cli.COMMANDS["loader"] = ("__main__", "")  # errors and Ctrl-C are one line, as of every command
    sys.exit(cli.main(["loader", *sys.argv[1:]]))
