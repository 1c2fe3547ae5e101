"""The readers that loader.py measures, each in a process of its own: it reads all images once for each line that it
gets, and answers with their number and the seconds.

All draw a random part of 8 to 100 % of the area, resize it, flip half of the images and give batches of bytes.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core import recipe as recipes
from hvdtrain.core.progress import Request
from hvdtrain.datasets import DRAWS
from hvdtrain.datasets.base import SHOWN
from hvdtrain.datasets.images import random_box
from hvdtrain.run.setup import load_dataset
from hvdtrain.untrusted import one_line

Epoch = Callable[[], Iterable[Any]]
"""A pass over the images, in an order and with parts drawn anew each time: batches (x, y)."""


class Task(NamedTuple):
    """What is read, and how."""

    data: str
    """A folder with train/<class>, or a packed set."""
    workers: int
    batch: int
    images: int
    crop: int


def hvdtrains(task: Task) -> Epoch:
    """hvdtrain's batches as they are copied to the device, which normalises them."""
    import torch

    from hvdtrain.torch.data import Loader, Pair

    class Bytes(Loader):
        def _normalised(self, x: torch.Tensor, y: torch.Tensor) -> Pair:
            return x, y

    keys = {"data_dir": task.data, "workers": task.workers, "batch_size": task.batch, "train_crop": task.crop}
    recipe = recipes.load("imagenet", keys)
    dataset = load_dataset(recipe)
    loader, random = Bytes(recipe, dataset, torch.device("cpu")), np.random.default_rng(0)

    def epoch() -> Iterable[Any]:
        order = random.permutation(len(dataset.train))[: task.images]
        batches = np.split(order, range(task.batch, len(order), task.batch))
        requests: list[Request] = [
            (samples, random.random((len(samples), DRAWS), dtype=np.float32)) for samples in batches
        ]
        return loader.batches(dataset.train, requests)

    return epoch


def torchvisions(task: Task, decode: Callable[[str], Any] | None = None) -> Epoch:
    """Torchvision's data set and transforms in PyTorch's DataLoader; `decode` makes tensors in Pillow's place."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader

    steps = [transforms.RandomResizedCrop(task.crop), transforms.RandomHorizontalFlip()]
    if not decode:
        steps.append(transforms.PILToTensor())
    dataset = ImageFolder(f"{task.data}/train", transforms.Compose(steps), loader=decode or default_loader)
    order: list[int] = []
    workers = task.workers
    loader = DataLoader(dataset, task.batch, sampler=order, num_workers=workers, persistent_workers=workers > 0)

    def epoch() -> Iterable[Any]:
        order[:] = torch.randperm(len(dataset))[: task.images].tolist()
        return loader

    return epoch


def torchcodecs(task: Task) -> Epoch:
    """Torchcodec's decoder in the same data set: it decodes the whole image into a tensor."""
    from torchcodec.decoders import decode_image

    return torchvisions(task, functools.partial(decode_image, mode="RGB"))


def spdls(task: Task) -> Epoch:
    """SPDL's threads: FFmpeg decodes the whole image, cuts, resizes and flips it."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    paths, random = _files(task), np.random.default_rng(0)
    spdl.io.demux_image(str(paths[0]))  # raises here where it finds no FFmpeg
    threads = max(1, task.workers)

    def decode(path: Path) -> Any:
        packets = spdl.io.demux_image(str(path))
        left, upper, right, lower = random_box(random, packets.width, packets.height)
        steps = f"crop={right - left}:{lower - upper}:{left}:{upper},scale={task.crop}:{task.crop}:flags=bilinear"
        flip = ",hflip" if random.random() < 0.5 else ""
        return spdl.io.decode_packets(packets, filter_desc=f"{steps}{flip},format=pix_fmts=rgb24")

    def together(images: list[Any]) -> Any:
        return spdl.io.to_torch(spdl.io.convert_frames(images)), images

    def epoch() -> Iterable[Any]:
        order = [paths[k] for k in random.permutation(len(paths))[: task.images]]
        steps = PipelineBuilder().add_source(order).pipe(decode, concurrency=threads).aggregate(task.batch)
        pipeline = steps.pipe(together).add_sink(2).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def dalis(task: Task) -> Epoch:
    """DALI on the processor: it decodes the part alone, of files or of the shards that `pack` writes."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    tars = sorted(map(str, Path(task.data).glob("train-*.tar")))

    @pipeline_def(batch_size=task.batch, num_threads=max(1, task.workers), device_id=None)
    def pipeline() -> Any:
        if tars:
            encoded, label = fn.readers.webdataset(paths=tars, ext=["jpg;png", "cls"], random_shuffle=True)
        else:
            encoded, label = fn.readers.file(file_root=f"{task.data}/train", random_shuffle=True)
        part = fn.decoders.image_random_crop(encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        resized = fn.resize(part, size=[task.crop, task.crop], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(resized, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()

    def epoch() -> Iterable[Any]:
        for _ in range(task.images // task.batch):
            images, labels = built.run()
            yield torch.from_numpy(np.array(images.as_array())), labels  # the pipeline uses its memory again

    return epoch


READERS: dict[str, Callable[[Task], Epoch]] = {
    "torchvision": torchvisions,
    "torchcodec": torchcodecs,
    "SPDL": spdls,
    "DALI": dalis,
    "hvdtrain": hvdtrains,
}


def _files(task: Task) -> list[Path]:
    return sorted(Path(task.data, "train").glob("*/*"))


def serve(name: str, task: Task) -> None:
    """Reads once for each line on standard input, until it ends."""
    import torch

    torch.set_num_threads(1)
    try:
        epoch = READERS[name](task)
    except Exception as error:  # a library that is installed and cannot start, for want of another one
        print(json.dumps({"failed": f"{type(error).__name__}: {one_line(error, SHOWN)}"}), flush=True)
        return
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        count = sum(len(x) for x, _ in epoch())
        print(json.dumps({"images": count, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Task(**json.loads(sys.argv[2])))
