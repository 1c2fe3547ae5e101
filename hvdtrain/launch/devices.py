"""Which GPU, how many threads and what memory a rank takes, for every framework."""

import ctypes
import functools
import itertools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from hvdtrain import processors
from hvdtrain.errors import DeviceError
from hvdtrain.launch.topology import Topology, launcher
from hvdtrain.untrusted import whole_number


def gpu_index(
    wanted: Literal["auto", "cpu", "cuda"], visible: int, topology: Topology, gpu_operations: bool
) -> int | None:
    """The index of this rank's GPU among the `visible` ones; None is the CPU.

    One visible GPU is the rank's own; with as many as there are ranks on the host, a rank takes its local
    rank's. `gpu_operations` says whether the engine averages what lies on a GPU. Raises DeviceError.
    """
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return None
    if not visible:
        raise DeviceError("--device cuda needs a visible GPU, got none; take --device cpu, or ask for a GPU.")
    if not gpu_operations:
        raise DeviceError(
            f"GPUs are visible ({visible}), but this Horovod averages on the CPU only; hide them (--device cpu, or "
            "CUDA_VISIBLE_DEVICES=), or, for PyTorch, build it for them: python -m hvdtrain build --gpu nccl"
        )
    if visible not in {1, topology.local_size}:
        raise DeviceError(
            f"{topology.host} shows {visible} GPUs to each of its {topology.local_size} ranks: it must show one for "
            "each rank, or to each rank its own; change the number of ranks or CUDA_VISIBLE_DEVICES."
        )
    return 0 if visible == 1 else topology.local_rank


@functools.cache
def driver_gpus(path: str | None, device_files: Path = Path("/dev")) -> int:
    """How many GPUs the driver shows to this process; without its nvidia-smi on the `path`, how many device files."""
    smi = shutil.which("nvidia-smi", path=path)
    if not smi:  # as in a container that was given the driver's libraries alone
        return len(list(device_files.glob("nvidia[0-9]*")))
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def visible_gpus(environ: Mapping[str, str], count: Callable[[str | None], int] = driver_gpus) -> int:
    """How many GPUs this process may use, found without a framework: those of the driver that CUDA_VISIBLE_DEVICES
    leaves. SLURM sets the variable on hosts that have none, too. `count` gives the driver's, from the PATH."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _named(named, sys.maxsize):
        return 0  # hidden: no need to call a slow driver
    present = count(environ.get("PATH"))
    return present if named is None else min(present, _named(named, present))


def _named(variable: str, present: int) -> int:
    """How many GPUs CUDA takes from its variable: those before the first that is not there, none where one is twice."""
    names = [name.strip() for name in variable.split(",")]
    valid = list(itertools.takewhile(lambda name: name.startswith(("GPU-", "MIG-")) or _index(name) < present, names))
    return len(valid) if len(set(valid)) == len(valid) else 0


def _index(name: str) -> float:
    return int(name) if name.isdecimal() else math.inf


def threads(
    cpus: int, cpus_of_host: int, topology: Topology, environ: Mapping[str, str], quota: float | None = None
) -> int | None:
    """How many threads a rank computes with, given the CPUs it may run on; None leaves the framework's choice.

    A task of srun's takes the CPUs it was promised, where it may run on as many; torchrun's ranks divide those of
    their agent. Elsewhere a rank that is bound to some of the host's CPUs has them for itself; unbound ranks
    divide the host's. A container's `quota`, in CPUs (left out: this process's), is divided by all ranks of the host.
    """
    if "OMP_NUM_THREADS" in environ:
        return None
    granted = math.ceil(min(cpus_of_host, processors.quota() if quota is None else quota))
    most = cpus if granted == cpus_of_host else max(1, min(cpus, granted // topology.local_size))
    # srun of SLURM 22.05 and later takes SRUN_CPUS_PER_TASK alone, and leaves the job's own variable as it was.
    promised = whole_number(environ.get("SRUN_CPUS_PER_TASK") or environ.get("SLURM_CPUS_PER_TASK") or "")
    cpus_of = launcher(topology.launcher).cpus_of
    if promised is not None and cpus_of:
        ranks = 1 if cpus_of == "rank" else topology.local_size
        return max(1, min(min(promised, cpus) // ranks, most))
    if cpus < cpus_of_host:
        return None if most == cpus else most
    return max(1, min(cpus // topology.local_size, most))


def keep_memory(environ: Mapping[str, str]) -> None:
    """Lets glibc's malloc keep what is freed, up to this process's peak, for its next step.

    By default an array of some MB goes back to the kernel, which zeroes its pages anew in the next step: of a ResNet50
    on CPUs that is 5 to 30 % of the time. Another malloc, or one with the user's own settings, stays as it is.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h
    own = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    if not own and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)
