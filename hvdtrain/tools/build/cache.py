"""Finished wheels, which may lie where others write, and the hashes of the right ones, in this user's own folder."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hvdtrain import files
from hvdtrain.errors import BuildError
from hvdtrain.tools.build.plan import BuildPlan

MOST = 1 << 28  # bytes of a wheel; Horovod's has 2 MB


def own_folder(folder: Path) -> None:
    """Leaves a folder that this user alone has written to. Raises BuildError where others may have."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{folder} can be written by others than you: remove it, or set XDG_CACHE_HOME to a folder of your own."
        )


def finished(plan: BuildPlan, report: Callable[[str], None]) -> bytes | None:
    """The plan's wheel, with a hash that this user has recorded or given; None where it is to be built.

    What is returned is what was hashed: the file may change at any time. Raises BuildError for a wheel of unknown hash
    that somebody else put there.
    """
    try:
        wheel, owner = _read(plan.wheel)
    except FileNotFoundError:
        if plan.wheel_sha256:
            raise BuildError(
                f"--wheel-sha256 is for a finished wheel, and there is no {plan.wheel}: take the frameworks, MPI and "
                "compiler that its builder had, or leave --wheel-sha256 out to build."
            ) from None
        return None
    found = hashlib.sha256(wheel).hexdigest()
    if found == (plan.wheel_sha256 or _recorded(plan)):
        report(f"a finished wheel is there: {plan.wheel}")
        return wheel
    if plan.wheel_sha256:
        raise BuildError(f"{plan.wheel} has not the SHA-256 of --wheel-sha256: do not use it, and ask its builder.")
    if owner != os.geteuid():
        raise BuildError(
            f"{plan.wheel} belongs to user {owner} and could hold anything: give --wheel-sha256 as its builder's "
            "build printed it, or leave --wheel-dir out to build your own."
        )
    report(f"{plan.wheel} is not the one that you built: building it again")
    return None


def _recorded(plan: BuildPlan) -> str | None:
    """The SHA-256 of the wheel that this user built by this plan; None where there was none."""
    try:
        return files.read(plan.own / "sha256")
    except (FileNotFoundError, ValueError):
        return None


def keep(wheel: bytes, plan: BuildPlan) -> None:
    """Records a wheel's hash, then puts the wheel where it belongs."""
    _write(plan.own / "sha256", hashlib.sha256(wheel).hexdigest().encode())
    _write(plan.wheel, wheel)


def _read(path: Path) -> tuple[bytes, int]:
    """A plain file's bytes and its owner; a pipe or a device instead of it keeps nobody waiting. Raises BuildError."""
    refused = BuildError(f"{path} is not a plain file of at most {MOST >> 20} MiB: choose another --wheel-dir.")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise refused
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST:
            raise refused
        return file.read(MOST), found.st_uid


def _write(path: Path, data: bytes) -> None:
    with files.replacing(path, binary=True) as file:
        os.fchmod(file.fileno(), 0o644)  # others may share the folder, whatever the umask
        file.write(data)
