"""What the doctor knows before it judges: frozen values, gathered at the edge, compared by pure functions."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvdtrain.launch.mpi import Kind, Mpi
from hvdtrain.launch.topology import Topology

Status = Literal["ok", "skip", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("skip", "ok", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix` is for a shell: a command, or a comment where no command fixes it."""

    name: str
    group: str
    status: Status
    found: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of one judgement, not yet under a name."""

    status: Status
    found: str
    expected: str = ""
    fix: str = ""

    def named(self, name: str, group: str) -> Check:
        """The same as a line of the report."""
        return Check(name, group, self.status, self.found, self.expected, self.fix)


@dataclass(frozen=True)
class Framework:
    """What importing a framework, and Horovod for it, gave in a process of its own. "" is unknown or not there."""

    name: str
    version: str = ""
    error: str = ""
    horovod_built: bool = False
    horovod_error: str = ""
    nccl_built: bool = False
    cuda: str = ""
    nccl: str = ""
    keras: str = ""
    """The version of tf.keras."""


@dataclass(frozen=True)
class Program:
    """A launcher, and the MPI it belongs to; `on_path` where its bare name finds it."""

    name: str
    path: Path
    kind: Kind | None
    version: str = ""
    on_path: bool = True

    @property
    def command(self) -> str:
        """What to type for this launcher and no other."""
        return self.name if self.on_path else str(self.path)


@dataclass(frozen=True)
class Software:
    """What is installed, as rank 0 finds it."""

    frameworks: tuple[Framework, ...] = ()
    horovod: str = ""
    built_against: Mapping[str, str] = field(default_factory=dict)
    mpi: Mpi | None = None
    mpi4py: str = ""
    programs: tuple[Program, ...] = ()
    slurm_plugins: tuple[str, ...] | None = None
    packages: frozenset[str] = frozenset()
    cached_wheels: tuple[str, ...] = ()
    driver: str = ""
    driver_cuda: str = ""

    @property
    def has_horovod(self) -> bool:
        """Whether Horovod is there for any framework."""
        return any(framework.horovod_built for framework in self.frameworks)


@dataclass(frozen=True)
class Interface:
    """A network interface; `address` is its IPv4 address, "" for none."""

    name: str
    up: bool
    address: str


@dataclass(frozen=True)
class Rank:
    """What one rank sees of its host. Limits are in bytes and files, -1 unlimited; `quota` is of CPUs."""

    rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    cpus: tuple[int, ...] = (0,)
    cpus_of_host: int = 1
    quota: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    visible_gpus: int = 0
    interfaces: tuple[Interface, ...] = ()
    default_route: str = ""
    infiniband: tuple[str, ...] = ()
    memlock: int = -1
    memlock_hard: int = -1
    nofile: int = 4096
    nofile_hard: int = -1
    address: str = ""
    folder: str = "runs"
    unwritable: str = ""
    free_bytes: int = 10**12

    def granted(self, cpus: int) -> int:
        """As many of these CPUs as its container's quota leaves."""
        return math.ceil(min(cpus, self.quota or cpus))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Rank":
        """The rank that `dataclasses.asdict` and JSON have flattened."""
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        interfaces = tuple(Interface(**interface) for interface in found["interfaces"])
        return cls(**{**found, **lists, "interfaces": interfaces})


@dataclass(frozen=True)
class Live:
    """What the ranks did together. `size` is None where Horovod never reported it; `error` is why."""

    rank: int | None = None
    size: int | None = None
    error: str = ""
    over: str = ""
    clocks: tuple[float, ...] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Of one allreduce, by its bytes."""


@dataclass(frozen=True)
class Step:
    """How this process was started, and the command line that starts it again.

    `plugin` is the one of srun's step around it, be it that of another launcher's daemons.
    `gloo`: the user has chosen Gloo for Horovod, whatever MPI it has. `key`: where the ranks have their key from, ""
    where they have none; `bad_key` is why one is refused.
    """

    topology: Topology
    plugin: str | None = None
    gloo: bool = False
    key: str = ""
    bad_key: str = ""
    nodes: int = 1
    hosts: str = ""
    argv: tuple[str, ...] = ("python", "-m", "hvdtrain", "doctor")
    root: bool = False
    live: Live | None = None


@dataclass(frozen=True)
class Findings:
    """Everything there is to judge; `ranks` are all of the step, or rank 0 alone where they could not join."""

    software: Software
    ranks: tuple[Rank, ...]
    step: Step
    clock: float

    @property
    def rank_0(self) -> Rank:
        """The rank that judges."""
        return self.ranks[0]

    @property
    def hosts(self) -> int:
        """How many hosts the ranks have between them."""
        return max(self.step.nodes, len({rank.host for rank in self.ranks}))


def count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def over_ranks(findings: Findings, name: str, group: str, judge: Callable[[Rank], Verdict]) -> Check:
    """The worst of the ranks' verdicts, which names its rank and host where not all are alike."""
    verdicts = [judge(rank) for rank in findings.ranks]
    worst = max(verdicts, key=lambda verdict: SEVERITY.index(verdict.status))
    alike = [rank for rank, verdict in zip(findings.ranks, verdicts, strict=True) if verdict.status == worst.status]
    if len(alike) < len(verdicts):
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        where = f"rank {alike[0].rank} on {alike[0].host}{more}: "
        worst = dataclasses.replace(worst, found=where + worst.found)
    return worst.named(name, group)
