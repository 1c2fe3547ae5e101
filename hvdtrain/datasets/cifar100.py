"""CIFAR-100 in its published files: 32x32 images of 100 classes (A. Krizhevsky, 2009).

Training images are augmented as in NERSC's tutorial of SC20: a crop after padding by 4, a flip, a rotation by up to 15
degrees.

The archive is fetched once for all processes of a machine. We do not use pooch (1.9): it has no lock between processes,
limits neither the size nor the duration of a transfer, and unpacks links, pipes and decompression bombs.
"""

import contextlib
import hashlib
import http.client
import os
import ssl
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.datasets import DATASETS
from hvdtrain.datasets.base import SHOWN, Dataset, default_data_dir, digest
from hvdtrain.datasets.pickles import read_batch
from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

FOLDER = DATASETS["cifar100"].downloaded_to
CLASSES = 100
MEAN = (0.50708, 0.48655, 0.44092)
STD = (0.26733, 0.25644, 0.27615)
SIDE = 32
PIXELS = SIDE * SIDE
PADDING = 4
DEGREES = 15
FIXED_BITS = 16
"""How many bits Pillow's fixed-point numbers have after the point."""
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
"""Of the archive. Its web page gives the MD5 eb9058c3a382ffc7106e4002c42a8d85. Source: Keras's datasets/cifar100.py."""
MEMBERS = ("train", "test", "meta")
MOST_BYTES = 1 << 28
"""The most bytes of the archive, which has 169 MB."""
BLOCK = 1 << 20
TIMEOUT_SECONDS = 30
FETCH_SECONDS = 3600
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)


@dataclass(frozen=True, eq=False)
class Cifar:
    """A split: the pixels of all images, uint8 [N * 1024 + 1, 3], of which the last is black; the labels, int64 [N]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if draws is None:
            return self.pixels[:-1].reshape(-1, SIDE, SIDE, 3)[indices], self.labels[indices]
        pixel, inside = source_pixels(placements(draws), np.arange(SIDE, dtype=np.int32))
        first = np.asarray(indices)[:, None, None] * PIXELS
        images = self.pixels.take(np.where(inside, pixel + first, len(self.pixels) - 1), axis=0)
        return images, self.labels[indices]

    def digest(self) -> str:
        return digest(self.pixels, self.labels)


def load(data_dir: Path | None = None) -> Dataset:
    """The training and the test images. Without a data_dir they are downloaded once and kept."""
    if data_dir is None:
        folder = download_cifar100(default_data_dir())
        remedy = f"remove {folder}, and the next run downloads it again"
    else:
        folder = data_dir if data_dir.name == FOLDER else data_dir / FOLDER
        remedy = f"unpack the published {FOLDER}.tar.gz into {folder.parent}, or leave data_dir out"
    train, valid = (_read(folder / split, remedy) for split in ("train", "test"))
    return Dataset("cifar100", train, valid, CLASSES, (SIDE, SIDE, 3), MEAN, STD)


def _read(path: Path, remedy: str) -> Cifar:
    batch = read_batch(path, remedy)
    planes, labels = batch.get("data"), batch.get("fine_labels")
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or not isinstance(labels, list):
        raise DataError(f"{path} lacks the array 'data' of uint8 or the list 'fine_labels': {remedy}")
    if planes.ndim != 2 or planes.shape[1] != 3 * PIXELS or not len(planes):
        raise DataError(
            f"{path}: wrong image shape: 'data' must be [N, 3 * 32 * 32], got {list(planes.shape)}: {remedy}"
        )
    if len(labels) != len(planes) or not all(isinstance(k, int) and 0 <= k < CLASSES for k in labels):
        raise DataError(f"{path}: 'fine_labels' must be {len(planes)} numbers from 0 to 99: {remedy}")
    pixels = np.zeros((len(planes) * PIXELS + 1, 3), np.uint8)
    pixels[:-1].reshape(-1, PIXELS, 3)[:] = planes.reshape(-1, 3, PIXELS).transpose(0, 2, 1)
    return Cifar(pixels, np.array(labels, np.int64))


def source_pixels(placement: Any, steps: Any) -> tuple[Any, Any]:
    """For placements [n, 2, 4], each pixel's source in its image, and whether it is inside of crop and image, both
    [n, 32, 32]. `steps`: 0 to 31 as int32. Of NumPy or PyTorch; in whole numbers, so that it is exact on any device."""
    start, per_row, per_column, offset = (placement[:, :, index, None, None] for index in range(4))
    cropped = (start + per_row * steps[:, None] + per_column * steps) >> FIXED_BITS
    inside = (cropped >= (-offset).clip(0)) & (cropped < SIDE - offset.clip(0))
    places = cropped + offset
    return places[:, 0] * SIDE + places[:, 1], inside.all(1)


def placements(draws: NDArray[np.float32]) -> NDArray[np.int32]:
    """Where the pixels of n augmented images are in their originals, for rows and columns: [n, 2, 4].

    The four numbers are the position of the first pixel and its growth per row and per column, in units of 2^-16
    pixels, and the crop's offset in pixels. draws[:, 0] and [:, 1] place the crop, [:, 2] decides the flip, and [:, 3]
    the angle.
    """
    offset = np.floor(draws[:, :2] * (2 * PADDING + 1)).astype(np.int32) - PADDING
    down, across = rotation((draws[:, 3].astype(np.float64) * 2 - 1) * DEGREES)
    is_flipped = (draws[:, 2] < 0.5)[:, None]
    # In fixed point, 32 - x less the smallest unit mirrors column k to 31 - k exactly.
    mirror = np.array([(SIDE << FIXED_BITS) - 1, 0, 0], np.int32)
    across = np.where(is_flipped, mirror - across, across)
    return np.concatenate([np.stack([down, across], axis=1), offset[:, :, None]], axis=2)


def rotation(degrees: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The rows and the columns that Pillow's Image.rotate reads, counter-clockwise about the centre, each [n, 3].

    The three numbers are the position of the first pixel and its growth per row and per column, in units of 2^-16
    pixels. Source: Image.rotate in Pillow's Image.py, affine_fixed in its Geometry.c.
    """
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    centre, half = SIDE / 2, 0.5
    row = [centre - (sin + cos) * centre + (sin + cos) * half, cos, sin]
    column = [centre - (cos - sin) * centre + (cos - sin) * half, -sin, cos]
    down, across = np.floor(np.array([row, column]) * (1 << FIXED_BITS) + 0.5).astype(np.int32)
    return down.T, across.T


