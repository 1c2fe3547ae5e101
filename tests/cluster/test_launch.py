"""Every launcher on a SLURM of four nodes: right ranks and keys, the same losses to the bit, wrong plugins refused."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import ENVIRONMENTS, losses
from marks import marked, rows
from paths import REPOSITORY, SUPPORT
from ranks import clean_environ, left_by, once

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ENDPOINT = SUPPORT / "endpoint.py"


@dataclass(frozen=True)
class Launch:
    """How ranks on 4 nodes are started; `launcher` is hvdtrain's name of the launcher."""

    launcher: str
    argv: tuple[str, ...]
    build: str = "openmpi"

    def command(self, *program: object) -> list[str]:
        """`program` is what follows `python`."""
        python = () if "torchrun" in self.argv else (str(ENVIRONMENTS[self.build] / "bin" / "python"),)
        return [*self.argv, *python, *map(str, program)]


def launches(a_node: int) -> dict[str, Launch]:
    """Every launcher with so many ranks on each of the nodes."""
    number, hosts = str(4 * a_node), ",".join(f"nid00{node}:{a_node}" for node in range(1, 5))
    shape, horovodrun = ("-N4", f"-n{number}"), ("exec", "nid001", "horovodrun", "-np", number, "-H", hosts)
    torchrun = ("torchrun", "--nnodes=4", f"--nproc-per-node={a_node}", "--rdzv-backend=c10d")
    # SLURM's own PMIx would contradict Hydra's PMI in the ranks that Hydra starts through srun.
    hydra = ("env", "SLURM_MPI_TYPE=none", "mpiexec.hydra", "-n", number)
    return {
        "srun pmix": Launch("srun", ("srun", *shape, "--mpi=pmix")),
        "srun pmi2": Launch("srun", ("srun", *shape, "--mpi=pmi2"), "mpich"),
        "srun without MPI": Launch("srun", ("srun", *shape), "gloo"),
        "mpirun": Launch("mpirun", ("salloc", *shape, "mpirun", "-np", number)),
        "mpiexec": Launch("mpiexec", ("salloc", *shape, *hydra), "mpich"),
        "horovodrun gloo": Launch("horovodrun", (*horovodrun, "--gloo")),
        "horovodrun mpi": Launch("mpirun", (*horovodrun, "--mpi")),
        "torchrun": Launch(
            "torchrun", ("srun", "-N4", "--ntasks-per-node=1", *torchrun, "--rdzv-endpoint=nid001:29400")
        ),
    }


LAUNCHES = launches(2)


@pytest.mark.parametrize("launch", marked(rows(LAUNCHES), slow={"mpirun", "mpiexec", "horovodrun mpi"}))
def test_every_rank_knows_its_endpoint(cluster, tmp_path_factory, launch):
    folder = tmp_path_factory.mktemp("ranks", numbered=True)
    cluster.run(*launch.command(ENDPOINT, folder), build=launch.build).good()
    ranks = left_by(8, folder)
    for rank, own in enumerate(ranks):
        assert (own["launcher"], own["rank"], own["size"]) == (launch.launcher, rank, 8)
        assert (own["host"], own["local_rank"], own["local_size"]) == (f"nid00{rank // 2 + 1}", rank % 2, 2)
        assert own["node"] == (None if launch.launcher in {"mpirun", "mpiexec"} else rank // 2)
        variables = own["variables"]
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), "8")
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert own["restored"] or launch.launcher == "torchrun"
    if launch.launcher in {"srun", "torchrun"}:
        assert {own["variables"]["MASTER_ADDR"] for own in ranks} == {"nid001"}
        assert len({own["variables"]["MASTER_PORT"] for own in ranks}) == 1


# Eight ranks once, four elsewhere: two cores take their time to start more.
TRAINED = [
    ("torch", "srun pmix", 2),
    ("tensorflow", "srun pmix", 1),
    *(("torch", name, 1) for name in LAUNCHES),
    ("torch --engine ddp", "srun pmix", 1),
    ("torch --engine ddp", "torchrun", 1),
    ("lightning --strategy ddp", "srun pmix", 1),
    ("lightning --strategy horovod", "srun pmix", 1),
    ("tensorflow --engine multiworker", "srun pmix", 1),
    ("tensorflow --engine multiworker", "torchrun", 1),
]
LINEAR = ("linear", "--epochs", 4, "--log-every-steps", 1)


@pytest.fixture(scope="module")
def trained(cluster):
    """`trained("torch --engine ddp", "srun pmix", 1)`: every step's loss of that run, each made once."""

    @once
    def of(adapter, name, a_node):
        folder, launch = cluster.folder / f"{adapter} {name} {a_node}", launches(a_node)[name]
        adapter_name, *engine = adapter.split()
        argv = ["-m", f"hvdtrain.{adapter_name}", *LINEAR, *engine, "--output", folder]
        cluster.run(*launch.command(*argv), build=launch.build).good()
        return losses(folder)

    return of


@pytest.mark.parametrize(
    ("adapter", "name", "a_node"),
    marked(
        # The others differ in a name alone, or have two parts that these have.
        TRAINED,
        fast={("torch", "srun pmix"), "srun pmi2", "tensorflow", ("tensorflow --engine multiworker", "srun pmix")},
    ),
)
def test_every_launcher_and_engine_gives_the_same_losses_to_the_bit(trained, adapter, name, a_node):
    steps = trained(adapter, name, a_node)
    assert [step for step, _ in steps] == list(range(1, 41))
    framework = "tensorflow" if adapter.startswith("tensorflow") else "torch"
    assert steps == trained(framework, "srun pmix", a_node)


def test_eight_uneven_local_batches_train_as_one_process(cluster, trained):
    python = ENVIRONMENTS["openmpi"] / "bin" / "python"
    cluster.run("exec", "nid001", python, "-m", "hvdtrain.torch", *LINEAR, "--output", "alone").good()
    alone = dict(losses(cluster.folder / "alone"))
    assert dict(trained("torch", "srun pmix", 2)) == pytest.approx(alone, rel=1e-6)


FIXES = {"openmpi": "start with: srun --mpi=pmix", "mpich": "--mpi=pmi2"}
WRONG = [(build, f"--mpi={name}") for build in FIXES for name in ("none", "cray_shasta")]


@pytest.mark.parametrize(
    ("build", "plugin"),
    marked([("openmpi", "--mpi=pmi2"), ("mpich", "--mpi=pmix"), *WRONG], fast={"--mpi=pmi2", "--mpi=pmix"}),
)
def test_a_wrong_plugin_is_refused_with_the_fix(cluster, build, plugin):
    python = ENVIRONMENTS[build] / "bin" / "python"
    ended = cluster.run("srun", "-N2", "-n2", plugin, python, "-m", "hvdtrain.torch", "linear", build=build)
    assert ended.code == 2
    assert ended.lines, ended.err
    for line in ended.lines:  # ranks that each believe to be alone may each print
        assert line.startswith("WorldError (rank 0 on nid")
        assert FIXES[build] in line
    assert ended.left == []


OTHER_MPI = {
    "Open MPI under MPICH's mpiexec": ("openmpi", "mpich", ("mpiexec.hydra", "-n", "2")),
    "Horovod without MPI under MPICH's mpiexec": ("gloo", "mpich", ("mpiexec.hydra", "-n", "2")),
    "Horovod without MPI under Open MPI's mpirun": ("gloo", "openmpi", ("mpirun", "-np", "2")),
}


@pytest.mark.parametrize(("program", "launcher", "command"), marked(rows(OTHER_MPI), slow={"gloo"}))
def test_the_other_mpis_launcher_is_refused(cluster, program, launcher, command):
    tool, *more = command
    path, python = ENVIRONMENTS[launcher] / "bin" / tool, ENVIRONMENTS[program] / "bin" / "python"
    train = (python, "-m", "hvdtrain.torch", "linear")
    ended = cluster.run("exec", "nid001", path, *more, *train, build=launcher)
    assert ended.code == 2
    assert (
        "promised rank 0 of 2 on nid001, but Horovod reports rank 0 of 1: nothing would be averaged; start with the"
        in (ended.out + ended.err)
    )


def test_nobody_waits_for_rank_0_that_refuses(cluster):
    train = (sys.executable, "-m", "hvdtrain.torch", "linear", "--output", "/proc/forbidden")
    ended = cluster.run("srun", "-N2", "-n4", "--mpi=pmix", *train)
    assert ended.code == 2
    (line,) = ended.lines
    assert line.startswith("OutputError (rank 0 on nid001): ")
    assert ended.left == []


def test_ranks_reach_one_another_though_docker0_has_one_address_on_all_nodes(cluster):
    for node in ("nid003", "nid004"):
        made = "ip link add docker0 type veth peer docker1 && ip addr add 172.17.0.1/16 dev docker0"
        cluster("exec", node, "sh", "-c", f"{made} && ip link set docker0 up && ip link set docker1 up")
    program = "import horovod.torch as hvd, torch; hvd.init(); print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum))"
    python = (ENVIRONMENTS["openmpi"] / "bin" / "python", "-c", program)
    try:
        ended = cluster.run("srun", "-w", "nid[003-004]", "-N2", "-n2", "--mpi=pmix", *python).good()
    finally:
        for node in ("nid003", "nid004"):
            cluster("exec", node, "ip", "link", "delete", "docker0")
    assert ended.out.count("sum tensor([2.])") == 2


# How the ranks come by one key: from a home that all nodes see, through munge where they see none.
FOUR = ("srun", "-N2", "-n4", "--mpi=pmix")
HOMES = {
    "one home for all nodes": "mkdir -p home && HOME=$PWD/home",
    "a home of each node's own": "mkdir -p /tmp/home && HOME=/tmp/home",
    "no home": "HOME=/none",
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_the_ranks_of_two_nodes_join(cluster, tmp_path_factory, home):
    folder = tmp_path_factory.mktemp("ranks", numbered=True)
    program = f"{home} XDG_CONFIG_HOME= exec {sys.executable} {ENDPOINT} {folder}"
    ended = cluster.run(*FOUR, "bash", "-c", program).good()
    assert ended.err == ""
    ranks = left_by(4, folder)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]


def test_without_home_and_munge_a_run_is_refused(cluster):
    program = f"HOME=/none XDG_CONFIG_HOME= PATH=/none exec {sys.executable} -m hvdtrain.torch linear"
    ended = cluster.run(*FOUR, "bash", "-c", program)
    assert ended.code == 2
    assert all("no key of this user's (/none: no such home), and munge does not answer" in line for line in ended.lines)
    assert [line.partition(":")[0] for line in sorted(ended.lines)] == [
        "WorldError (rank 0 on nid001)",
        "WorldError (rank 2 on nid002)",
    ]


def test_munge_itself(cluster):
    tests = (sys.executable, "-m", "pytest", "-q", "-k", "munge_carries", "tests/launch/test_keys.py")
    ended = cluster.run("exec", "nid001", *tests, cwd=REPOSITORY).good()
    assert "2 passed" in ended.out


def output_of(*command: object, **environ: str) -> str:
    """What the command prints on this machine, in the environment of MPICH; it must end with exit code 0."""
    path = f"{ENVIRONMENTS['mpich'] / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [*map(str, command)],
        env={**clean_environ(), "PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_a_build_for_gpus_loads_on_a_machine_without_one():
    program = """
import horovod.tensorflow, horovod.torch
from hvdtrain.launch.mpi import horovod_library
assert horovod.tensorflow.nccl_built() and horovod.torch.nccl_built()
print(horovod_library("tensorflow"), horovod_library("torch"))
"""
    for library in output_of("python", "-c", program).split():
        dynamic = output_of("readelf", "-d", library)
        assert "[libnccl.so.2]" in dynamic
        assert "$ORIGIN/../../nvidia/nccl/lib" in dynamic
        assert "hvdtrain-build-" not in dynamic  # where anybody could put a library, as the build's folder is removed
        kernels = output_of(cuobjdump(), "--list-elf", library)
        assert set(re.findall(r"sm_(\d+)", kernels)) == {"75", "80", "86", "89", "90", "100", "120"}


def cuobjdump() -> Path:
    """NVIDIA's program that lists the kernels in a library, which Triton's package has."""
    return next(Path(sys.prefix).glob("lib/python3.*/site-packages/triton/backends/nvidia/bin/cuobjdump"))


def test_a_horovod_built_on_mpich_runs_over_intels_mpi(tmp_path):
    """Intel's and Cray's MPI have MPICH's ABI: LD_LIBRARY_PATH replaces the library, and the losses stay the same."""
    there, train = tmp_path / "impi", ("-m", "hvdtrain.torch", "linear", "--epochs", "3", "--output")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--prefix", there, "impi-rt==2021.18.1")
    output_of(*pip)
    intels = {"LD_LIBRARY_PATH": str(there / "lib")}
    title = "from hvdtrain.launch import mpi; print(mpi.of_horovod('torch').title)"
    assert output_of("python", "-c", title, **intels) == "Intel MPI 2021.18.1\n"
    output_of(there / "bin" / "mpiexec.hydra", "-n", 2, "python", *train, tmp_path / "intel", **intels)
    output_of("mpiexec.hydra", "-n", 2, "python", *train, tmp_path / "mpich")
    assert losses(tmp_path / "intel") == losses(tmp_path / "mpich") != []
