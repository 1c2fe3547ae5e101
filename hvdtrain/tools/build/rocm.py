"""What a build for AMD's GPUs needs, which is for PyTorch alone."""

from collections.abc import Collection

from hvdtrain.tools.build.cuda import Toolkit

ARCHITECTURES = ((0, "gfx908;gfx90a"), (6, "gfx908;gfx90a;gfx942;gfx1100"), (7, "gfx908;gfx90a;gfx942;gfx950;gfx1100"))
"""From a release of HIP on: the GPUs that it compiles for, MI100, MI200, MI300, MI350 and Radeon RX 7900."""


def obstacle(frameworks: Collection[str], built_with: str | None, there: Toolkit | None) -> str | None:
    """Why no build for ROCm is possible, and what to do; None where it is. PyTorch was `built_with` this HIP."""
    if "tensorflow" in frameworks:
        return "TensorFlow's Horovod is not built for ROCm: build with --frameworks torch"
    if not built_with:
        return "torch was not built with ROCm: install its ROCm build, as from https://pytorch.org/get-started"
    if there is None:
        return "no ROCm was found: load its module, or set ROCM_PATH to the folder with include/hip/hip_version.h"
    if built_with.split(".")[0] != there.release.split(".")[0]:
        return f"torch was built with HIP {built_with}, but {there.home} has {there.release}: load the ROCm of torch"
    return None


def environment(it: Toolkit) -> dict[str, str]:
    """The variables that Horovod's build, torch and hipcc read."""
    release = int(it.release.split(".")[0])
    return {
        "HOROVOD_GPU": "ROCM",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        **dict.fromkeys(("HOROVOD_ROCM_HOME", "ROCM_HOME", "ROCM_PATH"), it.home),
        "HIP_PLATFORM": "amd",
        "PYTORCH_ROCM_ARCH": [names for since, names in ARCHITECTURES if release >= since][-1],
    }
