"""What the doctor knows before it judges, as frozen values, and how a check of them is declared."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from hvdtrain.launch.mpi import Kind, Mpi
from hvdtrain.launch.topology import Topology

Status = Literal["ok", "skip", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("skip", "ok", "warn", "fail")
Group = Literal["frameworks", "MPI", "GPU", "network", "limits", "cpus", "host", "traps", "step"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The parts of the report, in its order."""
MARK = "hvdtrain-doctor "
"""What stands before the values that a child of the doctor prints."""
NO_KERAS = "none"
TITLES = {"tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix` is for a shell: a command, or a comment where no command fixes it."""

    name: str
    group: Group
    status: Status
    found: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of a check, with what was expected where the check alone does not say it."""

    status: Status
    found: str
    expected: str = ""
    fix: str = ""


ok, skip, warn, fail = (partial(Verdict, status) for status in get_args(Status))


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
    def torch(self) -> Framework:
        """What is known of PyTorch."""
        return next((framework for framework in self.frameworks if framework.name == "torch"), Framework("torch"))

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
    infiniband: tuple[str, ...] = ()
    memlock: int = -1
    memlock_hard: int = -1
    nofile: int = 4096
    nofile_hard: int = -1
    address: str = ""
    folder: str = "runs"
    unwritable: str = ""
    free_bytes: int = 10**12

    @property
    def usable_interfaces(self) -> list[Interface]:
        """Those that are up and have an address."""
        return [it for it in self.interfaces if it.up and it.address]

    def granted(self, cpus: int) -> int:
        """As many of these CPUs as its container's quota leaves."""
        return math.ceil(min(cpus, self.quota or cpus))


@dataclass(frozen=True)
class Live:
    """What the ranks did together. `size` is None where Horovod never reported it; `error` is why."""

    rank: int | None = None
    size: int | None = None
    error: str = ""
    over: str = ""
    clocks: Sequence[float] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)
    """The seconds of one allreduce, by its bytes."""


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


Judge = Callable[..., Verdict]
CHECKS: list[tuple[Group, Callable[[Findings], Iterator[Check]]]] = []
"""What gives the lines of each check."""


def check(
    name: str, group: Group, expected: str, each: Literal["framework", "rank"] | None = None
) -> Callable[[Judge], Judge]:
    """Makes a check of a function that takes the findings and returns a verdict.

    With `each`, the function takes a framework or a rank too. Each framework has a line of its own;
    of the ranks' verdicts the worst is shown.
    """

    def line(verdict: Verdict, framework: str = "") -> Check:
        names = {"framework": framework, "title": TITLES.get(framework, framework)}
        expectation = verdict.expected or expected.format(**names)
        return Check(name.format(**names), group, verdict.status, verdict.found, expectation, verdict.fix)

    def add(judge: Judge) -> Judge:
        def lines(findings: Findings) -> Iterator[Check]:
            if each == "framework":
                frameworks = findings.software.frameworks
                yield from (line(judge(findings, framework), framework.name) for framework in frameworks)
            elif each == "rank":
                yield line(_worst(findings, [judge(findings, rank) for rank in findings.ranks]))
            else:
                yield line(judge(findings))

        CHECKS.append((group, lines))
        return judge

    return add


def judge(findings: Findings) -> list[Check]:
    """The lines of all checks, group by group."""
    by_group = sorted(CHECKS, key=lambda check: GROUPS.index(check[0]))
    return [line for _, lines in by_group for line in lines(findings)]


def _worst(findings: Findings, verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of the ranks' verdicts, which names its rank and host where not all are alike."""
    found = max(verdicts, key=lambda verdict: SEVERITY.index(verdict.status))
    alike = [rank for rank, verdict in zip(findings.ranks, verdicts, strict=True) if verdict.status == found.status]
    if len(alike) == len(verdicts):
        return found
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    where = f"rank {alike[0].rank} on {alike[0].host}{more}: "
    return dataclasses.replace(found, found=where + found.found)
