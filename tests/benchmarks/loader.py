"""`python tests/benchmarks/loader.py`: how fast training images are read, hvdtrain's readers beside those of others.

All give batches of bytes: a random part resized to the crop, half of them flipped. Each reader is a process of its own
with its workers, and one reads while the others wait. Per core means per second of processor time of a reader's
processes: what one core that did nothing else would read. The files are in the system's memory after the first round,
so that no disk is measured. Torchcodec, SPDL and DALI are measured where they are installed.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import benchmark
import loader_readers
import numpy as np
import pydantic
from loader_readers import Task
from PIL import Image
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.datasets import packed as shards
from hvdtrain.errors import EngineUnavailable, HvdtrainError, RecipeError
from hvdtrain.launch.topology import discover
from hvdtrain.terminal import Show
from hvdtrain.tools import pack
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.untrusted import quoted

GENERATED = 256
CLASSES = 4
SIZE = (500, 375)
QUALITY = 90
REDUCED: dict[str, Any] = {"shorter_side": 288, "quality": QUALITY}
"""The options of `pack` for smaller images."""
BASE = "torchvision"
CONTENDERS = {
    BASE: (BASE, "files"),
    "torchcodec": ("torchcodec", "files"),
    "SPDL": ("SPDL", "files"),
    "DALI": ("DALI", "files"),
    "DALI, reduced shards": ("DALI", "reduced shards"),
    "hvdtrain, files": ("hvdtrain", "files"),
    "hvdtrain, shards": ("hvdtrain", "shards"),
    "hvdtrain, reduced shards": ("hvdtrain", "reduced shards"),
}
"""The reader, and what it reads."""
LIBRARIES = {"torchcodec": "torchcodec", "SPDL": "spdl.io", "DALI": "nvidia.dali"}
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds: processor time is counted in these."""
LOOK = 0.1
"""Seconds between two looks at the memory."""


class Card(NamedTuple):
    """At how many images/s a card trains ResNet50 in mixed precision, and who has published it."""

    name: str
    rate: float
    count: int
    source: str


CARDS = (
    Card("V100", 8322 / 8, 8, "NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch 21.03, DGX-1 16GB: 8322 on 8"),
    Card("A100", 16621 / 8, 8, "the same, DGX A100 80GB: 16,621 on 8, 2470 on one"),
    Card("H100", 56042 / 8, 8, "MLPerf Training v3.0, NVIDIA DGX H100, MXNet 23.04, epoch 20: 56,041 on 8"),
)


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures images a second and core of hvdtrain's readers beside those of others."""

    data_dir: Annotated[Path | None, Flag("folder with train/<class>; left out: generated images")] = None
    enlarge: Annotated[
        str | None, Flag("WIDTHxHEIGHT to cut and resize the images to before, as JPEGs of quality 90")
    ] = None
    workers: Annotated[int, Field(ge=0, le=1024), Flag("reader processes, or threads of SPDL and DALI")] = 2
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
            known(_measured(options, Path(scratch), show))

    return measure.run("loader", measuring, lambda results: answer(results, options.data_dir is None), options)


def _check(options: Options) -> None:
    if importlib.util.find_spec("torchvision") is None:
        raise EngineUnavailable("loader.py needs torchvision; install it: pip install torchvision")
    if options.data_dir and shards.is_in(options.data_dir):
        raise RecipeError(f"--data-dir must be a folder of images for torchvision, {options.data_dir} is packed.")
    if options.data_dir and not any((options.data_dir / "train").glob("*/*")):
        raise RecipeError(f"--data-dir must hold images in train/<class>, got {options.data_dir}.")
    if options.enlarge and not re.fullmatch("[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", options.enlarge):
        raise RecipeError(f"--enlarge must be WIDTHxHEIGHT, in pixels up to 9999, got {quoted(options.enlarge)}.")


