"""Encoded images, read in several threads: ordinary JPEGs by libjpeg-turbo and OpenCV, others by Pillow.

Training images are augmented as usual for ResNet: a random part is resized (torchvision's RandomResizedCrop), and half
of them are flipped.
"""

import contextlib
import functools
import io
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from hvdtrain import datasets, files, processors
from hvdtrain.datasets.base import SHOWN, Dataset, digest
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.untrusted import LONGEST_MESSAGE, one_line, printable

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
AREA = (0.08, 1.0)
LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
TRIES = 10
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""The formats that are read, whatever the suffix: some of ImageNet's .JPEG files are PNG. An MPO is a JPEG to Pillow.
An EPS is refused, because Pillow would start Ghostscript."""
MOST_BYTES = 1 << 27
"""The most bytes of an image file; ImageNet's largest has 15 MB."""
MOST_PIXELS = 1 << 26
"""The most pixels of an image, also after it is resized: they take 268 MB of memory."""
MOST_SCANS = 50
"""The most scans of a progressive JPEG, which usually has ten: each one takes a pass over all pixels."""
SCAN, END = 0xDA, 0xD9
MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""A marker of a JPEG, except for those without a length, which occur within the data of a scan."""
MOST_NAMED = 8
"""The most bad images of a batch that a message names."""
MOST_CLASSES = 100_000
"""The most classes that a file may have: the last layer of a ResNet50 takes .8 GB for so many."""
EXIF = re.compile(rb"\xff\xe1..Exif\0\0", re.DOTALL)
"""The begin of the segment of a JPEG that holds its EXIF, up to what is in it."""
ORIENTATION = 0x0112
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
"""Pillow's names of the turns for the orientations 2 to 8, as in its ImageOps.exif_transpose."""
Box = tuple[int, int, int, int]
"""The left, upper, right and lower edge, in pixels."""


class Sides(NamedTuple):
    """The sizes of images in pixels: they are resized to the shorter side `valid_resize`, and cropped to squares."""

    train_crop: int
    valid_resize: int
    valid_crop: int


class BadImage(DataError):
    """An image cannot be read. The arguments are its location and the reason."""

    def __str__(self) -> str:
        where, reason = self.args
        return f"{where} cannot be read as an image ({reason}): fetch it again, or remove it."


def together(bad: Sequence[DataError], most: int = MOST_NAMED, of: str = "images", folder: str = "") -> DataError:
    """One error for all `bad` images, of which it names `most`, without their `folder`; it calls them `of`."""
    if len(bad) == 1:
        return DataError(str(bad[0]))
    texts = ("{} ({})".format(*each.args) if isinstance(each, BadImage) else str(each) for each in bad[:most])
    named = "; ".join(text.removeprefix(folder) for text in texts)
    more = f" and {len(bad) - most:,} more" if len(bad) > most else ""
    return DataError(f"{len(bad):,} {of} cannot be read: {named}{more}: fetch them again, or remove them.")


