"""Fixtures that many tests use: plans, Python processes, small disks."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm

from hvdtrain.core import plan as plans
from hvdtrain.core import recipe
from hvdtrain.core.plan import Plan
from hvdtrain.engines import frameworks
from hvdtrain.run.setup import load_dataset

LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI", "PRTE", "PALS_", "SLURM_", "MPI_", "TORCHELASTIC_")


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """make_plan("linear:full-batch", size=2, epochs=3) makes a plan as a run does."""

    def make(name: str = "linear", size: int = 1, **overrides: object) -> Plan:
        loaded = recipe.load(name, overrides)
        dataset = load_dataset(loaded)
        return plans.make(loaded, size, dataset, frameworks.network_of(loaded, "torch", dataset))

    return make


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """python("-m", "hvdtrain", …, environ={…}) runs Python in tmp_path, without a launcher, and waits for its end."""
    return functools.partial(_finished, tmp_path, [sys.executable])


@pytest.fixture
def warm_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Like `python`, but forked from a process that has already loaded hvdtrain, though no framework."""
    return functools.partial(_finished, tmp_path, warm.command("hvdtrain"))


def _finished(
    folder: Path, command: list[str], *argv: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return subprocess.run(
        [*command, *argv],
        env={**clean, "COLUMNS": "80", **(environ or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def mounted(disk: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of that size in memory."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a full disk needs `mount`")
    if done.returncode:
        reason = f"a full disk needs the right to mount a tmpfs ({done.stderr.strip()})"
        pytest.skip(f"{reason}: run the tests as root, outside of a container that refuses it")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk
