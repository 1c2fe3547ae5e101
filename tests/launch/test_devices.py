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
from hvdtrain.launch import devices
from hvdtrain.launch.devices import (
    amd_gpus,
    driver_gpus,
    gpu_index,
    own_gpu,
    threads,
    torch_hip,
    visible_gpus,
    visible_indices,
    why_cpu,
)
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


NODES = ("GPU-5f00-1", "GPU-5f00-2", "GPU-6a00-3", "GPU-6a00-4")


@pytest.mark.parametrize(
    ("variable", "present", "found"),
    [
        ("0,1", 4, [0, 1]),
        ("", 4, []),
        ("-1", 4, []),
        ("3,-1,2", 4, [3]),
        pytest.param(None, 4, [0, 1, 2, 3], id="all of the driver's"),
        pytest.param("0,1,2,3", 0, [], id="set by SLURM on a host that has none"),
        pytest.param("0,1,2,3", 1, [0], id="a node's order, in a step that sees one"),
        pytest.param("1,0", 1, [], id="the first is not there"),
        pytest.param("0,4,1", 4, [0], id="CUDA stops at the first that is not there"),
        pytest.param("NoDevFiles", 4, [], id="SLURM's name for none"),
        pytest.param("1, 0", 4, [1, 0], id="with a space"),
        pytest.param(" 0", 4, [0], id="after a space"),
        pytest.param("0,0", 4, [], id="one twice, which CUDA refuses"),
        # Seen on an H200: the driver shows one GPU for 0x0, and none for a UUID of no GPU.
        pytest.param("0x0", 1, [0], id="hexadecimal, of which CUDA reads the first digit"),
        pytest.param("+1,2gpu", 4, [1, 2], id="with a sign, and with letters behind"),
        pytest.param("gpu0", 4, [], id="letters before"),
        pytest.param("9" * 5000, 4, [], id="a number without end"),
        pytest.param("GPU-6a00-3,GPU-5f00-1", 4, [2, 0], id="UUIDs"),
        pytest.param("GPU-6a00-4,GPU-0000", 4, [3], id="a UUID of no GPU"),
        pytest.param("GPU-00000000-0000-0000-0000-000000000000", 1, [], id="only a UUID of no GPU"),
        pytest.param("GPU-6a", 3, [2], id="the beginning of one UUID"),
        pytest.param("GPU-6a", 4, [], id="the beginning of two UUIDs"),
        pytest.param("GPU-6a00-3,GPU-6a00-3", 4, [], id="a UUID twice"),
        pytest.param("5f00-1", 4, [], id="a UUID without GPU-"),
        pytest.param("0,GPU-5f00-2", 4, [0], id="an index, then a UUID"),
        pytest.param("GPU-5f00-2,0", 4, [1], id="a UUID, then an index"),
    ],
)
def test_visible_gpus_as_cuda_counts_them(variable, present, found):
    assert visible_indices(variable, NODES[:present]) == found
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environ, lambda path: NODES[:present]) == len(found)


def test_a_process_takes_one_slice_of_a_gpu():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, lambda path: NODES) == 1


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),  # as a laptop
        ({"ROCM_PATH": "/opt/rocm-7"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "0,2"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ff"}, 1),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1,2", "ROCM_PATH": "/opt/rocm-7"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
    ids=str,
)
def test_gpus_of_amd(tmp_path, monkeypatch, environ, count):
    """Two processors and three GPUs, in folders as the driver's; a control group hides a fourth."""
    for node, gpu_id, unique in ((0, 0, 0), (1, 0, 0), (2, 51, 255), (9, 52, 4096), (10, 53, 0), (11, "", 7)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\nunique_id {unique}\nsimd_count 440\n")
    monkeypatch.setattr(devices, "amd_gpus", functools.partial(amd_gpus, tmp_path))
    assert visible_gpus(environ, lambda path: ()) == count
    assert amd_gpus(tmp_path) == ("GPU-00000000000000ff", "GPU-0000000000001000", "GPU-0000000000000000")


def test_pytorch_for_amd_says_its_hip(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("hip: Optional[str] = '6.4.43484-123eb5128'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_hip() == "6.4"


def test_hidden_gpus_are_not_counted():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda path: pytest.fail("the driver was called")) == 0


# Two GPUs, the first of them in two slices.
NVML = """
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return ("GPU-a", "GPU-b")[handle]
def nvmlDeviceGetHandleByUUID(uuid): return {"MIG-1": 11, "MIG-2": 12}[uuid]
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle): return 0
"""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """`nvml(text)`: the text is NVIDIA's library."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text):
        (tmp_path / "pynvml.py").write_text(text)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    yield make
    driver_gpus.cache_clear()


def test_the_drivers_gpus(tmp_path, nvml, monkeypatch):
    nvml(NVML)
    assert driver_gpus("", tmp_path) == ()  # no device file: the library is not asked
    (tmp_path / "nvidia-smi").touch(0o755)
    assert driver_gpus(str(tmp_path), tmp_path) == ("GPU-a", "GPU-b")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert driver_gpus("/nowhere", tmp_path) == ("GPU-a", "GPU-b")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_gpus("/elsewhere", tmp_path) == ("", "")


@pytest.mark.parametrize(
    ("variable", "named"), [("2", "2"), ("\x1bx", "\\x1bx"), ("GPU-c,0", "GPU-c,0"), ("1", ""), ("", ""), ("-1", "")]
)
def test_why_a_run_is_on_the_cpu(tmp_path, nvml, variable, named):
    nvml(NVML)
    (tmp_path / "nvidia-smi").touch(0o755)
    line = f"on the CPU, though the driver has GPUs (2): CUDA_VISIBLE_DEVICES={named} names none of them: "
    line += "correct it, or unset it"
    assert why_cpu({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": variable}) == ((line,) if named else ())
    assert why_cpu({"PATH": "", "CUDA_VISIBLE_DEVICES": variable}) == ()


@pytest.mark.parametrize(
    ("environ", "uuid"),
    [
        ({}, "GPU-b"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "GPU-a"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "GPU-a"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, "GPU-a"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-2"}, "GPU-a"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-3"}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    ],
    ids=str,
)
def test_the_gpu_of_a_rank(nvml, environ, uuid):
    nvml(NVML)
    second = dataclasses.replace(NODE, rank=1, size=2, local_rank=1, local_size=2)
    assert own_gpu(second, environ) == uuid


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
