"""Processors of a node's own: a control group of the kernel's holds everything on it to a quota."""

import functools
import os
from pathlib import Path

from mini import ClusterError
from mini.processes import wait
from mini.state import HEAD, Cluster

PERIOD = 10_000  # microseconds, a tenth of the kernel's own: a node that has used its part up is not away for long
LEAST = 0.1  # of a processor: the kernel takes no quota below 1 ms


def require(nodes: int, processors: float) -> None:
    """Raises ClusterError where this machine cannot give so many nodes that many processors each."""
    there = len(os.sched_getaffinity(0))
    if not LEAST <= processors <= there / nodes:
        rule = f"from {LEAST:g} to {there / nodes:g}, with {nodes} nodes on {there} processors"
        raise ClusterError(f"--cpu-quota must be {rule}, got {processors:g}.")
    _controller()


@functools.cache
def _controller() -> tuple[Path, bool]:
    """Where the kernel's cpu controller is, and whether it is that of version 2. Raises ClusterError."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        folder = Path(mount.split()[4])
        kind, _, options = system.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return folder, False
        if kind == "cgroup2" and "cpu" in (folder / "cgroup.controllers").read_text().split():
            return folder, True
    raise ClusterError("--cpu-quota needs the kernel's cpu controller (cgroup), which is not mounted here: drop it.")


def _group(cluster: Cluster, host: str) -> Path:
    return _controller()[0] / f"minicluster{str(cluster.folder).replace('/', '-')}-{host}"


def hold(cluster: Cluster, host: str, pid: int) -> None:
    """Holds a process, and whatever it starts from now on, to the quota of a node. Raises ClusterError."""
    if host == HEAD or cluster.cpu_quota is None:
        return
    group, quota = _group(cluster, host), round(cluster.cpu_quota * PERIOD)
    top, second = _controller()
    limits = {"cpu.max": f"{quota} {PERIOD}"} if second else {"cpu.cfs_period_us": PERIOD, "cpu.cfs_quota_us": quota}
    try:
        if second:
            (top / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir(exist_ok=True)
        for name, value in {**limits, "cgroup.procs": pid}.items():
            (group / name).write_text(str(value))
    except OSError as error:
        raise ClusterError(f"--cpu-quota: {error.filename or group}: {error.strerror}; drop it.") from None


def forget(cluster: Cluster) -> None:
    """Removes the groups of a cluster whose processes have ended."""
    for node in cluster.nodes if cluster.cpu_quota is not None else ():
        wait(functools.partial(_removed, _group(cluster, node)), 60, f"the last process of {node} to end")


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process has not left it yet
        return False
    return True
