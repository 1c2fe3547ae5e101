"""What all ranks must have alike, at the start and while training, on ranks that are threads joined by a real sum."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from choices import choice
from ranks import on_ranks

from hvdtrain.core.compatibility import check_choice
from hvdtrain.core.progress import Progress
from hvdtrain.errors import AgreementError, DeviceError, ReplicaError, WorldError
from hvdtrain.launch.topology import LAUNCHERS, Topology
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import check_replicas, check_world
from hvdtrain.run.loop import Comparison

CONTENTS = {
    "training examples": 60,
    "validation examples": 30,
    "classes": 12,
    "class names": [f"class {label}" for label in range(12)],
    "training list": "96b0be1d7e1ca4aa",
    "validation list": "2bf97f48b57b993a",
}
TRAINING = {"step": 7, "epoch": 1, "lr": 0.1, "betas": [0.9, 0.999], "loss scale": 65536.0, "scheduler": None}
PROCESS = {"version: torch": "2.15.0", "setting: NVIDIA_TF32_OVERRIDE": None, "code: nets": "0123456789abcdef"}
FALSE = {
    int: 12345,
    float: 0.123,
    str: "false",
    bool: "neither",
    list: ["false"],
    tuple: ("false",),
    dict: {"false": 1},
    type(None): "1",
}


def values_of(plan):
    of_plan = agreement.of_plan(plan, CONTENTS)
    return (
        of_plan | agreement.named("training", TRAINING) | PROCESS | agreement.named("model", {"fc": "float32 [3, 8]"})
    )


def compared(of_ranks):
    """What `check` raises on each rank: of each rank the values."""

    def work(rank, sum_over_ranks):
        agreement.check_values(of_ranks[rank], (rank, len(of_ranks)), f"nid{rank}", sum_over_ranks)

    return on_ranks(len(of_ranks), work)


def test_each_value_that_one_of_three_ranks_has_otherwise_is_named(make_plan):
    values = values_of(make_plan())
    assert len(values) > 60
    assert compared([values] * 3) == [None] * 3
    for index, (name, value) in enumerate(values.items()):
        other = {**values, name: FALSE[type(value)]}
        ranks = [values] * 3
        ranks[rank := index % 3] = other
        errors = compared(ranks)
        assert {type(error) for error in errors} == {AgreementError}, name
        (text,) = {str(error) for error in errors}
        kind, _, short = name.partition(": ")
        begin = f"the ranks differ in {short}: rank {rank} on nid{rank} has "
        assert text.startswith(begin), (name, text)
        assert text.endswith(f": {agreement.REMEDIES[kind]}.")
        assert "\n" not in text


GPUS = {  # of each rank, the UUID of its GPU: the ranks that share one
    "one each": (["GPU-a", "GPU-b", "GPU-c"], None),
    "two slices of one": (["GPU-b", "GPU-a", "GPU-a"], "ranks 1 and 2 on nid1 share GPU-a"),
    "all on one": (["GPU-a"] * 3, "ranks 0 and 1 on nid0 share GPU-a"),
    "not known": (["", "", "GPU-a"], None),
}


@pytest.mark.parametrize(("gpus", "shared"), GPUS.values(), ids=GPUS)
def test_two_ranks_on_one_gpu_are_refused(monkeypatch, gpus, shared):
    monkeypatch.setattr(agreement, "own_gpu", lambda topology, environ: gpus[topology.rank])

    def work(rank, sum_over_ranks):
        topology = replace(Topology.alone(f"nid{rank}"), rank=rank, size=len(gpus))
        agreement.check_gpus(topology, {}, (rank, len(gpus)), sum_over_ranks)

    errors = on_ranks(len(gpus), work)
    rest = (
        ": NCCL takes one rank a GPU, and the slices of a GPU (MIG) count as one; start one rank for each GPU, or take "
        "--device cpu."
    )
    assert [str(error) for error in errors] == [shared + rest if shared else "None"] * 3
    assert {type(error) for error in errors} == {DeviceError if shared else type(None)}


def test_all_that_differs_is_named_in_one_line():
    first = {"data: training examples": 60, "data: classes": 3, "recipe: seed": 0, "training: lr": 0.0004}
    second = {**first, "data: training examples": 57, "training: lr": 0.1}
    assert str(compared([first, second])[0]) == (
        "the ranks differ in training examples: rank 1 on nid1 has 57, rank 0 on nid0 60; lr: rank 1 on nid1 has 0.1, "
        "rank 0 on nid0 0.0004: give every node the same data: copy the set whole, or name one shared folder, and give "
        "every rank the same numbers."
    )
    assert "rank 0 on nid0 has 60, the others 57" in str(compared([first, second, second])[1])
    assert "world.sync_batch_norm" in str(compared([{"training: state ema": 1}, {"training: state ema": 2}])[0])


def test_of_a_long_list_the_first_other_entry_is_shown():
    names = [f"n{number:08}" for number in range(1000)]
    ranks = [names, names, [*names[:500], "other", *names[501:]], names[:-1]]
    text = str(compared([{"data: class names": of} for of in ranks])[0])
    assert "rank 2 on nid2 has 1000 (number 500: other, on rank 0 n00000500)" in text
    assert "rank 3 on nid3 has 999 (number 999: none, on rank 0 n00000999), the others 1000: give" in text


def test_a_value_that_one_rank_has_alone_is_named():
    assert "moment: rank 1 on nid1 has 3, the others none" in str(compared([{}, {"training: moment": 3}, {}])[0])
    assert "moment: rank 0 on nid0 has 3, the others none" in str(compared([{"training: moment": 3}, {}, {}])[0])


def test_what_json_has_not_is_compared_by_what_it_is():
    values = [{"training: lr": np.float32(0.5), "training: hook": hook} for hook in (lambda: 0, lambda: 1)]
    assert compared(values) == [None, None]
    values[1]["training: lr"] = np.float32(0.25)
    assert "lr: rank 1 on nid1 has 0.25, rank 0 on nid0 0.5" in str(compared(values)[0])


def test_a_hostile_text_stays_one_printable_line():
    text = str(compared([{"data: class names": ["a\n\x1b[2J" * 999]}, {"data: class names": ["b"]}])[0])
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize("name", TRAINING)
def test_a_replicas_numbers_are_compared_with_its_weights(name):
    def work(rank, sum_over_ranks):
        values = {**TRAINING, **({name: FALSE[type(TRAINING[name])]} if rank == 2 else {})}
        check_replicas(5, agreement.named("training", values), 70, (rank, 3), f"nid{rank}", sum_over_ranks)

    errors = on_ranks(3, work)
    assert {type(error) for error in errors} == {ReplicaError}
    assert str(errors[0]).startswith(f"after step 70 the ranks differ in {name}: rank 2 on nid2 has ")


def test_a_module_that_one_rank_has_imported_alone_is_no_difference(monkeypatch):
    of_ranks = [{"train": "a", "plots": "b"}, {"train": "a", "notes": "c"}, {"train": "other"}]
    own = threading.local()
    monkeypatch.setattr(agreement, "code", lambda: of_ranks[own.rank])

    def work(rank, sum_over_ranks):
        own.rank = rank
        values = agreement.of_process({}, rank, sum_over_ranks)
        return {name: value for name, value in values.items() if name.startswith("code: ")}

    alike = {"code: train": "a", "code: plots": "b"}
    assert on_ranks(3, work) == [alike, alike, {**alike, "code: train": "other"}]


def test_a_thousand_ranks_compare_eight_bytes_each(make_plan):
    values, sent = values_of(make_plan()), []

    def sum_over_ranks(array):
        sent.append(array.nbytes)
        return np.repeat(array[:1], len(array), axis=0)  # as if all ranks had rank 0's

    agreement.check_values(values, (0, 1000), "nid0", sum_over_ranks)
    assert sent == [8000]
    assert len(json.dumps(values)) > 2000


EPOCHS = {
    "alike": ([{"iou": 0.5, "nan": float("nan")}, {"nan": float("nan"), "iou": 0.5}], None),
    "number": ([{"iou": 0.5}, {"iou": 0.25}], "iou: rank 1 on nid1 has 0.25, rank 0 on nid0 0.5"),
    "no number": ([{"iou": float("nan")}, {"iou": 0.25}], "iou: rank 1 on nid1 has 0.25, rank 0 on nid0 nan"),
    "two names": (
        [{"dice": 1.0}, {"dcie": 1.0}],
        "dice: rank 1 on nid1 has none, rank 0 on nid0 1.0; dcie: rank 1 on nid1 has 1.0, rank 0 on nid0 none",
    ),
}


@pytest.mark.parametrize("case", EPOCHS)
def test_what_epochs_report_is_compared(case):
    of_ranks, text = EPOCHS[case]
    expected = text and f"the ranks differ in {text}: {agreement.REMEDIES['report']}."
    assert [error and str(error) for error in compared([agreement.named("report", of) for of in of_ranks])] == [
        expected
    ] * 2


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
        check_choice(choice(engine, topology=started(*promised)), {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("promised", "engine"),
    [(("torchrun", 0, 2), "horovod"), (("srun", 0, 1), "local"), (("srun", 3, 4), "horovod")],
    ids=["torchrun", "srun of one, local", "srun"],
)
def test_a_launcher_the_engine_hears_passes(promised, engine):
    check_choice(choice(engine, topology=started(*promised)), {})


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
    run = SimpleNamespace(topology=ALONE, recipe=SimpleNamespace(check_replicas_every_steps=10))
    comparison, found = Comparison(run, replica), []
    for step in range(1, len(learns) + 1):
        if comparison.after_update(Progress(step=step), is_last=step == len(learns)):
            found.append(step)
            comparison._watch_next(step)
    assert found == compared
    assert watched == {2, 4, 8, 10, 20}
