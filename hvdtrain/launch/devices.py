"""Which GPU, how many threads and how much memory a rank uses, in every framework."""

import contextlib
import ctypes
import functools
import importlib.util
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hvdtrain import processors
from hvdtrain.errors import DeviceError
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import printable, whole_number

ROCM = {"ROCM_PATH", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "V100": 125e12}
"""FLOPs a second in bfloat16, of V100 in float16, of dense products, by a word of the GPU's name: NVIDIA's data sheets.
GH200 and GB200 have those of H200 and B200."""


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
def driver_gpus(path: str | None, root: Path = Path("/")) -> tuple[str, ...]:
    """The UUIDs of the GPUs that NVIDIA's driver shows; where it has no NVML, "" for each device file."""
    files = list(root.glob("dev/nvidia[0-9]*"))
    if not files and not shutil.which("nvidia-smi", path=path):  # WSL has no such files
        return ()  # to import NVML takes 50 ms
    with contextlib.suppress(Exception):  # of a driver
        return tuple(nvml_gpus()[1])
    return ("",) * len(files)


def amd_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """AMD's GPUs as ROCm's runtime names them, from the folders of the driver that it reads too."""
    found = []
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*"), key=lambda node: (len(node.name), node.name)):
        with contextlib.suppress(OSError, ValueError):  # a control group may hide it
            if int((node / "gpu_id").read_text()):  # else it is a processor
                unique = re.search(r"^unique_id (\d{1,20})$", (node / "properties").read_text(), re.MULTILINE)
                found.append(f"GPU-{int(unique[1]):016x}" if unique else "")
    return tuple(found)


def built_with(package: str, file: str, pattern: str) -> str | None:
    """The first group of the pattern in that file of an installed package, which is not imported; None where it is not
    there. A package may lie wherever Python finds it, as a centre's module does."""
    for folder in folders_of(package):
        if (folder / file).is_file() and (match := re.search(pattern, (folder / file).read_text(), re.MULTILINE)):
            return match[1]
    return None


def folders_of(package: str) -> list[Path]:
    """Where a package's files are, which is not imported; several where it has no __init__.py."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def torch_hip() -> str | None:
    """The release of HIP that PyTorch was built with, as in 6.4, where it was."""
    return built_with("torch", "version.py", r"^hip\b[^=]*=\s*'(\d+\.\d+)")


def visible_gpus(environ: Mapping[str, str], nvidia: Callable[[str | None], Sequence[str]] = driver_gpus) -> int:
    """How many GPUs this process may use, found without a framework: those of the driver that are in
    CUDA_VISIBLE_DEVICES, or in ROCm's variables. SLURM sets them on hosts without a GPU too. `nvidia` returns the UUIDs
    of all, given the PATH."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not re.match(r"\s*(\+?\d|GPU-|MIG-)", named):
        return 0  # hidden: no need to call a slow driver
    if present := nvidia(environ.get("PATH")):
        # A process takes one slice of a GPU.
        return 1 if (named or "").lstrip().startswith("MIG-") else len(visible_indices(named, present))
    if not (amd := amd_gpus()):
        return 0
    # The driver names a laptop's graphics too, which no framework computes with unless ROCm is there.
    has_rocm = torch_hip() or not environ.keys().isdisjoint(ROCM) or Path("/opt/rocm").is_dir()
    return len(visible_amd(environ, amd)) if has_rocm else 0


def visible_amd(environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """The indices of AMD's GPUs that ROCm's variables leave: HIP's counts among those of ROCm's runtime."""
    exposed = visible_indices(environ.get("ROCR_VISIBLE_DEVICES"), uuids)
    named = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    return [exposed[index] for index in visible_indices(named, [uuids[index] for index in exposed])]


def visible_indices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """The indices of the GPUs that CUDA takes from its variable: those before the first name of no GPU, or of another
    kind (index, UUID); none where one is there twice. A UUID may be cut short while it is that of one GPU. Of an index
    CUDA reads the first digits: 0x0 is 0."""
    if variable is None:
        return list(range(len(uuids)))
    found, names = list[int](), [name.strip() for name in variable.split(",")]
    for name in names:
        if names[0].startswith("GPU-"):
            fit = [i for i, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        else:
            number = re.match(r"\+?([0-9]{1,9})", name)
            fit = [int(number[1])] if number and int(number[1]) < len(uuids) else []
        if len(fit) != 1:
            break
        if fit[0] in found:
            return []
        found += fit
    return found


def nvml_gpus() -> tuple[Any, dict[str, Any]]:
    """NVIDIA's library, and by UUID its handles of the GPUs that no control group hides. Raises what it raises."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return nvml, {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}


def peak_flops(environ: Mapping[str, str]) -> float | None:
    """The FLOPs a second in 16 bits of the first whole GPU that NVML shows; None where they are not known."""
    with contextlib.suppress(Exception):  # of a driver
        nvml, handles = nvml_gpus()
        name = str(nvml.nvmlDeviceGetName(next(iter(handles.values()))))
        is_whole = not environ.get("CUDA_VISIBLE_DEVICES", "").lstrip().startswith("MIG-")
        return next((peak for word, peak in PEAKS.items() if word in name and is_whole), None)
    return None


def own_gpu(topology: Topology, environ: Mapping[str, str]) -> str:
    """The UUID of this rank's GPU by `gpu_index`, or of that of its slice (MIG); "" where NVML does not say it."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    with contextlib.suppress(Exception):  # of a driver
        nvml, handles = nvml_gpus()
        if named and named.lstrip().startswith("MIG-"):
            piece = nvml.nvmlDeviceGetHandleByUUID(named.split(",")[0].strip())
            return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(piece)))
        found = visible_indices(named, list(handles))
        return list(handles)[found[0 if len(found) == 1 else topology.local_rank]]
    return ""


def why_cpu(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A line for the log of a run that finds none of its host's GPUs; none where the variable is empty or -1."""
    named = environ.get("CUDA_VISIBLE_DEVICES") or "-1"
    if named == "-1" or visible_gpus(environ) or not (present := len(driver_gpus(environ.get("PATH")))):
        return ()
    why = f"CUDA_VISIBLE_DEVICES={printable(named)} names none of them: correct it, or unset it"
    return (f"on the CPU, though the driver has GPUs ({present}): {why}",)


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
    cpus_of = topology.row.cpus_of
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
