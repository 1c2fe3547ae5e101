"""What the doctor looks up: packages, launchers, this host, this step, and what child processes report of frameworks.

Nothing is judged here.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from hvdtrain import processors
from hvdtrain.errors import WorldError
from hvdtrain.files import read_bytes
from hvdtrain.installed import version_of
from hvdtrain.launch import ancestors, keys, mpi, slurm
from hvdtrain.launch.devices import folders_of, own_gpu, visible_gpus
from hvdtrain.launch.rendezvous import address_of
from hvdtrain.launch.topology import LAUNCHERS, Kind, Topology, discover, prefixes
from hvdtrain.terminal import Show, hidden
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS, MPI_WHEELS, framework_version, output_of
from hvdtrain.tools.doctor import gpus, launch
from hvdtrain.tools.doctor.findings import (
    MARK,
    Executable,
    Findings,
    Framework,
    Interface,
    JobStep,
    Live,
    Rank,
    Software,
)
from hvdtrain.untrusted import printable, program, whole_number

NO_END = "no end within"
CHILD = "hvdtrain.tools.doctor.child"
MOST_BYTES = 2**20  # of Horovod's record of its build
SECONDS = 60  # that a child may take: the first import of TensorFlow from a busy file system takes half of it
MPI4PY = (
    "import sys; sys.path[:] = filter(None, sys.path); import mpi4py; mpi4py.rc.initialize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)

VARIABLES = (
    "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "RDMAV_FORK_SAFE",
    "IBV_FORK_SAFE",
)  # fmt: skip
UP = 0x1
MOST_ABOVE = 100  # ancestors of this process
OUTPUT = Path("runs")


class Checking:
    """Shows the names of what is being checked. Any thread may call it."""

    def __init__(self, show: Show = hidden) -> None:
        self._show = show
        self._names: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Shows the name until the block ends."""
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
    """What is installed, and those frameworks, which child processes import at the same time."""

    def checked(name: str, find: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def work() -> Any:
            with checking(name):
                return find(*arguments, environ)

        return pool.submit(work)

    with ThreadPoolExecutor() as pool:
        frameworks = [checked(f"import of {name}", framework_of, name) for name in names]
        mpi4py = checked("mpi4py", _mpi4py)
        kinds = {name: row.mpi for row in LAUNCHERS if not row.needs_rendezvous for name in row.programs}
        programs = [checked(name, _programs, name, kind) for name, kind in kinds.items()]
        plugins = checked("SLURM's plugins", _slurm_plugins)
        wheels = checked("pip's cache", _cached_wheels)
        found = (mpi.of_horovod(name) for name in FRAMEWORK_WHEELS)
        return Software(
            frameworks=tuple(future.result() for future in frameworks),
            horovod=version_of("horovod") or "",
            built_against=_built_against(),
            mpi=next(filter(None, found), None),
            mpi4py=mpi4py.result(),
            programs=tuple(chain.from_iterable(future.result() for future in programs)),
            slurm_plugins=plugins.result(),
            mpi_packages=frozenset(filter(version_of, MPI_WHEELS.values())),
            cached_wheels=wheels.result(),
        )


def framework_of(name: str, environ: Mapping[str, str]) -> Framework:
    """The framework and Horovod for it, as a child process imports them."""
    version, built = framework_version(name), mpi.horovod_library(name) is not None
    if not version:
        return Framework(name, horovod_built=built)
    reported, wrong = child(program(CHILD, name), environ)
    if "version" not in reported:
        return Framework(name, version, error=wrong, horovod_built=built)
    error = "" if "nccl_built" in reported else wrong
    return Framework(name, horovod_error=error, horovod_built=built, **_fields_of(Framework, reported))


KNOWN_HERE = ("name", "error", "horovod_built", "horovod_error")
Reported = create_model(  # type: ignore[call-overload]
    "Reported",
    __config__=ConfigDict(strict=True, extra="ignore", allow_inf_nan=False),
    ranks=(list[Rank], []),
    **{it.name: (it.type, None) for it in (*fields(Framework), *fields(Live)) if it.name not in KNOWN_HERE},
)
"""What child processes may report of the frameworks and of the ranks."""


def _fields_of(kind: type[Framework] | type[Live], reported: Mapping[str, Any]) -> dict[str, Any]:
    """The reported values of that class's fields."""
    return {field.name: reported[field.name] for field in fields(kind) if field.name in reported}


def child(command: Sequence[str], environ: Mapping[str, str], given: str = "") -> tuple[dict[str, Any], str]:
    """The marked values that the program printed, and one line on what went wrong, "" for nothing."""
    try:
        # No open file is closed: one may be the launcher's connection (PMI_FD).
        with subprocess.Popen(
            command,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            close_fds=False,
        ) as process:
            try:
                out, err = process.communicate(given, timeout=SECONDS)
                wrong = _last_error(err, process.returncode) if process.returncode else ""
            except subprocess.TimeoutExpired:
                wrong = f"{NO_END} {SECONDS} s{_busy(process.pid)}"
                process.kill()
                out, _ = process.communicate()
    except OSError as error:
        return {}, f"{command[0]}: {error.strerror}"
    reported: dict[str, Any] = {}
    for line in out.splitlines():
        _, mark, values = line.partition(MARK)
        reported |= values_in(values) if mark else {}
    return reported, wrong


def _busy(pid: int) -> str:
    """Where the machine is too busy to judge: that, and for how long the process waited for a processor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        if waited > SECONDS / 4:
            return f", {launch.BUSY}: {waited:.0f} s of them it waited for a processor"
    return ""


def values_in(text: str) -> dict[str, Any]:
    """The values of `Reported` in a line that a child printed; none where another process's output damaged the line."""
    try:
        reported = Reported.model_validate_json(text)
    except ValidationError:
        return {}
    return {name: getattr(reported, name) for name in reported.model_fields_set}


def _last_error(err: str, code: int) -> str:
    """The most informative line of stderr: an error's, or the last one with text."""
    lines = [line.strip() for line in err.splitlines() if re.search("[A-Za-z]{3}", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|\*\*\*|.*\b(abort|Abort\w+\.)", line)]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return " ".join([*(errors or lines or [""])[-1].split(), f"({ended})"])


def _built_against() -> dict[str, str]:
    """The versions of the frameworks with which Horovod was built, by framework."""
    names = {"pytorch": "torch", "tensorflow": "tensorflow"}
    for folder in folders_of("horovod"):
        with contextlib.suppress(OSError, ValueError):  # pydantic's too, for damaged JSON, however deep
            record = TypeAdapter(dict[str, Any]).validate_json(read_bytes(folder / "metadata.json", MOST_BYTES))
            return {names[key]: str(version) for key, version in record.items() if key in names}
    return {}


def _mpi4py(environ: Mapping[str, str]) -> str:
    """The name and version of mpi4py's MPI; "" where mpi4py is not installed."""
    if not importlib.util.find_spec("mpi4py"):
        return ""
    output = output_of([sys.executable, "-c", MPI4PY], environ)
    return " ".join((output or "does not load an MPI").split())[:200]


def _programs(name: str, kind: Kind | None, environ: Mapping[str, str]) -> list[Executable]:
    """The launcher of that name on the PATH, and the one beside this Python where that is another."""
    on_path = shutil.which(name, path=environ.get("PATH", ""))
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    # With the variables of a rank, a launcher might try to join the others.
    outside = {key: value for key, value in environ.items() if not key.startswith(prefixes())}
    found = []
    for path in dict.fromkeys(path for path in (on_path, beside) if path):
        output = output_of([path, "--version"], outside) or "" if kind else ""
        release = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", output)
        version = release[0] if release else ""
        found.append(Executable(name, Path(path), launch.kind_in(output), version, path == on_path))
    return found


def _slurm_plugins(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    output = output_of(["srun", "--mpi=list"], environ)
    return None if output is None else tuple(sorted(set(slurm.PLUGIN_NAMES.findall(output))))


def _cached_wheels(environ: Mapping[str, str]) -> tuple[str, ...]:
    output = output_of(program("pip", "cache", "list", "horovod"), environ) or ""
    return tuple(re.findall(r"\S+\.whl", output))


def gather_findings(environ: Mapping[str, str], checking: Checking) -> Findings | None:
    """Everything that the checks judge, on rank 0; None on the other ranks, which only report to it.

    All ranks call it: they join over Horovod where they can.
    """
    topology = discover(environ)
    mine = this_rank(topology, environ)
    step = this_step(topology, environ)
    framework = next(filter(mpi.horovod_library, FRAMEWORK_WHEELS), None)
    if topology.is_alone or (framework and launch.mismatch(step, mpi.of_horovod(framework))):
        framework = None  # no launcher or Horovod that serves the ranks
    others = [name for name in FRAMEWORK_WHEELS if name != framework]
    reported, wrong = dict[str, Any](), ""
    with ThreadPoolExecutor() as pool:
        installed = pool.submit(software, environ, others, checking) if topology.is_rank_0 else None
        if framework:
            with checking(f"allreduce of the ranks ({framework})"):
                given = json.dumps(dataclasses.asdict(mine))
                reported, wrong = child(program(CHILD, framework, "--join"), environ, given)
    if installed is None:
        return None
    found = installed.result()
    if framework:
        step = dataclasses.replace(step, live=Live(error=wrong, **_fields_of(Live, reported)))
        imported = Framework(framework, horovod_built=True, **_fields_of(Framework, reported))
        if "nccl_built" not in reported:  # Horovod did not import
            imported = framework_of(framework, environ)
        found = dataclasses.replace(found, frameworks=(imported, *found.frameworks))
    return Findings(found, tuple(reported.get("ranks", ())) or (mine,), step, time.time())


def this_rank(topology: Topology, environ: Mapping[str, str]) -> Rank:
    """What this process sees of its host."""
    memlock, nofile = resource.getrlimit(resource.RLIMIT_MEMLOCK), resource.getrlimit(resource.RLIMIT_NOFILE)
    unwritable, free = _folder(OUTPUT)
    return Rank(
        rank=topology.rank,
        local_size=topology.local_size,
        host=topology.host,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpus_of_host=os.cpu_count() or 1,
        quota=None if math.isinf(quota := processors.quota()) else quota,
        environ={name: printable(environ[name], 500) for name in VARIABLES if name in environ},
        visible_gpus=visible_gpus(environ),
        gpu=own_gpu(topology, environ),
        gpus=gpus.shown(),
        interfaces=tuple(_interface(name) for _, name in socket.if_nameindex()),
        infiniband=_infiniband(),
        memlock=memlock[0],
        memlock_hard=memlock[1],
        nofile=nofile[0],
        nofile_hard=nofile[1],
        address=_address(topology.host),
        folder=str(OUTPUT.absolute()),
        unwritable=unwritable,
        free_bytes=free,
    )


def this_step(topology: Topology, environ: Mapping[str, str]) -> JobStep:
    """How this process was started."""
    key = bad_key = ""
    if topology.size > 1:
        try:
            key = keys.source(environ, topology)
        except WorldError as error:
            bad_key = str(error)
    return JobStep(
        topology=topology,
        plugin=mpi.plugin_of(environ),
        gloo=environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo",
        key=key,
        bad_key=bad_key,
        nodes=(whole_number(environ.get("SLURM_STEP_NUM_NODES", "")) or 1) if topology.row.by_slurm else 1,
        hosts=launch.hosts(topology, environ, _command_lines()),
        argv=tuple(sys.orig_argv),
        root=os.geteuid() == 0,
    )


def _interface(name: str) -> Interface:
    flags = Path(f"/sys/class/net/{name}/flags")
    up = flags.is_file() and bool(int(flags.read_text(), 16) & UP)
    return Interface(name, up, address_of(name) or "")


def _infiniband() -> tuple[str, ...]:
    """The InfiniBand devices that have an active port."""
    states = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    return tuple(dict.fromkeys(state.parts[-4] for state in states if "ACTIVE" in state.read_text()))


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


def _folder(folder: Path) -> tuple[str, int]:
    """Why nothing can be written there, "" where it can, and the number of free bytes."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as trial:
            trial.write(b"x")
            trial.flush()
        return "", shutil.disk_usage(nearest).free
    except OSError as error:
        return f"{nearest}: {error.strerror}", 0


def _command_lines() -> list[list[str]]:
    """The command lines of this process's ancestors, as far as they can be read, the nearest first."""
    found = []
    for pid in ancestors.above(os.getppid(), MOST_ABOVE):
        argv = ancestors.arguments_of(pid)
        found.append(argv)
        # Open MPI's and Horovod's launchers may run a shell with the whole command as one argument.
        for argument in argv:
            with contextlib.suppress(ValueError):
                found += [shlex.split(argument)] if " " in argument else []
    return found
