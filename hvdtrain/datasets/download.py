"""Fetches CIFAR-100 once for all processes of a machine.

Not by pooch (1.9), which has no lock between processes, bounds neither the size nor the duration of a transfer, and
unpacks links, pipes and bombs.
"""

import contextlib
import gzip
import hashlib
import http.client
import itertools
import os
import shutil
import ssl
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from hvdtrain import files
from hvdtrain.datasets.base import SHOWN
from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
"""Of the archive whose MD5 its page gives as eb9058c3a382ffc7106e4002c42a8d85. Source: Keras's datasets/cifar100.py."""
MEMBERS = ("train", "test", "meta")
MOST_BYTES = 1 << 28
"""Of the archive (169 MB), and of what it unpacks to (186 MB)."""
MOST_MEMBERS = 100
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


def default_data_dir() -> Path:
    """$HVDTRAIN_DATA, or hvdtrain/data in the user's cache folder."""
    if chosen := os.environ.get("HVDTRAIN_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "data"


def download_cifar100(dest: Path, url: str = URL, expected: str = SHA256) -> Path:
    """The folder dest/cifar-100-python, fetched unless it is there: complete or not at all.

    Processes of a user that need it at once fetch it once. Raises DataError where it cannot be fetched or written.
    """
    folder = dest / "cifar-100-python"
    if folder.is_dir():
        return folder
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with _locked(dest) as progress:
            if not folder.is_dir():
                _fetch_and_unpack(url, expected, folder, progress)
    except OSError as error:
        remedy = "free some space or choose another folder with HVDTRAIN_DATA"
        raise DataError(f"{dest} cannot take CIFAR-100 ({error.strerror or error}): {remedy}") from None
    return folder


@contextlib.contextmanager
def _locked(dest: Path) -> Iterator[Callable[[], None]]:
    """The user's lock; none where the file system has none, or it is another's: the final rename is safe without."""
    name = f".cifar-100-{os.geteuid()}.lock"
    with contextlib.ExitStack() as stack:
        progress: Callable[[], None] = lambda: None  # noqa: E731
        with contextlib.suppress(OSError):
            progress = stack.enter_context(files.held(dest / name)).progress
        yield progress


def _fetch_and_unpack(url: str, expected: str, folder: Path, progress: Callable[[], None]) -> None:
    try:
        with files.new_folder(folder) as unfinished, tempfile.TemporaryFile(dir=unfinished) as archive:
            found = _fetch(url, archive, folder.parent, progress)
            if found != expected:
                raise DataError(f"{url} has the SHA-256 {found}, not {expected}: try again, or fetch it by hand")
            archive.seek(0)
            _unpack(archive, unfinished, progress)
    except OSError:
        if not folder.is_dir():  # else another machine was first
            raise


def _fetch(url: str, archive: IO[bytes], dest: Path, progress: Callable[[], None]) -> str:
    """Into the open archive; its SHA-256."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return _receive(answer, archive, progress)
    except NETWORK_ERRORS as error:
        reason = one_line(getattr(error, "reason", None) or error, SHOWN)
        remedy = f"fetch it where there is a network, and unpack it into {dest}"
        raise DataError(f"{url} cannot be fetched ({reason}): {remedy}") from None


def _receive(answer: http.client.HTTPResponse, archive: IO[bytes], progress: Callable[[], None]) -> str:
    """A server that sends a byte now and then never runs into a timeout."""
    end, received, digest = time.monotonic() + FETCH_SECONDS, 0, hashlib.sha256()
    while block := answer.read1(BLOCK):
        received += archive.write(block)
        digest.update(block)
        progress()
        if time.monotonic() > end:
            raise TimeoutError(f"{received:,} bytes came in {FETCH_SECONDS:,} s")
        if received > MOST_BYTES:
            raise http.client.HTTPException(f"it sends more than {MOST_BYTES:,} bytes")
    return digest.hexdigest()


def _unpack(archive: IO[bytes], folder: Path, progress: Callable[[], None]) -> None:
    """Only the three expected files: a member's own path is never used to write, nor a link followed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as plain:
            _inflate(archive, plain, progress)
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                members = {member.name: member for member in itertools.islice(tar, MOST_MEMBERS)}
                for name in MEMBERS:
                    _extract(tar, members[f"cifar-100-python/{name}"], folder / name)
    except Exception as error:  # a damaged archive raises nearly any exception there is
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise  # the disk's
        reason = one_line(error, SHOWN)
        raise DataError(f"The archive of CIFAR-100 is not as published ({reason}): fetch it by hand") from None


def _inflate(archive: IO[bytes], plain: IO[bytes], progress: Callable[[], None]) -> None:
    """Into a file, so that nothing in the archive can announce more than there is."""
    size = 0
    with gzip.open(archive) as packed:
        while block := packed.read(BLOCK):
            size += plain.write(block)
            progress()
            if size > MOST_BYTES:
                raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
    plain.seek(0)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, dest: Path) -> None:
    is_plain = member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and not member.issparse()
    content = tar.extractfile(member) if is_plain and 0 <= member.size <= MOST_BYTES else None
    if content is None:
        raise ValueError(f"{dest.name} is no file")
    with content, dest.open("wb") as file:
        shutil.copyfileobj(content, file)
