"""What compiles Horovod for GPUs: a CUDA toolkit of this machine, or pip's; a ROCm for AMD's, with PyTorch alone."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import BuildError

PIP_FROM = 13
"""The first release of CUDA whose compiler is on the Python package index; its older packages have no nvcc."""
OF_CUDA = ((0, "70,75,80,86,89,90"), (12.8, "70,75,80,86,89,90,100,120"), (13, "75,80,86,89,90,100,120"))
"""From a release of CUDA on: the GPUs that it compiles for, from V100 or T4 to Blackwell."""
OF_ROCM = ((0, "gfx908;gfx90a"), (6, "gfx908;gfx90a;gfx942;gfx1100"), (7, "gfx908;gfx90a;gfx942;gfx950;gfx1100"))
"""From a release of HIP on: the GPUs that it compiles for, MI100, MI200, MI300, MI350 and Radeon RX 7900."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc or a hipcc with its headers and libraries."""

    home: str
    """Its folder, which has bin/ and include/; "" stands for pip's packages of CUDA."""
    release: str
    """As in 12.4, of HIP too; of pip's CUDA also a pattern, as in 13.*."""
    named: str
    """Where it was found, as in CUDA_HOME."""

    def __str__(self) -> str:
        where = f"in {self.home}, from {self.named}" if self.home else "by pip, for the time of the build"
        return f"{self.release} {where}"

    def architectures(self, table: Sequence[tuple[float, str]]) -> str:
        """The GPUs of the table that it compiles for."""
        release = float(".".join(self.release.replace("*", "0").split(".")[:2]))
        return [names for since, names in table if release >= since][-1]


def cuda(wanted: str, built_with: Mapping[str, str], there: Sequence[Toolkit]) -> Toolkit:
    """The toolkit for frameworks that were built with these releases of CUDA.

    `wanted` is what --cuda-home says: auto, pip or a folder, which is then the only toolkit `there`. Raises
    BuildError where the frameworks differ, or there is none of their major release.
    """
    majors = {name: _major(release) for name, release in built_with.items()}
    if len(set(majors.values())) > 1:
        raise BuildError(
            f"torch was built with CUDA {built_with['torch']} and tensorflow with {built_with['tensorflow']}, whose "
            "libraries take the same folders: make an environment for each, and build in one with "
            "python -m hvdtrain build --frameworks torch, and in the other with "
            "python -m hvdtrain build --frameworks tensorflow."
        )
    framework, major = next(iter(majors.items()), ("", 0))
    built = f"{framework} was built with CUDA {built_with.get(framework)}"
    if wanted not in {"auto", "pip"}:
        if not there:
            raise BuildError(
                f"--cuda-home {wanted} must hold include/cuda_runtime.h and a bin/nvcc that runs: name such a folder, "
                "or auto, or pip."
            )
        if major and _major(there[0].release) != major:
            raise BuildError(f"--cuda-home {wanted} is CUDA {there[0].release}, but {built}: take one of CUDA {major}.")
        return there[0]
    if wanted == "auto" and (of_major := next((each for each in there if _major(each.release) == major), None)):
        return of_major
    if major and major < PIP_FROM:
        raise BuildError(
            f"{built}, and pip has nvcc from CUDA {PIP_FROM} on: load your centre's module of CUDA {major}, or name a "
            f"toolkit with --cuda-home, or take --gpu none."
        )
    return Toolkit("", f"{built_with[framework]}.*" if framework else f"{PIP_FROM}.*", "pip")


def _major(release: str) -> int:
    return int(release.partition(".")[0])


def links(toolkit: Toolkit) -> tuple[tuple[str, str], ...]:
    """(link, target) that make pip's toolkit look like a toolkit's folder."""
    if toolkit.home:
        return ()
    home = f"cuda/nvidia/cu{_major(toolkit.release)}"
    return (f"{home}/lib64", "lib"), (f"{home}/lib/libcudart.so", f"libcudart.so.{_major(toolkit.release)}")


def cuda_environment(toolkit: Toolkit, nccl: str | None) -> dict[str, str]:
    """The variables that Horovod's build reads. Raises BuildError where no NCCL was found."""
    if nccl is None:
        raise BuildError(
            f"no NCCL found: pip install nvidia-nccl-cu{_major(toolkit.release)}, or load your centre's module and set "
            "NCCL_HOME to its folder, which has include/nccl.h."
        )
    home = toolkit.home or f"{{work}}/cuda/nvidia/cu{_major(toolkit.release)}"
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": home,
        "CUDA_HOME": home,
        "HOROVOD_NCCL_HOME": nccl,
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": toolkit.architectures(OF_CUDA),
    }


def rocm_obstacle(frameworks: Collection[str], built_with: str | None, there: Toolkit | None) -> str | None:
    """Why no build for ROCm is possible, and what to do; None where it is. PyTorch was `built_with` this HIP."""
    if "tensorflow" in frameworks:
        return "TensorFlow's Horovod is not built for ROCm: build with --frameworks torch"
    if not built_with:
        return "torch was not built with ROCm: install its ROCm build, as from https://pytorch.org/get-started"
    if there is None:
        return "no ROCm was found: load its module, or set ROCM_PATH to the folder with include/hip/hip_version.h"
    if _major(built_with) != _major(there.release):
        return f"torch was built with HIP {built_with}, but {there.home} has {there.release}: load the ROCm of torch"
    return None


def rocm_environment(toolkit: Toolkit) -> dict[str, str]:
    """The variables that Horovod's build, torch and hipcc read."""
    return {
        "HOROVOD_GPU": "ROCM",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        **dict.fromkeys(("HOROVOD_ROCM_HOME", "ROCM_HOME", "ROCM_PATH"), toolkit.home),
        "HIP_PLATFORM": "amd",
        "PYTORCH_ROCM_ARCH": toolkit.architectures(OF_ROCM),
    }
