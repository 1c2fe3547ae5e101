"""A small ImageNet-style folder of made images."""

import numpy as np
from PIL import Image

from hvdtrain.datasets import DRAWS
from hvdtrain.tools import pack

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def scene(width, height, seed=0):
    """A smooth colourful image."""
    corners = np.random.default_rng(seed).integers(256, size=(4, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def draws(count, seed=3):
    """The draws that augment so many images."""
    return np.random.default_rng(seed).random((count, DRAWS), dtype=np.float32)


def write_tree(root, train=8, val=3):
    """Writes two classes of so many images each, of various shapes, one of them a PNG; returns the folder."""
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(("n01", "n02")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                suffix = "png" if (split, label, k) == ("train", 1, 0) else "JPEG"
                scene(160 - 10 * k, 100 + 5 * k, 100 * label + k).save(folder / f"{name}_{k}.{suffix}", quality=95)
    return root


def of_split(tree, split):
    """The split's images {(class, name): bytes}, in the order of the folder."""
    return {(path.parent.name, path.name): path.read_bytes() for path in sorted((tree / split).glob("*/*"))}


def packed(source, dest, **options):
    pack.pack(pack.Options(source, dest, **options))
    return dest


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def samples(dataset):
    """(class, bytes) of each sample, of both splits."""
    found = []
    for split in (dataset.train, dataset.valid):
        labels = [dataset.names[label] for label in split.labels]
        found.append(sorted(zip(labels, map(split.encoded, range(len(split))), strict=True)))
    return found
