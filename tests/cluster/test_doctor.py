"""The doctor on a SLURM of several nodes: each wrong launch is reported and fixed, and what else steps lack."""

import json
import os
import re
from dataclasses import dataclass

import pytest
from cluster import ENVIRONMENTS, Minicluster
from marks import marked, rows
from ranks import Ended

from hvdtrain.tools.doctor.findings import Check

pytestmark = [
    pytest.mark.cluster,
    *(
        pytest.mark.skipif(not (folder / "bin" / "python").exists(), reason="needs each Horovod: make cluster-test")
        for folder in ENVIRONMENTS.values()
    ),
]

OPENMPI, MPICH, GLOO = (str(ENVIRONMENTS[build] / "bin") for build in ("openmpi", "mpich", "gloo"))
DOCTOR = "-m hvdtrain doctor --json"
TWO = "nid001:1,nid002:1"
IN_A_JOB = ("salloc", "-Q", "-N2", "--ntasks-per-node=1", "-wnid001,nid002", "bash", "-c")
OF_TWO_CPUS = (*IN_A_JOB[:-2], "--cpus-per-task=2", *IN_A_JOB[-2:])
BY_HAND = ("exec", "nid001", "bash", "-c")
# As any program has it, which imports Horovod and prints its rank.
ALONE = 'import horovod.torch as hvd; hvd.init(); print("rank", hvd.rank(), "of", hvd.size())'


def srun(build: str, plugin: str) -> str:
    """As the doctor prints it: srun has put the program's path for its name."""
    return f"srun --mpi={plugin} -N 2 -n 2 {ENVIRONMENTS[build]}/bin/python {DOCTOR}"


# Open MPI's mpirun puts its own folder first in its ranks' PATH, and Python of another build is not there.
MPIRUN = f"{OPENMPI}/mpirun -n 2 -N 1 --bind-to none"
HYDRA = f"SLURM_MPI_TYPE=none {MPICH}/mpiexec.hydra -n 2 -ppn 1"
RIGHT = {  # build, how, command; over what they add
    "Open MPI, srun pmix": ("openmpi", IN_A_JOB, srun("openmpi", "pmix"), "MPI"),
    "Open MPI, mpirun": ("openmpi", IN_A_JOB, f"mpirun -n 2 -H {TWO} --allow-run-as-root python {DOCTOR}", "MPI"),
    "Open MPI, horovodrun --gloo": ("openmpi", BY_HAND, f"horovodrun --gloo -np 2 -H {TWO} python {DOCTOR}", "Gloo"),
    "Open MPI, horovodrun --mpi": ("openmpi", BY_HAND, f"horovodrun --mpi -np 2 -H {TWO} python {DOCTOR}", "MPI"),
    "MPICH, srun pmi2": ("mpich", IN_A_JOB, srun("mpich", "pmi2"), "MPI"),
    "MPICH, Hydra": (
        "mpich",
        IN_A_JOB,
        f"SLURM_MPI_TYPE=none mpiexec.hydra -n 2 -hosts {TWO} python {DOCTOR}",
        "MPI",
    ),
    "MPICH, horovodrun --gloo": ("mpich", BY_HAND, f"horovodrun --gloo -np 2 -H {TWO} python {DOCTOR}", "Gloo"),
    "MPICH, horovodrun --mpi": ("mpich", BY_HAND, f"horovodrun --mpi -np 2 -H {TWO} python {DOCTOR}", "MPI"),
    "no MPI, srun pmix": ("gloo", IN_A_JOB, srun("gloo", "pmix"), "Gloo"),
    "no MPI, srun none": ("gloo", IN_A_JOB, srun("gloo", "none"), "Gloo"),
    "no MPI, horovodrun --gloo": ("gloo", IN_A_JOB, f"horovodrun --gloo -np 2 -H {TWO} python {DOCTOR}", "Gloo"),
}


@dataclass(frozen=True)
class Wrong:
    """A launch that makes no world. `alone`: each process then is rank 0 of 1, silently; else it aborts."""

    build: str
    launch: str
    alone: bool
    found: str
    fix: str
    python: str = "python"


def wrong_plugin(build: str, plugin: str, alone: bool = True) -> Wrong:
    name, right = {"openmpi": ("Open MPI", "pmix"), "mpich": ("MPICH", "pmi2")}[build]
    found = f"srun started 2 tasks with --mpi={plugin}; Horovod's {name} {{version}} needs --mpi={right}"
    return Wrong(build, f"srun --mpi={plugin}", alone, found, srun(build, right))


