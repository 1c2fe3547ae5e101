"""An ImageNet-style folder: {train,val}/<class>/<image>, read by Pillow in a few threads.

Augmented as ResNet is usually trained: a random part resized (torchvision's RandomResizedCrop), and a flip.
"""

import contextlib
import dataclasses
import functools
import io
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from hvdtrain import files, processors
from hvdtrain.datasets import folders
from hvdtrain.datasets.base import SHOWN, Dataset, digest, require_positive
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.untrusted import LONGEST_MESSAGE, one_line, printable

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
AREA = (0.08, 1.0)
LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
TRIES = 10
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""Some of ImageNet's .JPEG files are PNG. Whatever the suffix, Pillow would take an EPS too, and start Ghostscript.

An MPO is a JPEG to it."""
MOST_BYTES = 1 << 27
"""In one image's file; ImageNet's largest holds 15 MB."""
MOST_PIXELS = 1 << 26
"""In one image, also once it is resized: 268 MB in memory."""
MOST_SCANS = 50
"""In a progressive JPEG, where ten are usual: each costs a pass over all pixels."""
SCAN, END = 0xDA, 0xD9
MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""Of a JPEG, but those that stand alone within the data of a scan."""
MOST_NAMED = 8
"""Bad images of one batch."""
MOST_CLASSES = 100_000
"""Which a file may name: the last layer of a ResNet50 takes .8 GB for so many."""
Box = tuple[int, int, int, int]
"""Left, upper, right and lower edge, in pixels."""


class BadImage(DataError):
    """An image cannot be read; its arguments are where it lies, and why."""

    def __str__(self) -> str:
        where, reason = self.args
        return f"{where} cannot be read as an image ({reason}): fetch it again, or remove it."


def together(bad: Sequence[DataError], most: int = MOST_NAMED, of: str = "images", folder: str = "") -> DataError:
    """One error for all of them, of which so many are named, without the `folder` that they are in; `of`: what they
    are."""
    if len(bad) == 1:
        return DataError(str(bad[0]))
    texts = ("{} ({})".format(*each.args) if isinstance(each, BadImage) else str(each) for each in bad[:most])
    named = "; ".join(text.removeprefix(folder) for text in texts)
    more = f" and {len(bad) - most:,} more" if len(bad) > most else ""
    return DataError(f"{len(bad):,} {of} cannot be read: {named}{more}: fetch them again, or remove them.")


@dataclass(frozen=True, eq=False)
class Encoded(ABC):
    """A split of images that lie somewhere in one of FORMATS, decoded in a few threads."""

    labels: NDArray[np.int64]
    resize: int
    """Without augmentation the shorter side is resized to this, and the centre cropped."""
    crop: int
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image's bytes. Raises OSError where they cannot be read, DataError where they are damaged."""

    @abstractmethod
    def location(self, index: int) -> str:
        """Where the image lies, for a message."""

    @abstractmethod
    def digest(self) -> str:
        """Of the list of images in their order."""

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(indices), self.crop, self.crop, 3), np.uint8)
        left, bad = iter(range(len(indices))), dict[int, BadImage]()

        def decode() -> None:
            for number in left:
                crop = functools.partial(self._cropped, draws=None if draws is None else draws[number])
                try:
                    images[number] = self.decoded(int(indices[number]), crop)
                except BadImage as error:
                    bad[number] = error

        in_threads(decode)
        if bad:
            raise together([bad[number] for number in sorted(bad)])
        return images, self.labels[indices]

    def _cropped(self, image: Image.Image, draws: NDArray[np.float32] | None) -> Image.Image:
        if draws is None:
            return centre_crop(image, self.resize, self.crop)
        return random_crop(image, self.crop, draws)

    def decoded(self, index: int, prepare: Callable[[Image.Image], Image.Image]) -> NDArray[np.uint8]:
        """The image, prepared. Raises BadImage where it is damaged."""
        with self.as_data_error(index), opened(self.encoded(index)) as image:
            return np.asarray(prepare(image))

    @contextlib.contextmanager
    def as_data_error(self, index: int) -> Iterator[None]:
        """Around the reading of an image: whatever is wrong with it is a BadImage."""
        try:
            yield
        except HvdtrainError:
            raise
        except Exception as error:  # a damaged image raises nearly any exception there is
            reason = "of no known format" if isinstance(error, UnidentifiedImageError) else one_line(error, SHOWN)
            where = printable(self.location(index), LONGEST_MESSAGE)
            raise BadImage(where, reason) from None


