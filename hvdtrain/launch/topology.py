"""The rank of this process among those of its run, which its launcher reports in the environment."""

import bisect
import dataclasses
import itertools
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.errors import TopologyError
from hvdtrain.launch import slurm
from hvdtrain.untrusted import printable, quoted

Environ = Mapping[str, str]
Kind = Literal["openmpi", "mpich"]
"""Which binary interface an MPI library has."""


@dataclass(frozen=True)
class Topology:
    """The rank of this process, and its host, among those of its run.

    `node` is the index of this host among the run's hosts, None where the launcher does not report it (Open MPI,
    MPICH). Of horovodrun it is the cross rank: where hosts have unequal numbers of ranks, it counts only the hosts with
    more than `local_rank` ranks. Of torchrun it is the agent's rank. `job_id` is that of the SLURM allocation,
    whichever launcher runs in it; over ssh some ranks may not have it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int | None
    host: str
    launcher: str
    job_id: str | None

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank writes the files and the log."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether no launcher started this process."""
        return self.launcher == ALONE.name

    @property
    def row(self) -> "Launcher":
        """All that this package knows about the launcher."""
        return launcher(self.launcher)

    @classmethod
    def alone(cls, host: str | None = None, job_id: str | None = None) -> "Topology":
        """One process that no launcher started."""
        return cls(0, 1, 0, 1, 0, host or socket.gethostname(), "alone", job_id)


