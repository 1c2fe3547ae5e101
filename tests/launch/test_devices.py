"""GPU and threads of a rank."""

import dataclasses
import functools
import math
import os
import subprocess
import sys

import pytest
from refusals import refusal

from hvdtrain import processors
from hvdtrain.errors import DeviceError
from hvdtrain.launch.devices import amd_gpus, driver_gpus, gpu_index, threads, torch_hip, visible_gpus
from hvdtrain.launch.topology import Topology

NODE = dataclasses.replace(Topology.alone("nid001"), rank=6, size=8, local_rank=2, local_size=4)


@pytest.mark.parametrize(
    ("wanted", "visible", "operations", "index"),
    [
        pytest.param("auto", 0, False, None, id="no GPU"),
        pytest.param("cpu", 4, False, None, id="GPUs, but the CPU is wanted"),
        pytest.param("auto", 4, True, 2, id="as many as ranks here: the local rank's"),
        pytest.param("auto", 1, True, 0, id="the one that is visible"),
        pytest.param("cuda", 4, True, 2, id="requested"),
    ],
)
def test_gpu_index(wanted, visible, operations, index):
    assert gpu_index(wanted, visible, NODE, operations) == index


UNEQUAL = (
    "nid001 shows {} GPUs to each of its 4 ranks: it must show one for each rank, or to each rank its own; change the "
    "number of ranks or CUDA_VISIBLE_DEVICES."
)


@pytest.mark.parametrize(
    ("wanted", "visible", "operations", "message"),
    [
        pytest.param(
            "cuda",
            0,
            True,
            "--device cuda needs a visible GPU, got none; take --device cpu, or ask for a GPU.",
            id="none visible",
        ),
        pytest.param(
            "auto",
            4,
            False,
            "GPUs are visible (4), but this Horovod averages on the CPU only; hide them (--device cpu, or "
            "CUDA_VISIBLE_DEVICES=), or, for PyTorch, build it for them: python -m hvdtrain build --gpu nccl",
            id="Horovod without NCCL",
        ),
        pytest.param("auto", 8, True, UNEQUAL.format(8), id="more GPUs than ranks"),
        pytest.param("auto", 2, True, UNEQUAL.format(2), id="fewer GPUs than ranks"),
    ],
)
def test_gpu_refused(wanted, visible, operations, message):
    assert refusal(DeviceError, gpu_index, wanted, visible, NODE, operations) == message


@pytest.mark.parametrize(
    ("variable", "present", "count"),
    [
        ("0,1", 4, 2),
        ("", 4, 0),
        ("-1", 4, 0),
        ("3,-1,2", 4, 1),
        ("GPU-5f,GPU-6a", 4, 2),
        pytest.param(None, 4, 4, id="all of the driver's"),
        pytest.param("0,1,2,3", 0, 0, id="set by SLURM on a host that has none"),
        pytest.param("0,1,2,3", 1, 1, id="a node's order, in a step that sees one"),
        pytest.param("0,4,1", 4, 1, id="CUDA stops at the first that is not there"),
        pytest.param("NoDevFiles", 4, 0, id="SLURM's name for none"),
        pytest.param("1, 0", 4, 2, id="with a space"),
        pytest.param("0,0", 4, 0, id="one twice, which CUDA refuses"),
        pytest.param("MIG-1,MIG-2", 1, 1, id="a process takes one instance of a GPU"),
    ],
)
def test_visible_gpus_as_cuda_counts_them(variable, present, count):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environ, lambda path: present) == count


def test_no_driver_shows_no_gpu(tmp_path):
    assert visible_gpus({"PATH": ""}, functools.partial(driver_gpus, device_files=tmp_path)) == 0


def test_amds_gpus_are_nodes_with_an_identity(tmp_path, monkeypatch):
    for node, identity in enumerate(("0", "51234", "4711")):
        file = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id"
        file.parent.mkdir(parents=True)
        file.write_text(f"{identity}\n")
    assert amd_gpus(tmp_path) == 0  # no /dev/kfd, as in a container
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    assert amd_gpus(tmp_path) == 2
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "1"}, lambda path: amd_gpus(tmp_path)) == 1
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("hip: Optional[str] = '6.4.43484-123eb5128'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_hip() == "6.4"


def test_hidden_gpus_are_not_counted():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda path: pytest.fail("the driver was called")) == 0


LISTS = {
    "two GPUs, one in MIG instances": "echo 'GPU 0: A100 (UUID: GPU-1)'; echo '  MIG 3g.20gb Device 0: (UUID: MIG-1)'; "
    "echo 'GPU 1: A100 (UUID: GPU-2)'",
    "none": "echo No devices were found; exit 6",
}


@pytest.mark.parametrize(("case", "count"), list(zip(LISTS, (2, 0), strict=True)))
def test_the_drivers_gpus(tmp_path, case, count):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{LISTS[case]}\n")
    smi.chmod(0o755)
    assert driver_gpus(str(tmp_path), tmp_path) == count


