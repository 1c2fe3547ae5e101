"""The promises checked while training, on ranks that are threads joined by a real sum."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from choices import choice
from ranks import on_ranks

from hvdtrain.core.compatibility import check
from hvdtrain.core.progress import Progress
from hvdtrain.errors import ReplicaError, WorldError
from hvdtrain.launch.topology import LAUNCHERS, Topology
from hvdtrain.ranks.agreement import check_replicas, check_world
from hvdtrain.run.loop import Comparison

ALONE = Topology.alone("nid1")


def started(launcher: str, rank: int, size: int, host: str = "nid1") -> Topology:
    return replace(ALONE, rank=rank, size=size, host=host, launcher=launcher)


WORLDS = {
    "srun": (
        ("srun", 2, 4),
        (0, 1),
        "srun promised rank 2 of 4 on nid1, but Horovod reports rank 0 of 1: nothing would be averaged; ask srun for "
        "the plugin of the MPI that Horovod was built with: --mpi=pmix (Open MPI), --mpi=pmi2 or --mpi=cray_shasta "
        "(MPICH, Cray-MPICH), and load that MPI's module.",
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


@pytest.mark.parametrize("launcher", [row.name for row in LAUNCHERS])
def test_the_promised_world_passes(launcher):
    check_world(started(launcher, 3, 4), 3, 4)


DEAF = {
    "local under srun": (
        ("srun", 0, 8),
        "local",
        "engine local trains one rank alone, but srun started 8; drop --engine local, or start one process.",
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
        check_replicas(fingerprints[rank], {}, 7, (rank, size), host, sum_over_ranks)

    return on_ranks(size, check)


def differing(named: str) -> str:
    return (
        f"after step 7 the ranks differ in weights: {named}: resume from the last checkpoint with the same command, "
        "and check that host's memory."
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fingerprint", [0, -1, 2**63 - 1, -(2**63), 12345])
def test_identical_replicas_pass(size, fingerprint):
    assert compare([fingerprint] * size) == [None] * size


def has(rank: int, fingerprint: int) -> str:
    return f"rank {rank} on nid{rank // 2} has {fingerprint % 2**64:016x}"


DIFFERING = {
    "one of two": ([5, 6], f"{has(1, 6)}, rank 0 on nid0 {5:016x}"),
    "one of four": ([5, 5, 5, 6], f"{has(3, 6)}, the others {5:016x}"),
    "by the highest bit": ([5, 5, 5 - 2**63, 5], f"{has(2, 5 - 2**63)}, the others {5:016x}"),
    "by the lowest bit": ([2**63 - 1, 2**63 - 2], f"{has(1, 2**63 - 2)}, rank 0 on nid0 {2**63 - 1:016x}"),
    "two of them": ([5, 9, 5, 6], f"{has(1, 9)}, {has(3, 6)}, the others {5:016x}"),
    "rank 0 itself": ([1, 5, 5], f"{has(0, 1)}, the others {5:016x}"),
    "all": (
        [*range(12)],
        f"{', '.join(has(rank, rank) for rank in range(1, 9))} and 3 more ranks, rank 0 on nid0 {0:016x}",
    ),
}


@pytest.mark.parametrize(("fingerprints", "named"), DIFFERING.values(), ids=DIFFERING)
def test_differing_replicas_are_named_on_every_rank(fingerprints, named):
    outcomes = compare(fingerprints)
    assert {type(outcome) for outcome in outcomes} == {ReplicaError}
    assert {str(outcome) for outcome in outcomes} == {differing(named)}


HOSTS = {"accented": "knöten", "bytes that are no UTF-8": "nid\udcff", "long": "x" * 999, "a terminal's": "n\x1b[2J"}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_strange_host_names(host):
    for outcome in compare([1, 2], ["a", host]):
        assert str(outcome).startswith(f"after step 7 the ranks differ in weights: rank 1 on {host[:3].strip()[:1]}")
        assert str(outcome).isprintable()
        assert len(str(outcome)) < 500


@pytest.mark.parametrize(
    ("learns", "compared"),
    [
        ("a" * 22, [1, 2, 4, 8, 10, 20, 22]),
        (
            "aaaab" + "bbb" + "abab" + "a" * 8 + "ca",
            [1, 2, 4, 5, 8, 10, 20, 21, 22],
        ),  # a set that comes again costs nothing
    ],
)
def test_replicas_are_compared_early_and_after_each_set_of_parameters_that_learn(learns, compared):
    watched = set[int]()
    replica = SimpleNamespace(
        engine=SimpleNamespace(rank=0, size=2, sum=None),
        learns=lambda: learns[step - 1],
        watch=lambda enabled: watched.add(step + 1) if enabled else None,
    )
    run = SimpleNamespace(topology=ALONE, recipe=SimpleNamespace(guard_every_steps=10))
    comparison, found = Comparison(run, replica), []
    for step in range(1, len(learns) + 1):
        if comparison.after_update(Progress(step=step), is_last=step == len(learns)):
            found.append(step)
            comparison._watch_next(step)
    assert found == compared
    assert watched == {2, 4, 8, 10, 20}