@dataclass(frozen=True, eq=False)
class Encoded(ABC):
    """A split of encoded images in one of FORMATS, which are decoded in several threads."""

    labels: NDArray[np.int64]
    resize: int
    """The shorter side to which an image is resized before its centre is cropped, where it is not augmented."""
    crop: int
    classes: tuple[str, ...]
    decoder: datasets.Decoder = field(default="pillow", kw_only=True)
    """What reads ordinary JPEGs where they are augmented; Pillow reads all others."""
    exif: datasets.Exif = field(default="ignore", kw_only=True)
    """Whether images are turned upright, as their EXIF says, before they are cropped; then Pillow reads the turned."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image's bytes. Raises OSError where they cannot be read, DataError where they are damaged."""

    @abstractmethod
    def location(self, index: int) -> str:
        """The image's location, for messages."""

    @abstractmethod
    def digest(self) -> str:
        """A digest of the list of images."""

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(indices), self.crop, self.crop, 3), np.uint8)
        self.read_into(images, indices, draws)
        return images, self.labels[indices]

    def read_into(
        self, images: NDArray[np.uint8], indices: NDArray[np.int64], draws: NDArray[np.float32] | None
    ) -> None:
        """Like `read`, into an array of the caller's of the shape and type of x."""
        left, bad = iter(self.in_order(indices)), dict[int, BadImage]()

        def decode() -> None:
            for number in left:
                try:
                    self._decode(int(indices[number]), None if draws is None else draws[number], images[number])
                except BadImage as error:
                    bad[number] = error

        in_threads(decode)
        if bad:
            raise together([bad[number] for number in sorted(bad)])

    def in_order(self, indices: NDArray[np.int64]) -> Sequence[int]:
        """The numbers 0 to n - 1 in the order in which the n samples are read."""
        return range(len(indices))

    def mixed(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """The order in which `pack` takes the samples."""
        return draw.permutation(len(self))

    def _decode(self, index: int, draws: NDArray[np.float32] | None, out: NDArray[np.uint8]) -> None:
        with self.as_data_error(index):
            encoded = self.encoded(index)
            is_applied = self.exif == "apply"
            if draws is not None and self.decoder == "turbo" and _is_read_fast(encoded, draws, out, is_applied):
                return
            with opened(encoded) as stored:
                image = _upright(stored) if is_applied else stored
                if draws is None:
                    out[:] = np.asarray(centre_crop(image, self.resize, self.crop))
                else:
                    out[:] = np.asarray(random_crop(image, self.crop, draws))

    @contextlib.contextmanager
    def as_data_error(self, index: int) -> Iterator[None]:
        """Turns all errors of the block, which reads the image, into a BadImage."""
        try:
            yield
        except HvdtrainError:
            raise
        except Exception as error:  # a damaged image may raise any exception
            reason = "of no known format" if isinstance(error, UnidentifiedImageError) else one_line(error, SHOWN)
            where = printable(self.location(index), LONGEST_MESSAGE)
            raise BadImage(where, reason) from None


class Names:
    """Many names in little memory: an array of them would take as much for each as for the longest."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self._joined = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)

    def __getitem__(self, index: int) -> bytes:
        return self._joined[self._ends[index] : self._ends[index + 1]]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all names, and the positions at which each name begins and the last one ends."""
        return np.frombuffer(self._joined, np.uint8), self._ends


@dataclass(frozen=True, eq=False)
class Images(Encoded):
    """Image files by number. A million of them take some 30 MB, so that they are sent to workers quickly."""

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
    """The bytes of an image file. Raises OSError, ValueError."""
    with files.opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise ValueError(f"it must have at most {MOST_BYTES:,} bytes")
        return file.read(size)


def opened(encoded: bytes) -> Image.Image:
    """The image, not yet decoded. May raise any exception where it is damaged, too large or in no format of FORMATS."""
    if encoded.startswith(b"\xff\xd8") and _has_many_scans(encoded):
        raise ValueError(f"more than {MOST_SCANS} scans")
    image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    _require_pixels(*image.size)
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError(f"white is no known value of mode {image.mode}: save it with 8 or 16 bits a channel")
    return image


def orientation(image: Image.Image) -> int:
    """The orientation in the image's EXIF, 2 to 8 where it has to be turned; 1 also where the EXIF is damaged. Of a
    TIFF it is 1, which Pillow turns itself."""
    if image.format == "PNG":
        image.load()  # the EXIF may stand behind the pixels
    return _orientation(image.info.get("exif", b""))


def _orientation(content: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(content)
        found: Any = exif.get(ORIENTATION)
        return int(found) if found in range(2, 9) else 1
    except Exception:  # a damaged EXIF may raise any exception
        return 1


def _upright(image: Image.Image) -> Image.Image:
    turned = orientation(image)
    return image.transpose(Image.Transpose[TURNS[turned - 2]]) if turned > 1 else image


def _is_read_fast(encoded: bytes, draws: NDArray[np.float32], out: NDArray[np.uint8], is_applied: bool = False) -> bool:
    """Reads a random part of an ordinary JPEG; returns False where Pillow has to, or to say what is wrong. Pillow reads
    those that have to be turned, if the EXIF `is_applied`."""
    from hvdtrain.datasets import jpeg  # whose libraries are not there for whoever takes Pillow

    header = jpeg.frame(encoded)
    if not header or header.height * header.width > MOST_PIXELS:
        return False
    if not header.has_one_scan and _has_many_scans(encoded):
        return False
    exif = EXIF.search(encoded, 2, header.height_at) if is_applied else None
    if exif and _orientation(encoded[exif.end() : header.height_at]) > 1:
        return False
    box, is_flipped = random_part(draws, header.width, header.height)
    return jpeg.read(encoded, header, box, is_flipped, out)


def _has_many_scans(jpeg: bytes) -> bool:
    """Whether the image has more than MOST_SCANS, without those of its thumbnails and of a film after its end."""
    if jpeg.count(b"\xff\xda") <= MOST_SCANS:
        return False
    scans, place = 0, 2
    while scans <= MOST_SCANS and (found := MARKER.search(jpeg, place)) and (marker := found[0][1]) != END:
        scans += marker == SCAN
        # The length includes its own two bytes; libjpeg refuses a smaller one.
        place = found.end() + max(2, int.from_bytes(jpeg[found.end() : found.end() + 2], "big"))
    return scans > MOST_SCANS


def _require_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")


def in_threads(work: Callable[[], None]) -> None:
    """Calls `work` in this thread and others, one for each processor of this process, and waits for all.

    Pillow decodes without the interpreter lock. Each call decodes many images: to submit a task for each image takes
    up to half as long as decoding a small one.
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


# A forked process inherits the pool, but not its threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


def dataset(split: Callable[[str, int, int], Encoded], classes: int, sides: Sides) -> Dataset:
    """The data set of two splits, which `split` makes from their name ("train" or "val"), resize and crop.

    A training image that is not augmented is resized in the same proportion as a validation image.
    """
    train = split("train", math.ceil(sides.train_crop * sides.valid_resize / sides.valid_crop), sides.train_crop)
    valid = split("val", sides.valid_resize, sides.valid_crop)
    names = train.classes if len(train.classes) == classes else ()
    return Dataset("imagenet", train, valid, classes, (train.crop, train.crop, 3), MEAN, STD, names=names)


def centre_crop(image: Image.Image, resize: int, crop: int) -> Image.Image:
    """Resizes the shorter side, then crops the centre, like torchvision's Resize and CenterCrop."""
    shorter = min(image.size)
    width, height = (int(resize * side / shorter) for side in image.size)
    left, upper = round((width - crop) / 2), round((height - crop) / 2)
    _require_pixels(width, height)  # an image of 1 x 60,000 pixels would become one of 256 x 15,360,000
    resized = rgb(image).resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, upper, left + crop, upper + crop))