def test_a_driver_without_its_program(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert driver_gpus("", tmp_path) == 2


@pytest.mark.parametrize(
    ("launcher", "cpus", "of_host", "environ", "expected"),
    [
        pytest.param("mpirun", 8, 8, {}, 2, id="unbound ranks divide the host"),
        pytest.param("mpirun", 2, 8, {}, None, id="bound by the launcher"),
        pytest.param("mpirun", 8, 8, {"SLURM_CPUS_PER_TASK": "4"}, 2, id="srun's promise is not mpirun's"),
        pytest.param("srun", 8, 8, {"OMP_NUM_THREADS": "3"}, None, id="set by the user"),
        pytest.param("srun", 24, 96, {"SLURM_CPUS_PER_TASK": "24"}, 24, id="as promised"),
        pytest.param("srun", 96, 96, {"SLURM_CPUS_PER_TASK": "24"}, 24, id="as promised, unbound"),
        pytest.param(
            "srun", 96, 96, {"SLURM_CPUS_PER_TASK": "24", "SRUN_CPUS_PER_TASK": "6"}, 6, id="srun's own variable"
        ),
        pytest.param("srun", 1, 96, {"SLURM_CPUS_PER_TASK": "24"}, 1, id="the job's promise, which srun did not keep"),
        pytest.param("srun", 8, 8, {"SLURM_CPUS_PER_TASK": "many"}, 2, id="no number"),
        pytest.param("torchrun", 40, 40, {"SLURM_CPUS_PER_TASK": "40"}, 10, id="ranks divide their agent's"),
    ],
)
def test_threads(launcher, cpus, of_host, environ, expected):
    topology = dataclasses.replace(NODE, launcher=launcher)
    assert threads(cpus, of_host, topology, environ, math.inf) == expected


@pytest.mark.parametrize(
    ("launcher", "cpus", "of_host", "quota", "environ", "expected"),
    [
        pytest.param("mpirun", 64, 64, 8.0, {}, 2, id="divided by the host's ranks"),
        pytest.param("mpirun", 64, 64, 4.5, {}, 1, id="the last one in part"),
        pytest.param("mpirun", 64, 64, 0.5, {}, 1, id="never none"),
        pytest.param("mpirun", 16, 64, 8.0, {}, 2, id="of a container that is bound too"),
        pytest.param("mpirun", 2, 64, 8.0, {}, None, id="ranks that are bound to no more"),
        pytest.param("mpirun", 64, 64, 64.0, {}, 16, id="of the whole host"),
        pytest.param("torchrun", 64, 64, 8.0, {"SLURM_CPUS_PER_TASK": "64"}, 2, id="less than was promised"),
    ],
)
def test_threads_of_a_quota(launcher, cpus, of_host, quota, environ, expected):
    assert threads(cpus, of_host, dataclasses.replace(NODE, launcher=launcher), environ, quota) == expected


V1 = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
QUOTAS = {  # /proc/self/cgroup, files below /sys/fs/cgroup: the quota in processors
    "none": ("0::/\n", {}, math.inf),
    "of version 2": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "max 100000"}, 0.5),
    "of two groups, the less": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "25000 100000"}, 0.25),
    "of a namespace": ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    "of a group in a namespace": ("0::/a\n", {"a/cgroup.procs": "", "cpu.max": "150000 100000"}, 1.5),
    "version 2 beside version 1": ("1:memory:/\n0::/a\n", {"unified/a/cpu.max": "50000 100000"}, 0.5),
    "of version 1": ("2:cpu,cpuacct:/a\n0::/\n", {f"cpu/a/{name}": V1[name] for name in V1}, 0.5),
    "docker run's": ("2:cpu:/docker/5f\n", {f"cpu/{name}": V1[name] for name in V1}, 0.5),
    "in docker run's": (
        "2:cpu:/docker/5f/a/b\n",
        {"cpu/a/b/tasks": "", **{f"cpu/a/{name}": V1[name] for name in V1}},
        0.5,
    ),
    "version 1, unlimited": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    "another controller's": ("2:cpuset:/a\n", {"a/cpu.max": "50000 100000"}, math.inf),
    "damaged": ("0::/\n", {"cpu.max": ""}, math.inf),
}


@pytest.mark.parametrize(("groups", "files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_the_quota_of_a_container(tmp_path, groups, files, expected):
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processors.quota(tmp_path) == expected


def test_no_quota_where_there_are_no_control_groups(tmp_path):
    assert processors.quota(tmp_path) == math.inf
    assert processors.count() in range(1, len(os.sched_getaffinity(0)) + 1)


FAULTS = """
import os, resource
import numpy as np
from hvdtrain.launch.devices import keep_memory
keep_memory(os.environ)
def touch(): np.ones(2**24)  # 128 MiB
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("environ", "keeps"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)], ids=["kept", "the user's own settings"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc, which it sets, is Linux's: run it there")
def test_freed_memory_is_kept_for_the_next_step(environ, keeps):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**plain, **environ}, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 100) == keeps