MPICH_HYDRA, NO_MPI = (RIGHT[name][2] for name in ("MPICH, Hydra", "no MPI, horovodrun --gloo"))
OPENMPI_MPIRUN = RIGHT["Open MPI, mpirun"][2]
WRONG = {
    "Open MPI, srun pmi2": wrong_plugin("openmpi", "pmi2"),
    "Open MPI, srun none": wrong_plugin("openmpi", "none"),
    "Open MPI, srun cray_shasta": wrong_plugin("openmpi", "cray_shasta"),
    "Open MPI, Hydra": Wrong(
        "openmpi",
        HYDRA,
        True,
        "mpiexec of MPICH started 2 ranks; this Horovod was built with Open MPI {version}",
        OPENMPI_MPIRUN,
    ),
    "MPICH, srun pmix": wrong_plugin("mpich", "pmix", alone=False),
    "MPICH, srun none": wrong_plugin("mpich", "none"),
    "MPICH, srun cray_shasta": wrong_plugin("mpich", "cray_shasta"),
    "MPICH, mpirun": Wrong(
        "mpich",
        MPIRUN,
        False,
        "mpirun of Open MPI started 2 ranks; this Horovod was built with MPICH {version}",
        MPICH_HYDRA.replace("python", f"{MPICH}/python"),
        python=f"{MPICH}/python",
    ),
    "MPICH, Hydra over the job's pmix": Wrong(
        "mpich",
        "mpiexec.hydra -n 2 -ppn 1",
        False,
        "mpiexec started 2 ranks; Horovod reported: .* Found both env vars PMI_SIZE and PMIX_NAMESPACE.*",
        MPICH_HYDRA,
    ),
    "MPICH, horovodrun --mpi over the job's pmix": Wrong(
        "mpich",
        f"horovodrun --mpi -np 2 -H {TWO}",
        False,
        "mpiexec started 2 ranks; Horovod reported: .* Found both env vars PMI_SIZE and PMIX_NAMESPACE.*",
        MPICH_HYDRA,
    ),
    "no MPI, mpirun": Wrong(
        "gloo",
        MPIRUN,
        True,
        "mpirun of Open MPI started 2 ranks; this Horovod was built without MPI",
        NO_MPI.replace("python", f"{GLOO}/python"),
        python=f"{GLOO}/python",
    ),
    "no MPI, Hydra": Wrong(
        "gloo",
        HYDRA,
        True,
        "mpiexec of MPICH started 2 ranks; this Horovod was built without MPI",
        NO_MPI,
    ),
}


class Doctors:
    """Runs the doctor under a launch; its report is kept, so that the fixes and the right launches share starts."""

    def __init__(self, cluster: Minicluster) -> None:
        self.cluster = cluster
        self.reported: dict[tuple[str, ...], tuple[int, dict[str, Check]]] = {}

    def __call__(self, build: str, how: tuple[str, ...], command: str) -> tuple[int, dict[str, Check]]:
        """The exit code of the launch, and the checks by name."""
        key = (build, *how, command)
        if key not in self.reported:
            ended = self.cluster.run(*how, command, build=build)
            self.reported[key] = (ended.code, checks(ended))
        return self.reported[key]


def checks(ended: Ended) -> dict[str, Check]:
    """What was printed as JSON, by name; a launcher may have put the rank before each line."""
    lines = [re.sub(r"^\[[\d,]+\](<stdout>:| ) ?", "", line) for line in ended.out.splitlines()]
    assert "[" in lines, f"exit code {ended.code}:\n{ended.out[-2000:]}\n{ended.err[-4000:]}"
    # Hydra ends its ranks' output with a box of its own.
    found, _ = json.JSONDecoder().raw_decode("\n".join(lines[lines.index("[") :]))
    return {check["name"]: Check(**check) for check in found}


@pytest.fixture(scope="module")
def doctor(cluster: Minicluster) -> Doctors:
    """`doctor("mpich", IN_A_JOB, "srun …")`"""
    return Doctors(cluster)


def sound(reported: tuple[int, dict[str, Check]]) -> bool:
    """Whether the ranks are one world, and nothing is to be fixed."""
    code, found = reported
    assert [check for check in found.values() if check.status == "fail"] == []
    assert found["world"].found.endswith(" started 2 ranks, and Horovod reports 2 on 2 hosts")
    assert re.fullmatch(r"over (MPI|Gloo); 1 MB: .*\d [GM]B/s", found["allreduce"].found)
    return code == 0


@pytest.mark.parametrize(
    ("build", "how", "command", "over"),
    # The others differ in a name alone, or the fix of a wrong one starts them.
    marked(rows(RIGHT), fast={"Open MPI, srun pmix", "MPICH, srun pmi2"}),
)
def test_a_launch_that_is_right(doctor, build, how, command, over):
    reported = doctor(build, how, command)
    assert sound(reported)
    assert reported[1]["allreduce"].found.startswith(f"over {over}; ")


