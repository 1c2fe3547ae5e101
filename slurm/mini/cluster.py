"""Brings a cluster up and down, and its nodes."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from mini import ClusterError, config, network, quota
from mini.processes import ENVIRON, Process, end, inside, wait
from mini.state import HEAD, SWITCH, UP, Cluster, require_roots

HIDDEN = ("/tmp", "/dev/shm", "/run")
Waiting = subprocess.Popen[str]


def claim(folder: Path) -> None:
    """Makes the state folder, anew where a cluster of before the last restart is in it. Raises ClusterError."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "cluster.json").is_file():
            raise ClusterError(f"{folder} holds what is no minicluster's: name another folder with --state.")
        if Cluster.load(folder).up:
            raise ClusterError(
                f"a cluster is up in {folder}: slurm/minicluster down, or give another folder to --state."
            )
        shutil.rmtree(folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    require_roots(folder)  # again: in /tmp another may have made it in between
    folder.chmod(0o755)


def up(cluster: Cluster, machine: config.Machine, user: pwd.struct_passwd) -> None:
    """All of it, every node idle. Where that fails or is interrupted, nothing stays."""
    claim(cluster.folder)
    with _undone_on_failure(cluster):
        cluster.processes[UP] = Process.of(os.getpid())
        cluster.save()
        config.write(cluster, machine, user)
        network.start_switch(cluster)
        waiting = {host: _start(cluster, host) for host in cluster.hosts}
        for host, node in waiting.items():
            _join(cluster, host, node)
            if host == HEAD:
                _until_served(cluster, HEAD)  # before the nodes register: they try again only after seconds
        for host in cluster.nodes:
            _until_served(cluster, host)
        del cluster.processes[UP]
        cluster.save()


@contextlib.contextmanager
def _undone_on_failure(cluster: Cluster) -> Iterator[None]:
    def interrupted(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        yield
    except BaseException:
        cluster.processes.pop(UP, None)
        down(cluster)
        raise


def down(cluster: Cluster) -> None:
    """Nothing of it stays: no process, mount, link or file."""
    if UP in cluster.processes:
        # It may have started what it has not written down: it cleans up after itself.
        end([cluster.processes.pop(UP)], signal.SIGTERM)
        if not cluster.folder.exists():
            return
        cluster = Cluster.load(cluster.folder)
    switch = cluster.processes.pop(SWITCH, None)
    end(list(cluster.processes.values()))
    end([switch] if switch else [])
    quota.forget(cluster)
    shutil.rmtree(cluster.folder)


def power_off(cluster: Cluster, host: str) -> None:
    """Kills everything on a host at once, and closes no connection."""
    if host in cluster.processes and cluster.processes[host].alive:
        network.block(cluster, host, True)
        end([cluster.processes[host]])


def cut(cluster: Cluster, host: str) -> None:
    """Has a host's link silently drop every packet."""
    cluster.process(host)
    network.block(cluster, host, True)
    cluster.cut = sorted({*cluster.cut, host})
    cluster.save()


def heal(cluster: Cluster, host: str) -> None:
    """Boots a host that is off, restores its link, and waits until SLURM has it back."""
    if not cluster.processes[host].alive:
        _join(cluster, host, _start(cluster, host))
    network.block(cluster, host, False)
    cluster.cut = [other for other in cluster.cut if other != host]
    cluster.save()
    for served in cluster.hosts if host == HEAD else [host]:
        if cluster.processes[served].alive and served not in cluster.cut:
            _until_served(cluster, served)


def states(cluster: Cluster) -> dict[str, str]:
    """Every node's state in SLURM; nothing while slurmctld does not respond."""
    lines = _query(cluster, "sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
    rows = [line.split() for line in lines]
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in cluster.nodes}


def _served(cluster: Cluster, host: str) -> bool:
    """Whether SLURM works there. Raises ClusterError where the host is dead."""
    if not cluster.processes[host].alive:
        raise ClusterError(f"{host} ended as it started")
    if host == HEAD:
        return "is UP" in _query(cluster, "scontrol", "ping")
    state = states(cluster).get(host, "*")
    return not state.endswith("*") and not state.startswith(("down", "unknown"))


def _until_served(cluster: Cluster, host: str) -> None:
    try:
        wait(lambda: _served(cluster, host), 60, f"SLURM on {host}")
    except ClusterError as error:
        raise ClusterError(f"{error}: {_last_lines(cluster, host)}") from None


def _query(cluster: Cluster, *arguments: str) -> str:
    return inside(cluster.process(HEAD), *arguments, check=False)


def _start(cluster: Cluster, host: str) -> Waiting:
    """A host's namespaces and folders; it continues when _join writes to it, and ends with this process."""
    flags = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--propagation=private")
    with (cluster.folder / "log" / f"{host}.log").open("a") as log:
        return subprocess.Popen(
            [
                "unshare",
                *flags,
                str(Path(__file__).with_name("init.sh")),
                host,
                _daemon(host),
                str(cluster.folder),
                *cluster.shares,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=ENVIRON,
            cwd="/",
            start_new_session=True,
        )


def _join(cluster: Cluster, host: str, node: Waiting) -> None:
    """Connects a host that waits, and lets it continue."""
    assert node.stdin and node.stdout
    pid = node.stdout.readline()
    if not pid:
        raise ClusterError(f"{host} did not start: {_last_lines(cluster, host)}")
    cluster.processes[host] = Process.of(int(pid))
    cluster.save()
    quota.hold(cluster, host, int(pid))
    network.connect(cluster, host)
    node.stdin.write("\n")
    node.stdin.close()
    node.stdout.close()


def _daemon(host: str) -> str:
    return "slurmctld" if host == HEAD else "slurmd"


def _last_lines(cluster: Cluster, host: str) -> str:
    """The ends of a host's logs."""
    logs = [
        cluster.folder / "log" / name for name in (f"{_daemon(host)}.log", f"{_daemon(host)}.{host}.log", f"{host}.log")
    ]
    ends = [log.read_text(errors="replace").strip().splitlines()[-3:] for log in logs if log.is_file()]
    return " | ".join(line for end_of_log in ends for line in end_of_log) or "its logs are empty"
