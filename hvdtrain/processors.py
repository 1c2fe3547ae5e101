"""How many processors this process may use, by its CPU affinity and the quotas of its control groups."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files in which a control group of version 2, or of version 1, holds its quota and its period."""


def count() -> int:
    """The number of processors that this process may use, rounded up."""
    return math.ceil(min(len(os.sched_getaffinity(0)), quota()))


def quota(root: Path = Path("/")) -> float:
    """The smallest quota of this process's control groups and their parents, in processors; infinite without one."""
    granted = math.inf
    for group in _groups(root):
        for names in FILES:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limit, period = (int(part) for name in names for part in (group / name).read_text().split())
                granted = min(granted, limit / period) if limit > 0 else granted
    return granted


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups. In a container its own group may be mounted as the top."""
    own, mounts = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        controllers, path = line.split(":", 2)[1:]
        parts, tops = path.strip("/").split("/"), () if controllers else (mounts, mounts / "unified")
        for top in mounts.glob("*cpu*") if "cpu" in controllers.split(",") else tops:
            begin = next((i for i in range(len(parts)) if top.joinpath(*parts[i:]).is_dir()), len(parts))
            yield from (top.joinpath(*parts[begin:end]) for end in range(begin, len(parts) + 1))
