"""What a cluster is made of, as its state folder keeps it from one command to the next."""

import dataclasses
import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from mini import ClusterError
from mini.processes import Process

HEAD = "head"
SWITCH = "switch"
UP = "up"  # the command that brings the cluster up, while it does


def require_roots(folder: Path) -> None:
    """Raises ClusterError where anybody but root could replace a state folder, or put something into it."""
    _require_roots(folder.absolute())  # the links on the way too
    _require_roots(folder.resolve())


def _require_roots(folder: Path) -> None:
    for path in (*reversed(folder.parents), folder):
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        if found.st_uid:
            _refuse(f"{path} belongs to user {found.st_uid}", folder)
        sticky = found.st_mode & stat.S_ISVTX and path != folder  # like /tmp: what is root's in it stays so
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky and not stat.S_ISLNK(found.st_mode):
            _refuse(f"{path} can be written by others", folder)


def _refuse(what: str, folder: Path) -> NoReturn:
    raise ClusterError(f"{what}: --state must be a folder that root alone can change, got {folder}.")


@dataclasses.dataclass
class Cluster:
    """A cluster that is up, or nearly.

    `processes` has process 1 of each host, and the switch's. `networks` gives each interface the start of its
    addresses, the fabric last. `links` holds each node's rate and delay, `cut` the nodes whose link is cut.
    """

    folder: Path
    nodes: list[str]
    networks: dict[str, str]
    suffix: str
    shares: list[str]
    description: str
    cpu_quota: float | None = None
    """Processors that a node may use; None is as many as there are."""
    program: bool = False
    """Whether the switch is our program instead of the kernel's bridge."""
    links: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    cut: list[str] = dataclasses.field(default_factory=list)
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "Cluster":
        """The cluster of this state folder. Raises ClusterError where there is none."""
        try:
            fields: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
        except FileNotFoundError:
            raise ClusterError(
                f"no cluster in {folder}: slurm/minicluster up, or name its folder with --state."
            ) from None
        fields["processes"] = {name: Process(*record) for name, record in fields["processes"].items()}
        return cls(folder=folder, **fields)

    def save(self) -> None:
        """Into the state folder, at once and as a whole."""
        fields = dataclasses.asdict(self)
        del fields["folder"]
        part = self.folder / "cluster.json.part"
        part.write_text(json.dumps(fields, indent=1))
        part.replace(self.folder / "cluster.json")

    @property
    def hosts(self) -> list[str]:
        """The login host and the nodes."""
        return [HEAD, *self.nodes]

    @property
    def up(self) -> bool:
        """Whether anything of it runs."""
        return any(process.alive for process in self.processes.values())

    def address(self, host: str, interface: str) -> str:
        """A host's address on one of its interfaces."""
        return f"{self.networks[interface]}.{'0.1' if host == HEAD else f'1.{self.nodes.index(host) + 1}'}"

    def check(self, host: str) -> None:
        """Raises ClusterError where there is no such host."""
        if host not in self.hosts:
            raise ClusterError(f"no node {host!r}: this cluster has {', '.join(self.hosts)}.")

    def process(self, host: str) -> Process:
        """Process 1 of a host, or the switch's. Raises ClusterError where it is off."""
        process = self.processes.get(host)
        if not process or not process.alive:
            raise ClusterError(
                f"{host} is off: slurm/minicluster {'down, then up' if host == SWITCH else f'heal {host}'}."
            )
        return process
