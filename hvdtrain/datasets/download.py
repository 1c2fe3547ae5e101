"""Fetches CIFAR-100 once for all processes of a machine."""

import contextlib
import fcntl
import hashlib
import http.client
import os
import shutil
import ssl
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
MEMBERS = ("train", "test", "meta")
TIMEOUT_SECONDS = 30
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


def download_cifar100(dest: Path, url: str = URL, md5: str = MD5) -> Path:
    """The folder dest/cifar-100-python, fetched unless it is there: complete or not at all.

    Processes that ask for it at once fetch it once. Raises DataError where it cannot be fetched or written.
    """
    folder = dest / "cifar-100-python"
    if folder.is_dir():
        return folder
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with _locked(dest / ".cifar-100.lock"):
            if not folder.is_dir():
                _fetch_and_unpack(url, md5, folder)
    except OSError as error:
        remedy = "free some space or choose another folder with HVDTRAIN_DATA"
        raise DataError(f"{dest} cannot take CIFAR-100 ({error.strerror or error}): {remedy}") from None
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Some network file systems have no locks; the final rename is safe without.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_and_unpack(url: str, md5: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cifar-100-") as scratch:
        archive, unpacked = Path(scratch, "archive"), Path(scratch, folder.name)
        _fetch(url, archive)
        _check(archive, md5, url)
        _unpack(archive, unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another machine was first
                raise


def _fetch(url: str, archive: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except NETWORK_ERRORS as error:
        reason = getattr(error, "reason", None) or error
        remedy = f"fetch it where there is a network, and unpack it into {archive.parents[1]}"
        raise DataError(f"{url} cannot be fetched ({reason}): {remedy}") from None


def _check(archive: Path, md5: str, url: str) -> None:
    with archive.open("rb") as file:
        digest = hashlib.md5(usedforsecurity=False)
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != md5:
        raise DataError(f"{url} has the MD5 {digest.hexdigest()}, not {md5}: try again, or fetch it by hand")


def _unpack(archive: Path, folder: Path) -> None:
    """Only the three expected files: a member's own path is never used to write."""
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for name in MEMBERS:
                member = tar.extractfile(f"cifar-100-python/{name}")
                if member is None:
                    raise KeyError(f"{name} is no file")
                with (folder / name).open("wb") as file:
                    shutil.copyfileobj(member, file)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"The archive of CIFAR-100 is not as published ({error}): fetch it by hand") from None
