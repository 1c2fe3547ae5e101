"""What the doctor finds, as frozen values, and how a check of them is declared."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.topology import Kind, Topology

Status = Literal["ok", "skip", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("skip", "ok", "warn", "fail")
Group = Literal["frameworks", "MPI", "GPU", "network", "limits", "cpus", "host", "traps", "step"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The groups of checks, in the order of the report."""
MARK = "hvdtrain-doctor "
"""What stands before the values that a child of the doctor prints."""
NO_KERAS = "none"
TITLES = {"tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix` is text for a shell: a command, or a comment where no command fixes it."""

    name: str
    group: Group
    status: Status
    found: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `expected` may be left out where the check's own text is enough."""

    status: Status
    found: str
    expected: str = ""
    fix: str = ""


ok, skip, warn, fail = (partial(Verdict, status) for status in get_args(Status))
NOTHING = skip("")
"""The verdict of a check that has no line in the report."""


@dataclass(frozen=True)
class Framework:
    """A framework, and Horovod for it, as a process found them that imported both. "" is unknown or not there."""

    name: str
    version: str = ""
    error: str = ""
    horovod_built: bool = False
    horovod_error: str = ""
    nccl_built: bool = False
    cuda: str = ""
    nccl: str = ""
    keras: str = ""
    """The version of the Keras that is tf.keras."""


@dataclass(frozen=True)
class Program:
    """A launcher and its MPI; `on_path` where the shell finds it by its name."""

    name: str
    path: Path
    kind: Kind | None
    version: str = ""
    on_path: bool = True

    @property
    def command(self) -> str:
        """What to type to get this launcher and no other."""
        return self.name if self.on_path else str(self.path)


@dataclass(frozen=True)
class Software:
    """What is installed on rank 0's host."""

    frameworks: tuple[Framework, ...] = ()
    horovod: str = ""
    built_against: Mapping[str, str] = field(default_factory=dict)
    mpi: Mpi | None = None
    mpi4py: str = ""
    programs: tuple[Program, ...] = ()
    slurm_plugins: tuple[str, ...] | None = None
    mpi_packages: frozenset[str] = frozenset()
    cached_wheels: tuple[str, ...] = ()

    @property
    def has_horovod(self) -> bool:
        """Whether Horovod was built for any framework."""
        return any(framework.horovod_built for framework in self.frameworks)


@dataclass(frozen=True)
class Interface:
    """A network interface; `address` is its IPv4 address, "" where it has none."""

    name: str
    up: bool
    address: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML shows it. `ecc_errors`: uncorrected, since the driver began. `link`: to its node's GPUs."""

    uuid: str
    name: str = ""
    persistence: int | None = None
    ecc_errors: int | None = None
    ecc_ever: int | None = None
    link: str = ""
    nvlink_errors: int = 0
    driver: str = ""


@dataclass(frozen=True)
class Rank:
    """A rank and its host, as that rank sees it.

    `memlock` is in bytes and `nofile` in files, -1 for unlimited. `quota` is the number of CPUs that a container may
    use, `unwritable` the reason why nothing can be written to `folder`. `gpu` is the UUID of the rank's GPU, or of that
    of which it has a slice; `gpus` are those of the host that no control group hides from it.
    """

    rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    cpus: tuple[int, ...] = (0,)
    cpus_of_host: int = 1
    quota: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    visible_gpus: int = 0
    gpu: str = ""
    gpus: tuple[Gpu, ...] = ()
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
        """The interfaces that are up and have an address."""
        return [it for it in self.interfaces if it.up and it.address]

    def granted(self, cpus: int) -> int:
        """How many of that number of CPUs the container's quota lets the rank use."""
        return math.ceil(min(cpus, self.quota or cpus))


@dataclass(frozen=True)
class Live:
    """What the ranks measured together. `size` is None where Horovod never reported it; `error` says why."""

    rank: Annotated[int, Field(ge=0)] | None = None
    size: Annotated[int, Field(ge=1)] | None = None
    error: str = ""
    over: str = ""
    """MPI, Gloo or NCCL."""
    clocks: Sequence[float] = ()
    """The time on each rank's clock at the same moment, in seconds since 1970."""
    seconds: Mapping[Annotated[int, Field(gt=0, strict=False)], Annotated[float, Field(gt=0)]] = field(
        default_factory=dict
    )
    """The seconds of one allreduce, by its bytes."""
    connections: Sequence[tuple[int, int, Annotated[str, Field(pattern=r"^[\w /-]{1,60}$")]]] = ()
    """Two ranks, and NCCL's transport between them."""


@dataclass(frozen=True)
class Step:
    """How this process was started, and the command line that starts it again."""

    topology: Topology
    plugin: str | None = None
    """The plugin of the srun step around this process, which may have started another launcher's daemons."""
    gloo: bool = False
    """Whether the user has chosen Gloo for Horovod."""
    key: str = ""
    """The source of the ranks' key; "" where they have none."""
    bad_key: str = ""
    """Why the key is refused."""
    nodes: int = 1
    hosts: str = ""
    argv: tuple[str, ...] = ("python", "-m", "hvdtrain", "doctor")
    root: bool = False
    live: Live | None = None


@dataclass(frozen=True)
class Findings:
    """Everything that the checks judge; `ranks` holds all of the step, or rank 0 alone where they could not join."""

    software: Software
    ranks: tuple[Rank, ...]
    step: Step
    clock: float

    @property
    def rank_0(self) -> Rank:
        """The rank that makes the report."""
        return self.ranks[0]

    @property
    def hosts(self) -> int:
        """The number of hosts on which the ranks run."""
        return max(self.step.nodes, len({rank.host for rank in self.ranks}))


Judge = Callable[..., Verdict]
CHECKS: list[tuple[Group, Callable[[Findings], Iterator[Check]]]] = []
"""Each check's group, and the function that makes its lines of the report."""


def check(
    name: str, group: Group, expected: str, each: Literal["framework", "rank"] | None = None
) -> Callable[[Judge], Judge]:
    """A decorator that adds a function to the checks. The function takes the findings and returns a verdict.

    With `each`, the function also takes a framework or a rank. Each framework has a line of its own; of the ranks'
    verdicts, the report shows the worst.
    """

    def add(judge: Judge) -> Judge:
        def lines(findings: Findings) -> Iterator[Check]:
            if each == "framework":
                judged = [(judge(findings, framework), framework.name) for framework in findings.software.frameworks]
            elif each == "rank":
                judged = [(_worst(findings, [judge(findings, rank) for rank in findings.ranks]), "")]
            else:
                judged = [(judge(findings), "")]
            for it, framework in judged:
                names = {"framework": framework, "title": TITLES.get(framework, framework)}
                expectation = it.expected or expected.format(**names)
                yield Check(name.format(**names), group, it.status, it.found, expectation, it.fix)

        CHECKS.append((group, lines))
        return judge

    return add


def judge(findings: Findings) -> list[Check]:
    """The lines of all checks that found something, group by group."""
    by_group = sorted(CHECKS, key=lambda check: GROUPS.index(check[0]))
    return [line for _, lines in by_group for line in lines(findings) if line.found]


def _worst(findings: Findings, verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of the ranks' verdicts. It names the rank and its host where the verdicts differ."""
    worst = max(verdicts, key=lambda verdict: SEVERITY.index(verdict.status))
    alike = [rank for rank, verdict in zip(findings.ranks, verdicts, strict=True) if verdict.status == worst.status]
    if len(alike) == len(verdicts):
        return worst
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return dataclasses.replace(worst, found=f"rank {alike[0].rank} on {alike[0].host}{more}: {worst.found}")