class Names:
    """Many names in little memory, whatever the longest: an array would give each of them as much."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self._joined = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)

    def __getitem__(self, index: int) -> bytes:
        return self._joined[self._ends[index] : self._ends[index + 1]]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The names' bytes, and where each begins and the last ends."""
        return np.frombuffer(self._joined, np.uint8), self._ends


@dataclass(frozen=True, eq=False)
class Images(Encoded):
    """Image files by number; a million of them take some 30 MB, so that workers get them quickly."""

    root: Path
    names: Names

    def path(self, index: int) -> Path:
        return self.root / self.classes[self.labels[index]] / os.fsdecode(self.names[index])

    def encoded(self, index: int) -> bytes:
        return content(self.path(index))

    def location(self, index: int) -> str:
        return str(self.path(index))

    def digest(self) -> str:
        return digest(*self.names.arrays(), self.labels)


def content(path: Path) -> bytes:
    """The bytes of an image's file. Raises OSError, ValueError."""
    with files.opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise ValueError(f"it must have at most {MOST_BYTES:,} bytes")
        return file.read(size)


def opened(encoded: bytes) -> Image.Image:
    """The image, not yet decoded. Raises nearly any exception where it is damaged, too large or of other FORMATS."""
    if encoded.startswith(b"\xff\xd8") and _has_many_scans(encoded):
        raise ValueError(f"more than {MOST_SCANS} scans")
    image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    _require_pixels(*image.size)
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError(f"white is no known value of mode {image.mode}: save it with 8 or 16 bits a channel")
    return image


def _has_many_scans(jpeg: bytes) -> bool:
    """Whether there are more than MOST_SCANS up to its end, without those of thumbnails and of a film behind it."""
    if jpeg.count(b"\xff\xda") <= MOST_SCANS:
        return False
    scans, place = 0, 2
    while scans <= MOST_SCANS and (found := MARKER.search(jpeg, place)) and (marker := found[0][1]) != END:
        scans += marker == SCAN
        # A length counts its own two bytes; libjpeg refuses a smaller one.
        place = found.end() + max(2, int.from_bytes(jpeg[found.end() : found.end() + 2], "big"))
    return scans > MOST_SCANS


def _require_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")


def in_threads(work: Callable[[], None]) -> None:
    """Calls it in as many threads as this process has processors, this one among them, and waits for all.

    Pillow decodes without the interpreter lock. Each task decodes many images: to hand over each one by itself costs
    up to half of what decoding a small one does.
    """
    others, pool = _threads()
    tasks = [pool.submit(work) for _ in range(others)]
    try:
        work()
    finally:
        done = [task.exception() for task in tasks]
    for error in filter(None, done):
        raise error


@functools.cache
def _threads() -> tuple[int, ThreadPoolExecutor]:
    others = processors.count() - 1
    return others, ThreadPoolExecutor(max(1, others), "decode")


# A forked child inherits the pool, but not its threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


def load(
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    shuffle: str = "global",
    decoder: str = "pillow",
    train_crop: int = 224,
    valid_resize: int = 256,
    valid_crop: int = 224,
) -> Dataset:
    """ImageNet as data_dir holds it: packed, by index files, or a folder for each class.

    Of a packed set, cache_dir keeps a copy on this node, and shuffle "shards" numbers the training samples shard after
    shard.
    """
    from hvdtrain.datasets import index, packed

    sides, is_by_shard = (train_crop, valid_resize, valid_crop), shuffle == "shards"
    if data_dir is not None and packed.is_in(data_dir):
        whole = packed.load(data_dir, *sides, is_by_shard, packed.on_node(data_dir, cache_dir) if cache_dir else None)
    elif is_by_shard or cache_dir:
        key = "shuffle shards" if is_by_shard else "cache_dir"
        raise DataError(f"{key} needs a packed data_dir: python -m hvdtrain pack {data_dir or 'SOURCE'} DEST")
    else:
        whole = (index.load if index.is_in(data_dir) else load_folder)(data_dir, *sides)
    if decoder == "dali":
        from hvdtrain.datasets import dali

        return dali.decoding(whole)
    return whole


def load_folder(data_dir: Path | None, train_crop: int, valid_resize: int, valid_crop: int) -> Dataset:
    """The images under data_dir/train and data_dir/val (or valid), numbered by class, folder and file name.

    Raises DataError where a folder is missing or empty, or the two hold different classes.
    """
    check_sides(train_crop, valid_resize, valid_crop)
    if data_dir is None:
        raise DataError("imagenet needs a data_dir with the folders train/<class> and val/<class>.")
    train = folders.find(folders.split_folder(data_dir, "train"))
    valid = folders.find(folders.split_folder(data_dir, "val", "valid"))
    folders.require_same_classes(train, valid)
    train_resize = resize_beside(train_crop, valid_resize, valid_crop)
    whole = dataset(
        _images(train, train_resize, train_crop), _images(valid, valid_resize, valid_crop), len(train.classes)
    )
    return dataclasses.replace(whole, left_out=folders.left_out(train, valid))


