"""GPU and threads of a rank."""

import dataclasses

import pytest

from hvdtrain.devices import gpu_index, threads
from hvdtrain.errors import DeviceError
from hvdtrain.topology import Topology

NODE = dataclasses.replace(Topology.alone("nid001"), rank=6, size=8, local_rank=2, local_size=4)


@pytest.mark.parametrize(
    ("wanted", "visible", "operations", "index"),
    [
        pytest.param("auto", 0, False, None, id="no GPU"),
        pytest.param("cpu", 4, False, None, id="GPUs, but the CPU is wanted"),
        pytest.param("auto", 4, True, 2, id="as many as ranks here: the local rank's"),
        pytest.param("auto", 1, True, 0, id="the one that is visible"),
        pytest.param("cuda", 4, True, 2, id="asked for"),
    ],
)
def test_gpu_index(wanted, visible, operations, index):
    assert gpu_index(wanted, visible, NODE, operations) == index


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
        pytest.param(
            "auto",
            8,
            True,
            "nid001 shows 8 GPUs to each of its 4 ranks: it must show one for each rank, or to each rank its own; "
            "change the number of ranks or CUDA_VISIBLE_DEVICES.",
            id="more GPUs than ranks",
        ),
        pytest.param(
            "auto",
            2,
            True,
            "nid001 shows 2 GPUs to each of its 4 ranks: it must show one for each rank, or to each rank its own; "
            "change the number of ranks or CUDA_VISIBLE_DEVICES.",
            id="fewer GPUs than ranks",
        ),
    ],
)
def test_gpu_refused(wanted, visible, operations, message):
    with pytest.raises(DeviceError) as refused:
        gpu_index(wanted, visible, NODE, operations)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("cpus", "of_host", "ranks", "environ", "expected"),
    [
        pytest.param(8, 8, 4, {}, 2, id="unbound ranks share the host"),
        pytest.param(2, 2, 4, {}, 1, id="never none"),
        pytest.param(2, 8, 4, {}, None, id="bound by the launcher"),
        pytest.param(8, 8, 4, {"OMP_NUM_THREADS": "3"}, None, id="said by the user"),
    ],
)
def test_threads(cpus, of_host, ranks, environ, expected):
    assert threads(cpus, of_host, ranks, environ) == expected