@dataclass(frozen=True)
class Launcher:
    """One row of the table: all that this package knows about a launcher."""

    name: str
    command: str
    """The command that a message asks a person to type."""
    signs: tuple[str, ...]
    """Variables by which a rank of this launcher is recognised."""
    rank: str
    """The variables of a rank's indices."""
    size: str
    local_rank: str
    local_size: str
    node: str | None = None
    _: dataclasses.KW_ONLY
    start: str
    """The words that start ranks on one host; see `words`."""
    on_hosts: str = ""
    """The same on several hosts, where it is different."""
    starts_python: bool = False
    """Whether these words start Python too."""
    install: str = ""
    """The command that installs it beside this Python, of one that benchmarks start."""
    remedy: str
    """What to do where Horovod reports other ranks than this launcher."""
    mpi: Kind | None = None
    """The MPI to which the launcher belongs."""
    launch: tuple[str, ...] = ()
    """The variables whose values are different for each launch on a host."""
    host_of_rank_0: str = ""
    """The variable that names it, where the launcher does."""
    holds_store: bool = False
    """Whether the launcher itself listens at MASTER_ADDR, for torch.distributed."""
    by_slurm: bool = False
    """Whether SLURM starts the ranks, which an MPI then joins by a plugin of SLURM's."""
    prefixes: tuple[str, ...] = ()
    """The first letters of the variables that it or its daemons set for a rank. Another launcher that is started with
    them may believe to be that rank."""
    programs: tuple[str, ...] = ()
    """The names of its programs: on the PATH, and among the processes above a rank."""
    runs_as: tuple[str, ...] = ()
    """Other names that these have once they run."""
    ranks_outlive_it: bool = False
    """Whether some signals kill it while its ranks continue."""
    rewrites_output: bool = False
    """Whether it reads what a rank prints, and prints it itself."""
    needs_rendezvous: bool = False
    """Whether rank 0 has to start Horovod's rendezvous server, as this launcher does not."""
    cpus_of: Literal["rank", "host"] | None = None
    """Who gets the processors that SLURM has promised a task: each rank, or all ranks of a host together."""

    _enough = staticmethod(any)

    def is_in(self, environ: Environ) -> bool:
        """Whether this launcher has set its signs: some rows need one of them, some all."""
        return self._enough(sign in environ for sign in self.signs)

    def words(self, ranks: int, hosts: Mapping[str, int]) -> list[str]:
        """The words that start so many ranks; `hosts`: how many on each, which {placed} gives as -H where several."""
        placed = f"-H {','.join(f'{host}:{count}' for host, count in hosts.items())}" if len(hosts) > 1 else ""
        numbers = {"ranks": ranks, "last": ranks - 1, "nodes": len(hosts), "each": ranks // len(hosts)}
        words = (len(hosts) > 1 and self.on_hosts) or self.start
        return words.format(**numbers, first=next(iter(hosts)), placed=placed).split()

    def rendezvous(self, environ: Environ) -> tuple[str, str] | None:
        """The host of rank 0, and a text that no other launch there has; None where the launcher names no host."""
        if (host := environ.get(self.host_of_rank_0)) is None:
            return None
        token = "-".join(environ.get(name, "") for name in self.launch)
        return slurm.first_host(host) if self.by_slurm else host, token

    def topology(self, environ: Environ, host: str) -> Topology:
        """The topology that the launcher reports. Raises TopologyError where it contradicts itself."""
        size = self._number(environ, self.size)
        rank = self._index(environ, self.rank, size, self.size)
        local_size = self._ranks_of_this_host(environ)
        if not 1 <= local_size <= size:
            raise self._refuse(f"{self.local_size} must lie in [1, {self.size}={size}], got {local_size}")
        local_rank = self._index(environ, self.local_rank, local_size, self.local_size)
        node = self._number(environ, self.node) if self.node else None
        return Topology(rank, size, local_rank, local_size, node, host, self.name, _job_id(environ))

    def _ranks_of_this_host(self, environ: Environ) -> int:
        return self._number(environ, self.local_size)

    def _text(self, environ: Environ, variable: str) -> str:
        if variable not in environ:
            sign = next(sign for sign in self.signs if sign in environ)
            raise self._refuse(f"{variable} must be set where {sign}={printable(environ[sign])} is")
        return environ[variable]

    def _number(self, environ: Environ, variable: str) -> int:
        text = self._text(environ, variable)
        if not re.fullmatch("[0-9]{1,9}", text):
            raise self._refuse(f"{variable} must be a whole number, got {quoted(text)}")
        return int(text)

    def _index(self, environ: Environ, variable: str, limit: int, limit_name: str) -> int:
        if (value := self._number(environ, variable)) >= limit:
            raise self._refuse(f"{variable} must lie in [0, {limit_name}={limit}), got {value}")
        return value

    def _refuse(self, rule: str) -> TopologyError:
        return TopologyError(f"{rule}; start every rank with {self.command}, and set none of its variables by hand.")


class SlurmStep(Launcher):
    """The row of a SLURM step, which has the numbers of ranks of all its hosts in one variable."""

    # The shell of a batch job has SLURM_PROCID=0 and the task count too, but is no rank: only a step has both signs.
    _enough = staticmethod(all)

    def topology(self, environ: Environ, host: str) -> Topology:
        """The step's numbers. Raises TopologyError where those of PMI, PMIx or Cray's PALS are different."""
        topology = super().topology(environ, host)
        for twins in slurm.plugins_of(environ).values():
            for twin, variable in zip(twins, (self.rank, self.size), strict=True):
                if twin in environ and environ[twin] != environ[variable]:
                    step = f"{topology.job_id}.{environ['SLURM_STEP_ID']}"
                    rule = f"{twin} must equal {variable}={environ[variable]} in step {step}"
                    raise self._refuse(f"{rule}, got {printable(environ[twin])}")
        return topology

    def _ranks_of_this_host(self, environ: Environ) -> int:
        text = self._text(environ, self.local_size)
        try:
            groups = slurm.tasks_per_node(text)
        except ValueError:
            raise self._refuse(f"{self.local_size} must read like 2(x3),1, got {quoted(text)}") from None
        if sum(ranks * repeat for ranks, repeat in groups) != self._number(environ, self.size):
            raise self._refuse(
                f"{self.local_size} must add up to {self.size}={environ[self.size]}, got {printable(text)}"
            )
        node = self._number(environ, "SLURM_NODEID")
        ends = list(itertools.accumulate(repeat for _, repeat in groups))
        if node >= ends[-1]:
            raise self._refuse(f"SLURM_NODEID must name one of {ends[-1]} hosts in {self.local_size}, got {node}")
        return groups[bisect.bisect(ends, node)][0]


class ByHand(Launcher):
    """The row of ranks that a person or an operator of Kubernetes numbers, by the variables of torch.distributed's
    env://. There is one on each host, unless LOCAL_RANK and LOCAL_WORLD_SIZE are set."""

    _enough = staticmethod(all)

    def topology(self, environ: Environ, host: str) -> Topology:
        """The topology by these variables; alone where there is one rank. Raises TopologyError."""
        one_a_host = {} if self.local_rank in environ else {self.local_rank: "0", self.local_size: "1"}
        topology = super().topology({**environ, **one_a_host}, host)
        if topology.size == 1:
            return Topology.alone(host, topology.job_id)
        self._text(environ, "MASTER_ADDR")
        return dataclasses.replace(topology, node=topology.rank) if one_a_host else topology

    def _refuse(self, rule: str) -> TopologyError:
        return TopologyError(f"{rule}; give every rank RANK, WORLD_SIZE and MASTER_ADDR, or unset all of them.")


MPICH: dict[str, Any] = {
    "remedy": "start with the mpiexec of the MPI that Horovod was built with",
    "mpi": "mpich",
    "start": "mpiexec -n {ranks}",
    "launch": ("PMI_PORT",),
    "prefixes": ("PMI_", "PALS_", "HYDI_", "MPI_"),
    "programs": ("mpiexec.hydra", "mpiexec"),
    "rewrites_output": True,
}
TORCH: dict[str, Any] = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "host_of_rank_0": "MASTER_ADDR",
    "remedy": "build Horovod with Gloo: python -m hvdtrain build",
    "needs_rendezvous": True,
}
# The innermost launcher first: an mpirun, Hydra or torchrun that is started in a step of srun's keeps srun's variables.
# HOROVOD_CONTROLLER alone means no launcher, and a PMIX_RANK may be that of a daemon.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "horovodrun",
        "horovodrun",
        signs=("HOROVOD_RANK", "HOROVOD_SIZE"),
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        node="HOROVOD_CROSS_RANK",
        start="horovodrun -np {ranks} {placed}",
        install="python -m hvdtrain build",
        remedy="build Horovod with the controller that horovodrun used: python -m hvdtrain build",
        launch=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
        programs=("horovodrun",),
        ranks_outlive_it=True,
        rewrites_output=True,
    ),
    Launcher(
        "torchrun",
        "torchrun",
        signs=("TORCHELASTIC_RUN_ID",),
        node="GROUP_RANK",
        start="torchrun --standalone --nproc-per-node={each}",
        on_hosts="torchrun --nproc-per-node={each} --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={first}:29400",
        starts_python=True,
        install="pip install torch",
        # All torchruns without an id have the same one; two on one host have different ports.
        launch=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        holds_store=True,
        programs=("torchrun", "torch.distributed.run"),
        ranks_outlive_it=True,
        cpus_of="host",
        **TORCH,
    ),
    Launcher(
        "mpirun",
        "mpirun",
        # prterun without `--personality ompi` gives PMIX_RANK but no number of ranks: it is refused.
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED"),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        start="mpirun -np {ranks} {placed}",
        remedy="start with the mpirun of the MPI that Horovod was built with",
        mpi="openmpi",
        launch=("PMIX_NAMESPACE",),
        prefixes=("OMPI_", "PMIX", "PRTE"),
        programs=("mpirun", "mpiexec"),
        runs_as=("prterun", "orterun"),
        rewrites_output=True,
    ),
    Launcher(
        "mpiexec",
        "mpiexec.hydra",
        # MPI_LOCALRANKID is Hydra's own; under `srun --mpi=pmi2` a rank has PMI_RANK without it.
        signs=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        **MPICH,
    ),
    SlurmStep(
        "srun",
        "srun",
        signs=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        start="srun --nodes={nodes} --ntasks={ranks}",
        launch=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        host_of_rank_0="SLURM_STEP_NODELIST",
        by_slurm=True,
        remedy="ask srun for the plugin of the MPI that Horovod was built with: --mpi=pmix (Open MPI), --mpi=pmi2 or "
        "--mpi=cray_shasta (MPICH, Cray-MPICH), and load that MPI's module",
        prefixes=("SLURM_",),
        needs_rendezvous=True,
        cpus_of="rank",
    ),
    Launcher(
        "mpiexec",
        "mpiexec.hydra or Cray's mpiexec",
        signs=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_size="PMI_LOCAL_SIZE",
        **MPICH,
    ),
    ByHand(
        "env://",
        "",
        signs=("RANK", "WORLD_SIZE"),
        start="RANK=0..{last} WORLD_SIZE={ranks} MASTER_ADDR={first}",
        # Some operators of Kubernetes give rank 0 another name for its host than the other ranks.
        launch=("MASTER_PORT", "WORLD_SIZE"),
        **TORCH,
    ),
)
ALONE = Launcher(
    *("alone", "", (), "", "", "", ""),
    start="",
    remedy="take --engine local, or start with horovodrun, mpirun or srun",
)
SIZES = ("WORLD_SIZE", "JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "PMIX_SIZE")
"""Variables that hold a number of ranks, but are no sign of a launcher in the table."""
RANKS = ("PALS_RANKID", "JSM_NAMESPACE_RANK", "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", "FLUX_TASK_RANK")
"""Variables of launchers that are not in the table: a process that has one is a rank."""


def launcher(name: str) -> Launcher:
    """The row of that name, as in a Topology."""
    return next((row for row in LAUNCHERS if row.name == name), ALONE)


def prefixes() -> tuple[str, ...]:
    """The first letters of the variables that launchers set for a rank."""
    return tuple(prefix for row in LAUNCHERS for prefix in row.prefixes)


def discover(environ: Environ, host: str | None = None) -> Topology:
    """The rank of this process, as the innermost launcher reports it; alone where there is no launcher.

    `host`: another name for this host. Raises TopologyError where the launcher contradicts itself. The collective
    library may later have another rank.
    """
    host = host or socket.gethostname()
    for row in LAUNCHERS:
        if row.is_in(environ):
            return row.topology(environ, host)
    _check_alone(environ)
    return Topology.alone(host, _job_id(environ))


def _check_alone(environ: Environ) -> None:
    """Raises TopologyError where a variable shows that this process is one of several ranks."""
    sizes = [*SIZES, "SLURM_NTASKS"] if "SLURM_STEP_ID" in environ else SIZES
    several = [name for name in sizes if re.fullmatch("0*[1-9][0-9]+|0*[2-9]", environ.get(name, ""))]
    for name in [*several, *(name for name in RANKS if name in environ)]:
        raise TopologyError(
            f"{name}={printable(environ[name])} says that this is one of several ranks, and nothing says which; start "
            "them with srun, mpirun, horovodrun or torchrun, give each RANK, WORLD_SIZE and MASTER_ADDR, or for one "
            f"process unset {name}."
        )


def _job_id(environ: Environ) -> str | None:
    job = environ.get("SLURM_JOB_ID") or None
    if job and not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", job, re.ASCII):  # it becomes the name of a folder
        raise TopologyError(f"SLURM_JOB_ID must be a job's number, got {quoted(job)}; unset it outside a job.")
    return job