def check_sides(train_crop: int, valid_resize: int, valid_crop: int) -> None:
    """Raises DataError where crops and resize, in pixels, do not go together."""
    require_positive(train_crop=train_crop, valid_resize=valid_resize, valid_crop=valid_crop)
    if valid_crop > valid_resize:
        raise DataError(f"valid_crop must be at most valid_resize={valid_resize}, got {valid_crop}.")


def resize_beside(train_crop: int, valid_resize: int, valid_crop: int) -> int:
    """The shorter side of a training image that is not augmented: in proportion to a validation image's."""
    return math.ceil(train_crop * valid_resize / valid_crop)


def dataset(train: Encoded, valid: Encoded, classes: int) -> Dataset:
    """The two splits, with ImageNet's mean and standard deviation."""
    names = train.classes if len(train.classes) == classes else ()
    return Dataset("imagenet", train, valid, classes, (train.crop, train.crop, 3), MEAN, STD, names=names)


def _images(found: folders.Found, resize: int, crop: int) -> Images:
    labels = np.repeat(np.arange(len(found.classes)), found.counts)
    return Images(labels, resize, crop, found.classes, found.root, Names(found.names))


def centre_crop(image: Image.Image, resize: int, crop: int) -> Image.Image:
    """The shorter side resized, then the centre: as torchvision's Resize and CenterCrop."""
    shorter = min(image.size)
    width, height = (int(resize * side / shorter) for side in image.size)
    left, upper = round((width - crop) / 2), round((height - crop) / 2)
    _require_pixels(width, height)  # a line of 1 x 60,000 pixels would become one of 256 x 15,360,000
    resized = rgb(image).resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, upper, left + crop, upper + crop))


def random_crop(image: Image.Image, crop: int, draws: NDArray[np.float32]) -> Image.Image:
    """A random part resized to a square and flipped half of the time; draws [DRAWS] seed the choices."""
    box, is_flipped = random_part(draws, *image.size)
    resized = cut(image, box, crop)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else resized


def random_part(draws: NDArray[np.float32], width: int, height: int) -> tuple[Box, bool]:
    """Which part of an image of that size the draws choose, and whether it is flipped."""
    random = np.random.default_rng(np.ascontiguousarray(draws, np.float32).view(np.uint32))
    return random_box(random, width, height), random.random() < 0.5


def random_box(random: np.random.Generator, width: int, height: int) -> Box:
    """A box of 8 to 100 % of the area and of 3:4 to 4:3; the centre where ten tries do not fit.

    Source: torchvision's RandomResizedCrop.get_params.
    """
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(*LOG_RATIO))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            upper, left = int(random.integers(height - down + 1)), int(random.integers(width - across + 1))
            return left, upper, left + across, upper + down
    return centre_box(width, height)


def centre_box(width: int, height: int) -> Box:
    """The largest box of 3:4 to 4:3 in the middle."""
    across = min(width, round(height * 4 / 3))
    down = min(height, round(width / (3 / 4)))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


def cut(image: Image.Image, box: Box, size: int) -> Image.Image:
    """That box of an image not yet decoded, resized to size x size.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as the box keeps at least size x size pixels.
    """
    width, height = image.size
    left, upper, right, lower = box
    enough = math.ceil(width * size / (right - left)), math.ceil(height * size / (lower - upper))
    drafted = image.draft(None, enough)
    scale = drafted[1][2] / width if drafted else 1.0
    # Cropping first keeps the filter from reading pixels beside the box, as torchvision does.
    whole = (
        math.floor(left * scale),
        math.floor(upper * scale),
        math.ceil(right * scale),
        math.ceil(lower * scale),
    )
    x, y = whole[:2]
    inner = left * scale - x, upper * scale - y, right * scale - x, lower * scale - y
    return rgb(image.crop(whole)).resize((size, size), Image.Resampling.BILINEAR, box=inner)


def rgb(image: Image.Image) -> Image.Image:
    """In colour, without transparency; of 16-bit greys the high byte."""
    if image.mode.startswith("I"):
        # Pillow's own conversion clips: all above 255 of 65535 would be white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image.info.pop("transparency", None)  # Pillow would advise a conversion to RGBA, of as many bytes again
    return image.convert("RGB")
