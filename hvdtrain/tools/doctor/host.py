"""What this rank has: its CPUs, limits, network and folder, and how it was started."""

import math
import os
import resource
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdtrain import processors
from hvdtrain.errors import WorldError
from hvdtrain.launch import keys, mpi
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.rendezvous import address_of
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.doctor import gather, launch
from hvdtrain.tools.doctor.findings import Interface, Rank, Step
from hvdtrain.untrusted import printable, whole_number

VARIABLES = (
    "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "RDMAV_FORK_SAFE",
    "IBV_FORK_SAFE",
)  # fmt: skip
UP = 0x1
MOST_BYTES = 2**16  # of a command line above this process
OUTPUT = Path("runs")


def rank(topology: Topology, environ: Mapping[str, str]) -> Rank:
    """What this process sees of its host."""
    memlock, nofile = resource.getrlimit(resource.RLIMIT_MEMLOCK), resource.getrlimit(resource.RLIMIT_NOFILE)
    unwritable, free = _folder(OUTPUT)
    return Rank(
        rank=topology.rank,
        local_size=topology.local_size,
        host=topology.host,
        cpus=gather.cpus(),
        cpus_of_host=os.cpu_count() or 1,
        quota=None if math.isinf(quota := processors.quota()) else quota,
        environ={name: printable(environ[name], 500) for name in VARIABLES if name in environ},
        visible_gpus=visible_gpus(environ),
        interfaces=tuple(_interface(name) for _, name in socket.if_nameindex()),
        default_route=_default_route(),
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


def step(topology: Topology, environ: Mapping[str, str]) -> Step:
    """How this process was started; its argv can be typed again."""
    inside_srun = topology.launcher == "srun"
    key, bad_key = _key(topology, environ)
    return Step(
        topology=topology,
        plugin=mpi.plugin_of(environ),
        gloo=environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo",
        key=key,
        bad_key=bad_key,
        nodes=(whole_number(environ.get("SLURM_STEP_NUM_NODES", "")) or 1) if inside_srun else 1,
        hosts=launch.hosts(topology, environ, _ancestors()),
        argv=tuple(sys.orig_argv),
        root=os.geteuid() == 0,
    )


def _key(topology: Topology, environ: Mapping[str, str]) -> tuple[str, str]:
    if topology.size == 1:
        return "", ""
    try:
        return keys.source(environ, topology), ""
    except WorldError as error:
        return "", str(error)


def _interface(name: str) -> Interface:
    flags = Path(f"/sys/class/net/{name}/flags")
    up = flags.is_file() and bool(int(flags.read_text(), 16) & UP)
    return Interface(name, up, address_of(name) or "")


def _default_route() -> str:
    table = Path("/proc/net/route")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.is_file() else []
    return next((row[0] for row in rows if row[1] == "00000000"), "")


def _infiniband() -> tuple[str, ...]:
    """The devices that have a live port."""
    states = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    return tuple(dict.fromkeys(state.parts[-4] for state in states if "ACTIVE" in state.read_text()))


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


def _folder(folder: Path) -> tuple[str, int]:
    """Why nothing can be written there ("" for it can), and the bytes that are free."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as trial:
            trial.write(b"x")
            trial.flush()
        return "", shutil.disk_usage(nearest).free
    except OSError as error:
        return f"{nearest}: {error.strerror}", 0


def _ancestors() -> list[list[str]]:
    """The command lines above this process that may be read, the nearest first."""
    found, pid = [], os.getppid()
    while pid > 1:
        try:
            with Path(f"/proc/{pid}/cmdline").open("rb") as file:
                argv = file.read(MOST_BYTES).decode(errors="replace").rstrip("\0").split("\0")
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        # Open MPI's and Horovod's launchers may run a shell with the whole command as one argument.
        found += [argv, *(_split(argument) for argument in argv if " " in argument)]
    return found


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []
