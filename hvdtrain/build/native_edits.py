"""Edits to Horovod's CMake files, as today's frameworks and tools want them."""

from collections.abc import Mapping

from hvdtrain.build.table import Edit

Release = tuple[int, ...]


def native_edits(frameworks: Mapping[str, Release], cuda: Release | None) -> tuple[Edit, ...]:
    """The edits for these frameworks (name -> release), with NCCL kernels where a CUDA release is given."""
    edits = [*_FOR_SETUP, _BESIDE_PYTHON, _standard("CMakeLists.txt", 17), _GLOO, _CORE]
    if "torch" in frameworks:
        standard = 20 if frameworks["torch"] >= (2, 14) else 17
        edits += [_standard("horovod/torch/CMakeLists.txt", standard), _core_for("PYTORCH", "Pytorch", "torch")]
        edits += [*_TORCH_HEADERS, *_TORCH_QUERIED_ONCE]
        if cuda is None:
            edits += _TORCH_WITHOUT_GPU
    if "tensorflow" in frameworks:
        edits += [_core_for("TF", "Tensorflow", "tensorflow"), *_TENSORFLOW_SHARES]
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


def _core_for(variable: str, package: str, folder: str) -> Edit:
    return Edit(
        f"the compiled core for {folder}",
        f"horovod/{folder}/CMakeLists.txt",
        f"SHARED ${{SOURCES}} ${{{variable}_SOURCES}}",
        f"SHARED $<TARGET_OBJECTS:horovod_core_${{{package}_CXX11}}> ${{{variable}_SOURCES}}",
        "the core includes no header of a framework, so one compilation serves both",
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

_CORE = Edit(
    "the core is compiled once",
    "CMakeLists.txt",
    "#MXNet\n",
    """\
# The core, once for each string ABI that a framework was built with
foreach(CXX11 IN ITEMS TRUE FALSE)
    if("${CXX11}" STREQUAL "${Pytorch_CXX11}" OR "${CXX11}" STREQUAL "${Tensorflow_CXX11}")
        add_library(horovod_core_${CXX11} OBJECT ${SOURCES})
        set_target_properties(horovod_core_${CXX11} PROPERTIES POSITION_INDEPENDENT_CODE ON
                              UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8 UNITY_BUILD_RELOCATABLE ON)
        target_include_directories(horovod_core_${CXX11} PRIVATE ${EIGEN_INCLUDE_PATH} ${FLATBUFFERS_INCLUDE_PATH})
        target_compile_definitions(horovod_core_${CXX11} PRIVATE _GLIBCXX_USE_CXX11_ABI=$<BOOL:${CXX11}>
                                   Eigen=horovod_eigen)
    endif()
endforeach()
#MXNet
""",
    "each framework's extension compiled it again, and each of its files the same headers; its Eigen gets a namespace "
    "of its own, since TensorFlow's file in the same library holds another release of Eigen, with another alignment",
)

_GLOO = Edit(
    "Gloo's files share their headers",
    "CMakeLists.txt",
    "    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)\n",
    """\
    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)
    set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16 UNITY_BUILD_RELOCATABLE ON)
    set_source_files_properties("${PROJECT_SOURCE_DIR}/third_party/gloo/gloo/allreduce_local.cc"
                                TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
""",
    "compiling each file by itself takes three times as long; allreduce_local.cc uses a name that allreduce.cc has",
)

_TORCH_HEADERS = (
    Edit(
        "torch's tensors alone",
        "horovod/torch/adapter_v2.h",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/types.h>\n",
        "the rest of torch's C++ interface takes half of the compiler's time, and is not used",
    ),
    Edit(
        "torch's tensors and their binding alone",
        "horovod/torch/mpi_ops_v2.cc",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/csrc/utils/pybind.h>\n#include <torch/types.h>\n",
        "the rest of torch's C++ interface takes a third of the compiler's time, and is not used",
    ),
)

_TENSORFLOW_SHARES = (
    Edit(
        "TensorFlow's Eigen is TensorFlow's",
        "horovod/tensorflow/CMakeLists.txt",
        'set(EIGEN_INCLUDE_PATH "${TF_EIGEN_INCLUDE_PATH}" PARENT_SCOPE)\n',
        "",
        "the core and torch's files take Horovod's own, whether TensorFlow is there or not",
    ),
    Edit(
        "one Gloo",
        "horovod/tensorflow/CMakeLists.txt",
        "    set(Tensorflow_CXX17 TRUE)\n",
        "    set(Tensorflow_CXX17 FALSE)\n",
        "a second Gloo, in C++17 for TensorFlow, is not wanted where the first one is in C++17",
    ),
)

_FIND_TORCH = "cmake/Modules/FindPytorch.cmake"


def _query(python: str, variable: str) -> str:
    """A question to Python in Horovod's CMake files."""
    return f"""\
execute_process(COMMAND ${{PY_EXE}} -c "{python}"
                OUTPUT_VARIABLE {variable} OUTPUT_STRIP_TRAILING_WHITESPACE)
"""


def _query_extension(attribute: str) -> str:
    return (
        "import os,sys; sys.stdout=sys.stderr=open(os.devnull,'w'); "
        "from torch.utils.cpp_extension import ${Pytorch_EXT} as ext; e = ext('', []); "
        f"print(';'.join(e.{attribute}), file=sys.__stdout__)"
    )


_TORCH_QUERIED_ONCE = (
    Edit(
        "torch's folders in one import",
        _FIND_TORCH,
        _query(_query_extension("include_dirs"), "Pytorch_INCLUDE_DIRS")
        + _query(_query_extension("library_dirs"), "Pytorch_LIBRARY_DIRS")
        + _query(_query_extension("libraries"), "_Pytorch_LIBRARIES"),
        _query(
            _query_extension("include_dirs").replace("e.include_dirs", "map(os.path.realpath, e.include_dirs)")
            + "; print(';'.join(e.library_dirs), ';'.join(e.libraries), "
            "sys.modules['torch'].compiled_with_cxx11_abi(), sep=chr(10), file=sys.__stdout__)",
            "Pytorch_OUTPUT",
        )
        + r"""string(REPLACE ";" "|" Pytorch_OUTPUT "${Pytorch_OUTPUT}")
string(REPLACE "\n" ";" Pytorch_OUTPUT "${Pytorch_OUTPUT}")
list(POP_FRONT Pytorch_OUTPUT Pytorch_INCLUDE_DIRS Pytorch_LIBRARY_DIRS _Pytorch_LIBRARIES Pytorch_CXX11)
string(REPLACE "|" ";" Pytorch_INCLUDE_DIRS "${Pytorch_INCLUDE_DIRS}")
string(REPLACE "|" ";" Pytorch_LIBRARY_DIRS "${Pytorch_LIBRARY_DIRS}")
string(REPLACE "|" ";" _Pytorch_LIBRARIES "${_Pytorch_LIBRARIES}")
""",
        "CMake imports torch for each of seven questions: seconds each, and nothing compiles meanwhile; and a torch "
        "that is a link into another environment is the same text to ccache",
    ),
    Edit(
        "torch's string ABI in the same import",
        _FIND_TORCH,
        _query("import torch; print(torch.torch.compiled_with_cxx11_abi())", "Pytorch_CXX11"),
        "",
        "as above",
    ),
)


def _query_home(name: str, attribute: str) -> str:
    return _query(
        f"import torch; from torch.utils.cpp_extension import {name}_HOME; "
        f"print(True if ((torch.version.{attribute} is not None) and ({name}_HOME is not None)) else False)",
        f"Pytorch_{name}",
    )


_TORCH_WITHOUT_GPU = (
    Edit(
        "torch for the CPU",
        _FIND_TORCH,
        _query_home("CUDA", "cuda"),
        "set(Pytorch_CUDA FALSE)\n",
        "beside a partial CUDA folder a CUDA build of torch makes Horovod demand a whole toolkit",
    ),
    Edit(
        "torch without ROCm",
        _FIND_TORCH,
        _query_home("ROCM", "hip"),
        "set(Pytorch_ROCM FALSE)\n",
        "one import of torch less; this builder knows no ROCm",
    ),
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
