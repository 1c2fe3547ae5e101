"""The promises checked while training, on ranks that are threads joined by a real sum."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from choices import choice

from hvdtrain.core.compatibility import check
from hvdtrain.errors import HvdtrainError, LoopError, ReplicaError, WorldError
from hvdtrain.launch.topology import LAUNCHERS, Topology
from hvdtrain.run.guard import REMEDIES, check_epoch, check_replicas, check_world

ALONE = Topology.alone("nid1")


def started(launcher: str, rank: int, size: int, host: str = "nid1") -> Topology:
    return replace(ALONE, rank=rank, size=size, host=host, launcher=launcher)


def on_ranks(size: int, work: Callable[[int, Callable[[np.ndarray], np.ndarray]], Any]) -> list[Any]:
    """work(rank, sum_over_ranks) on `size` threads at once; what each returned or raised."""
    given: list[np.ndarray] = [np.empty(0)] * size
    barrier = threading.Barrier(size, timeout=30)

    def on(rank: int) -> Any:
        def sum_over_ranks(array: np.ndarray) -> np.ndarray:
            given[rank] = array
            barrier.wait()
            total = np.sum(given, axis=0)
            barrier.wait()
            return total

        try:
            return work(rank, sum_over_ranks)
        except HvdtrainError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on, range(size)))


def test_every_launcher_has_a_remedy():
    assert {launcher.name for launcher in LAUNCHERS} | {"alone"} == set(REMEDIES)


WORLDS = {
    "srun": (
        ("srun", 2, 4),
        (0, 1),
        "srun promised rank 2 of 4 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; ask srun for "
        "the plugin of the MPI that Horovod was built with: --mpi=pmix (Open MPI), --mpi=pmi2 or --mpi=cray_shasta "
        "(MPICH, Cray-MPICH), and load that MPI's module.",
    ),
    "mpirun": (
        ("mpirun", 0, 2),
        (0, 1),
        "mpirun promised rank 0 of 2 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; start with "
        "the mpirun of the MPI that Horovod was built with.",
    ),
    "mpiexec": (
        ("mpiexec", 0, 2),
        (0, 1),
        "mpiexec promised rank 0 of 2 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; start with "
        "the mpiexec of the MPI that Horovod was built with.",
    ),
    "torchrun": (
        ("torchrun", 0, 2),
        (0, 1),
        "torchrun promised rank 0 of 2 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; build "
        "Horovod with Gloo: python -m hvdtrain build.",
    ),
    "horovodrun": (
        ("horovodrun", 1, 2),
        (0, 1),
        "horovodrun promised rank 1 of 2 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; build "
        "Horovod with the controller that horovodrun used: python -m hvdtrain build.",
    ),
    "alone": (
        ("alone", 0, 1),
        (0, 2),
        "alone promised rank 0 of 1 on nid1, but Horovod reports rank 0 of 2: the ranks would not share the batch; "
        "take --engine local, or start with horovodrun, mpirun or srun.",
    ),
    "ranks in another order": (
        ("mpirun", 1, 4),
        (2, 4),
        "mpirun promised rank 1 of 4 on nid1, but Horovod reports rank 2 of 4: the ranks would not share the batch; "
        "start with the mpirun of the MPI that Horovod was built with.",
    ),
}


@pytest.mark.parametrize(("promised", "found", "message"), WORLDS.values(), ids=WORLDS)
def test_another_world_is_refused(promised, found, message):
    with pytest.raises(WorldError) as caught:
        check_world(started(*promised), *found)
    assert str(caught.value) == message


@pytest.mark.parametrize("launcher", REMEDIES)
def test_the_promised_world_passes(launcher):
    check_world(started(launcher, 3, 4), 3, 4)


DEAF = {
    "local under srun": (
        ("srun", 0, 8),
        "local",
        "engine local trains one rank alone, but srun started 8; drop --engine local, or start one process.",
    ),
    "local under torchrun": (
        ("torchrun", 0, 2),
        "local",
        "engine local trains one rank alone, but torchrun started 2; drop --engine local, or start one process.",
    ),
}


@pytest.mark.parametrize(("promised", "engine", "message"), DEAF.values(), ids=DEAF)
def test_a_launcher_the_engine_cannot_hear_is_refused(promised, engine, message):
    with pytest.raises(WorldError) as caught:
        check(choice(engine, topology=started(*promised)), {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("promised", "engine"),
    [(("torchrun", 0, 2), "horovod"), (("srun", 0, 1), "local"), (("srun", 3, 4), "horovod")],
    ids=["torchrun", "srun of one, local", "srun"],
)
def test_a_launcher_the_engine_hears_passes(promised, engine):
    check(choice(engine, topology=started(*promised)), {})


def compare(fingerprints: Sequence[int], hosts: Sequence[str] | None = None) -> list[Any]:
    size = len(fingerprints)

    def check(rank: int, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> None:
        host = hosts[rank] if hosts else f"nid{rank // 2}"
        check_replicas(fingerprints[rank], 7, (rank, size), host, sum_over_ranks)

    return on_ranks(size, check)


def differing(named: str) -> str:
    return (
        f"after step 7 the weights of {named} differ from rank 0's: the replicas have diverged and training stops; "
        "resume from the last checkpoint with the same command, and check that host's memory."
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fingerprint", [0, -1, 2**63 - 1, -(2**63), 12345])
def test_identical_replicas_pass(size, fingerprint):
    assert compare([fingerprint] * size) == [None] * size


DIFFERING = {
    "one of two": ([5, 6], "rank 1 on nid0"),
    "one of four": ([5, 5, 5, 6], "rank 3 on nid1"),
    "by the highest bit": ([5, 5, 5 - 2**63, 5], "rank 2 on nid1"),
    "by the lowest bit": ([2**63 - 1, 2**63 - 2], "rank 1 on nid0"),
    "two of them": ([5, 9, 5, 6], "rank 1 on nid0, rank 3 on nid1"),
    "rank 0 itself": ([1, 5, 5], "rank 1 on nid0, rank 2 on nid1"),
    "nearly all": (
        [0, *range(1, 12)],
        "rank 1 on nid0, rank 2 on nid1, rank 3 on nid1, rank 4 on nid2, rank 5 on nid2, rank 6 on nid3, "
        "rank 7 on nid3, rank 8 on nid4, 3 more",
    ),
}


@pytest.mark.parametrize(("fingerprints", "named"), DIFFERING.values(), ids=DIFFERING)
def test_differing_replicas_are_named_on_every_rank(fingerprints, named):
    outcomes = compare(fingerprints)
    assert {type(outcome) for outcome in outcomes} == {ReplicaError}
    assert {str(outcome) for outcome in outcomes} == {differing(named)}


HOSTS = {
    "accented": ("knöten", "knöten"),
    "bytes that are no UTF-8": ("nid\udcff", "nid\N{REPLACEMENT CHARACTER}"),
    "longer than a host name may be": ("x" * 63 + "ö", "x" * 63 + "\N{REPLACEMENT CHARACTER}"),
}


@pytest.mark.parametrize(("host", "shown"), HOSTS.values(), ids=HOSTS)
def test_strange_host_names(host, shown):
    outcomes = compare([1, 2], ["a", host])
    assert [str(outcome) for outcome in outcomes] == [differing(f"rank 1 on {shown}")] * 2


ALIKE = "call run.report() on every rank, with the same names."
EPOCHS = {
    "alike": ([(4, {"iou": 0.5, "nan": float("nan")}), (4, {"nan": float("nan"), "iou": 0.5})], None),
    "zeros": ([(4, {"x": 0.0}), (4, {"x": -0.0})], None),
    "steps": (
        [(4, {}), (4, {}), (3, {})],
        "in epoch 7 rank 0 made 4 steps and rank 2 made 3; every rank must make the same: end an epoch early by a "
        "number that all of them have, as of world.sum.",
    ),
    "number": (
        [(4, {"loss": 1.0, "iou": 0.5}), (4, {"loss": 1.0, "iou": 0.25})],
        "in epoch 7 rank 0 reported iou=0.5 and rank 1 iou=0.25; every rank must report the same: take "
        "iou=world.mean(total, count).",
    ),
    "no number": (
        [(4, {"iou": float("nan")}), (4, {"iou": 0.25})],
        "in epoch 7 rank 0 reported iou=nan and rank 1 iou=0.25; every rank must report the same: take "
        "iou=world.mean(total, count).",
    ),
    "nothing": ([(4, {"iou": 0.5}), (4, {})], f"in epoch 7 rank 1 reported nothing, rank 0 iou=0.5; {ALIKE}"),
    "nothing of rank 0": ([(4, {}), (4, {"iou": 0.5})], f"in epoch 7 rank 0 reported nothing, rank 1 iou=0.5; {ALIKE}"),
    "name": (
        [(4, {"iou": 0.5, "dice": 1.0}), (4, {"iou": 0.5, "dcie": 1.0})],
        f"in epoch 7 rank 1 reported no dice, rank 0 dice=1; {ALIKE}",
    ),
}


@pytest.mark.parametrize("case", EPOCHS)
def test_ranks_whose_epochs_differ_are_named(case):
    of_ranks, text = EPOCHS[case]
    size = len(of_ranks)
    found = on_ranks(size, lambda rank, add: check_epoch(7, *of_ranks[rank], (rank, size), add))
    assert [type(error) for error in found] == [LoopError if text else type(None)] * size
    assert [str(error) for error in found if error] == ([text] * size if text else [])