def download_cifar100(dest: Path, url: str = URL, expected: str = SHA256) -> Path:
    """The folder cifar-100-python in `dest`. If it is not there, it is fetched, and appears when it is complete.

    Of several processes of a user only one fetches it. Raises DataError where it cannot be fetched or written.
    """
    folder = dest / FOLDER
    if folder.is_dir():
        return folder
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            progress: files.Progress = lambda: None  # noqa: E731
            # The file system may have no locks, or the file be another user's: the final rename needs none.
            with contextlib.suppress(OSError):
                progress = stack.enter_context(files.held(dest / f".cifar-100-{os.geteuid()}.lock"))
            if not folder.is_dir():
                _fetch_and_unpack(url, expected, folder, progress)
    except OSError as error:
        remedy = "free some space or choose another folder with HVDTRAIN_DATA"
        raise DataError(f"{dest} cannot take CIFAR-100 ({error.strerror or error}): {remedy}") from None
    return folder


def _fetch_and_unpack(url: str, expected: str, folder: Path, progress: files.Progress) -> None:
    try:
        with files.new_folder(folder) as unfinished, tempfile.TemporaryFile(dir=unfinished) as archive:
            found = _fetch(url, archive, folder.parent, progress)
            if found != expected:
                raise DataError(f"{url} has the SHA-256 {found}, not {expected}: try again, or fetch it by hand")
            archive.seek(0)
            _unpack(archive, unfinished, progress)
    except OSError:
        if not folder.is_dir():  # otherwise another machine was faster
            raise


def _fetch(url: str, archive: IO[bytes], dest: Path, progress: files.Progress) -> str:
    """Writes what the server sends into the open archive; returns the SHA-256."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return _receive(answer, archive, progress)
    except NETWORK_ERRORS as error:
        reason = one_line(getattr(error, "reason", None) or error, SHOWN)
        remedy = f"fetch it where there is a network, and unpack it into {dest}"
        raise DataError(f"{url} cannot be fetched ({reason}): {remedy}") from None


def _receive(answer: http.client.HTTPResponse, archive: IO[bytes], progress: files.Progress) -> str:
    end, received, digest = time.monotonic() + FETCH_SECONDS, 0, hashlib.sha256()
    while block := answer.read1(BLOCK):
        received += archive.write(block)
        digest.update(block)
        progress()
        if time.monotonic() > end:  # urllib's timeout never ends a server that sends a byte now and then
            raise TimeoutError(f"{received:,} bytes came in {FETCH_SECONDS:,} s")
        if received > MOST_BYTES:
            raise http.client.HTTPException(f"it sends more than {MOST_BYTES:,} bytes")
    return digest.hexdigest()


def _unpack(archive: IO[bytes], folder: Path, progress: files.Progress) -> None:
    """Unpacks the three files of the published archive."""
    with tarfile.open(fileobj=archive, mode="r:gz") as tar:
        for name in MEMBERS:
            member = tar.extractfile(f"{FOLDER}/{name}")
            assert member is not None
            with member, (folder / name).open("wb") as file:
                while block := member.read(BLOCK):
                    file.write(block)
                    progress()
