"""Which CUDA toolkit compiles Horovod for GPUs: one of this machine, or pip's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import BuildError

PIP_FROM = 13
"""The first release of CUDA whose compiler is on the Python package index; its older packages have no nvcc."""
ARCHITECTURES = ((0, "70,75,80,86,89,90"), (12.8, "70,75,80,86,89,90,100,120"), (13, "75,80,86,89,90,100,120"))
"""From a release of CUDA on: the GPUs that it compiles for, from V100 or T4 to Blackwell."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc with its headers and libraries."""

    home: str
    """Its folder, which has bin/nvcc and include/; "" stands for pip's packages."""
    release: str
    """As in 12.4; of pip's also a pattern, as in 13.*."""
    named: str
    """Where it was found, as in CUDA_HOME."""


def chosen(wanted: str, built_with: Mapping[str, str], there: Sequence[Toolkit]) -> Toolkit:
    """The toolkit for frameworks that were built with these releases of CUDA.

    `wanted` is what --cuda-home says: auto, pip or a folder, which is then the only toolkit `there`. Raises
    BuildError where the frameworks differ, or there is none of their major release.
    """
    majors = {name: int(float(release.split(".")[0])) for name, release in built_with.items()}
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
        if major and _major(there[0]) != major:
            raise BuildError(f"--cuda-home {wanted} is CUDA {there[0].release}, but {built}: take one of CUDA {major}.")
        return there[0]
    if wanted == "auto" and (of_major := next((each for each in there if _major(each) == major), None)):
        return of_major
    if major and major < PIP_FROM:
        raise BuildError(
            f"{built}, and pip has nvcc from CUDA {PIP_FROM} on: load your centre's module of CUDA {major}, or name a "
            f"toolkit with --cuda-home, or take --gpu none."
        )
    return Toolkit("", f"{built_with[framework]}.*" if framework else f"{PIP_FROM}.*", "pip")


def _major(toolkit: Toolkit) -> int:
    return int(toolkit.release.split(".")[0])


def describe(toolkit: Toolkit, nccl: str | None) -> str:
    """The toolkit and NCCL in one phrase: CUDA 12.4 in /opt/cuda, named by CUDA_HOME; NCCL in /opt/nccl."""
    where = f"in {toolkit.home}, from {toolkit.named}" if toolkit.home else "by pip, for the time of the build"
    return f"CUDA {toolkit.release} {where}; NCCL in {nccl}"


def links(toolkit: Toolkit) -> tuple[tuple[str, str], ...]:
    """(link, target) that make pip's toolkit look like a toolkit's folder."""
    if toolkit.home:
        return ()
    home = f"cuda/nvidia/cu{_major(toolkit)}"
    return (f"{home}/lib64", "lib"), (f"{home}/lib/libcudart.so", f"libcudart.so.{_major(toolkit)}")


def environment(toolkit: Toolkit, nccl: str | None) -> dict[str, str]:
    """The variables that Horovod's build reads. Raises BuildError where no NCCL was found."""
    if nccl is None:
        raise BuildError(
            f"no NCCL found: pip install nvidia-nccl-cu{_major(toolkit)}, or load your centre's module and set "
            "NCCL_HOME to its folder, which has include/nccl.h."
        )
    home = toolkit.home or f"{{work}}/cuda/nvidia/cu{_major(toolkit)}"
    release = float(".".join(toolkit.release.replace("*", "0").split(".")[:2]))
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": home,
        "CUDA_HOME": home,
        "HOROVOD_NCCL_HOME": nccl,
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": [names for since, names in ARCHITECTURES if release >= since][-1],
    }
