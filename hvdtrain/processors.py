"""How many processors, and how much memory, this process may use, by its CPU affinity and its control groups; the most
memory that it has had; and how many of its job's processes the kernel has ended for lack of memory."""

import contextlib
import itertools
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files in which a control group of version 2, or of version 1, holds its quota and its period."""

LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The files in which a control group of version 2, or of version 1, holds its limit of memory in bytes."""
KILLS = ("memory.events.local", "memory.events", "memory.oom_control")
"""The files that count the processes of a control group which the kernel has ended for lack of memory: of version 2, of
version 2 before Linux 5.2, of version 1."""


def peak_memory() -> float:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def count() -> int:
    """The number of processors that this process may use, rounded up."""
    return math.ceil(min(len(os.sched_getaffinity(0)), quota()))


def quota(root: Path = Path("/")) -> float:
    """The smallest quota of this process's control groups and their parents, in processors; infinite without one."""
    granted = math.inf
    for group, names in itertools.product(itertools.chain(*_groups(root, "cpu")), FILES):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit, period = (int(part) for name in names for part in (group / name).read_text().split())
            granted = min(granted, limit / period) if limit > 0 else granted
    return granted


def memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process may use: all of the machine's, or as many as its control groups grant."""
    words = (root / "proc/meminfo").read_text().split()
    granted = int(words[words.index("MemTotal:") + 1]) << 10
    for group, name in itertools.product(itertools.chain(*_groups(root, "memory")), LIMITS):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            granted = min(granted, int((group / name).read_text()))
    return granted


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has ended for lack of memory: those of this process's control group and, where
    SLURM has made one for each task, of the tasks beside it."""
    own = [groups[0] for groups in _groups(root, "memory")]
    tasks = [task for group in own if group.name[:5] == "task_" for task in group.parent.glob("task_*")]
    return sum(map(_kills, tasks or own))


def _kills(group: Path) -> int:
    for name in KILLS:
        with contextlib.suppress(OSError, ValueError):
            words = (group / name).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def _groups(root: Path, controller: str) -> Iterator[list[Path]]:
    """The folders of this process's control group and its parents, in each hierarchy that may have the controller. In a
    container its own group may be mounted as the top."""
    own, mounts = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        controllers, path = line.split(":", 2)[1:]
        parts, tops = path.strip("/").split("/"), () if controllers else (mounts, mounts / "unified")
        for top in mounts.glob(f"*{controller}*") if controller in controllers.split(",") else tops:
            begin = next((i for i in range(len(parts)) if top.joinpath(*parts[i:]).is_dir()), len(parts))
            yield [top.joinpath(*parts[begin:end]) for end in range(len(parts), begin - 1, -1)]