def _measured(options: Options, scratch: Path, show: Show) -> dict[str, Any]:
    """What the process that reads found. Raises HvdtrainError."""
    show("preparing the images")
    source = options.data_dir or generated(scratch / "generated")
    folder, count = chosen(source, scratch / "files", options.images, options.enlarge)
    pack.pack(pack.Options(folder, scratch / "shards"), show)
    pack.pack(pack.Options(folder, scratch / "reduced shards", **REDUCED), show)
    numbers = (options.workers, options.batch_size, count, options.crop, options.rounds)
    results = ranks.launch([__file__, benchmark.RANK, str(scratch), *map(str, numbers)], "local", 1, show=show)
    kind = str(options.data_dir or f"generated, {SIZE[0]} x {SIZE[1]}")
    results["data"] = f"{kind}, brought to {options.enlarge} at quality {QUALITY}" if options.enlarge else kind
    results["bytes_per_image"] = {
        name: round(sum(path.stat().st_size for path in (scratch / name).glob(pattern)) / count)
        for name, pattern in (("files", "train/*/*"), ("shards", "train-*"), ("reduced shards", "train-*"))
    }
    return results


def generated(folder: Path) -> Path:
    """A folder of smooth colourful JPEGs with some noise. Their decoding costs less than a photograph's."""
    random = np.random.default_rng(0)
    for number in range(GENERATED):
        of_class = folder / "train" / f"class{number % CLASSES}"
        of_class.mkdir(parents=True, exist_ok=True)
        corners = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(corners.resize(SIZE, Image.Resampling.BICUBIC)).astype(int)
        noisy = np.clip(smooth + random.integers(-12, 13, size=smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(of_class / f"{number}.JPEG", quality=QUALITY)
    return folder


def chosen(source: Path, folder: Path, images: int, size: str | None) -> tuple[Path, int]:
    """Makes a folder of so many of the training images, or of all, brought to a size; also their number.

    They are spread evenly over the classes. The first of each class is its only validation image, too.
    """
    paths = sorted(path for path in (source / "train").glob("*/*") if path.is_file())
    paths = [paths[k * len(paths) // images] for k in range(images)] if images < len(paths) else paths
    for path in paths:
        content = resized(path.read_bytes(), *map(int, size.split("x"))) if size else path.read_bytes()
        for split in ("train", "val"):
            of_class = folder / split / path.parent.name
            if split == "train" or not of_class.exists():
                of_class.mkdir(parents=True, exist_ok=True)
                (of_class / path.name).write_bytes(content)
    return folder, len(paths)


def resized(encoded: bytes, width: int, height: int) -> bytes:
    """The largest part of that shape in the centre, resized, as a JPEG."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = min(image.width / width, image.height / height)
    x, y = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = x, y, x + width * scale, y + height * scale
    written = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS, box).save(written, "JPEG", quality=QUALITY)
    return written.getvalue()


def processor_seconds(root: int | None = None) -> float:
    """User and system time of the process (this one) and of all that live below it, in seconds."""
    return sum(_family(root).values()) * TICK


def own_bytes(root: int) -> int:
    """The memory of a process and of all below it, without that of files, which all processes share."""
    found = 0
    for pid in _family(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    found += int(line.split()[1]) * 1024
    return found


def _family(root: int | None) -> dict[int, int]:
    """The ticks that each process has used, of the process (this one) and of all that live below it."""
    parents, used = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold spaces; proc(5) counts the fields behind it from 3.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)], used[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {root or os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: used[pid] for pid in family if pid in used}


def answer(results: dict[str, Any], is_generated: bool) -> measure.Answer:
    """Images/s of each reader, over torchvision's, its memory, and the cores that cards need."""
    found, ratios = results["images_per_core_second"], results["ratios"]
    rows = [
        (
            name,
            measure.summary(values),
            measure.summary(ratios[name]) if name in ratios else "1",
            f"{results['peak_bytes'][name] / 1e6:,.0f}",
        )
        for name, values in found.items()
    ]
    header = ("reader", "images/s per core", f"times {BASE}'s", "MB")
    rates = {name: measure.spread(values).median for name, values in found.items()}
    ours = (f"{measure.spread(values).median:.2f} ({name})" for name, values in ratios.items() if "hvdtrain" in name)
    sentence = f"Per core hvdtrain reads {', '.join(ours)} times as many images as {BASE}.\n"
    for card in CARDS:
        wanted = card.count * card.rate
        cores = (f"{math.ceil(wanted / rate):,} ({name})" for name, rate in rates.items())
        sentence += f"To feed {card.count} {card.name} at {wanted:,.0f} images/s takes {', '.join(cores)} cores.\n"
    sentence += f"Rates of ResNet50, mixed precision: {'; '.join(card.source for card in CARDS)}.\n"
    sentence += "Memory is that of all processes of a reader, without libraries' code."
    if left_out := results["left_out"]:
        sentence += f"\nLeft out: {'; '.join(f'{name}, {reason}' for name, reason in left_out.items())}."
    if is_generated:
        sentence += " The images are generated: give --data-dir for what real ones give."
    return measure.Answer(
        "loader",
        measure.table(header, rows),
        sentence,
        results,
        measure.over_rounds(found, "images/s per core"),
    )


def rank(folder: str, *numbers: str) -> None:
    """The process that measures the readers."""
    try:
        with ranks.showing(discover({})) as show, contextlib.ExitStack() as stack:
            _measure(show, stack, Path(folder), *map(int, numbers))
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _measure(
    show: Show, stack: contextlib.ExitStack, folder: Path, workers: int, batch: int, images: int, crop: int, rounds: int
) -> None:
    """Measures and keeps the figures."""
    readers, left_out = dict[str, Reader](), dict[str, str]()
    for title, (name, data) in CONTENDERS.items():
        show(f"starting {title}")
        if name in LIBRARIES and not _is_installed(LIBRARIES[name]):
            left_out[title] = "not installed"
            continue
        reader = stack.enter_context(started(name, Task(str(folder / data), workers, batch, images, crop)))
        if failed := reader.answered().get("failed"):
            left_out[title] = failed
            continue
        readers[title] = reader
    found = measure.interleaved(
        {title: reader.rate for title, reader in readers.items()},
        rounds,
        show=show,
        text=lambda rate: f"{rate:,.0f} images/s a core",
    )
    results = {
        "images_per_core_second": found,
        "images_per_second": {title: reader.by_clock[-rounds:] for title, reader in readers.items()},
        "ratios": {
            title: [one / theirs for one, theirs in zip(values, found[BASE], strict=True)]
            for title, values in found.items()
            if title != BASE
        },
        "peak_bytes": {title: reader.peak for title, reader in readers.items()},
        "left_out": left_out,
        "cores": len(os.sched_getaffinity(0)),
        "workers": workers,
        "batch_size": batch,
        "images": images,
        "crop": crop,
    }
    ranks.keep(results)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


class Reader:
    """A reader's process."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self._name, self._process = name, process
        self._used, self.peak, self.by_clock = 0.0, 0, list[float]()

    def rate(self) -> float:
        """Images a second of processor time of one pass, with what the reader has read ahead for it before."""
        is_first, stdin = not self.by_clock, self._process.stdin
        assert stdin
        stdin.write("\n")
        stdin.flush()
        done = self.answered(is_first)
        used = processor_seconds(self._process.pid)
        rate = done["images"] / max(used - self._used, TICK)
        self._used = used
        self.by_clock.append(done["images"] / done["seconds"])
        return rate

    def answered(self, is_watched: bool = False) -> dict[str, Any]:
        """The next answer. Until then, where it is watched, looks at the memory. Raises EngineUnavailable."""
        stdout, is_waiting = self._process.stdout, is_watched
        assert stdout
        while is_waiting:
            is_waiting = not select.select([stdout], [], [], LOOK)[0]
            self.peak = max(self.peak, own_bytes(self._process.pid))
        if not (line := stdout.readline()):
            raise EngineUnavailable(f"the reader {self._name} ended; what it printed is above.")
        return dict(json.loads(line))


@contextlib.contextmanager
def started(name: str, task: Task) -> Iterator[Reader]:
    """The reader's process, which ends with the block."""
    command = [sys.executable, loader_readers.__file__, name, json.dumps(task._asdict())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Reader(name, process)
        finally:
            assert process.stdin
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    benchmark.start("loader", rank)