@pytest.mark.parametrize("wrong", marked(rows(WRONG), fast={"Open MPI, srun pmi2", "Open MPI, Hydra"}))
def test_a_launch_that_is_wrong_is_reported_and_fixed(doctor, wrong):
    code, found = doctor(wrong.build, IN_A_JOB, f"{wrong.launch} {wrong.python} {DOCTOR}")
    assert code
    world = found["world"]
    pattern = re.escape(wrong.found).replace(r"\.\*", ".*").replace(r"\{version\}", r"\d+\.\d+\.\d+")
    assert re.fullmatch(pattern, world.found)
    assert (world.status, world.fix) == ("fail", wrong.fix)
    assert found["allreduce"].status == "skip"
    assert sound(doctor(wrong.build, IN_A_JOB, world.fix))


KINDS = {(wrong.build, wrong.alone): (name, wrong) for name, wrong in WRONG.items()}  # one of each


@pytest.mark.parametrize(
    "wrong",
    marked(
        rows(dict(KINDS.values())),
        slow={"Open MPI, Hydra", "MPICH, horovodrun --mpi over the job's pmix", "no MPI, Hydra"},
    ),
)
def test_what_horovod_makes_of_a_launch_that_is_wrong(cluster, wrong):
    ended = cluster.run(*IN_A_JOB, f"{wrong.launch} {wrong.python} -c '{ALONE}'", build=wrong.build)
    if wrong.alone:
        assert ended.code == 0
        assert ended.out.count("rank 0 of 1\n") == 2
    else:
        assert ended.code
        assert "rank" not in ended.out


def test_horovodrun_itself_refuses_mpi_where_there_is_none(cluster):
    ended = cluster.run(*BY_HAND, f"horovodrun --mpi -np 2 -H {TWO} python {DOCTOR}", build="gloo")
    assert ended.code
    assert "MPI support has not been built" in ended.err


# The minicluster's SLURM binds nobody; a site's binds a task to one CPU where SRUN_CPUS_PER_TASK does not request more.
SICK = """\
[ "$SLURMD_NODENAME" = nid001 ] || export NCCL_SOCKET_IFNAME=ipogif0
exec taskset -c 0 python -m hvdtrain doctor --json
"""
FULL = "/tmp/full"
FAULTS = {  # check: what is found, what was expected, the fix
    "NCCL's interface": (
        "rank 1 on nid002: NCCL_SOCKET_IFNAME=ipogif0 names none that is up",
        "one of: lo, eth0",
        "export NCCL_SOCKET_IFNAME=eth0",
    ),
    "output folder": (
        f"rank 1 on nid002: {FULL}: No space left on device",
        f"to write {FULL}/runs",
        'cd "${SCRATCH:-$HOME}"',
    ),
    "cpus per task": (
        f"1 of the host's {os.cpu_count()}",
        "2: srun of SLURM 22.05 and newer does not take it from sbatch",
        f"srun --mpi=pmix --cpus-per-task=2 -N 2 -n 2 python {DOCTOR}",
    ),
}


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs, to take one away")
def test_what_else_a_step_lacks_is_reported_and_fixed(cluster, doctor):
    script = cluster.folder / "sick.sh"
    script.write_text(SICK)
    for host in ("head", "nid001", "nid002"):
        cluster("exec", host, "mkdir", FULL)
    cluster("exec", "nid002", "mount", "-t", "tmpfs", "-o", "size=4k", "none", FULL)
    try:
        cluster("exec", "nid002", "sh", "-c", f"yes > {FULL}/checkpoint || true")
        code, found = doctor("gloo", OF_TWO_CPUS, f"cd {FULL}; srun bash {script}")
        wrong = [check for check in found.values() if check.status == "fail"]
        failed = {check.name: (check.found, check.expected, check.fix) for check in wrong}
        assert (code, failed) == (1, FAULTS)
        *before, command = (fix for _, _, fix in FAULTS.values())
        reported = doctor("gloo", OF_TWO_CPUS, f"cd {FULL}; {'; '.join(before)}; {command}")
    finally:
        cluster("exec", "nid002", "umount", FULL)
    assert sound(reported)
    assert reported[1]["NCCL's interface"].found.endswith(", from NCCL_SOCKET_IFNAME")
    assert reported[1]["cpus per task"].found == f"{os.cpu_count()} of the host's {os.cpu_count()}, 2 requested"


@pytest.mark.slow
def test_a_healthy_step_of_four_nodes_prints_one_table(cluster):
    ended = cluster.run("srun", "-N4", "-n8", "--mpi=pmix", "python", "-m", "hvdtrain", "doctor").good()
    lines = ended.out.splitlines()
    assert lines[0].startswith("hvdtrain doctor: 8 ranks of srun, seen from nid001, ")
    assert len([line for line in lines if re.match(" [✓!✗-] world ", line)]) == 1
    assert re.fullmatch(r"\d+ ok(, \d+ to look at)?, \d+ left out", lines[-1])
    # A person's own srun, whose output cannot be seen from here, has signs of life.
    assert [line for line in ended.err.splitlines() if not line.startswith(("looking", "checking"))] == []
