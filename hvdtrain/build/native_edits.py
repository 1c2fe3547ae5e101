"""Edits to Horovod's CMake files, as today's frameworks and tools want them."""

from collections.abc import Mapping

from hvdtrain.build.table import Edit

Release = tuple[int, ...]


def native_edits(frameworks: Mapping[str, Release], cuda: Release | None) -> tuple[Edit, ...]:
    """The edits for these frameworks (name -> release), with NCCL kernels where a CUDA release is given."""
    standard = 20 if frameworks.get("torch", ()) >= (2, 14) else 17
    edits = [*_FOR_SETUP, _BESIDE_PYTHON, _standard("CMakeLists.txt", standard)]
    if "torch" in frameworks:
        edits.append(_standard("horovod/torch/CMakeLists.txt", standard))
        if cuda is None:
            edits.append(_TORCH_WITHOUT_CUDA)
    if frameworks.get("tensorflow", ()) >= (2, 20):
        edits.append(_TENSORFLOW_WITHOUT_XLA)
    if cuda is not None:
        edits.append(_KERNELS_IN_CXX17)
    return tuple(edits)


def _standard(file: str, standard: int) -> Edit:
    return Edit(
        f"C++{standard}",
        file,
        "set(CMAKE_CXX_STANDARD 14)",
        f"set(CMAKE_CXX_STANDARD {standard})",
        "torch's headers want C++17, and C++20 from 2.14 on; TensorFlow's folder sets its own 17",
        "horovod PR 3998",
    )


_FOR_SETUP = (
    Edit(
        "as many jobs as asked for",
        "setup.py",
        "make_args = ['-j8'] if not os.environ.get('MAKEFLAGS') else []",
        "make_args = []",
        "eight compilers at a time need more memory than many machines have; CMAKE_BUILD_PARALLEL_LEVEL says how many",
    ),
    Edit(
        "verbose Ninja",
        "setup.py",
        "make_args.append('VERBOSE=1')",
        "make_args.append('-v')",
        "Ninja, which pip can install where make is missing, takes VERBOSE=1 for a target",
    ),
    Edit(
        "no debug information",
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        "the same -O3 without -g: compiles sooner, and the wheel is a tenth of the size",
    ),
)

_BESIDE_PYTHON = Edit(
    "MPI is looked for beside Python",
    "CMakeLists.txt",
    "set(CMAKE_CXX_EXTENSIONS OFF)\n",
    'set(CMAKE_CXX_EXTENSIONS OFF)\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")\n',
    "a wheel built against pip's MPI works in every environment that has it, not only where it was built",
)

_TORCH_WITHOUT_CUDA = Edit(
    "torch for the CPU",
    "cmake/Modules/FindPytorch.cmake",
    'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
    "set(Pytorch_CUDA FALSE)\n",
    "beside a partial CUDA folder a CUDA build of torch makes Horovod demand a whole toolkit",
)

_TENSORFLOW_WITHOUT_XLA = Edit(
    "TensorFlow without XLA operations",
    "horovod/tensorflow/CMakeLists.txt",
    'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
    "",
    "the wheel lacks headers that this file includes; it holds only the jit_compile form of allreduce, off by default",
    "horovod PR 4302",
)

_KERNELS_IN_CXX17 = Edit(
    "CUDA kernels in C++17",
    "horovod/common/ops/cuda/CMakeLists.txt",
    "set(CMAKE_CUDA_STANDARD 11)",
    "set(CMAKE_CUDA_STANDARD 17)",
    "nvcc 13 has given up C++11",
)
