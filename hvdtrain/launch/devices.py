"""Which GPU, how many threads and how much memory a rank uses, in every framework."""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import math
import re
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
    """The index of this rank's GPU among the `visible` ones; None for the CPU.

    A single visible GPU is this rank's. Where as many are visible as there are ranks on the host, the local rank is the
    index. `gpu_operations`: whether the engine can average arrays on a GPU. Raises DeviceError.
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
    """How many GPUs the driver has; where nvidia-smi is not on the `path`, how many device files there are. AMD's GPUs
    count where PyTorch is built for them."""
    smi = shutil.which("nvidia-smi", path=path)
    if not smi:  # as in a container that has only the driver's libraries
        return len(list(device_files.glob("nvidia[0-9]*"))) or (amd_gpus() if torch_hip() else 0)
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def amd_gpus(root: Path = Path("/")) -> int:
    """How many of AMD's GPUs its driver shows: its nodes with an identity, which CPUs lack."""
    found = 0
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id") if (root / "dev/kfd").exists() else ():
        with contextlib.suppress(OSError):  # a cgroup hides it
            found += path.read_text().strip() != "0"
    return found


def torch_hip() -> str | None:
    """The release of HIP that PyTorch was built with, as in 6.4, where it was; read without importing it."""
    spec = importlib.util.find_spec("torch")
    for path in (Path(folder, "version.py") for folder in (spec and spec.submodule_search_locations) or ()):
        if path.is_file() and (match := re.search(r"^hip\b[^=]*=\s*'(\d+\.\d+)", path.read_text(), re.MULTILINE)):
            return match[1]
    return None


def visible_gpus(environ: Mapping[str, str], count: Callable[[str | None], int] = driver_gpus) -> int:
    """How many GPUs this process may use, found without a framework: those of the driver that are in
    CUDA_VISIBLE_DEVICES and in AMD's variables. SLURM sets these on hosts without a GPU too. `count` returns the
    driver's number, given the PATH."""
    variables = (f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR"))  # ROCm reads all three
    named = [environ[name] for name in variables if name in environ]
    if not all(_named(each, sys.maxsize) for each in named):
        return 0  # hidden: no need to call a slow driver
    present = count(environ.get("PATH"))
    return min((present, *(_named(each, present) for each in named)))


def _named(variable: str, present: int) -> int:
    """How many GPUs CUDA takes from its variable: those before the first that does not exist; none where one is there
    twice."""

    def exists(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < present)

    valid = list(itertools.takewhile(exists, (name.strip() for name in variable.split(","))))
    return len(valid) if len(set(valid)) == len(valid) else 0


def threads(
    cpus: int, cpus_of_host: int, topology: Topology, environ: Mapping[str, str], quota: float | None = None
) -> int | None:
    """How many threads a rank computes with, given the CPUs on which it may run; None: the framework decides.

    A task of srun's uses the CPUs that SLURM has promised it, where it may run on as many; torchrun's ranks share those
    of their agent. Elsewhere a rank that is bound to some of the host's CPUs uses them alone, and ranks that are not
    bound share the host's. All ranks of a host share a container's `quota` of CPUs (left out: this process's).
    """
    if "OMP_NUM_THREADS" in environ:
        return None
    granted = math.ceil(min(cpus_of_host, processors.quota() if quota is None else quota))
    most = cpus if granted == cpus_of_host else max(1, min(cpus, granted // topology.local_size))
    # srun of SLURM 22.05 and later reads SRUN_CPUS_PER_TASK alone, and does not change the job's own variable.
    promised = whole_number(environ.get("SRUN_CPUS_PER_TASK") or environ.get("SLURM_CPUS_PER_TASK") or "")
    cpus_of = launcher(topology.launcher).cpus_of
    if promised is not None and cpus_of:
        ranks = 1 if cpus_of == "rank" else topology.local_size
        return max(1, min(min(promised, cpus) // ranks, most))
    if cpus < cpus_of_host:
        return None if most == cpus else most
    return max(1, min(cpus // topology.local_size, most))


def keep_memory(environ: Mapping[str, str]) -> None:
    """Makes glibc's malloc keep freed memory for the next step, up to this process's peak.

    By default it returns an array of some MB to the kernel, which zeroes its pages again in the next step. That takes
    5 to 30 % of the time of a ResNet50 on CPUs. Another malloc, or one with settings of the user's, is not changed.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h
    is_configured = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get(
        "GLIBC_TUNABLES", ""
    )
    if not is_configured and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)