def random_crop(image: Image.Image, crop: int, draws: NDArray[np.float32]) -> Image.Image:
    """Resizes a random part to a square, and flips half of the images; the draws [DRAWS] seed the choices."""
    box, is_flipped = random_part(draws, *image.size)
    resized = cut(image, box, crop)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else resized


def random_part(draws: NDArray[np.float32], width: int, height: int) -> tuple[Box, bool]:
    """The part that the draws choose of an image of that size, and whether it is flipped."""
    random = np.random.default_rng(np.ascontiguousarray(draws, np.float32).view(np.uint32))
    return random_box(random, width, height), random.random() < 0.5


def random_box(random: np.random.Generator, width: int, height: int) -> Box:
    """A box of 8 to 100 % of the area and of 3:4 to 4:3, or the largest such box in the centre if no try fits.

    Source: torchvision's RandomResizedCrop.get_params.
    """
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(*LOG_RATIO))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            upper, left = int(random.integers(height - down + 1)), int(random.integers(width - across + 1))
            return left, upper, left + across, upper + down
    across = min(width, round(height * 4 / 3))
    down = min(height, round(width / (3 / 4)))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


def cut(image: Image.Image, box: Box, size: int) -> Image.Image:
    """The box of an image that is not yet decoded, resized to size x size.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the box then still has at least size x size pixels.
    """
    width, height = image.size
    left, upper, right, lower = box
    enough = math.ceil(width * size / (right - left)), math.ceil(height * size / (lower - upper))
    drafted = image.draft(None, enough)
    scale = drafted[1][2] / width if drafted else 1.0
    # Like torchvision, crop first, so that the filter reads no pixels outside of the box.
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
    """The image in colour and without transparency; greys of 16 bits keep their high byte."""
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip values above 255 of 65535 to white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image.info.pop("transparency", None)  # else Pillow would recommend RGBA, which takes more memory
    return image.convert("RGB")
