"""`python -m hvdtrain doctor`: what was found, what was expected, and the command that fixes it."""

import contextlib
import dataclasses
import json
import math
import os
import resource
import shlex
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Annotated

import pydantic
import tyro
from rich.console import Console
from rich.text import Text

from hvdtrain import processors
from hvdtrain.errors import WorldError
from hvdtrain.launch import keys, mpi
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.rendezvous import address_of
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS
from hvdtrain.tools.doctor import gather, launch, machine, software
from hvdtrain.tools.doctor.findings import Check, Findings, Interface, Rank, Status, Step, count
from hvdtrain.tools.doctor.gather import Checking
from hvdtrain.tools.rank_status import shown
from hvdtrain.untrusted import printable, whole_number

EXPECTED = {
    "torch": "it imports, if installed",
    "tensorflow": "it imports, if installed",
    "horovod": "one built by python -m hvdtrain build",
    "horovod.torch": "it imports, built against the torch that is installed",
    "horovod.tensorflow": "it imports, built against the TensorFlow that is installed",
    "Horovod's MPI": "a library that the loader finds, or none",
    "mpi4py's MPI": "Horovod's",
    "launchers": "those of Horovod's MPI",
    "SLURM's PMI": "a plugin that Horovod's MPI supports",
    "driver": "one for each GPU host",
    "CUDA": "a driver at least as new as torch's CUDA",
    "NCCL": "a Horovod built with NCCL, where there are GPUs",
    "GPUs": "one for each rank, or to each rank its own",
    "NCCL's interface": "one that is up and reaches the other hosts",
    "Gloo's interface": "one that is up and reaches the other hosts",
    "InfiniBand": "used where it is there",
    "locked memory": "unlimited over InfiniBand",
    "open files": "at least 4096",
    "cpus per task": "as many as the job requested",
    "OMP_NUM_THREADS": "at most the CPUs of the task",
    "binding": "a CPU for each rank",
    "hostname": "it resolves",
    "output folder": "it can be written",
    "free space": "at least 5 GB",
    "clock": "this century, and within 1 s of the other ranks",
    "fork under MPI": "no MPI over InfiniBand, or fork made safe",
    "two MPI packages": "at most one",
    "pip's cache": "no Horovod wheel of another build",
    "world": "the launcher's rank and size",
    "ports": "the ranks' own closed to other users: by a key, and a Horovod built by python -m hvdtrain build",
    "allreduce": "it ends, at the network's speed",
}
MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "skip": ("-", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
PLURALS: dict[Status, str] = {"ok": "ok", "warn": "to look at", "fail": "to fix", "skip": "left out"}
VARIABLES = (
    "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "RDMAV_FORK_SAFE",
    "IBV_FORK_SAFE",
)  # fmt: skip
UP = 0x1
MOST_BYTES = 2**16  # of a command line above this process
OUTPUT = Path("runs")


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Checks this machine, and inside a job step the step; exit code 1 where something is to be fixed."""

    json: Annotated[bool, tyro.conf.arg(help="the checks as JSON")] = False


def main(argv: Sequence[str]) -> int:
    """Checks, and rank 0 prints; 1 where a check fails. Raises TopologyError where the launcher contradicts itself."""
    from hvdtrain.core import flags

    options = flags.parse(Options, "python -m hvdtrain doctor", argv)
    started = time.monotonic()
    with shown(discover(os.environ), "looking at this machine") as show:
        findings = gather_findings(os.environ, Checking(show))
    if findings is None:
        return 0
    checks = judge(findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        at = findings.step.topology
        where = at.host if at.launcher == "alone" else f"{count(at.size, 'rank')} of {at.launcher}, seen from {at.host}"
        # Open MPI gives its ranks a terminal of their own, wherever their output goes in the end.
        console = Console(force_terminal=False if at.launcher == "mpirun" else None)
        report(checks, f"hvdtrain doctor: {where}, {time.monotonic() - started:.0f} s", console)
    return 1 if any(check.status == "fail" for check in checks) else 0


def judge(findings: Findings) -> list[Check]:
    """Every check, in the order of its group."""
    checks = [*software.checks(findings), *machine.checks(findings), *launch.checks(findings)]
    checks = [dataclasses.replace(check, expected=check.expected or EXPECTED[check.name]) for check in checks]
    groups = list(dict.fromkeys(check.group for check in checks if check.group not in {"traps", "step"}))
    return sorted(checks, key=lambda check: [*groups, "traps", "step"].index(check.group))


def gather_findings(environ: Mapping[str, str], checking: Checking | None = None) -> Findings | None:
    """All there is to judge, on rank 0; None on the other ranks, which only send theirs."""
    checking = checking or Checking()
    topology = discover(environ)
    mine = this_rank(topology, environ)
    step = this_step(topology, environ)
    framework = _to_join_with(step)
    others = [name for name in FRAMEWORK_WHEELS if name != framework]
    with ThreadPoolExecutor() as pool:
        installed = pool.submit(gather.software, environ, others, checking) if topology.is_rank_0 else None
        with checking(f"allreduce of the ranks ({framework})") if framework else contextlib.nullcontext():
            joined = gather.live(framework, dataclasses.asdict(mine), environ) if framework else gather.Joined()
    if installed is None:
        return None
    found = installed.result()
    if framework:
        imported = joined.framework or gather.framework(framework, environ)
        found = dataclasses.replace(found, frameworks=(imported, *found.frameworks))
    ranks = tuple(Rank.from_json(rank) for rank in joined.ranks) or (mine,)
    return Findings(found, ranks, dataclasses.replace(step, live=joined.live), time.time())


def _to_join_with(step: Step) -> str | None:
    """The framework with which the ranks shall join; None where it is plain that they cannot."""
    framework = next(filter(mpi.horovod_library, FRAMEWORK_WHEELS), None)
    if step.topology.launcher == "alone" or not framework or launch.mismatch(step, mpi.of_horovod(framework)):
        return None
    return framework


def report(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints the table, then every fix on lines of its own that are never folded, then how many there are of each."""
    _print(console, Text(title, style="bold"))
    rows = list(_rows(checks))
    name_width = max(len(names) for _, names, _ in rows)
    for group, members in groupby(rows, key=lambda row: row[0]):
        _print(console, Text(f"\n{group}", style="bold cyan"))
        for _, names, check in members:
            _print(console, _line(names.ljust(name_width), check, console.width))
    worst_first = sorted((check for check in checks if check.fix), key=lambda check: check.status != "fail")
    for fix in dict.fromkeys(check.fix for check in worst_first):
        fixed = [check for check in worst_first if check.fix == fix]
        mark, style = MARKS[fixed[0].status]
        _print(console, Text(f"\n{mark} {', '.join(check.name for check in fixed)}", style=style))
        _print(console, Text(f"    {fix}"))
    counts = [
        f"{sum(check.status == status for check in checks)} {plural}"
        for status, plural in PLURALS.items()
        if any(check.status == status for check in checks)
    ]
    _print(console, Text(f"\n{', '.join(counts)}", style="bold"))


def _rows(checks: Sequence[Check]) -> Iterator[tuple[str, str, Check]]:
    """Group, names and check of each line: neighbours that are left out for the same reason share one."""
    for _, group in groupby(checks, key=lambda check: (check.group, check.status, check.found)):
        members = list(group)
        if members[0].status == "skip":
            members, names = members[:1], ", ".join(check.name for check in members)
            yield members[0].group, names, members[0]
        else:
            yield from ((check.group, check.name, check) for check in members)


def _line(name: str, check: Check, width: int) -> Text:
    """One check, its text folded to the width of the terminal."""
    mark, style = MARKS[check.status]
    room = max(20, width - len(name) - 4)
    dim = "dim" if check.status == "skip" else ""
    lines = [(line, dim) for line in textwrap.wrap(check.found, room)]
    if check.status in {"warn", "fail"} and check.expected:
        lines += [(line, "dim") for line in textwrap.wrap(f"expected: {check.expected}", room)]
    text = Text.assemble(" ", (mark, style), " ", (name, dim))
    for number, (line, line_style) in enumerate(lines):
        text.append("\n" + " " * (len(name) + 4) if number else " ").append(line, style=line_style)
    return text


def _print(console: Console, text: Text) -> None:
    # A folded command could not be copied; and what rich takes for a name or number it would colour.
    console.print(text, soft_wrap=True, highlight=False)


def this_rank(topology: Topology, environ: Mapping[str, str]) -> Rank:
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


def this_step(topology: Topology, environ: Mapping[str, str]) -> Step:
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
